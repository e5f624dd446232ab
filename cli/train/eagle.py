"""`specrun train eagle`: a layer that predicts the target's hidden states.

`specrun train eagle3`: a layer that reads three of the target's, trained on its own predictions.
"""

from __future__ import annotations

import click

from specrun.cli.options.group import SectionedCommand, option
from specrun.cli.options.output import terminal_options
from specrun.cli.terminal.terminal import Terminal
from specrun.cli.train.head import run_head_training
from specrun.cli.train.options import (
    TrainFeatures,
    TrainResult,
    TrainRun,
    TrainSource,
    train_features_options,
    train_result_options,
    train_run_options,
    train_source_options,
)

_EPILOG = """\b
Examples:
  specrun train eagle --target Llama-3.2-1B --data chats.jsonl -o head --gguf head.gguf
  specrun train eagle --target Llama-3.2-1B --data chats.jsonl -o head --unroll 3

\b
The head learns the target's next hidden state (smooth L1), and with --token-weight the law that follows from
it, while uniform noise shakes the states it reads. --unroll trains on its own predictions too, as HASS does:
each step costs as much time again. One head serves EAGLE-1's and EAGLE-2's trees.
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@train_source_options
@option(
    "--token-weight",
    old_names=("--word-weight",),
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
    token_weight: float,
    noise: float,
    unroll: int,
    states: TrainFeatures,
    run: TrainRun,
    result: TrainResult,
    terminal: Terminal,
) -> None:
    """Train an EAGLE head for a target."""
    from specrun.train.heads.eagle import EagleRecipe

    recipe = EagleRecipe(token_weight=token_weight, noise=noise, steps=unroll)
    run_head_training(recipe, source, states, run, result, terminal)


_EPILOG_3 = """\b
Examples:
  specrun train eagle3 --target Llama-3.2-1B --data chats.jsonl -o head --gguf head.gguf
  specrun train eagle3 --target Llama-3.2-1B --data chats.jsonl -o head --unroll 4 --draft-tokens 8000

\b
Training-time test: chains of --unroll steps below every position, each reading the head's own states and
attending to its own earlier steps. The draft vocabulary is the tokens said most often in the answers of the
data; other tokens are never drafted, which costs speed and never changes what the target says.
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_EPILOG_3)
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
    "--draft-tokens",
    old_names=("--draft-words",),
    section="Head",
    type=click.IntRange(1),
    default=32000,
    show_default=True,
    metavar="N",
    help="The most tokens that can be drafted.",
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
    draft_tokens: int,
    read_layers: tuple[int, int, int] | None,
    states: TrainFeatures,
    run: TrainRun,
    result: TrainResult,
    terminal: Terminal,
) -> None:
    """Train an EAGLE-3 head for a target."""
    from specrun.train.heads.eagle3 import Eagle3Recipe

    recipe = Eagle3Recipe(steps=unroll, draft_tokens=draft_tokens, layers=read_layers)
    run_head_training(recipe, source, states, run, result, terminal)
