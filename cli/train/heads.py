"""Heads and look-ahead positions of a target: `specrun train medusa`, `eagle`, `pass` and others.

Each command only makes the recipe that its options describe; `_train_and_report` runs any of them.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.cli.options.group import Section
from specrun.cli.options.types import FILE, SHARE_BELOW_ONE
from specrun.cli.train.options import (
    OptionValue,
    TrainFeatures,
    TrainJob,
    states_options,
    train_command,
)
from specrun.cli.train.report import check_result, measures_text, print_report, trained

if TYPE_CHECKING:
    from specrun.train.data import AnswerSettings
    from specrun.train.heads import HeadRecipe, TargetRecipe

_HEADS, _HEAD, _JOINT = Section("Heads"), Section("Head"), Section("Medusa-2")
_POSITIVE = click.FloatRange(0, min_open=True)
_STEPS = click.IntRange(1, 16)

_MEDUSA_EPILOG = """\b
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


@train_command(
    _MEDUSA_EPILOG,
    _HEADS.option("--heads N", "How many.", click.IntRange(1, 32), default=5),
    _HEADS.option("--layers N", "Residual blocks of each.", click.IntRange(1, 16), default=1),
    _HEADS.option(
        "--decay X",
        "The loss of head k weighs this to the power of k.",
        click.FloatRange(0, 1, min_open=True),
        default=0.8,
    ),
    _HEADS.flag("--shared-output", "Use the target's output matrix for all heads."),
    _HEADS.flag(
        "--from-law", "Learn the target's law (KL divergence) instead of the tokens of the text."
    ),
    _JOINT.flag("--joint", "Medusa-2: train a copy of the target together with its heads."),
    _JOINT.option(
        "--head-weight X", "Of the heads' loss beside the model's own.", _POSITIVE, default=0.2
    ),
    _JOINT.option(
        "--model-rate X", "Times the learning rate: the model's own.", _POSITIVE, default=0.25
    ),
    _JOINT.option(
        "--heads-alone SHARE",
        "The share of the steps before the model begins to learn.",
        SHARE_BELOW_ONE,
        default=0.1,
    ),
    states_options,
    target="MODEL",
    needs_data=False,
)
def medusa(
    job: TrainJob, states: TrainFeatures, joint: bool, shared_output: bool, **values: OptionValue
) -> None:
    """Train Medusa heads for a target."""
    from specrun.train.heads import Medusa2Recipe, MedusaRecipe

    of_both = {name: values.pop(name) for name in ("head_weight", "model_rate", "heads_alone")}
    recipe = MedusaRecipe(own_output=not shared_output, **values)
    if not joint:
        _train_recipe(recipe, job, states)
        return
    # Joint heads draft for the model that was trained with them.
    both = Medusa2Recipe(recipe, **of_both)
    _train_and_report("medusa", both, job.settings["output"], job, states)


_HYDRA_EPILOG = """\b
Examples:
  specrun train hydra --target Llama-3.2-1B --data chats.jsonl -o heads --gguf heads.gguf
  specrun train hydra --target Llama-3.2-1B --data chats.jsonl -o heads --plus

\b
Head k guesses the token k + 1 places ahead and knows the tokens in between. --plus is Hydra++: 4 blocks a
head, a layer over the states in front, and the target's own law as what is learnt.
"""  # noqa: E501 - as it is shown


@train_command(
    _HYDRA_EPILOG,
    _HEADS.option("--heads N", "How many.", click.IntRange(1, 32), default=4),
    _HEADS.option(
        "--layers N", "Blocks of each.", click.IntRange(1, 16), show_default="1; with --plus 4"
    ),
    _HEADS.flag("--plus", "Hydra++."),
    _HEADS.option(
        "--dropout SHARE",
        "The share of numbers that is left out while learning.",
        SHARE_BELOW_ONE,
        show_default="0; with --plus 0.2",
    ),
    _HEADS.option(
        "--noise ALPHA",
        "Shake what heads read while they learn by up to ALPHA / sqrt(tokens x width), as NEFTune "
        "does; 75 in Hydra's paper, 0 in its code.",
        click.FloatRange(0),
        default=0.0,
    ),
    states_options,
    target="MODEL",
    needs_data=False,
)
def hydra(job: TrainJob, states: TrainFeatures, plus: bool, **values: OptionValue) -> None:
    """Train Hydra heads for a target."""
    from specrun.train.heads import HydraRecipe

    recipe = HydraRecipe.plus_plus() if plus else HydraRecipe()
    _train_recipe(dataclasses.replace(recipe, **_fields(values)), job, states)


_EAGLE_EPILOG = """\b
Examples:
  specrun train eagle --target Llama-3.2-1B --data chats.jsonl -o head --gguf head.gguf
  specrun train eagle --target Llama-3.2-1B --data chats.jsonl -o head --unroll 3
  specrun train eagle --target model-Q4_K_M.gguf -o head --gguf head.gguf
  specrun train eagle --target model.gguf --prompts mine.txt -o head --gguf head.gguf
  specrun train eagle --target model.gguf --from head.gguf --prompts more.txt -o better --gguf better.gguf

\b
The head learns the target's next hidden state (smooth L1), and with --token-weight the law that follows from
it, while uniform noise shakes the states it reads. --unroll trains on its own predictions too, as HASS does:
each step costs as much time again. One head serves EAGLE-1's and EAGLE-2's trees.
"""  # noqa: E501 - as it is shown


_law_option = _HEAD.option(
    "--law-tokens N",
    "Compare laws among N tokens: those said most often, and a quarter drawn anew each step; "
    "faster where the target is narrow.",
    click.IntRange(0),
    default=0,
    show_default="all",
)
_late_option = _HEAD.option(
    "--unroll-late N",
    "As many in the last two fifths of the training, when later steps read better states.",
    _STEPS,
    show_default="as --unroll",
)

_from_option = _HEAD.option(
    "--from HEAD.gguf",
    "Learn on from this head, which was made for the same target: its draft tokens stay.",
    FILE,
    dest="earlier",
)


@train_command(
    _EAGLE_EPILOG,
    _from_option,
    _HEAD.option(
        "--token-weight X",
        "Of the cross-entropy with the target's law, beside the distance of states.",
        click.FloatRange(0),
        default=0.1,
    ),
    _HEAD.option(
        "--noise X",
        "The most that is added to or taken from a state.",
        click.FloatRange(0),
        default=0.1,
    ),
    _HEAD.option(
        "--unroll N",
        "Steps of a chain that are trained; from the second on, the head reads its own states.",
        _STEPS,
        default=1,
    ),
    _late_option,
    _law_option,
    _HEAD.option(
        "--draft-tokens N",
        "Draft the N tokens alone that are said most often (FR-Spec): faster where the vocabulary "
        "is large and the target small. Laws are then compared among these.",
        click.IntRange(0),
        default=0,
        show_default="all",
    ),
    _HEAD.option(
        "--inputs",
        "What the head reads, as in the paper's ablation; both: states and the tokens after them.",
        click.Choice(["both", "features", "tokens"]),
        default="both",
    ),
    _HEAD.option(
        "--start",
        "How the head begins; fitted: by least squares over the target's states, which is worth "
        "hundreds of steps; random: as upstream's.",
        click.Choice(["fitted", "random"]),
        default="fitted",
    ),
    states_options,
    target="MODEL",
    needs_data=False,
)
def eagle(
    job: TrainJob, states: TrainFeatures, earlier: Path | None, **values: OptionValue
) -> None:
    """Train an EAGLE head for a target."""
    from specrun.train.heads import EagleRecipe

    _train_recipe(EagleRecipe(**_fields(values)), job, states, earlier)


_EAGLE3_EPILOG = """\b
Examples:
  specrun train eagle3 --target Llama-3.2-1B --data chats.jsonl -o head --gguf head.gguf
  specrun train eagle3 --target Llama-3.2-1B --data chats.jsonl -o head --unroll 4 --draft-tokens 8000

\b
Training-time test: chains of --unroll steps below every position, each reading the head's own states and
attending to its own earlier steps. The draft vocabulary is the tokens said most often in the answers of the
data; other tokens are never drafted, which costs speed and never changes what the target says.
"""  # noqa: E501 - as it is shown


@train_command(
    _EAGLE3_EPILOG,
    _from_option,
    _HEAD.option("--unroll N", "Steps of a chain that are trained.", _STEPS, default=7),
    _late_option,
    _HEAD.option(
        "--optimizer",
        "Of the matrices between states; muon: a step teaches more and takes longer.",
        click.Choice(["adamw", "muon"]),
        default="adamw",
    ),
    _HEAD.option(
        "--draft-tokens N",
        "The most tokens that can be drafted.",
        click.IntRange(1),
        default=32000,
    ),
    _law_option,
    _HEAD.option(
        "--read-layers LOW MIDDLE HIGH",
        "The layers whose inputs are read.",
        click.IntRange(0),
        nargs=3,
        show_default="2, n/2, n-3",
    ),
    states_options,
    target="MODEL",
    needs_data=False,
)
def eagle3(
    job: TrainJob, states: TrainFeatures, earlier: Path | None, **values: OptionValue
) -> None:
    """Train an EAGLE-3 head for a target."""
    from specrun.train.heads import Eagle3Recipe

    _train_recipe(Eagle3Recipe(**_fields(values)), job, states, earlier)


_DFLASH_EPILOG = """\b
Examples:
  specrun train dflash --target model-Q4_K_M.gguf -o block --gguf block.gguf
  specrun train dflash --target model.gguf --prompts mine.txt -o block --gguf block.gguf --markov-rank 64
  specrun train dflash --target Llama-3.2-1B --data chats.jsonl -o block --block 16 --layers 5

\b
A block drafter (DFlash) drafts a whole block in one evaluation of a few layers, which read inputs of some
of the target's layers. --markov-rank adds DSpark's Markov head, which weighs a token by the one before, and
--confidence the head that says how far a draft is sure. The file is llama.cpp's architecture dflash.
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


@train_command(
    _DFLASH_EPILOG,
    _HEAD.option(
        "--block N",
        "Tokens of a block, of which the last one of the text is the first.",
        click.IntRange(2, 256),
        dest="block_size",
        default=8,
    ),
    _HEAD.option("--layers N", "Its layers.", click.IntRange(1, 64), dest="n_layers", default=2),
    _HEAD.option(
        "--slot-decay X",
        "The loss of the token at depth k weighs this to the power of k - 1; e^(-1/4) in DFlash's "
        "paper for blocks of 8, e^(-1/7) for 16.",
        click.FloatRange(0, 1, min_open=True),
        default=0.78,
    ),
    _HEAD.option(
        "--anchor-every N",
        "Blocks are learnt behind one of N tokens, drawn anew at each step.",
        click.IntRange(1),
        default=4,
    ),
    _HEAD.option(
        "--markov-rank N",
        "Of DSpark's Markov head, 256 in its paper.",
        click.IntRange(0),
        default=0,
        show_default="none",
    ),
    _HEAD.flag("--confidence", "With DSpark's confidence head, beside a Markov head."),
    _HEAD.option(
        "--optimizer",
        "Of the matrices between states; muon: a step teaches more and takes longer.",
        click.Choice(["adamw", "muon"]),
        default="adamw",
    ),
    _HEAD.option(
        "--draft-tokens N",
        "Draft the N tokens alone that are said most often, with an output matrix of its own: "
        "faster where the vocabulary is large.",
        click.IntRange(0),
        default=0,
        show_default="all",
    ),
    _law_option,
    _HEAD.option(
        "--read-layers LIST",
        "The layers whose inputs are read, such as 1,4,7.",
        callback=_layer_numbers,
        show_default="2, n/2, n-3",
    ),
    _HEAD.option(
        "--mask-token ID",
        "The token that stands for those to draft.",
        click.IntRange(0),
        dest="mask",
        show_default="the one said least often",
    ),
    states_options,
    target="MODEL",
    needs_data=False,
)
def dflash(job: TrainJob, states: TrainFeatures, **values: OptionValue) -> None:
    """Train a block drafter for a target (DFlash, DSpark)."""
    from specrun.train.heads import DFlashRecipe

    _train_recipe(DFlashRecipe(**_fields(values)), job, states)


# == Look-ahead positions =========================================================================


_POSITIONS, _MODEL = Section("Look-ahead positions"), Section("The model")

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
def pass_(job: TrainJob, states: TrainFeatures, **values: OptionValue) -> None:
    """Train look-ahead embeddings for a target (PaSS)."""
    from specrun.train.lookahead import PassRecipe

    recipe = PassRecipe(**_fields(values))
    _train_and_report("pass", recipe, job.settings["target"], job, states)


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
def space(job: TrainJob, states: TrainFeatures, **values: OptionValue) -> None:
    """Train a copy of a target to draft at mask tokens (SPACE)."""
    from specrun.train.lookahead import SpaceRecipe

    # The mask drafts for the model that was trained with it.
    recipe = SpaceRecipe(**_fields(values))
    _train_and_report("space", recipe, job.settings["output"], job, states)


# == The run =======================================================================================


_FIELDS = {
    "unroll": "steps",
    "unroll_late": "late_steps",
    "read_layers": "layers",
    "positions": "count",
}
"""Fields of recipes by the option that gives them, if the names differ."""


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of options, as far as they are given, by the fields of a recipe."""
    return {_FIELDS.get(name, name): value for name, value in values.items() if value is not None}


def _train_recipe(
    recipe: HeadRecipe, job: TrainJob, states: TrainFeatures, earlier: Path | None = None
) -> None:
    drafts_for = states.teacher or job.settings["target"]
    _train_and_report(recipe.kind, recipe, drafts_for, job, states, earlier)


def _train_and_report(
    kind: str,
    recipe: TargetRecipe,
    drafts_for: Path,
    job: TrainJob,
    states: TrainFeatures,
    earlier: Path | None = None,
) -> None:
    """Train, draw curves, convert the head for `drafts_for`, and report on it."""
    from specrun.train.heads import HeadRun

    plot = check_result(job.result)
    run = HeadRun(
        **job.settings,
        teacher=states.teacher,
        own_answers=_own_answers(states, job),
        prompts=states.prompts,
        n_prompts=states.n_prompts,
        n_own_prompts=states.own_prompts,
        cache=states.cache,
        features=states.features,
        earlier=earlier,
    )
    if job.result.gguf is not None:
        from specrun.convert.heads.target_facts import target_facts

        target_facts(states.teacher or run.target)  # raises now, not when the head is converted
    from specrun.convert.heads.head_conversion import convert_head

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


def _own_answers(states: TrainFeatures, job: TrainJob) -> AnswerSettings | None:
    """Return the settings of the target's answers, None if the data's answers are learnt."""
    given = bool(job.settings["data"])
    if given and states.prompts is not None:
        raise click.UsageError("--data and --prompts are both given: leave one of them out")
    if not given and states.answers == "given":
        raise click.UsageError("--answers given needs --data with answers to learn")
    if given and states.answers != "target":
        return None
    from specrun.train.data import AnswerSettings

    return AnswerSettings(
        temperature=states.answer_temp,
        longest=states.answer_length,
        seed=job.settings["seed"],
        parallel=states.parallel,
    )
