"""`specrun train eagle`: a layer that predicts the target's hidden states."""

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

__all__ = ["eagle"]

_EPILOG = """\b
Examples:
  specrun train eagle --target Llama-3.2-1B --data chats.jsonl -o head --gguf head.gguf
  specrun train eagle --target Llama-3.2-1B --data chats.jsonl -o head --unroll 3

\b
The head learns the target's next hidden state (smooth L1), and with --word-weight the law that follows from
it, while uniform noise shakes the states it reads. --unroll trains on its own predictions too, as HASS does:
each step costs as much time again. One head serves EAGLE-1's and EAGLE-2's trees.
"""


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@train_source_options
@option(
    "--word-weight",
    section="Head",
    type=click.FloatRange(0),
    default=0.1,
    show_default=True,
    metavar="X",
    help="Of the cross-entropy with the target's law, beside the distance of states.",
)
@option(
    "--noise",
    section="Head",
    type=click.FloatRange(0),
    default=0.1,
    show_default=True,
    metavar="X",
    help="The most that is added to or taken from a state.",
)
@option(
    "--unroll",
    section="Head",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    metavar="N",
    help="Steps of a chain that are trained; from the second on, the head reads its own states.",
)
@train_features_options
@train_run_options
@train_result_options
@terminal_options
def eagle(
    source: TrainSource,
    word_weight: float,
    noise: float,
    unroll: int,
    states: TrainFeatures,
    run: TrainRun,
    result: TrainResult,
    terminal: Terminal,
) -> None:
    """Train an EAGLE head for a target."""
    from specrun.train.eagle import EagleRecipe

    recipe = EagleRecipe(word_weight=word_weight, noise=noise, steps=unroll)
    run_head_training(recipe, source, states, run, result, terminal)
