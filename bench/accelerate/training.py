"""A head for a GGUF file, trained from the file alone on answers that the model itself gives.

A head that is there already for the file, one of those that come with specrun or lie beside it, is
learnt on from. The results of an interrupted training (answers, states, a checkpoint) lie in the
user's cache, and another call continues with them.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from specrun.bench.accelerate.kinds import HeadAccount
from specrun.bindings.errors import (
    MissingPackageError,
    ModelError,
    OptionError,
    PairError,
    TemplateError,
    UnsupportedModelError,
)
from specrun.bindings.files import atomic_path, cache_folder, json_object, read_kept
from specrun.bindings.gguf import read_header
from specrun.runtime.planning import (
    CostCurve,
    Count,
    Number,
    decoded,
    profile_file,
    write_json,
)
from specrun.runtime.planning.theory import multiplications_of

if TYPE_CHECKING:
    import torch

    from specrun.train.heads import HeadRecipe, HeadRun
    from specrun.train.target import HeadTarget
    from specrun.train.trainer import TrainingStatus


# == The hours of a training: how long answers may take, and how many steps fit into the rest ======
#
# Answers take a third at most, or half if their states come with them. The states of the target
# take their time, and the training the rest, with as many steps as fit. Their number is known
# once the first of them were timed.


ASKS, _ANSWERS = "the target asks", "the target answers"  # as the training names them
_ASKING = 0.1  # of the time, at most
ANSWERING, ANSWERING_WITH_STATES = 0.33, 0.5
"""Of the time, at most, asking included: without the answers' states, and with them."""
FEWEST_PROMPTS = 16
# At least: six steps alone are no good measure while other programs run.
_TIMED_STEPS, _TIMED_SECONDS, _TIMED_SHARE = 12, 30.0, 0.01
_FEWEST_STEPS = 20
_TRAINING = 0.9  # of the time that is left: measures and writing take the rest

HeadKind = Literal["eagle", "eagle3", "dflash"]


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The inputs of a training: another call with the same hours goes on with it.

    `n_tries` are those at prompts of the target's own, `n_prompts` and `steps` 0: not known yet.
    `spent` are the seconds of earlier calls, `earlier` the head's file that is learnt on from, if
    any.
    """

    kind: HeadKind
    hours: Number
    n_tries: Count
    n_prompts: Count = 0
    steps: Count = 0
    spent: Number = 0.0
    earlier: str = ""


class PlanKnown(Exception):
    """The time showed a number of the plan, such as `steps`: it goes on with that."""

    def __init__(self, **counts: int) -> None:
        super().__init__(f"the plan has {counts}")
        self.counts: dict[str, Any] = {**counts}


class Hours:
    """Times a training, and decides on enough answers and the number of steps.

    A `RunListener`, which shows nothing. `clock` returns seconds. An average step takes `dearer`
    times as long as one of the first, which are timed. Answers are enough when the share
    `answering` of the time is over.
    """

    def __init__(
        self,
        seconds: float,
        plan: TrainingPlan,
        clock: Callable[[], float] = time.monotonic,
        dearer: float = 1.0,
        answering: float = ANSWERING,
    ) -> None:
        self.plan = plan
        self._seconds, self._clock = seconds, clock
        self._dearer, self._answering = dearer, answering
        self._started = clock() - plan.spent
        self._timed: list[float] = []

    @property
    def spent(self) -> float:
        """Seconds of all calls."""
        return self._clock() - self._started

    def note(self, text: str) -> None:
        """Receive a fact."""

    def stage(self, what: str, done: int, total: int) -> None:
        """Receive the progress of work before the training; raises PlanKnown at its time's end."""
        if what == ASKS and self.spent > _ASKING * self._seconds and done < total:
            raise PlanKnown(n_tries=done)
        late = self.spent > self._answering * self._seconds
        if what == _ANSWERS and late and FEWEST_PROMPTS <= done < total:
            raise PlanKnown(n_prompts=done)

    def status(self, status: TrainingStatus) -> None:
        """Receive the progress of steps; raises PlanKnown once the first ones were timed."""
        if self.plan.steps:
            return
        self._timed.append(self._clock())
        # The first ones are slower: memory is allocated.
        counted = self._timed[_TIMED_STEPS // 2 - 1 :]
        n_steps = len(self._timed) - _TIMED_STEPS // 2
        enough = min(_TIMED_SECONDS, _TIMED_SHARE * self._seconds)
        if n_steps >= _TIMED_STEPS // 2 and counted[-1] - counted[0] >= enough:
            each = self._dearer * (counted[-1] - counted[0]) / n_steps
            left = _TRAINING * (self._seconds - self.spent)
            self._timed.clear()
            raise PlanKnown(steps=max(_FEWEST_STEPS, int(left / max(each, 1e-6))))


# == Training ======================================================================================


_FEWEST_BUILT_IN, _BUILT_IN_A_TRY = 2000, 2  # more than there is time to answer on a CPU
# At prompts of its own: more than a twentieth of the time lets a small one do.
_TRIES_AN_HOUR = 1500
_LONGEST_ANSWER = 192  # tokens: more answers teach more than longer ones
_AT_ONCE = 16  # conversations: three times the tokens a second of four, of a small model on a CPU
_TOKENS_PER_BATCH = 1024  # small batches learn more in the same time
_FIRST_STEPS = 1_000_000  # until it is known how many fit
_NARROW = 2048
"""The width below which distributions of all tokens are most of a step's work, and of a draft's."""
_DRAFT_TOKENS = 12288
_WIDE_DRAFT_TOKENS = 32000  # EAGLE-3's own
_LAW_TOKENS = 8192  # of EAGLE-3's, in a step: the head's output matrix is half of one's work
_NARROW_RATE = 0.576  # over the width: 1e-3 at 576, which was found good
_NARROW_BLOCK_RATE = 1.6  # likewise, of block drafters by Muon: 6e-3 at 256
_BLOCK_LAYERS, _WIDE_BLOCK_LAYERS, _MARKOV_RANK = 1, 2, 128
_WORTH_EAGLE3 = 12.0  # hours on a CPU for a wide target, as its steps take seven times as long
_UNROLLED = 2  # steps of chains that narrow targets' heads learn; more take longer
_UNROLLED_LATE = 4  # late in the training, for EAGLE-3
_LATE_COST = 1.25  # of an average step then, in early ones: late ones take 1.6 times as long
_UNROLLED_ON = 3  # where EAGLE-3 learns on
_RATE_ON = 0.3  # of a narrow target's rate: the learnt weights are not to be shaken again


@dataclass(frozen=True, slots=True)
class TrainingOrder:
    """The target of a head: a `target`, in so many `hours`, on prompts of the user's and ours.

    `prompts` are those that may be learnt from, none of which is held out. Of the heads in
    `earlier`, if any fits, the first is learnt on from. By the target's cost `curve` it is decided
    whether a block drafter is trained; without one none is.
    """

    target: Path
    hours: float
    prompts: tuple[str, ...] = ()
    n_threads: int = 0
    earlier: tuple[Path, ...] = ()
    curve: CostCurve | None = None

    @property
    def folder(self) -> Path:
        """Where the training keeps everything."""
        return cache_folder() / "heads" / profile_file(self.target).stem

    @property
    def head(self) -> Path:
        """The finished head's file."""
        return self.folder / "head.gguf"


def train_head(order: TrainingOrder) -> Path:
    """Return the GGUF file of a head; earlier heads are not trained again.

    Ctrl-C keeps the results so far. Raises MissingPackageError without torch, TemplateError for a
    target without a chat template and no prompts, UnsupportedModelError for one that no head can be
    trained for, and the errors of `specrun.train.trainer.train`.
    """
    plan = _begun(order)
    if plan is None:
        kind, earlier = _beginning(order)
        plan = TrainingPlan(kind, order.hours, _n_tries(order), earlier=earlier)
    elif order.head.is_file():
        return order.head
    order.folder.mkdir(parents=True, exist_ok=True)
    with_states = _head_target(order)[0].leaves_states
    from specrun.train.trainer import train

    listener = Hours(
        order.hours * 3600.0,
        plan,
        dearer=_dearer(order, plan),
        answering=ANSWERING_WITH_STATES if with_states else ANSWERING,
    )
    try:
        while True:
            _keep(order, plan, listener)
            try:
                plan = _asked(order, plan, listener)
                _keep(order, plan, listener)
                train(_recipe(order, plan), _run(order, plan), listener)
                break
            except PlanKnown as known:
                plan = replace(plan, **known.counts)
            listener.plan = plan
    finally:
        _keep(order, plan, listener)
    from specrun.convert.heads.head_conversion import convert_head

    trained = order.folder / "training"
    convert_head(trained, order.head, target=order.target, kind=plan.kind, force=True)
    return order.head


def _run(order: TrainingOrder, plan: TrainingPlan) -> HeadRun:
    from specrun.train.data import AnswerSettings
    from specrun.train.heads import HeadRun

    output = order.folder / "training"
    prompts = order.folder / "prompts.jsonl"
    resume = bool(plan.steps) and (output / "training" / "state.pt").is_file()
    return HeadRun(
        target=order.target,
        data=(),
        output=output,
        steps=plan.steps or _FIRST_STEPS,
        tokens_per_batch=_TOKENS_PER_BATCH,
        learning_rate=_rate(order, plan),
        max_length=2 * _LONGEST_ANSWER,
        n_threads=order.n_threads,
        resume=resume,
        force=not resume,
        own_answers=AnswerSettings(longest=_LONGEST_ANSWER, parallel=_AT_ONCE),
        prompts=prompts,
        earlier=Path(plan.earlier) if plan.earlier else None,
    )


def _recipe(order: TrainingOrder, plan: TrainingPlan) -> HeadRecipe:
    from specrun.train.heads import DFlashRecipe, Eagle3Recipe, EagleRecipe

    narrow = _width(order) < _NARROW
    # Trained on its own predictions too: later tokens of a chain are nearly as often right then.
    if plan.kind == "eagle":
        return EagleRecipe(draft_tokens=_DRAFT_TOKENS if narrow else 0, steps=_UNROLLED)
    if plan.kind == "dflash":
        return DFlashRecipe(
            n_layers=_BLOCK_LAYERS if narrow else _WIDE_BLOCK_LAYERS,
            markov_rank=_MARKOV_RANK,
            confidence=True,
            draft_tokens=_DRAFT_TOKENS if narrow else _WIDE_DRAFT_TOKENS,
            law_tokens=_LAW_TOKENS if narrow else 0,
            optimizer="muon",
        )
    if plan.earlier:
        return Eagle3Recipe(steps=_UNROLLED_ON)
    if narrow:
        return Eagle3Recipe(
            steps=_UNROLLED,
            late_steps=_UNROLLED_LATE,
            draft_tokens=_DRAFT_TOKENS,
            law_tokens=_LAW_TOKENS,
        )
    return Eagle3Recipe()


def _dearer(order: TrainingOrder, plan: TrainingPlan) -> float:
    """Return how many times as long an average step takes as one of the first."""
    has_late = plan.kind == "eagle3" and not plan.earlier and _width(order) < _NARROW
    return _LATE_COST if has_late else 1.0


def _rate(order: TrainingOrder, plan: TrainingPlan) -> float | None:
    """Return the learning rate, None for the usual one of the recipe."""
    width = _width(order)
    if width >= _NARROW:
        return None
    if plan.kind == "dflash":
        return _NARROW_BLOCK_RATE / width
    return _NARROW_RATE / width * (_RATE_ON if plan.earlier else 1.0)


def _width(order: TrainingOrder) -> int:
    """Return how wide the target's states are, as far as its header has it."""
    header = read_header(order.target)
    width = header.metadata.get(f"{header.architecture}.embedding_length", 0)
    return width if isinstance(width, int) and width > 0 else _NARROW


def _beginning(order: TrainingOrder) -> tuple[HeadKind, str]:
    """Return the name of the training, and the head that it continues from, or "".

    If the target's layers can be tapped and EAGLE-3 learns in the time, a new head is EAGLE-3's or
    a block drafter, whichever should be faster.
    """
    target, device = _head_target(order)
    from specrun.convert.heads.target_facts import target_facts
    from specrun.train.heads import Eagle3Recipe, read_earlier_head

    for path in order.earlier:
        kind = read_header(path).architecture
        try:
            head = read_earlier_head(path, kind, target.shape, target_facts(order.target))
            target.check_taps(head.taps)
        except (ModelError, PairError):
            continue  # another kind, or of another target: it may draft, but is no start
        return cast("HeadKind", kind), str(path)
    if device.type == "cpu" and _width(order) >= _NARROW and order.hours < _WORTH_EAGLE3:
        return "eagle", ""
    try:
        target.check_taps(Eagle3Recipe().taps(target.shape))
    except (UnsupportedModelError, OptionError):
        return "eagle", ""
    return "eagle3" if order.curve is None else _account(order, order.curve).faster, ""


def _account(order: TrainingOrder, curve: CostCurve) -> HeadAccount:
    """Return the account of heads that could be trained."""
    shape, narrow = _head_target(order)[0].shape, _width(order) < _NARROW
    drafted = min(shape.vocab_size, _DRAFT_TOKENS if narrow else _WIDE_DRAFT_TOKENS)
    layers = _BLOCK_LAYERS if narrow else _WIDE_BLOCK_LAYERS
    target = multiplications_of(order.target, read_header(order.target))
    return HeadAccount(shape, target, curve, drafted, layers)


def _head_target(order: TrainingOrder) -> tuple[HeadTarget, torch.device]:
    """Return the target as training reads it, and the device that it learns on."""
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingPackageError("training a head", "torch", "train") from error
    from specrun.train.target import open_head_target
    from specrun.train.trainer import usable_device

    device = usable_device("auto")
    return open_head_target(order.target, None, device=device, n_threads=order.n_threads), device


# -- prompts ---------------------------------------------------------------------------------------


def _n_tries(order: TrainingOrder) -> int:
    """Return how often the target is to write a prompt; the time may end it sooner."""
    if read_header(order.target).metadata.get("tokenizer.chat_template") is not None:
        return max(FEWEST_PROMPTS, round(_TRIES_AN_HOUR * order.hours))
    if len(order.prompts) < FEWEST_PROMPTS:
        raise TemplateError(
            f"{order.target.name} has no chat template, so it would not answer the built-in "
            f"prompts: give {2 * FEWEST_PROMPTS} beginnings or more that it is to go on with "
            "(--prompts FILE)"
        )
    return 0


def _asked(order: TrainingOrder, plan: TrainingPlan, listener: Hours) -> TrainingPlan:
    """Write the prompts' file; return the plan with their number, of all if there was none.

    The user's come first, then by turns prompts of the target's own and built-in ones: however many
    there is time for, there are some of each. Raises PlanKnown.
    """
    prompts = list(order.prompts)
    if plan.n_tries:
        built_in = _built_in(_FEWEST_BUILT_IN + _BUILT_IN_A_TRY * plan.n_tries)
        mixed = itertools.zip_longest(_own(order, plan, listener), built_in)
        prompts += [prompt for pair in mixed for prompt in pair if prompt is not None]
    count = plan.n_prompts or len(prompts)
    with atomic_path(order.folder / "prompts.jsonl", force=True) as aside:
        lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in prompts[:count])
        aside.write_text("".join(lines), encoding="utf-8")
    return replace(plan, n_prompts=count)


def _own(order: TrainingOrder, plan: TrainingPlan, listener: Hours) -> list[str]:
    """Return the prompts that the target writes itself; none if it writes nothing of use."""
    from specrun.train.data import Answered, own_prompts
    from specrun.train.target import source_identity
    from specrun.train.trainer import usable_precision

    target, device = _head_target(order)
    target.precision = usable_precision("auto", device)
    try:
        found = own_prompts(
            target.answerer(order.folder, listener.note),
            target.tokens,
            plan.n_tries,
            order.folder / "own_prompts.jsonl",
            identity=source_identity(order.target),
            parallel=_AT_ONCE,
            n_threads=order.n_threads,
            progress=lambda done, total: listener.stage(ASKS, done, total),
        )
    except (ModelError, TemplateError):
        return []
    return [document.prompt for document in found if isinstance(document, Answered)]


def _built_in(count: int) -> list[str]:
    """Return so many of the built-in prompts, or all: to be read as tokens takes time, too."""
    from specrun.train.data import Answered, built_in_prompts, most_prompts

    some = built_in_prompts(min(count, most_prompts()))
    return [document.prompt for document in some if isinstance(document, Answered)]


# -- files -----------------------------------------------------------------------------------------


def _begun(order: TrainingOrder) -> TrainingPlan | None:
    """Return how an earlier training with these hours was begun; None if there was none."""

    def parse(data: bytes) -> TrainingPlan | None:
        content = json_object(data)
        plan = decoded(content["plan"], TrainingPlan)
        same = content["prompts"] == list(order.prompts) and plan.hours == order.hours
        return plan if same else None

    what, advice = "the plan of an earlier training", "it begins anew"
    return read_kept(order.folder / "plan.json", parse, what=what, advice=advice)


def _keep(order: TrainingOrder, plan: TrainingPlan, listener: Hours) -> None:
    content = {"plan": asdict(replace(plan, spent=listener.spent)), "prompts": list(order.prompts)}
    write_json(order.folder / "plan.json", content)
