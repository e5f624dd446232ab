"""`specrun man`, `completion` and `config`: texts made from the options, and the settings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
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
    options_by_section,
)
from specrun.cli.options.output import terminal_options
from specrun.cli.terminal.screen import print_table
from specrun.cli.terminal.terminal import Terminal


def _context_of(context: click.Context, names: tuple[str, ...]) -> click.Context:
    """Return the context of a command by its names, such as ("bench", "drafters")."""
    context = context.find_root()
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
@click.argument(
    "command", nargs=-1, help="A command. Without it, the page describes specrun as a whole."
)
@terminal_options
@click.pass_context
def man(context: click.Context, command: tuple[str, ...], terminal: Terminal) -> None:
    """Print the manual page of specrun, or of a COMMAND, for man(1)."""
    page = _context_of(context, command)
    terminal.answer("\n".join(_page(page)) + "\n")


def _page(context: click.Context) -> Iterator[str]:
    """Yield the lines of a page in roff, with the macros of man(7)."""
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
    yield from _entries(
        (argument.make_metavar(context), argument.help)
        for argument in command.params
        if isinstance(argument, click.Argument) and argument.help
    )
    sections = options_by_section(context)
    yield ".SH OPTIONS"
    for section, options in sections.items():
        if len(sections) > 1:
            yield f".SS {_word(section)}"
        yield from _entries(options)
    if isinstance(command, click.Group):
        yield ".SH COMMANDS"
        names = command.list_commands(context)
        known = ((name, command.get_command(context, name)) for name in names)
        yield from _entries((name, sub.get_short_help_str(200)) for name, sub in known if sub)
    yield from _epilog(command.epilog or "")


def _entries(described: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, text in described:
        yield f".TP\n\\fB{_text(name)}\\fR\n{_text(_joined(text))}"


def _epilog(text: str) -> Iterator[str]:
    """Yield the epilog of a help text: headings, and lines without changes."""
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
To load it in every shell:
  bash  eval "$(specrun completion bash)"          in ~/.bashrc
  zsh   eval "$(specrun completion zsh)"           in ~/.zshrc, after compinit
  fish  specrun completion fish | source           in ~/.config/fish/config.fish
"""


@click.command(cls=SectionedCommand, epilog=_COMPLETION_EPILOG)
@click.argument(
    "shell",
    required=False,
    type=click.Choice(SHELLS),
    help="The shell. Without it, the variable SHELL names it.",
)
@terminal_options
@click.pass_context
def completion(context: click.Context, shell: str | None, terminal: Terminal) -> None:
    """Print the completion script of a shell. Without SHELL, it is for the current shell."""
    shell = shell or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise click.UsageError(f"name the shell: {', '.join(SHELLS)}")
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(context.find_root().command, {}, "specrun", "_SPECRUN_COMPLETE")
    # Not `source()`: it runs bash to read its version.
    terminal.answer(script.source_template % script.source_vars() + "\n")


# == specrun config ================================================================================


_CONFIG_EPILOG = """\b
An example of a config file (TOML). Keys are the long names of options; [chat] is for one command:
  threads = 4
  model = "~/models/target.gguf"
  [chat]
  temp = 0.7
  model-draft = "~/models/small.gguf"

\b
Flags override the environment (SPECRUN_TEMP=0, SPECRUN_CHAT_TEMP=0). The environment overrides the
config file, and the file overrides the defaults. SPECRUN_CONFIG names another file.
"""
_SOURCES = {
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "file",
    ParameterSource.DEFAULT: "default",
}


@click.group(epilog=_CONFIG_EPILOG)
def config() -> None:
    """Show the config file, and the options that it and the environment set."""


@config.command(cls=SectionedCommand)
@terminal_options
def path(terminal: Terminal) -> None:
    """Print the path of the config file, even if the file does not exist."""
    terminal.answer(f"{config_path()}\n")


@config.command(cls=SectionedCommand)
@click.argument("command", nargs=-1, help="The command, such as chat or bench drafters.")
@terminal_options
@click.pass_context
def show(context: click.Context, command: tuple[str, ...], terminal: Terminal) -> None:
    """Show the settings in force, or all options of a COMMAND, such as chat."""
    file = config_path()
    there = "" if file.is_file() else " (there is no such file)"
    if command:
        rows = list(_options(_context_of(context, command)))
        title = f"specrun {' '.join(command)}, with {file}{there}"
        print_table(terminal, title, ("option", "value", "from"), rows)
        return
    settings = list(_of_file(read_config(file)))
    for name, value in sorted(os.environ.items()):
        if name.startswith(f"{ENVIRONMENT_PREFIX}_") and value and name != PATH_VARIABLE:
            settings.append(("", name, _shown(name, value), "environment"))
    if settings:
        print_table(terminal, f"{file}{there}", ("for", "option", "value", "from"), settings)
    else:
        terminal.say(f"Nothing is set: {file}{there}")


def _of_file(settings: dict[str, Any], command: str = "") -> Iterator[tuple[str, str, str, str]]:
    for key, value in settings.items():
        if not isinstance(value, dict):
            yield command or "all commands", key, _shown(key, value), "file"
    for name, table in settings.items():
        if isinstance(table, dict):
            yield from _of_file(table, f"{command} {name}".strip())


def _shown(name: str, value: object) -> str:
    secret = any(part in name.lower() for part in ("token", "key", "password"))
    return "(set)" if secret else str(value)


def _options(context: click.Context) -> Iterator[tuple[str, str, str]]:
    """Yield the options of a command with their values and the sources of these."""
    context.default_map = defaults_of(context)
    for option in context.command.params:
        if isinstance(option, click.Option) and not option.hidden:
            value, source = option.consume_value(context, {})
            given = source is not ParameterSource.DEFAULT or option.default is not None
            text = _shown(str(option.name), value) if given else ""
            yield option.opts[-1], "" if "UNSET" in text else text, _SOURCES.get(source, "")
