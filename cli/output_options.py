"""Options about what is shown: colour, logging, statistics. Used by every command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from specrun.cli.errors import set_verbosity
from specrun.cli.logs import start_logging
from specrun.cli.option_group import option, option_group
from specrun.cli.terminal import ColorChoice, Terminal

__all__ = ["AnswerDisplay", "answer_display_options", "terminal_options"]

_SECTION = "Output"


@dataclass(frozen=True, slots=True)
class AnswerDisplay:
    """What is shown of an answer beside its text."""

    show_timings: bool
    show_draft: bool


def _open_terminal(color: ColorChoice, verbose: int, quiet: bool, log_file: Path | None) -> Terminal:
    set_verbosity(verbose)
    stop = start_logging(verbose, log_file)
    click.get_current_context().call_on_close(stop)
    return Terminal(color, quiet=quiet, verbosity=verbose)


terminal_options = option_group(
    "terminal",
    _open_terminal,
    option(
        "-co",
        "--color",
        section=_SECTION,
        type=click.Choice(["on", "off", "auto"]),
        default="auto",
        show_default=True,
        help="Colours; auto: on terminals, and as NO_COLOR and FORCE_COLOR say.",
    ),
    option(
        "-v",
        "--verbose",
        section=_SECTION,
        count=True,
        help="Log to stderr; -vv logs llama.cpp too, and shows tracebacks.",
    ),
    option("-q", "--quiet", section=_SECTION, is_flag=True, help="Only answers, warnings and errors."),
    option(
        "--log-file",
        section=_SECTION,
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Append the log, llama.cpp's too, to a file.",
    ),
)

answer_display_options = option_group(
    "display",
    AnswerDisplay,
    option(
        "--show-timings/--no-show-timings",
        section=_SECTION,
        default=True,
        show_default=True,
        help="A line of statistics after each answer. tok/s of gen leaves out the prompt's time.",
    ),
    option(
        "--show-draft",
        section=_SECTION,
        is_flag=True,
        help="Show accepted drafted tokens in cyan (with colours).",
    ),
)
