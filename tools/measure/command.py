"""The table of the measurements."""

from __future__ import annotations

import click

from specrun.cli.options.group import LazyCommand, LazyGroup

_COMMANDS = (
    LazyCommand("measure.commands.components", "overhead", "Python's share of a round, by part."),
    LazyCommand(
        "measure.commands.components", "heads", "What evaluating a head costs, beside its bytes."
    ),
    LazyCommand("measure.commands.components", "lookup", "What retrieving drafts costs a round."),
    LazyCommand(
        "measure.commands.components", "mixture", "Experts: what is predicted, and the clock."
    ),
    LazyCommand("measure.commands.replay", "replay", "Drafters along known texts, without noise."),
    LazyCommand("measure.commands.load", "load", "Throughput by how many conversations go on."),
    LazyCommand("measure.commands.peers", "peers", "llama-server and specrun side by side."),
    LazyCommand(
        "measure.commands.benchmarks", "benchmarks", "docs/benchmarks.md, and its records."
    ),
    LazyCommand("measure.commands.components", "convert", "Conversion: bandwidth and memory."),
    LazyCommand("measure.commands.soak", "soak", "Answers with faults, for hours: none differs."),
    LazyCommand("measure.commands.serve", "serve", "What the server adds to a round."),
    LazyCommand(
        "measure.commands.serve",
        "serve-soak",
        "Thousands of requests to a server: nothing fails or grows.",
        attribute="serve_soak",
    ),
)

_EPILOG = """\b
Examples:
  python tools/measure overhead --vocab 32000
  python tools/measure replay --demo --workload edited --drafter prompt-lookup --drafter lookahead
  python tools/measure load --demo --pad-to 400M --parallel 1,2,4,8 --plot load.png
  python tools/measure peers -m target.gguf --suite own --questions 2
  python tools/measure benchmarks --measure real --minutes 30
  python tools/measure convert --size 4G
  python tools/measure mixture --size 1.2G
  python tools/measure soak --minutes 60
  python tools/measure serve-soak --requests 2000 --malformed 1000

\b
Measure on a machine that does nothing else: llama.cpp's threads wait for each other, and a
single busy program beside them makes every figure meaningless.
"""


@click.group(
    cls=LazyGroup,
    lazy=_COMMANDS,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
def measure() -> None:
    """Measure specrun itself: its share of a round, its parts, and whether it holds for hours."""
