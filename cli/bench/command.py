"""`specrun bench`: the table of its measurements."""

from __future__ import annotations

import click

from specrun.cli.lazy_group import LazyCommand, LazyGroup

_COMMANDS = {
    "drafters": LazyCommand(
        "specrun.cli.bench.drafters", "drafters", "Drafters against plain decoding."
    ),
    "heads": LazyCommand(
        "specrun.cli.bench.heads", "heads", "What evaluating a head costs, beside its bytes."
    ),
    "lookup": LazyCommand(
        "specrun.cli.bench.lookup", "lookup", "What retrieving drafts costs a round."
    ),
    "replay": LazyCommand(
        "specrun.cli.bench.replay", "replay", "Drafters along known texts, without noise."
    ),
    "convert": LazyCommand(
        "specrun.cli.bench.convert", "convert", "Conversion: bandwidth and memory."
    ),
    "overhead": LazyCommand(
        "specrun.cli.bench.overhead", "overhead", "Python's share of a round, by part."
    ),
}

_EPILOG = """\b
Examples:
  specrun bench drafters --demo --pad-to 400M
  specrun bench drafters -m target.gguf -md small.gguf -f prompt.txt --temp 0,0.8
  specrun bench replay --demo --workload edited --drafter prompt-lookup --drafter lookahead
  specrun bench overhead --vocab 32000
  specrun bench convert --size 4G

\b
Measure on a machine that does nothing else: llama.cpp's threads wait for each other, and a
single busy program beside them makes every figure meaningless.
"""


@click.group(cls=LazyGroup, lazy=_COMMANDS, epilog=_EPILOG)
def bench() -> None:
    """Measure what drafting gains and costs, and how fast models are converted."""
