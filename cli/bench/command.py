"""`specrun bench`: the table of its measurements."""

from __future__ import annotations

import click

from specrun.cli.lazy_group import LazyCommand, LazyGroup

_COMMANDS = (
    LazyCommand("specrun.cli.bench.drafters", "drafters", "Drafters against plain decoding."),
    LazyCommand(
        "specrun.cli.bench.components", "heads", "What evaluating a head costs, beside its bytes."
    ),
    LazyCommand("specrun.cli.bench.components", "lookup", "What retrieving drafts costs a round."),
    LazyCommand("specrun.cli.bench.replay", "replay", "Drafters along known texts, without noise."),
    LazyCommand(
        "specrun.cli.bench.cascade", "cascade", "Cascades of two models: quality for latency."
    ),
    LazyCommand("specrun.cli.bench.load", "load", "Throughput by how many conversations go on."),
    LazyCommand("specrun.cli.bench.components", "convert", "Conversion: bandwidth and memory."),
    LazyCommand("specrun.cli.bench.components", "overhead", "Python's share of a round, by part."),
    LazyCommand("specrun.cli.bench.soak", "soak", "Answers with faults, for hours: none differs."),
    LazyCommand("specrun.cli.bench.serve", "serve", "What the server adds to a round."),
    LazyCommand(
        "specrun.cli.bench.serve",
        "serve-soak",
        "Thousands of requests to a server: nothing fails or grows.",
        attribute="serve_soak",
    ),
)

_EPILOG = """\b
Examples:
  specrun bench drafters --demo --pad-to 400M
  specrun bench drafters -m target.gguf -md small.gguf -f prompt.txt --temp 0,0.8
  specrun bench replay --demo --workload edited --drafter prompt-lookup --drafter lookahead
  specrun bench cascade --demo --pad-to 400M --plot cascades.png
  specrun bench load --demo --pad-to 400M --parallel 1,2,4,8 --plot load.png
  specrun bench overhead --vocab 32000
  specrun bench convert --size 4G
  specrun bench soak --minutes 60
  specrun bench serve
  specrun bench serve-soak --requests 2000 --malformed 1000

\b
Measure on a machine that does nothing else: llama.cpp's threads wait for each other, and a
single busy program beside them makes every figure meaningless.
"""


@click.group(cls=LazyGroup, lazy=_COMMANDS, epilog=_EPILOG)
def bench() -> None:
    """Measure what drafting gains and costs, and how fast models are converted."""
