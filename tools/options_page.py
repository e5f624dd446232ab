"""Makes the page of options: `python tools/options_page.py > docs/options.md`.

It has the options of the commands that answer, as they are declared.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

import click

from specrun.cli.main import cli
from specrun.cli.options.group import ENVIRONMENT_PREFIX, SectionedOption, place_of_section
from specrun.runtime.engine import RuntimeOptions
from specrun.runtime.laws import SETTINGS

_RUNTIME = {field.name for field in dataclasses.fields(RuntimeOptions)}
_COMMANDS = ("generate", "chat", "serve")
_INTRODUCTION = """\
# Options of the commands that answer

`tools/options_page.py` makes this page from the declarations of the options; a test compares both.

A flag goes before the environment, and that before the config file (`specrun config path`). Keys of
the file are long names without dashes before them (`ctx-size = 8192`): at the top for all commands,
below `[chat]` for one, below `[models."NAME"]` for a model. `SPECRUN_CTX_SIZE` is for all commands,
`SPECRUN_CHAT_CTX_SIZE` for one. In Python, settings of sampling are fields of `SamplingParams`, all
others are options of `Runtime` and `Engine`. `/set` of a chat and saved conversations have the
names of `SamplingParams`, requests over HTTP those of the column. Other commands have some of these
options, and their own: `specrun COMMAND --help`.
"""


def page() -> str:
    """Return the text of the page."""
    sections: dict[str, list[str]] = {}
    seen: set[str] = set()
    for command in _COMMANDS:
        context = click.Context(cli, info_name="specrun")
        found = cli.get_command(context, command)
        assert found is not None
        context = click.Context(found, info_name=command, parent=context, max_content_width=110)
        for option in found.get_params(context):
            if isinstance(option, SectionedOption) and not (option.hidden or option.name in seen):
                seen.add(str(option.name))
                sections.setdefault(option.section, []).append(_row(option, context))
    parts = [_INTRODUCTION]
    for name in sorted(sections, key=place_of_section):
        parts += [f"\n## {name}\n", *_head(name), *sections[name]]
    return "".join(parts)


def _head(section: str) -> Iterator[str]:
    columns = ["option", "environment", "Python"]
    columns += ["requests"] if section == "Sampling" else []
    yield f"| {' | '.join(columns)} | |\n"
    yield f"|{'---|' * (len(columns) + 1)}\n"


def _row(option: SectionedOption, context: click.Context) -> str:
    record = option.get_help_record(context)
    assert record is not None
    usage, text = record
    variable = f"`{ENVIRONMENT_PREFIX}_{str(option.name).upper()}`"
    cells = [f"`{usage}`", variable if option.allow_from_autoenv else "", *_names(option)]
    return f"| {' | '.join(_escaped(cell) for cell in (*cells, ' '.join(text.split())))} |\n"


def _names(option: SectionedOption) -> list[str]:
    """Return the names of an option in Python and, if it is of sampling, in requests."""
    if option.section != "Sampling":
        field = option.field or str(option.name)
        is_known = field.partition(".")[0] in _RUNTIME
        name = field.removeprefix("context.").removeprefix("placement.")
        return [_code([name] if is_known else [])]
    known = (item for item in SETTINGS.items() if item[1].variable == option.name)
    name, setting = next(known, ("", None))
    return [_code([name]), _code(setting.fields if setting else ())]


def _code(names: Iterator[str] | list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names if name)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
