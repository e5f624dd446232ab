"""`specrun train eagle3`: a layer that reads three of the target's, trained on its own predictions."""

from __future__ import annotations

import click

from specrun.cli.option_group import SectionedCommand, option
from specrun.cli.output_options import terminal_options
from specrun.cli.terminal import Terminal
from specrun.cli.train_head import run_head_training
from specrun.cli.train_options import (
    TrainResult,
    TrainRun,
    TrainSource,
    train_result_options,
    train_run_options,
    train_source_options,
)
from specrun.cli.train_states_options import TrainFeatures, train_features_options

__all__ = ["eagle3"]

_EPILOG = """\b
Examples:
  specrun train eagle3 --target Llama-3.2-1B --data chats.jsonl -o head --gguf head.gguf
  specrun train eagle3 --target Llama-3.2-1B --data chats.jsonl -o head --unroll 4 --draft-words 8000

\b
Training-time test: chains of --unroll steps below every position, each reading the head's own states and
attending to its own earlier steps. The draft vocabulary are the words said most often in the answers of the
data; other words are never drafted, which costs speed and never changes what the target says.
"""


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@train_source_options
@option(
    "--unroll",
    section="Head",
    type=click.IntRange(1, 16),
    default=7,
    show_default=True,
    metavar="N",
    help="Steps of a chain that are trained.",
)
@option(
    "--draft-words",
    section="Head",
    type=click.IntRange(1),
    default=32000,
    show_default=True,
    metavar="N",
    help="The most words that can be drafted.",
)
@option(
    "--read-layers",
    section="Head",
    type=click.IntRange(0),
    nargs=3,
    metavar="LOW MIDDLE HIGH",
    show_default="2, n/2, n-3",
    help="The layers whose inputs are read.",
)
@train_features_options
@train_run_options
@train_result_options
@terminal_options
def eagle3(
    source: TrainSource,
    unroll: int,
    draft_words: int,
    read_layers: tuple[int, int, int] | None,
    states: TrainFeatures,
    run: TrainRun,
    result: TrainResult,
    terminal: Terminal,
) -> None:
    """Train an EAGLE-3 head for a target."""
    from specrun.train.eagle3 import Eagle3Recipe

    recipe = Eagle3Recipe(steps=unroll, draft_words=draft_words, layers=read_layers)
    run_head_training(recipe, source, states, run, result, terminal)
