"""A session: a target, an acceptance rule and one conversation; prompts become token streams."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from inspect import GEN_CREATED, GEN_RUNNING, GEN_SUSPENDED, getgeneratorstate

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import (
    BusyError,
    ClosedError,
    ContextFullError,
    OptionError,
)
from specrun.bindings.models.model import Model
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime.acceptance import PairRule, Rule, SequentialCascade
from specrun.runtime.engine.answer import Answer, Making, Stage
from specrun.runtime.engine.sequential import small_model
from specrun.runtime.laws.sampling import SamplingParams, whole_number
from specrun.runtime.online import RejectionNotes
from specrun.runtime.round.drafter import Drafter, Owned, close_all
from specrun.runtime.round.loop import Conversation, Witness, require_laws, require_rule
from specrun.runtime.round.padding import Shape, Wider, open_target
from specrun.runtime.round.results import GenerationResult, TokenEvent
from specrun.runtime.round.target import TargetModel

_UNDER_WAY = (GEN_RUNNING, GEN_SUSPENDED)


class _Step:
    """What every step of a session's answers holds; close() gives it what is to be closed.

    That happens when nobody holds it any more: at once, or where a step is under way, in another
    thread or under a signal's handler, when it has ended.
    """

    def __init__(self) -> None:
        self.to_close: Sequence[Owned] = ()
        self.problems: list[BaseException] = []

    def __del__(self) -> None:
        try:
            close_all(self.to_close)
        except BaseException as problem:  # raised by whoever let go of it
            self.problems.append(problem)


class Session:
    """Decodes one answer at a time, in a conversation whose cache persists between answers.

    `target`, `rule` and `vocabulary` are what any number of conversations could share; all that
    belongs to this one is in `conversation`. It is busy while the generator of an answer that has
    begun exists and has not ended: that is not noted anywhere, so nothing can forget to take it
    back. `owned` is closed with it, after drafter and context. `backend_sampling` lets the target
    send the best logits of rows only, in answers whose log-probabilities nobody reads. Where it
    `settles`, log-probabilities are computed as events are handed out, for readers in threads.
    `memory_note` says what everything takes, for errors of memory. `rejections`, where there is a
    buffer, takes the target's rows where drafts were rejected.
    """

    backend_sampling = False
    settles = False
    memory_note: Callable[[], str] = staticmethod(lambda: "")
    rejections: RejectionNotes | None = None

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        rule: Rule | SequentialCascade,
        vocabulary: Vocabulary,
        owned: Sequence[Owned] = (),
    ) -> None:
        self.target = target
        self.rule = rule
        self.vocabulary = vocabulary
        self.conversation = Conversation(drafter)
        self._owned = owned
        self._step: _Step | None = _Step()
        self._answering: Callable[[], Making | None] = lambda: None

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
        try:
            require_fitting(rule, drafter, shape)
            target = open_target(model, drafter, options, shape, wider)
        # Ctrl-C as well: the drafter may own native memory.
        except BaseException:
            drafter.close()
            raise
        return cls(target, drafter, rule, model.vocabulary, owned)

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
        index: int = 0,
        max_tokens: int | None = None,
        logprobs: bool = True,
        top_logprobs: int = 0,
        n_max: int | None = None,
        witness: Witness | None = None,
    ) -> GenerationStream:
        """Return a stream that answers the prompt's tokens; nothing runs until it is iterated.

        Seed, prompt and `index` key all random draws: several answers to one prompt have several
        indices. `max_tokens` None goes on until the model ends or the context is full. Without
        `logprobs` events have none, and the device may keep whole rows to itself; with
        `top_logprobs` they also have those of so many most likely tokens. No round drafts more than
        `n_max` nodes. `witness` sees every round of a rule that verifies. Raises
        `ContextFullError` for a prompt that does not fit, `OptionError` for an empty one, a
        negative limit or index, a rule that needs laws which the drafter does not tell, or one that
        is not exact with mirostat, `BusyError` while another answer is being streamed.
        """
        self.require_idle()
        if not isinstance(self.rule, SequentialCascade):
            require_laws(self.rule, self.drafter, params)
        require_rule(self.rule, params)
        n_ctx = self.target.n_positions
        if not prompt:
            problem = "the prompt is empty: this model needs at least one token to continue from"
            raise OptionError(problem)
        if len(prompt) > n_ctx:
            raise ContextFullError(self._too_long(len(prompt), n_ctx))
        most = require_length(max_tokens)
        number = whole_number(index)
        if number is None or number < 0:
            raise OptionError(f"index is {index!r}: give the number of the answer, from 0")
        n_top = require_count(top_logprobs)
        answer = Answer(
            self,
            list(prompt),
            params,
            seed,
            number,
            most,
            logprobs=logprobs,
            n_max=n_max,
            n_top=n_top,
            witness=witness,
        )
        return GenerationStream(self, answer, seed)

    def _too_long(self, n_prompt: int, n_ctx: int) -> str:
        context = self.target.context
        if n_ctx < context.model.n_ctx_train or context.options.rope.stretches:
            advice = f"shorten it or raise the context size (-c) to more than {n_prompt}"
        else:
            stretching = "(--rope-scaling yarn --rope-scale 2 stretches it)"
            advice = f"shorten it; the model was trained for no more {stretching}"
        return f"the prompt has {n_prompt} tokens and the context {n_ctx}: {advice}"

    def native_seconds(self) -> tuple[float, float]:
        """Return the native evaluation time of target and drafter so far."""
        return self.target.native_seconds, self.drafter.native_seconds

    def require_idle(self) -> None:
        """Raise `BusyError` while an answer is being streamed."""
        making = self._answering()
        if making is not None and getgeneratorstate(making) in _UNDER_WAY:
            problem = "an answer is still being streamed: finish it or close() the stream first"
            raise BusyError(problem)

    @property
    def closed(self) -> bool:
        """Whether `close()` was called; what a step under way still uses is freed after it."""
        return self._step is None

    def require_open(self) -> None:
        """Raise `ClosedError` after `close()`."""
        if self.closed:
            raise ClosedError("the runtime was closed while an answer was being streamed")

    def swap_drafter(self, drafter: Drafter, weights: Owned, old_weights: Owned) -> None:
        """Draft with another drafter from the next answer on; the old one and its weights go.

        Never in the middle of an answer: each draw is tested with the law that it was drawn from,
        and that is its own drafter's. The new drafter's caches are empty and fill from the next
        prompt. Raises BusyError while an answer is being streamed, OptionError for a drafter that
        this context has no room or no states for; the old one then stays, the new is not closed.
        """
        self.require_open()
        self.require_idle()
        require_as_small(drafter, self.drafter)
        old = self.drafter
        owned = [weights if each is old_weights else each for each in self._owned]
        # Together: whatever interrupts finds one drafter, with its weights.
        self.conversation.drafter, self._owned = drafter, owned
        self._show_again(drafter)
        close_all((old, old_weights))

    def draft_with(self, drafter: Drafter) -> None:
        """Draft with another drafter from the next answer on; neither is closed.

        The context has room for its trees. Raises BusyError while an answer is being streamed.
        """
        self.require_idle()
        if drafter is not self.drafter:
            self.conversation.drafter = drafter
            self._show_again(drafter)

    def _show_again(self, drafter: Drafter) -> None:
        if drafter.reads_target:  # states of tokens in the cache cannot be had again
            self.conversation.forget(self.target)

    def close(self) -> None:
        """Free the drafter, then the target's context and the rest; an answer cannot go on.

        It never waits, and may be called in any thread or signal handler: a step of an answer that
        is under way meets a closed context soon, raises `ClosedError`, and frees what it used.
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

    def step(self, making: Making) -> Stage:
        """Let an answer go on by a step; `StopIteration` where it has ended.

        Raises `BusyError` where it would begin while another one is under way.
        """
        step: _Step | None = None
        problems: list[BaseException] | None = None
        try:
            step = self._step
            if step is not None:
                problems = step.problems
            if step is None or self._answering() is not making:
                self._admit(making)
            return next(making)
        finally:
            step = None  # frees what close() has left to it
            if problems:
                raise problems.pop()

    def _admit(self, making: Making) -> None:
        """Let an answer begin, or end where the session was closed."""
        state = getgeneratorstate(making)
        if state == GEN_CREATED:
            self.require_open()
            self.require_idle()
            # Weak: an answer that nobody holds any more is over.
            self._answering = weakref.ref(making)
        elif state == GEN_SUSPENDED:
            making.close()
            self.require_open()

    def turn_to(self, prompt: Sequence[int]) -> int:
        """Take a prompt that is yet to be read; return how many of its tokens are cached."""
        return self.conversation.turn_to(self.target, prompt)

    def read_prompt(self) -> Iterator[None]:
        """Read the prompt that was turned to; yields after each piece."""
        # In a sequential cascade the target reads prompts when it is asked, too.
        if isinstance(self.rule, SequentialCascade):
            return iter(())
        return self.conversation.read_prompt(self.target)

    def forget(self) -> None:
        """Empty the cache and the drafter's state: the next answer shares nothing with them."""
        self.require_idle()
        self.conversation.forget(self.target)


class GenerationStream(Iterator[TokenEvent]):
    """An answer in the making: iterate over its tokens; afterwards `result` holds the whole.

    Closing or dropping it early (or Ctrl-C while it runs) leaves the session usable; `result` then
    says "cancelled".
    """

    def __init__(self, session: Session, answer: Answer, seed: int) -> None:
        self.seed = seed
        self._session = session
        # The generator knows the answer, not this stream: no cycle, so dropping the stream ends it.
        self._answer = answer
        self._making = answer.make()

    def __iter__(self) -> GenerationStream:
        return self

    def __next__(self) -> TokenEvent:
        answer = self._answer
        session = self._session
        answer.clock.come_back()
        # The consumer had control and may have closed the runtime: a step says so.
        while (
            session._step is None or answer.spoken is None or (event := answer.next_event()) is None
        ):
            session.step(self._making)
        return event

    def advance(self) -> Stage | None:
        """Let the answer go on by a step, which need not bring a token; None: it has ended.

        After "round", `next_of_round` hands out what it brought. This is for an engine, which
        decides which answer goes on; everyone else iterates.
        """
        answer = self._answer
        answer.clock.come_back()
        try:
            return self._session.step(self._making)
        except StopIteration:
            return None
        except BaseException:
            self.close()  # or the error's traceback would keep the answer, and the session busy
            raise

    def next_of_round(self) -> TokenEvent | None:
        """Hand out the next token of the round; None: all of them were."""
        return self._answer.next_event()

    def close(self) -> None:
        """Stop the answer; what was generated so far stays in `result`."""
        self._making.close()

    @property
    def result(self) -> GenerationResult:
        """The answer so far, complete once the stream is exhausted or closed."""
        return self._answer.result

    def drain(self) -> GenerationResult:
        """Run to the end and return the result."""
        return self._run(self._answer.take_round)

    def hand_to(self, consume: Callable[[TokenEvent], None]) -> GenerationResult:
        """Run to the end, give each token to `consume` as it comes, and return the result.

        Where a device computes (a GPU), tokens of a round are handed out while it evaluates the
        next one, so that what `consume` takes, such as printing, is no part of a round. Answers
        with stop strings or log-probabilities are handed out before: there they decide what comes
        next, or read what the next evaluation overwrites. What `consume` raises ends the answer.
        """
        answer = self._answer

        def hand_out() -> None:
            while answer.spoken is not None and (event := answer.next_event()) is not None:
                consume(event)
                del event  # one that somebody holds costs the stream a copy of its logits
                if answer.hand_out is None:
                    answer.clock.come_back()
                else:  # in time that counts: a device computed meanwhile
                    answer.clock.left = None

        return self._run(hand_out)

    def _run(self, hand_out: Callable[[], None]) -> GenerationResult:
        """Go on to the end, and have every round handed out."""
        answer, context = self._answer, self._session.target.context
        waits = answer.may_wait
        try:
            answer.clock.come_back()
            if waits:
                answer.hand_out = context.while_computing = hand_out
            while True:
                if not waits or answer.is_at_end:
                    hand_out()
                self._session.step(self._making)
        except StopIteration:
            return answer.result
        except BaseException:
            self.close()  # or the error's traceback would keep the answer, and the session busy
            raise
        finally:
            context.while_computing = None


def require_length(max_tokens: int | None) -> int | None:
    """Return how long an answer may be; raises `OptionError` for what is no number of tokens."""
    most = None if max_tokens is None else whole_number(max_tokens)
    if (most is None) != (max_tokens is None) or (most is not None and most < 0):
        advice = "give a whole number of tokens from 0, or None for no limit"
        raise OptionError(f"max_tokens is {max_tokens!r}: {advice}")
    return most


def require_count(top_logprobs: int) -> int:
    """Return how many log-probabilities are asked for; raises `OptionError` for what is none."""
    count = whole_number(top_logprobs)
    if count is None or count < 0:
        problem = "give how many most likely tokens to tell of, 0 or more"
        raise OptionError(f"top_logprobs is {top_logprobs!r}: {problem}")
    return count


def require_as_small(drafter: Drafter, old: Drafter) -> None:
    """Raise `OptionError` where a context made for the old drafter does not do for another."""
    for what, new, there in (
        ("nodes", drafter.max_nodes, old.max_nodes),
        ("paths", drafter.max_leaves, old.max_leaves),
    ):
        if new > there:
            problem = f"drafts {new} {what}, and the context has room for {there}"
            raise OptionError(f"{drafter.name} {problem}: open a new runtime for it")
    layers = set(drafter.layer_inputs) - set(old.layer_inputs)
    hidden = drafter.needs_hidden_states and not old.needs_hidden_states
    if layers or hidden or (drafter.needs_nextn_states and not old.needs_nextn_states):
        problem = f"reads states of the target that {old.name} did not"
        raise OptionError(f"{drafter.name} {problem}: open a new runtime for it")


def require_fitting(rule: Rule | SequentialCascade, drafter: Drafter, shape: Shape) -> None:
    """Raise `OptionError` where a rule needs a small model that speaks, or another shape."""
    if isinstance(rule, PairRule):
        if rule.fallback > 0.0:
            small_model(rule, drafter)
        if rule.chains_only and drafter.max_leaves > 1:
            why = "tests one token after the other"
            problem = f"{rule.name} {why}, and {drafter.name} drafts trees: give a chain, as n=5"
            raise OptionError(problem)
    if not isinstance(rule, SequentialCascade):
        require_laws(rule, drafter)
        return
    small_model(rule, drafter)
    if shape != "free":
        why = "evaluates what the target missed at once, in batches of any width"
        raise OptionError(f"{rule.name} {why}, and the shape is {shape}: give --shape free")
