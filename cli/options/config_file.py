"""The user's config file: defaults of options, in TOML. Flags and the environment override it.

Keys are the long names of options, without the dashes before them. Keys at the top are for every
command that has the option, and keys of a table for the command of that name. Keys of a model are
for every command that opens the model by -m; they override the others:

    threads = 4
    [chat]
    temp = 0.7
    [bench.drafters]
    repetitions = 5
    [models."Qwen3-0.6B-Q8_0"]
    ctx-size = 16384
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from specrun.bindings.errors import OptionError
from specrun.cli.terminal.terminal import one_line

PATH_VARIABLE = "SPECRUN_CONFIG"
_MODELS = "models"  # the table of `specrun models`, and of models by their names
_PART = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")
Settings = dict[str, Any]


def config_path() -> Path:
    """Return the path of the file, which may not exist: SPECRUN_CONFIG, or in the user's folder."""
    given = os.environ.get(PATH_VARIABLE)
    return Path(given).expanduser() if given else Path(click.get_app_dir("specrun"), "config.toml")


def read_config(path: Path) -> Settings:
    """Return the content of a file, {} if there is none; raises OptionError if it is not TOML."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OptionError(f"{path} is not TOML: {one_line(str(error))}") from error
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror})") from error


def has_model_tables() -> bool:
    """Whether the file has options for some model."""
    return bool(_split(read_config(config_path()))[1])


def defaults_of(context: click.Context, model: Iterable[str] = ()) -> Settings:
    """Return the file's values for the running command, by the names of its parameters.

    `model` are the names of its model: its path, its name in a store. Raises OptionError, with the
    nearest name, for a key of a command's table that is no option of this command, and for a key at
    the top or of a model that is no option of any command.
    """
    path = config_path()
    settings, of_models = _split(read_config(path))
    if not (settings or of_models):
        return {}
    program = context.find_root().command
    names: list[str] = []  # from the program to the running command
    parent: click.Context | None = context
    while parent is not None and parent.parent is not None:
        names.insert(0, str(parent.info_name))
        parent = parent.parent
    found: Settings = {}
    known = {name for text in model for name in _names_of(text)}
    own = [(table, program) for name, table in of_models.items() if name.casefold() in known]
    for level, command in [*_levels(path, program, settings, names), *own]:
        for key, value in level.items():
            option = _option_named(context.command, key)
            if option is None:
                _require_known(path, command, key)
            else:
                found[str(option.name)] = _checked(path, option, key, value)
    return found


def _split(settings: Settings) -> tuple[Settings, dict[str, Settings]]:
    """Return the settings without the tables of models, and these tables by the models' names."""
    table = settings.get(_MODELS)
    if not isinstance(table, dict):
        return settings, {}
    of_models = {name: value for name, value in table.items() if isinstance(value, dict)}
    rest = {key: value for key, value in table.items() if key not in of_models}
    return {**settings, _MODELS: rest}, of_models


def _names_of(text: str) -> Iterator[str]:
    """Yield the possible names of a model's table, in lower case."""
    name = text.removeprefix("hf:").casefold()
    yield name
    last = name.rstrip("/\\").replace("\\", "/").rpartition("/")[2]
    yield last
    yield _PART.sub("", last)


def _levels(
    path: Path, command: click.Command, settings: Settings, names: list[str]
) -> Iterator[tuple[Settings, click.Command]]:
    """Yield the settings for all commands of a group, then for one of them, and so on."""
    tables = {key: value for key, value in settings.items() if isinstance(value, dict)}
    known = _subcommands(command)
    for table in tables:
        if table not in known:
            near = difflib.get_close_matches(table, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else "a table has the name of a command"
            raise OptionError(f"{path}: there is no command {table!r}: {hint}")
    yield {key: value for key, value in settings.items() if key not in tables}, command
    if names and names[0] in tables:
        yield from _levels(path, known[names[0]](), tables[names[0]], names[1:])


def _subcommands(command: click.Command) -> Mapping[str, Any]:
    """Return functions that import the commands of a group, by name."""
    if not isinstance(command, click.Group):
        return {}
    context = click.Context(command)
    names = command.list_commands(context)
    return {name: functools.partial(command.get_command, context, name) for name in names}


def _option_named(command: click.Command, key: str) -> click.Option | None:
    """Return the option of a command with this long name, None without one."""
    name = f"--{key.replace('_', '-')}"
    return next((option for option in _shown_options(command) if name in option.opts), None)


def _shown_options(command: click.Command) -> Iterator[click.Option]:
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            yield option


def _require_known(path: Path, command: click.Command, key: str) -> None:
    """Raise OptionError unless some command below this one has the option."""
    names: set[str] = set()
    for leaf in _leaves(command):
        if _option_named(leaf, key) is not None:
            return
        flags = (name for option in _shown_options(leaf) for name in option.opts)
        names |= {name[2:] for name in flags if name.startswith("--")}
    near = difflib.get_close_matches(key.replace("_", "-"), sorted(names), 1)
    hint = f"did you mean {near[0]!r}?" if near else "`specrun config show COMMAND` lists them"
    of = "any command" if isinstance(command, click.Group) else f"specrun {command.name}"
    raise OptionError(f"{path}: {key!r} is no option of {of}: {hint}")


def _leaves(command: click.Command) -> Iterator[click.Command]:
    if isinstance(command, click.Group):
        for load in _subcommands(command).values():
            yield from _leaves(load())
    else:
        yield command


def _checked(path: Path, option: click.Option, key: str, value: object) -> Any:  # noqa: ANN401
    """Return the value as click takes it from a file; its type converts it."""
    items = value if isinstance(value, list) else [value]
    plain = all(isinstance(item, str | int | float) for item in items)
    if not plain or (isinstance(value, list) and not option.multiple):
        raise OptionError(f"{path}: {key} is {value!r}, and {option.opts[-1]} takes one value")
    if option.is_flag != isinstance(value, bool) and not option.count:
        wanted = "true or false" if option.is_flag else "a value"
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        raise OptionError(f"{path}: {key} is {shown}: give {wanted}")
    return items if option.multiple else value
