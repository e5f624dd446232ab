"""`specrun config`: where the config file lies, and which settings are in force."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import click
from click.core import ParameterSource

from specrun.bindings.errors import OptionError
from specrun.cli.options.config_file import PATH_VARIABLE, config_path, defaults_of, read_config
from specrun.cli.options.group import ENVIRONMENT_PREFIX, SectionedCommand
from specrun.cli.options.output import terminal_options
from specrun.cli.terminal.table import print_table
from specrun.cli.terminal.terminal import Terminal

_EPILOG = """\b
An example, with the long names of options; a table holds for one command:
  threads = 4
  model = "~/models/target.gguf"
  [chat]
  temp = 0.7
  model-draft = "~/models/small.gguf"

\b
Defaults give way to the file, the file to the environment (SPECRUN_TEMP=0, SPECRUN_CHAT_TEMP=0),
and that to flags. SPECRUN_CONFIG names another file.
"""
_SOURCES = {
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "file",
    ParameterSource.DEFAULT: "default",
}
_SECRET = ("token", "key", "password")


@click.group(epilog=_EPILOG)
def config() -> None:
    """Show the config file, and what it and the environment set."""


@config.command(cls=SectionedCommand)
@terminal_options
def path(terminal: Terminal) -> None:
    """Print where the config file lies, or would lie."""
    terminal.answer(f"{config_path()}\n")


@config.command(cls=SectionedCommand)
@click.argument("command", nargs=-1)
@terminal_options
@click.pass_context
def show(context: click.Context, command: tuple[str, ...], terminal: Terminal) -> None:
    """Show what is set; of a COMMAND, such as chat or bench drafters, all of its options."""
    file = config_path()
    there = "" if file.is_file() else " (there is no such file)"
    if command:
        rows = list(_options(context.find_root(), command))
        title = f"specrun {' '.join(command)}, with {file}{there}"
        print_table(terminal, title, ("option", "value", "from"), rows)
        return
    settings = [*_of_file(read_config(file)), *_of_environment()]
    if settings:
        print_table(terminal, f"{file}{there}", ("for", "option", "value", "from"), settings)
    else:
        terminal.say(f"Nothing is set: {file}{there}")


def _of_file(settings: dict[str, Any], command: str = "") -> Iterator[tuple[str, str, str, str]]:
    tables = {key: value for key, value in settings.items() if isinstance(value, dict)}
    for key, value in settings.items():
        if key not in tables:
            yield command or "all commands", key, _shown(key, value), "file"
    for name, table in tables.items():
        yield from _of_file(table, f"{command} {name}".strip())


def _of_environment() -> Iterator[tuple[str, str, str, str]]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(f"{ENVIRONMENT_PREFIX}_") and value and name != PATH_VARIABLE:
            yield "", name, _shown(name, value), "environment"


def _shown(name: str, value: object) -> str:
    return "(set)" if any(part in name.lower() for part in _SECRET) else str(value)


def _options(root: click.Context, names: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """Yield the options of a command with their values and where these come from."""
    context = root
    for name in names:
        group = context.command
        found = group.get_command(context, name) if isinstance(group, click.Group) else None
        if found is None:
            raise OptionError(f"there is no command {' '.join(names)}: specrun --help lists all")
        context = click.Context(found, info_name=name, parent=context)
    context.default_map = defaults_of(context)
    for option in context.command.params:
        if isinstance(option, click.Option) and not option.hidden:
            value, source = option.consume_value(context, {})
            given = source is not ParameterSource.DEFAULT or option.default is not None
            text = _shown(str(option.name), value) if given else ""
            yield option.opts[-1], "" if "UNSET" in text else text, _SOURCES.get(source, "")
