"""`specrun bench`: the table of its measurements."""

from __future__ import annotations

import click

from specrun.cli.lazy_group import LazyCommand, LazyGroup

_COMMANDS = (
    LazyCommand("specrun.cli.bench.drafters", "drafters", "Drafters against plain decoding."),
    LazyCommand(
        "specrun.cli.bench.cascade", "cascade", "Cascades of two models: quality for latency."
    ),
)

_EPILOG = """\b
Examples:
  specrun bench drafters --demo --pad-to 400M
  specrun bench drafters -m target.gguf -md small.gguf -f prompt.txt --temp 0,0.8
  specrun bench cascade --demo --pad-to 400M --plot cascades.png

\b
Measure on a machine that does nothing else: llama.cpp's threads wait for each other, and a
single busy program beside them makes every figure meaningless.
"""


@click.group(cls=LazyGroup, lazy=_COMMANDS, epilog=_EPILOG)
def bench() -> None:
    """Measure what drafting gains and costs."""
