"""`specrun train pass` and `space`: what the target reads at look-ahead positions."""

from __future__ import annotations

import functools

import click

from specrun.cli.options.group import Section
from specrun.cli.train.heads import train_and_report
from specrun.cli.train.options import TrainFeatures, TrainJob, states_options, train_command

_POSITIONS, _MODEL = Section("Look-ahead positions"), Section("The model")
_POSITIVE = click.FloatRange(0, min_open=True)

_POSITION_OPTIONS = (
    _POSITIONS.option(
        "--positions N", "How many behind a token.", click.IntRange(1, 64), default=3
    ),
    _POSITIONS.option(
        "--groups N",
        "Behind how many tokens of a text they are learnt in a step, at most.",
        click.IntRange(1),
        default=48,
    ),
    _POSITIONS.option(
        "--decay X",
        "The loss of position j weighs this to the power of j - 1.",
        click.FloatRange(0, 1, min_open=True),
        default=0.8,
    ),
    _POSITIONS.flag(
        "--from-law", "Learn the target's law (KL divergence) instead of the tokens of the text."
    ),
)

_PASS_EPILOG = """\b
Examples:
  specrun train pass --target Llama-3.2-1B --data chats.jsonl -o ahead --gguf ahead.gguf
  specrun train pass --target Llama-3.2-1B --data prompts.jsonl -o ahead --answers target --from-law

\b
PaSS: the target stays as it is, and so does its file. What is learnt are --positions embeddings, which stand
behind a token in the place of the tokens to come; the target drafts at them while it verifies.
"""  # noqa: E501 - as it is shown


@train_command(_PASS_EPILOG, *_POSITION_OPTIONS, states_options, needs_data=False)
def pass_(
    job: TrainJob,
    positions: int,
    groups: int,
    decay: float,
    from_law: bool,
    states: TrainFeatures,
) -> None:
    """Train look-ahead embeddings for a target (PaSS)."""
    from specrun.train.lookahead import PassRecipe, train_pass

    recipe = PassRecipe(count=positions, groups=groups, decay=decay, from_law=from_law)
    run = functools.partial(train_pass, recipe)
    train_and_report("pass", run, job.settings["target"], job, states)


pass_.name = "pass"  # which Python does not allow as the name of a function


_SPACE_EPILOG = """\b
Examples:
  specrun train space --target Llama-3.2-1B --data chats.jsonl -o fast --gguf mask.gguf
  specrun convert fast -o fast.gguf --kind model

\b
SPACE makes a NEW MODEL: a copy of the target is trained together with a mask token, to say tokens ahead at
mask tokens. It says what the new model says, not what the old one said; --from-law keeps the two close. The
folder has both: convert it twice, with --kind model and, as --gguf does, with --kind space.
"""  # noqa: E501 - as it is shown


@train_command(
    _SPACE_EPILOG,
    *_POSITION_OPTIONS,
    _MODEL.option(
        "--mask-weight X",
        "Of what masks learn beside the model's own loss.",
        _POSITIVE,
        default=1.0,
    ),
    _MODEL.option(
        "--mask-rate X", "Times the learning rate: the mask token's own.", _POSITIVE, default=20.0
    ),
    states_options,
    needs_data=False,
)
def space(
    job: TrainJob,
    positions: int,
    groups: int,
    decay: float,
    from_law: bool,
    mask_weight: float,
    mask_rate: float,
    states: TrainFeatures,
) -> None:
    """Train a copy of a target to draft at mask tokens (SPACE)."""
    from specrun.train.lookahead import SpaceRecipe, train_space

    recipe = SpaceRecipe(
        count=positions,
        groups=groups,
        decay=decay,
        from_law=from_law,
        mask_weight=mask_weight,
        mask_rate=mask_rate,
    )
    # The mask drafts for the model that was trained with it.
    run = functools.partial(train_space, recipe)
    train_and_report("space", run, job.settings["output"], job, states)
