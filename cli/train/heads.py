"""`specrun train medusa`, `hydra`, `eagle` and `eagle3`: heads that read a target's hidden states.

Each command only makes the recipe that its options describe; `train_and_report` runs any of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.cli.options.group import Section
from specrun.cli.options.types import FILE, SHARE_BELOW_ONE
from specrun.cli.train.options import TrainFeatures, TrainJob, states_options, train_command
from specrun.cli.train.progress import ShownRun, measures_text, shown_run
from specrun.cli.train.training import check_result, draw_and_convert, print_report

if TYPE_CHECKING:
    from specrun.train.data import AnswerSettings
    from specrun.train.heads import EagleInputs, EagleStart, HeadRecipe, HeadRun
    from specrun.train.trainer import MatrixOptimizer, TrainingReport

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
    job: TrainJob,
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
) -> None:
    """Train Medusa heads for a target."""
    from specrun.train.heads import MedusaRecipe

    recipe = MedusaRecipe(
        heads=heads, layers=layers, decay=decay, own_output=not shared_output, from_law=from_law
    )
    if not joint:
        _train_recipe(recipe, job, states)
        return
    from specrun.train.heads import Medusa2Recipe, train_medusa2

    both = Medusa2Recipe(
        recipe, head_weight=head_weight, model_rate=model_rate, heads_alone=heads_alone
    )
    # Joint heads draft for the model that was trained with them.
    train_and_report(
        "medusa", functools.partial(train_medusa2, both), job.settings["output"], job, states
    )


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
def hydra(
    job: TrainJob,
    heads: int,
    layers: int | None,
    plus: bool,
    dropout: float | None,
    noise: float,
    states: TrainFeatures,
) -> None:
    """Train Hydra heads for a target."""
    from specrun.train.heads import HydraRecipe

    recipe = HydraRecipe.plus_plus() if plus else HydraRecipe()
    given: dict[str, Any] = {"heads": heads, "layers": layers, "dropout": dropout, "noise": noise}
    changes = {name: value for name, value in given.items() if value is not None}
    _train_recipe(dataclasses.replace(recipe, **changes), job, states)


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
    job: TrainJob,
    token_weight: float,
    noise: float,
    unroll: int,
    unroll_late: int | None,
    law_tokens: int,
    draft_tokens: int,
    inputs: EagleInputs,
    start: EagleStart,
    earlier: Path | None,
    states: TrainFeatures,
) -> None:
    """Train an EAGLE head for a target."""
    from specrun.train.heads import EagleRecipe

    recipe = EagleRecipe(
        token_weight=token_weight,
        noise=noise,
        steps=unroll,
        late_steps=unroll_late or 0,
        inputs=inputs,
        law_tokens=law_tokens,
        draft_tokens=draft_tokens,
        start=start,
    )
    _train_recipe(recipe, job, states, earlier)


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
    job: TrainJob,
    unroll: int,
    unroll_late: int | None,
    optimizer: MatrixOptimizer,
    draft_tokens: int,
    law_tokens: int,
    read_layers: tuple[int, int, int] | None,
    earlier: Path | None,
    states: TrainFeatures,
) -> None:
    """Train an EAGLE-3 head for a target."""
    from specrun.train.heads import Eagle3Recipe

    recipe = Eagle3Recipe(
        steps=unroll,
        late_steps=unroll_late or 0,
        optimizer=optimizer,
        draft_tokens=draft_tokens,
        law_tokens=law_tokens,
        layers=read_layers,
    )
    _train_recipe(recipe, job, states, earlier)


def _train_recipe(
    recipe: HeadRecipe, job: TrainJob, states: TrainFeatures, earlier: Path | None = None
) -> None:
    from specrun.train.heads import train_head

    drafts_for = states.teacher or job.settings["target"]
    train = functools.partial(train_head, recipe)
    train_and_report(recipe.kind, train, drafts_for, job, states, earlier)


def train_and_report(
    kind: str,
    train: Callable[[HeadRun, ShownRun], TrainingReport],
    drafts_for: Path,
    job: TrainJob,
    states: TrainFeatures,
    earlier: Path | None = None,
) -> None:
    """Run `train`, draw its curves, convert the head for `drafts_for`, and report on it."""
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

        target_facts(states.teacher or run.target)  # raises now what converting would raise later
    with shown_run(job.terminal) as shown:
        report = train(run, shown)
    from specrun.convert.heads.head_conversion import convert_head

    convert = functools.partial(convert_head, target=drafts_for, kind=kind)
    files = draw_and_convert(job, run, report, plot, kind, convert, what="head")
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
    """Return how the target answers, None where the data's answers are learnt."""
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
