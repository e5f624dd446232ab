"""Heads and look-ahead positions of a target: `specrun train medusa`, `eagle`, `pass` and others.

Each command only makes the recipe that its options describe; `_train_and_report` runs any of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.cli.options.group import CommandFunction, Decorator, Section
from specrun.cli.options.types import FILE, SHARE_BELOW_ONE
from specrun.cli.train.options import (
    OptionValue,
    TrainJob,
    named_fields,
    states_options,
    train_command,
)
from specrun.cli.train.report import check_result, measures_text, print_report, trained

if TYPE_CHECKING:
    from specrun.train.data import AnswerSettings
    from specrun.train.heads import TargetRecipe

_HEADS, _HEAD, _JOINT = Section("Heads"), Section("Head"), Section("Medusa-2")
_POSITIVE = click.FloatRange(0, min_open=True)
_STEPS = click.IntRange(1, 16)

States = dict[str, Any]
"""The fields of a `HeadRun` that the options of states give, and those of the target's answers."""


def _head_command(
    epilog: str, *own: Decorator, target: str = "MODEL"
) -> Callable[[CommandFunction], click.Command]:
    """Return `train_command` with the options of states; data may be left out."""
    return train_command(epilog, *own, states_options, target=target, needs_data=False)


_MEDUSA_EPILOG = """\b
Examples:
  specrun train medusa --target Llama-3.2-1B --data chats.jsonl -o heads --gguf heads.gguf
  specrun train medusa --target Llama-3.2-1B --data chats.jsonl -o heads --heads 3 --shared-output
  specrun train medusa --target Llama-3.2-1B --data prompts.jsonl -o heads --answers target --from-law

\b
Medusa-1: the target stays as it is. Head k guesses the token k + 1 places ahead; its loss weighs --decay to
the power of k. With --shared-output heads have no output matrix of their own: 5 heads of a 1B model then take
80 MB instead of 5.3 GB in float32, and only specrun runs them. --answers target --from-law is
self-distillation: the target answers the prompts of the data itself, and heads learn its distribution.

\b
With --joint (Medusa-2) the folder is a new model with its heads: convert it twice, with --kind model and
with --kind medusa --target. Its text is the new model's, not the old one's; --from-law keeps
the two close.
"""  # noqa: E501 - as it is shown


@_head_command(
    _MEDUSA_EPILOG,
    _HEADS.option("--heads N", "The number of heads.", click.IntRange(1, 32), default=5),
    _HEADS.option(
        "--layers N",
        "The number of residual blocks in each head.",
        click.IntRange(1, 16),
        default=1,
    ),
    _HEADS.option(
        "--decay X",
        "The weight of head k's loss is this to the power of k.",
        click.FloatRange(0, 1, min_open=True),
        default=0.8,
    ),
    _HEADS.flag("--shared-output", "Use the target's output matrix for all heads."),
    _HEADS.flag(
        "--from-law",
        "Learn the target's distribution (KL divergence) instead of the tokens of the text.",
    ),
    _JOINT.flag("--joint", "Medusa-2: train a copy of the target together with its heads."),
    _JOINT.option(
        "--head-weight X",
        "The weight of the heads' loss, relative to the model's own.",
        _POSITIVE,
        default=0.2,
    ),
    _JOINT.option(
        "--model-rate X",
        "The model's learning rate, as a multiple of --learning-rate.",
        _POSITIVE,
        default=0.25,
    ),
    _JOINT.option(
        "--heads-alone SHARE",
        "The share of the steps that train only the heads, before the model learns too.",
        SHARE_BELOW_ONE,
        default=0.1,
    ),
)
def medusa(
    job: TrainJob, states: States, joint: bool, shared_output: bool, **values: OptionValue
) -> None:
    """Train Medusa heads for a target."""
    from specrun.train.heads import Medusa2Recipe, MedusaRecipe

    of_both = {name: values.pop(name) for name in ("head_weight", "model_rate", "heads_alone")}
    recipe = MedusaRecipe(own_output=not shared_output, **values)
    if joint:
        _train_and_report(Medusa2Recipe(recipe, **of_both), job, states, kind="medusa")
    else:
        _train_and_report(recipe, job, states)


_HYDRA_EPILOG = """\b
Examples:
  specrun train hydra --target Llama-3.2-1B --data chats.jsonl -o heads --gguf heads.gguf
  specrun train hydra --target Llama-3.2-1B --data chats.jsonl -o heads --plus

\b
Head k guesses the token k + 1 places ahead and reads the tokens in between. --plus is Hydra++: 4 blocks a
head, a layer over the states in front, and the target's own distribution as the goal.
"""  # noqa: E501 - as it is shown


@_head_command(
    _HYDRA_EPILOG,
    _HEADS.option("--heads N", "The number of heads.", click.IntRange(1, 32), default=4),
    _HEADS.option(
        "--layers N",
        "The number of blocks in each head.",
        click.IntRange(1, 16),
        show_default="1; with --plus 4",
    ),
    _HEADS.flag("--plus", "Train Hydra++."),
    _HEADS.option(
        "--dropout SHARE",
        "The share of activations that is dropped during training.",
        SHARE_BELOW_ONE,
        show_default="0; with --plus 0.2",
    ),
    _HEADS.option(
        "--noise ALPHA",
        "Add noise of up to ALPHA / sqrt(tokens x width) to the heads' inputs during training, "
        "as NEFTune does. Hydra's paper has 75, its code 0.",
        click.FloatRange(0),
        default=0.0,
    ),
)
def hydra(job: TrainJob, states: States, plus: bool, **values: OptionValue) -> None:
    """Train Hydra heads for a target."""
    from specrun.train.heads import HydraRecipe

    recipe = HydraRecipe.plus_plus() if plus else HydraRecipe()
    _train_and_report(dataclasses.replace(recipe, **named_fields(**values)), job, states)


_EAGLE_EPILOG = """\b
Examples:
  specrun train eagle --target Llama-3.2-1B --data chats.jsonl -o head --gguf head.gguf
  specrun train eagle --target Llama-3.2-1B --data chats.jsonl -o head --unroll 3
  specrun train eagle --target model-Q4_K_M.gguf -o head --gguf head.gguf
  specrun train eagle --target model.gguf --prompts mine.txt -o head --gguf head.gguf
  specrun train eagle --target model.gguf --from head.gguf --prompts more.txt -o better --gguf better.gguf

\b
The head learns the target's next hidden state (smooth L1), and with --token-weight the distribution that
follows from it. Uniform noise is added to the states it reads. --unroll also trains on its own predictions,
as HASS does; each step costs as much time again. One head serves EAGLE-1's and EAGLE-2's trees.
"""  # noqa: E501 - as it is shown


_law_option = _HEAD.option(
    "--law-tokens N",
    "Compare distributions over N tokens only: the most frequent ones, and a quarter drawn "
    "anew at each step. This is faster if the target is narrow.",
    click.IntRange(0),
    default=0,
    show_default="all",
)
_late_option = _HEAD.option(
    "--unroll-late N",
    "The value of --unroll in the last two fifths of training, when later steps read better "
    "states.",
    _STEPS,
    show_default="as --unroll",
)
_optimizer_option = _HEAD.option(
    "--optimizer",
    "The optimizer of the matrices between states. Steps of muon teach more and take longer.",
    click.Choice(["adamw", "muon"]),
    default="adamw",
)
_from_option = _HEAD.option(
    "--from HEAD.gguf",
    "Continue from this head, which was made for the same target. Its draft vocabulary stays.",
    FILE,
    dest="earlier",
)


@_head_command(
    _EAGLE_EPILOG,
    _from_option,
    _HEAD.option(
        "--token-weight X",
        "The weight of the cross-entropy with the target's distribution, relative to the "
        "distance of states.",
        click.FloatRange(0),
        default=0.1,
    ),
    _HEAD.option(
        "--noise X",
        "The largest amount of noise added to a state.",
        click.FloatRange(0),
        default=0.1,
    ),
    _HEAD.option(
        "--unroll N",
        "Train N steps of a chain. From the second on, the head reads its own states.",
        _STEPS,
        default=1,
    ),
    _late_option,
    _law_option,
    _HEAD.option(
        "--draft-tokens N",
        "Draft only the N most frequent tokens (FR-Spec). This is faster if the vocabulary is "
        "large and the target small. Distributions are then compared over these tokens.",
        click.IntRange(0),
        default=0,
        show_default="all",
    ),
    _HEAD.option(
        "--start",
        "The initial weights. fitted: least squares over the target's states, which saves "
        "hundreds of steps. random: as upstream.",
        click.Choice(["fitted", "random"]),
        default="fitted",
    ),
)
def eagle(job: TrainJob, states: States, earlier: Path | None, **values: OptionValue) -> None:
    """Train an EAGLE head for a target."""
    from specrun.train.heads import EagleRecipe

    _train_and_report(EagleRecipe(**named_fields(**values)), job, states, earlier)


_EAGLE3_EPILOG = """\b
Examples:
  specrun train eagle3 --target Llama-3.2-1B --data chats.jsonl -o head --gguf head.gguf
  specrun train eagle3 --target Llama-3.2-1B --data chats.jsonl -o head --unroll 4 --draft-tokens 8000

\b
Training-time test: chains of --unroll steps below every position, each reading the head's own states and
attending to its own earlier steps. The draft vocabulary has the most frequent tokens in the answers of the
data. Other tokens are never drafted, which costs speed and never changes the target's text.
"""  # noqa: E501 - as it is shown


@_head_command(
    _EAGLE3_EPILOG,
    _from_option,
    _HEAD.option("--unroll N", "Train N steps of a chain.", _STEPS, default=7),
    _late_option,
    _optimizer_option,
    _HEAD.option(
        "--draft-tokens N", "The size of the draft vocabulary.", click.IntRange(1), default=32000
    ),
    _law_option,
    _HEAD.option(
        "--read-layers LOW MIDDLE HIGH",
        "The target's layers whose inputs the head reads.",
        click.IntRange(0),
        nargs=3,
        show_default="2, n/2, n-3",
    ),
)
def eagle3(job: TrainJob, states: States, earlier: Path | None, **values: OptionValue) -> None:
    """Train an EAGLE-3 head for a target."""
    from specrun.train.heads import Eagle3Recipe

    _train_and_report(Eagle3Recipe(**named_fields(**values)), job, states, earlier)


_DFLASH_EPILOG = """\b
Examples:
  specrun train dflash --target model-Q4_K_M.gguf -o block --gguf block.gguf
  specrun train dflash --target model.gguf --prompts mine.txt -o block --gguf block.gguf --markov-rank 64
  specrun train dflash --target Llama-3.2-1B --data chats.jsonl -o block --block 16 --layers 5

\b
A block drafter (DFlash) drafts a whole block in one evaluation of a few layers, which read inputs of some
of the target's layers. --markov-rank adds DSpark's Markov head, which weighs a token by the one before.
--confidence adds the head that estimates how much of a draft is right. The file is llama.cpp's architecture dflash.
"""  # noqa: E501 - as it is shown


def _layer_numbers(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Return the numbers of a list such as 1,4,7."""
    if value is None:
        return None
    try:
        return tuple(int(number) for number in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of layers such as 1,4,7") from None


@_head_command(
    _DFLASH_EPILOG,
    _HEAD.option(
        "--block N",
        "The number of tokens in a block. The first one is the last token of the text.",
        click.IntRange(2, 256),
        dest="block_size",
        default=8,
    ),
    _HEAD.option(
        "--layers N", "The number of layers.", click.IntRange(1, 64), dest="n_layers", default=2
    ),
    _HEAD.option(
        "--slot-decay X",
        "The weight of the loss at depth k is this to the power of k - 1. DFlash's paper has "
        "e^(-1/4) for blocks of 8, e^(-1/7) for 16.",
        click.FloatRange(0, 1, min_open=True),
        default=0.78,
    ),
    _HEAD.option(
        "--anchor-every N",
        "Train a block after one of every N tokens, drawn anew at each step.",
        click.IntRange(1),
        default=4,
    ),
    _HEAD.option(
        "--markov-rank N",
        "The rank of DSpark's Markov head. Its paper has 256.",
        click.IntRange(0),
        default=0,
        show_default="none",
    ),
    _HEAD.flag("--confidence", "Also train DSpark's confidence head. It needs a Markov head."),
    _optimizer_option,
    _HEAD.option(
        "--draft-tokens N",
        "Draft only the N most frequent tokens, with an output matrix of their own. This is "
        "faster if the vocabulary is large.",
        click.IntRange(0),
        default=0,
        show_default="all",
    ),
    _law_option,
    _HEAD.option(
        "--read-layers LIST",
        "The target's layers whose inputs the drafter reads, such as 1,4,7.",
        callback=_layer_numbers,
        show_default="2, n/2, n-3",
    ),
    _HEAD.option(
        "--mask-token ID",
        "The token that stands in the places of the tokens to draft.",
        click.IntRange(0),
        dest="mask",
        show_default="the least frequent one",
    ),
)
def dflash(job: TrainJob, states: States, **values: OptionValue) -> None:
    """Train a block drafter for a target (DFlash, DSpark)."""
    from specrun.train.heads import DFlashRecipe

    _train_and_report(DFlashRecipe(**named_fields(**values)), job, states)


# == Look-ahead positions =========================================================================


_POSITIONS, _MODEL = Section("Look-ahead positions"), Section("The model")

_POSITION_OPTIONS = (
    _POSITIONS.option(
        "--positions N", "The number of positions after a token.", click.IntRange(1, 64), default=3
    ),
    _POSITIONS.option(
        "--groups N",
        "Train positions after at most N tokens of a text in each step.",
        click.IntRange(1),
        default=48,
    ),
    _POSITIONS.option(
        "--decay X",
        "The weight of position j's loss is this to the power of j - 1.",
        click.FloatRange(0, 1, min_open=True),
        default=0.8,
    ),
    _POSITIONS.flag(
        "--from-law",
        "Learn the target's distribution (KL divergence) instead of the tokens of the text.",
    ),
)

_PASS_EPILOG = """\b
Examples:
  specrun train pass --target Llama-3.2-1B --data chats.jsonl -o ahead --gguf ahead.gguf
  specrun train pass --target Llama-3.2-1B --data prompts.jsonl -o ahead --answers target --from-law

\b
PaSS: the target and its file stay as they are. Training gives --positions embeddings, which stand after a
token in the places of the tokens to come. The target drafts at them while it verifies.
"""  # noqa: E501 - as it is shown


@_head_command(_PASS_EPILOG, *_POSITION_OPTIONS, target="DIR")
def pass_(job: TrainJob, states: States, **values: OptionValue) -> None:
    """Train look-ahead embeddings for a target (PaSS)."""
    from specrun.train.lookahead import PassRecipe

    _train_and_report(PassRecipe(**named_fields(**values)), job, states)


pass_.name = "pass"  # which Python does not allow as the name of a function


_SPACE_EPILOG = """\b
Examples:
  specrun train space --target Llama-3.2-1B --data chats.jsonl -o fast --gguf mask.gguf
  specrun convert fast -o fast.gguf --kind model

\b
SPACE makes a NEW MODEL: a copy of the target is trained together with a mask token, to predict tokens ahead
at mask tokens. Its text is the new model's, not the old one's; --from-law keeps the two close. The
folder has both: convert it twice, with --kind model and, as --gguf does, with --kind space.
"""  # noqa: E501 - as it is shown


@_head_command(
    _SPACE_EPILOG,
    *_POSITION_OPTIONS,
    _MODEL.option(
        "--mask-weight X",
        "The weight of the mask tokens' loss, relative to the model's own.",
        _POSITIVE,
        default=1.0,
    ),
    _MODEL.option(
        "--mask-rate X",
        "The mask token's learning rate, as a multiple of --learning-rate.",
        _POSITIVE,
        default=20.0,
    ),
    target="DIR",
)
def space(job: TrainJob, states: States, **values: OptionValue) -> None:
    """Train a copy of a target to draft at mask tokens (SPACE)."""
    from specrun.train.lookahead import SpaceRecipe

    _train_and_report(SpaceRecipe(**named_fields(**values)), job, states)


# == The run =======================================================================================


def _train_and_report(
    recipe: TargetRecipe,
    job: TrainJob,
    states: States,
    earlier: Path | None = None,
    *,
    kind: str | None = None,
) -> None:
    """Train, draw curves, convert the head, of a `kind` if not the recipe's, and report on it."""
    from specrun.train.heads import HeadRun

    plot = check_result(job.result)
    own_answers = _own_answers(states, job)
    run = HeadRun(**job.settings, **states, own_answers=own_answers, earlier=earlier)
    if job.result.gguf is not None:
        from specrun.convert.heads.target_facts import target_facts

        target_facts(run.source)  # raises now, not when the head is converted
    from specrun.convert.heads.head_conversion import convert_head

    kind = kind or recipe.kind
    # A head drafts for the model that was trained with it, if there is one.
    drafts_for = run.output if recipe.changes_model else run.source
    convert = functools.partial(convert_head, target=drafts_for, kind=kind)
    report, files = trained(job, recipe, run, plot, kind, convert, what="head")
    curves = report.result.curves
    measures = curves.measures[-1][1] if curves.measures else {}
    print_report(
        job,
        kind,
        report,
        files,
        shown={"agrees with the target": measures_text(measures)},
        counts={"held_out": report.n_held_out},
        measures={"measures": measures},
    )


def _own_answers(states: States, job: TrainJob) -> AnswerSettings | None:
    """Take the options of the target's answers out of `states`.

    Return its settings, None if the data's answers are learnt.
    """
    given, whose = bool(job.settings["data"]), states.pop("answers", None)
    longest, temperature = states.pop("answer_length"), states.pop("answer_temp")
    options = {"longest": longest, "temperature": temperature, "parallel": states.pop("parallel")}
    if given and "prompts" in states:
        raise click.UsageError("--data and --prompts are both given: leave one of them out")
    if not given and whose == "given":
        raise click.UsageError("--answers given needs --data with answers to learn")
    if given and whose != "target":
        return None
    from specrun.train.data import AnswerSettings

    return AnswerSettings(**options, seed=job.settings["seed"])
