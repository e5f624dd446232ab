"""`--parallel N`: how many prompts are answered at once, where answers are not timed."""

from __future__ import annotations

import click

from specrun.cli.options.group import Decorator, Section

_MOST = 64


def parallel_option(section: Section) -> Decorator:
    """Return `--parallel`, the conversations that an engine answers at once."""
    return section.option(
        "--parallel N",
        "Prompts that are answered at once, their drafts verified in one evaluation.",
        click.IntRange(1, _MOST),
        default=1,
    )
