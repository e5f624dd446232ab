"""`specrun train medusa`: heads that guess the next tokens at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from specrun.cli.options.group import SectionedCommand, option
from specrun.cli.options.output import terminal_options
from specrun.cli.terminal.terminal import Terminal
from specrun.cli.train.head import run_head_training, train_and_report
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

if TYPE_CHECKING:
    from specrun.cli.train.progress import ShownRun
    from specrun.train.heads.run import HeadRun
    from specrun.train.trainer.run import TrainingReport

_JOINT = "Medusa-2"

_EPILOG = """\b
Examples:
  specrun train medusa --target Llama-3.2-1B --data chats.jsonl -o heads --gguf heads.gguf
  specrun train medusa --target Llama-3.2-1B --data chats.jsonl -o heads --heads 3 --shared-output
  specrun train medusa --target Llama-3.2-1B --data prompts.jsonl -o heads --answers target --from-law

\b
Medusa-1: the target stays as it is. Head k guesses the token k + 1 places ahead; its loss weighs --decay to
the power of k. With --shared-output heads have no output matrix of their own: 5 heads of a 1B model then take
80 MB instead of 5.3 GB in float32, and only specrun runs them. --answers target --from-law is
self-distillation: the target answers the prompts of the data itself, and heads learn its law.

\b
With --joint (Medusa-2) the folder is a new model with its heads: convert it twice, with --kind model and
with --kind medusa --target. It says what the new model says, not what the old one said; --from-law keeps
the two close.
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@train_source_options
@option(
    "--heads",
    section="Heads",
    type=click.IntRange(1, 32),
    default=5,
    show_default=True,
    metavar="N",
    help="How many.",
)
@option(
    "--layers",
    section="Heads",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    metavar="N",
    help="Residual blocks of each.",
)
@option(
    "--decay",
    section="Heads",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.8,
    show_default=True,
    metavar="X",
    help="The loss of head k weighs this to the power of k.",
)
@option(
    "--shared-output",
    section="Heads",
    is_flag=True,
    help="Use the target's output matrix for all heads.",
)
@option(
    "--from-law",
    section="Heads",
    is_flag=True,
    help="Learn the target's law (KL divergence) instead of the tokens of the text.",
)
@option(
    "--joint",
    section=_JOINT,
    is_flag=True,
    help="Medusa-2: train a copy of the target together with its heads.",
)
@option(
    "--head-weight",
    section=_JOINT,
    type=click.FloatRange(0, min_open=True),
    default=0.2,
    show_default=True,
    metavar="X",
    help="Of the heads' loss beside the model's own.",
)
@option(
    "--model-rate",
    section=_JOINT,
    type=click.FloatRange(0, min_open=True),
    default=0.25,
    show_default=True,
    metavar="X",
    help="Times the learning rate: the model's own.",
)
@option(
    "--heads-alone",
    section=_JOINT,
    type=click.FloatRange(0, 1, max_open=True),
    default=0.1,
    show_default=True,
    metavar="SHARE",
    help="The share of the steps before the model begins to learn.",
)
@train_features_options
@train_run_options
@train_result_options
@terminal_options
def medusa(
    source: TrainSource,
    heads: int,
    layers: int,
    decay: float,
    shared_output: bool,
    from_law: bool,
    joint: bool,
    head_weight: float,
    model_rate: float,
    heads_alone: float,
    states: TrainFeatures,
    run: TrainRun,
    result: TrainResult,
    terminal: Terminal,
) -> None:
    """Train Medusa heads for a target."""
    from specrun.train.heads.medusa import MedusaRecipe

    recipe = MedusaRecipe(
        heads=heads, layers=layers, decay=decay, own_output=not shared_output, from_law=from_law
    )
    if not joint:
        run_head_training(recipe, source, states, run, result, terminal)
        return
    from specrun.train.heads.medusa2 import Medusa2Recipe, train_medusa2

    both = Medusa2Recipe(
        recipe, head_weight=head_weight, model_rate=model_rate, heads_alone=heads_alone
    )

    def train(wanted: HeadRun, shown: ShownRun) -> TrainingReport:
        return train_medusa2(both, wanted, shown)

    # Joint heads draft for the model that was trained with them.
    train_and_report(
        "medusa", train, result.output.expanduser(), source, states, run, result, terminal
    )
