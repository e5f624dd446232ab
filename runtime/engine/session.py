"""Sessions: one conversation with its target, its drafters and the answer that is being made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from inspect import GEN_RUNNING, GEN_SUSPENDED, getgeneratorstate
from typing import TYPE_CHECKING, Any

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import BusyError, ClosedError, ContextFullError, OptionError
from specrun.runtime.acceptance import Rule, SequentialCascade
from specrun.runtime.engine.answer import Answer, Making, Request, Stage, answer_options
from specrun.runtime.engine.schedule import Schedule
from specrun.runtime.engine.slots import EvaluationCost, SlotTarget
from specrun.runtime.engine.streams import GenerationStream
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.round.drafter import Drafter, Owned, close_all
from specrun.runtime.round.loop import Conversation, require_laws, require_rule
from specrun.runtime.round.target import TargetModel

if TYPE_CHECKING:
    from specrun.bindings.models.model import Model
    from specrun.bindings.models.vocabulary import Vocabulary
    from specrun.runtime.drafters.retrieval import AnswerStore
    from specrun.runtime.engine.choices import SlotDrafters
    from specrun.runtime.online import RejectionNotes
    from specrun.runtime.planning import CostCurve
    from specrun.runtime.round.padding import Shape, Wider


class _Step:
    """Held by every step of a session's answers; close() leaves it the parts that are to be closed.

    It closes them when nothing refers to it any more: at once, or at the end of a step that is
    under way in another thread or below a signal's handler.
    """

    def __init__(self) -> None:
        self.to_close: Sequence[Owned] = ()
        self.problems: list[BaseException] = []

    def __del__(self) -> None:
        try:
            close_all(self.to_close)
        except BaseException as problem:  # raised by the code that let go of it
            self.problems.append(problem)


class Session:
    """A slot: decodes one answer at a time, in a conversation whose cache outlives answers.

    Everything of one text is here or in its `conversation` (tokens, number of cached ones, drafter,
    noise); models, heads and stores are shared. `rule` decides answers that name no other. A
    session is busy while the generator of an answer that has begun exists and has not ended: no
    flag records that, so no interrupt can leave it wrong. `owned` is closed with it, after drafter
    and context. `drafters` are those of its slot, if requests may choose.

    A schedule uses the rest: `running`, the answer under way or, after an interrupt, the last one;
    a reference to the generator that is `making` it; and the turn in which the session was
    `last_used`.
    """

    backend_sampling = False
    """Whether the target may send only the best logits of rows, if no log-probability is read."""
    settles = False
    """Whether log-probabilities are computed as events are handed out, for readers in threads."""
    memory_note: Callable[[], str] = staticmethod(lambda: "")
    """Describes the memory in use, for errors of memory."""
    answers: AnswerStore | None = None
    """Takes the answers, if they are kept."""
    rejections: RejectionNotes | None = None
    """Takes the target's rows at rejected drafts, if there is a buffer."""
    clock: Callable[[], float] | None = None
    """Seconds of its own work, if it is done between that of others."""
    costs: CostCurve | None = None
    """The known cost of the target's evaluations."""
    cost_of: Callable[[int], EvaluationCost] = staticmethod(
        lambda n: EvaluationCost(n, n, 1, 0.0, 0.0)
    )
    """Returns the cost of the last evaluation, of which so many tokens were its own."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        rule: Rule | SequentialCascade,
        vocabulary: Vocabulary,
        owned: Sequence[Owned] = (),
        drafters: SlotDrafters | None = None,
    ) -> None:
        self.target = target
        self.rule = rule
        self.vocabulary = vocabulary
        self.conversation = Conversation(drafter)
        self.drafters = drafters
        for each in [drafter] if drafters is None else drafters.started.values():
            each.take_target(target)
        self._owned = owned
        self._step: _Step | None = _Step()
        self.making: Callable[[], Making | None] = lambda: None
        self.running: Answer | None = None
        self.last_used = 0

    @classmethod
    def open(
        cls,
        model: Model,
        drafter: Drafter,
        options: ContextOptions,
        rule: Rule | SequentialCascade,
        owned: Sequence[Owned] = (),
        shape: Shape = "free",
        wider: Wider | None = None,
    ) -> Session:
        """Make a context for the drafter's trees and a session; on failure, close the drafter."""
        from specrun.runtime.engine.choices import require_fitting
        from specrun.runtime.round.padding import open_target

        try:
            require_fitting(rule, drafter, shape)
            target = open_target(model, drafter, options, shape, wider)
            return cls(target, drafter, rule, model.vocabulary, owned)
        # Ctrl-C as well: the drafter may own native memory.
        except BaseException:
            drafter.close()
            raise

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def drafter(self) -> Drafter:
        """The conversation's drafter."""
        return self.conversation.drafter

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        **options: Any,  # noqa: ANN401 - the fields of AnswerOptions
    ) -> GenerationStream:
        """Return a stream that answers the prompt's tokens; nothing runs until it is iterated.

        Unlike elsewhere, `logprobs` are on by default. Raises `BusyError` while another answer is
        being streamed, and as `require_answerable`.
        """
        wanted = answer_options({"logprobs": True, **options})
        if wanted.drafter is not None or wanted.accept is not None:
            raise OptionError("drafter and accept are for requests of a Runtime or an Engine")
        return Schedule((self,)).stream(Request(prompt, params, seed, wanted))

    def require_answerable(self, request: Request) -> None:
        """Raise the error of a request that cannot be answered here.

        That is `ContextFullError` for a prompt that does not fit, `OptionError` for an empty one, a
        rule that needs distributions which the drafter does not have, or one that is not exact with
        mirostat.
        """
        rule, prompt = request.rule or self.rule, request.prompt
        if not isinstance(rule, SequentialCascade):
            require_laws(rule, self.drafter_of(request), request.params)
        require_rule(rule, request.params)
        n_ctx = self.target.n_positions
        if not prompt:
            problem = "the prompt is empty: this model needs at least one token to continue from"
            raise OptionError(problem)
        if len(prompt) > n_ctx:
            context = self.target.context
            advice = f"shorten it or raise the context size (-c) to more than {len(prompt)}"
            if n_ctx >= context.model.n_ctx_train and not context.options.rope.stretches:
                stretching = "(--rope-scaling yarn --rope-scale 2 stretches it)"
                advice = f"shorten it; the model was trained for no more {stretching}"
            problem = f"the prompt has {len(prompt)} tokens and the context {n_ctx}"
            raise ContextFullError(f"{problem}: {advice}")

    def native_seconds(self) -> tuple[float, float]:
        """Return the native evaluation time of target and drafter so far."""
        return self.target.native_seconds, self.drafter.native_seconds

    def require_idle(self) -> None:
        """Raise `BusyError` while an answer is being streamed."""
        if self.is_busy:
            problem = "an answer is still being streamed: finish it or close() the stream first"
            raise BusyError(problem)

    @property
    def closed(self) -> bool:
        """Whether `close()` was called; memory that a step under way uses is freed after it."""
        return self._step is None

    def require_open(self) -> None:
        """Raise `ClosedError` after `close()`."""
        if self.closed:
            raise ClosedError("the runtime was closed while an answer was being streamed")

    # -- drafters ----------------------------------------------------------------------------------

    def drafter_of(self, request: Request) -> Drafter:
        """Return the drafter of the answer to a request."""
        if self.drafters is None:
            return self.conversation.drafter
        return self.drafters.get(request.drafter or self.drafters.own)

    def draft_with(self, drafter: Drafter) -> None:
        """Draft with another drafter by default, from the next answer on; neither is closed.

        The context has room for its trees. Never in the middle of an answer: each draw is tested
        with the distribution that it was drawn from. Raises BusyError while an answer is being
        streamed.
        """
        self.require_idle()
        if self.drafters is not None:
            self.drafters.started[self.drafters.own] = drafter
        self.turn_to_drafter(drafter)

    def take_over(self, other: Session, request: Request, length: int, more_than: int) -> bool:
        """Share the cells of another slot's first `length` tokens, in place of all it has.

        False if they would be no more than a number of tokens. The drafter takes over the states
        that the other slot's drafter has read; those that it lacks are to be read again.
        """
        if self.slot is None or other.slot is None or length <= more_than:
            return False
        drafter = self.drafter_of(request)
        if drafter.reads_target:
            if other.drafter_of(request) is not other.drafter:
                return False
            # A recurrent state may not go back to where the states end. The slot would then have
            # lost its own states for nothing.
            if not self.target.context.model.can_branch and self.conversation.n_cached:
                return False
            self.turn_to_drafter(drafter)
            length = drafter.take_over(other.drafter, length)
            length = other.target.returns_to(other.conversation, length)
        if length <= more_than:
            return False
        self.slot.take_over(other.slot, length)
        return True

    def turn_to_drafter(self, drafter: Drafter) -> None:
        """Let a drafter draft for the conversation."""
        if drafter is self.conversation.drafter:
            return
        if drafter.reads_target:  # the states of tokens in the cache are gone
            self.target.rewind(self.conversation, 0)
            drafter.take_target(self.target)
            drafter.begin(())
        self.conversation.drafter = drafter

    # -- a schedule's view -------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether an answer has begun and has not ended."""
        making = self.making()
        return making is not None and getgeneratorstate(making) in (GEN_RUNNING, GEN_SUSPENDED)

    @property
    def is_idle(self) -> bool:
        """Whether an engine may give it the next request: no answer has it."""
        return self.running is None

    @property
    def slot(self) -> SlotTarget | None:
        """Its part of a context of several conversations; None: it has a context of its own."""
        return self.target if isinstance(self.target, SlotTarget) else None

    @property
    def number(self) -> int:
        """The number of its answer, in order of admission."""
        return 0 if self.running is None else self.running.number

    @property
    def stage(self) -> Stage | None:
        """The reason why its answer gave back control last."""
        return None if self.running is None else self.running.stage

    @property
    def is_preempted(self) -> bool:
        """Whether its cells were taken: it waits until its text is read again."""
        return self.running is not None and self.running.reads_again is not None

    @property
    def reads(self) -> bool:
        """Whether it reads a prompt, or a text again."""
        return self.stage == "reading" or self.is_preempted

    @property
    def drafts(self) -> bool:
        """Whether its draft waits for an evaluation of a model that conversations share."""
        return self.stage == "waiting" and not self.n_waiting

    @property
    def n_waiting(self) -> int:
        """How many tokens wait to be evaluated with those of others."""
        return 0 if self.slot is None else self.slot.n_waiting

    @property
    def n_unread(self) -> int:
        """How many tokens are to be evaluated before its text's last one."""
        return len(self.conversation.tokens) - 1 - self.conversation.n_cached

    # -- steps, and the end ------------------------------------------------------------------------

    def close(self) -> None:
        """Free the drafter, then the target's context and the rest; an answer cannot go on.

        It never waits, and may be called in any thread or signal handler: a step of an answer that
        is under way meets a closed context soon, raises `ClosedError`, and frees its memory.
        """
        step = self._step
        if step is None:
            return
        # Drafters are freed before the models that they read.
        step.to_close = (self.drafter, self.target.context, *self._owned)
        self._step, problems = None, step.problems
        del step
        self.target.context.close()
        if problems:  # a pool that cannot be saved
            raise problems.pop()

    def begin(self, answer: Answer, making: Making) -> None:
        """Turn to an answer that has not begun; the first step begins it.

        Raises `BusyError` while another one is under way, `ClosedError` after `close()`.
        """
        self.require_open()
        self.require_idle()
        self.running = answer
        # Weak: an answer is over when the owner of its generator drops it.
        self.making = weakref.ref(making)

    def step(self) -> Stage:
        """Let the answer go on by a step; raises `StopIteration` at its end."""
        step: _Step | None = None
        problems: list[BaseException] | None = None
        try:
            step, making = self._step, self.making()
            if making is None:
                raise StopIteration
            if step is None:
                making.close()
                self.require_open()
            else:
                problems = step.problems
            return next(making)
        finally:
            step = None  # closes the parts that close() has left to it
            if problems:
                raise problems.pop()

    def end(self) -> None:
        """End the answer under way, if any."""
        making = self.making()
        if making is not None:
            making.close()
        self.running = None

    def forget(self) -> None:
        """Empty the cache and the drafter's state: the next answer shares nothing with them."""
        self.require_idle()
        self.conversation.forget(self.target)
