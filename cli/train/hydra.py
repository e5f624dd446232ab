"""`specrun train hydra`: Medusa's heads that see each other's tokens."""

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
  specrun train hydra --target Llama-3.2-1B --data chats.jsonl -o heads --gguf heads.gguf
  specrun train hydra --target Llama-3.2-1B --data chats.jsonl -o heads --plus

\b
Head k guesses the token k + 1 places ahead and knows the tokens in between. --plus is Hydra++: 4 blocks a
head, a layer over the states in front, and the target's own law as what is learnt.
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@train_source_options
@option(
    "--heads",
    section="Heads",
    type=click.IntRange(1, 32),
    default=4,
    show_default=True,
    metavar="N",
    help="How many.",
)
@option(
    "--layers",
    section="Heads",
    type=click.IntRange(1, 16),
    show_default="1; with --plus 4",
    metavar="N",
    help="Blocks of each.",
)
@option("--plus", section="Heads", is_flag=True, help="Hydra++.")
@option(
    "--dropout",
    section="Heads",
    type=click.FloatRange(0, 1, max_open=True),
    show_default="0; with --plus 0.2",
    metavar="SHARE",
    help="The share of numbers that is left out while learning.",
)
@train_features_options
@train_run_options
@train_result_options
@terminal_options
def hydra(
    source: TrainSource,
    heads: int,
    layers: int | None,
    plus: bool,
    dropout: float | None,
    states: TrainFeatures,
    run: TrainRun,
    result: TrainResult,
    terminal: Terminal,
) -> None:
    """Train Hydra heads for a target."""
    import dataclasses

    from specrun.train.heads.hydra import HydraRecipe

    recipe = HydraRecipe.plus_plus() if plus else HydraRecipe()
    recipe = dataclasses.replace(
        recipe,
        heads=heads,
        layers=recipe.layers if layers is None else layers,
        dropout=recipe.dropout if dropout is None else dropout,
    )
    run_head_training(recipe, source, states, run, result, terminal)
