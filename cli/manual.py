"""`specrun man`, `completion` and `config`: texts made of the options, and settings in force."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import get_completion_class

from specrun.bindings.errors import OptionError
from specrun.cli.doctor import specrun_version
from specrun.cli.options.config_file import PATH_VARIABLE, config_path, defaults_of, read_config
from specrun.cli.options.group import (
    ENVIRONMENT_PREFIX,
    SectionedCommand,
    SectionedOption,
    place_of_section,
)
from specrun.cli.options.output import terminal_options
from specrun.cli.terminal.screen import print_table
from specrun.cli.terminal.terminal import Terminal


def _context_of(root: click.Context, names: tuple[str, ...]) -> click.Context:
    """Return the context of a command by its names, such as ("bench", "drafters")."""
    context = root
    for name in names:
        group = context.command
        found = group.get_command(context, name) if isinstance(group, click.Group) else None
        if found is None:
            raise OptionError(f"there is no command {' '.join(names)}: specrun --help lists all")
        context = click.Context(found, info_name=name, parent=context)
    return context


# == specrun man ===================================================================================


_MAN_EPILOG = """\b
Examples:
  specrun man | man -l -
  specrun man > ~/.local/share/man/man1/specrun.1
  specrun man bench drafters > specrun-bench-drafters.1
"""


@click.command(cls=SectionedCommand, epilog=_MAN_EPILOG)
@click.argument("command", nargs=-1)
@terminal_options
@click.pass_context
def man(context: click.Context, command: tuple[str, ...], terminal: Terminal) -> None:
    """Print the manual page, of specrun or of a COMMAND, for man(1)."""
    page = _context_of(context.find_root(), command)
    terminal.answer("\n".join(_page(page)) + "\n")


def _page(context: click.Context) -> Iterator[str]:
    """Yield the lines of a page in roff, as man(7) has them."""
    command, path = context.command, context.command_path
    name = path.replace(" ", "-")
    summary, _, rest = (command.help or "").partition("\n\n")
    yield f'.TH {_word(name.upper())} 1 "" {_word(f"specrun {specrun_version()}")} "User Commands"'
    yield ".SH NAME"
    yield f"{_text(name)} \\- {_text(_joined(summary))}"
    yield ".SH SYNOPSIS"
    yield f"\\fB{_text(path)}\\fR {_text(' '.join(command.collect_usage_pieces(context)))}"
    yield ".SH DESCRIPTION"
    for paragraph in filter(None, (summary, *rest.split("\n\n"))):
        yield f".PP\n{_text(_joined(paragraph))}"
    yield from _option_lines(context)
    if isinstance(command, click.Group):
        yield from _commands(context, command)
    yield from _epilog(command.epilog or "")


def _option_lines(context: click.Context) -> Iterator[str]:
    sections: dict[str, list[tuple[str, str]]] = {}
    for option in context.command.get_params(context):
        record = option.get_help_record(context)
        if record is not None:
            section = option.section if isinstance(option, SectionedOption) else "Other"
            sections.setdefault(section, []).append(record)
    yield ".SH OPTIONS"
    for section in sorted(sections, key=place_of_section):
        if len(sections) > 1:
            yield f".SS {_word(section)}"
        for usage, help_text in sections[section]:
            yield f".TP\n\\fB{_text(usage)}\\fR\n{_text(_joined(help_text))}"


def _commands(context: click.Context, group: click.Group) -> Iterator[str]:
    yield ".SH COMMANDS"
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        summary = "" if command is None else command.get_short_help_str(200)
        yield f".TP\n\\fB{_text(name)}\\fR\n{_text(summary)}"


def _epilog(text: str) -> Iterator[str]:
    """Yield the epilog of a help text: headings with lines that are kept as they are."""
    for block in re.split(r"\n\s*\n", text.replace("\b\n", "").strip()):
        lines = block.splitlines()
        heading = lines[0].rstrip(":") if lines and lines[0].endswith(":") else "Notes"
        shown = lines[1:] if heading != "Notes" else lines
        if shown:
            yield f".SH {_word(heading.upper())}\n.nf"
            yield from map(_text, shown)
            yield ".fi"


def _joined(text: str) -> str:
    return " ".join(text.split())


def _text(text: str) -> str:
    """Return text that roff shows as it is: backslashes, hyphens, and dots that begin a line."""
    safe = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return f"\\&{safe}" if safe.startswith((".", "\\(aq")) else safe


def _word(text: str) -> str:
    return '"' + _text(text).replace('"', "\\(dq") + '"'


# == specrun completion ============================================================================


SHELLS = ("bash", "zsh", "fish")
_COMPLETION_EPILOG = """\b
To have it in every shell:
  bash  eval "$(specrun completion bash)"          in ~/.bashrc
  zsh   eval "$(specrun completion zsh)"           in ~/.zshrc, behind compinit
  fish  specrun completion fish | source           in ~/.config/fish/config.fish
"""


@click.command(cls=SectionedCommand, epilog=_COMPLETION_EPILOG)
@click.argument("shell", required=False, type=click.Choice(SHELLS))
@terminal_options
@click.pass_context
def completion(context: click.Context, shell: str | None, terminal: Terminal) -> None:
    """Print the completion script of a shell; without SHELL, of the one that runs."""
    shell = shell or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise click.UsageError(f"name the shell: {', '.join(SHELLS)}")
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(context.find_root().command, {}, "specrun", "_SPECRUN_COMPLETE")
    # Not `source()`: it asks bash for its version, by running it.
    terminal.answer(script.source_template % script.source_vars() + "\n")


# == specrun config ================================================================================


_CONFIG_EPILOG = """\b
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


@click.group(epilog=_CONFIG_EPILOG)
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
    """Yield the options of a command with their values and the sources of these."""
    context = _context_of(root, names)
    context.default_map = defaults_of(context)
    for option in context.command.params:
        if isinstance(option, click.Option) and not option.hidden:
            value, source = option.consume_value(context, {})
            given = source is not ParameterSource.DEFAULT or option.default is not None
            text = _shown(str(option.name), value) if given else ""
            yield option.opts[-1], "" if "UNSET" in text else text, _SOURCES.get(source, "")
