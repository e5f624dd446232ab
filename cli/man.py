"""`specrun man`: the manual page, made of the help texts."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from specrun.bindings.errors import OptionError
from specrun.cli.doctor.command import specrun_version
from specrun.cli.options.group import SectionedCommand, SectionedOption, place_of_section
from specrun.cli.options.output import terminal_options
from specrun.cli.terminal.terminal import Terminal

_EPILOG = """\b
Examples:
  specrun man | man -l -
  specrun man > ~/.local/share/man/man1/specrun.1
  specrun man bench drafters > specrun-bench-drafters.1
"""


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@click.argument("command", nargs=-1)
@terminal_options
@click.pass_context
def man(context: click.Context, command: tuple[str, ...], terminal: Terminal) -> None:
    """Print the manual page, of specrun or of a COMMAND, for man(1)."""
    page = context.find_root()
    for name in command:
        group = page.command
        found = group.get_command(page, name) if isinstance(group, click.Group) else None
        if found is None:
            raise OptionError(f"there is no command {' '.join(command)}: specrun --help lists all")
        page = click.Context(found, info_name=name, parent=page)
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
    yield from _options(context)
    if isinstance(command, click.Group):
        yield from _commands(context, command)
    yield from _epilog(command.epilog or "")


def _options(context: click.Context) -> Iterator[str]:
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
    """Yield what stands below a help text: headings with lines that are kept as they are."""
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
