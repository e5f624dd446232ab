"""A session: a target, an acceptance rule and one conversation; prompts become token streams."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from inspect import GEN_CREATED, GEN_RUNNING, GEN_SUSPENDED, getgeneratorstate
from typing import Literal

from specrun.bindings.context_options import ContextOptions
from specrun.bindings.errors import (
    BusyError,
    ClosedError,
    ContextFullError,
    DecodeMemoryError,
    OptionError,
    OutOfMemoryError,
    SpecrunError,
)
from specrun.bindings.model import Model
from specrun.bindings.vocabulary import Vocabulary
from specrun.runtime.acceptance import PairRule, Rule, SequentialCascade
from specrun.runtime.backend_laws import candidates_needed, sampled_on_device
from specrun.runtime.conversation import Conversation
from specrun.runtime.drafter import Drafter, Owned, close_all
from specrun.runtime.fixed_shape import Shape, open_target
from specrun.runtime.limits import RoundLimits
from specrun.runtime.loop import (
    NOT_EVALUATED,
    DecodeSettings,
    Round,
    decode_rounds,
    require_laws,
    require_rule,
)
from specrun.runtime.noise import SeededNoise
from specrun.runtime.online.rejections import RejectionBuffer
from specrun.runtime.padding import Wider
from specrun.runtime.results import (
    Departures,
    FinishReason,
    GenerationResult,
    LogprobKeeper,
    Origin,
    RoundCounter,
    SpecStats,
    TokenEvent,
    Usage,
)
from specrun.runtime.samplers.dry import sequence_breakers
from specrun.runtime.samplers.state import FRESH, SamplerState
from specrun.runtime.sampling import SamplingParams, whole_number
from specrun.runtime.sequential import SequentialSettings, sequential_rounds, small_model
from specrun.runtime.target import Target, TargetModel
from specrun.runtime.text import TextAssembler

Stage = Literal["reading", "waiting", "round"]
"""Why an answer in the making gave back control: a piece of its prompt was read; its tree waits for
others to be evaluated with; there is a round to hand out."""

Making = Generator[Stage, None, None]
"""An answer that is being made, step by step: it knows itself whether it has begun and ended."""

_UNDER_WAY = (GEN_RUNNING, GEN_SUSPENDED)


@dataclass(slots=True)
class _Clock:
    """Wall time inside the runtime, without what the consumer of a stream does between tokens."""

    started: float
    native_before: tuple[float, float]
    elsewhere: float = 0.0
    prompt_s: float = 0.0
    first_token_s: float | None = None
    left: float | None = None  # when the consumer was given what it has now

    def elapsed(self) -> float:
        now = time.perf_counter() if self.left is None else self.left
        return now - self.started - self.elsewhere

    def hand_out(self) -> None:
        """Note that the consumer has a token, and goes on with it."""
        self.left = now = time.perf_counter()
        if self.first_token_s is None:
            self.first_token_s = now - self.started - self.elsewhere

    def come_back(self) -> None:
        """Note that the runtime goes on."""
        left, self.left = self.left, None
        if left is not None:
            self.elsewhere += time.perf_counter() - left


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
    send the best logits of rows only, in answers whose log-probabilities nobody reads.
    `memory_note` says what everything takes, for errors of memory. `rejections`, where there is a
    buffer, takes the target's rows where drafts were rejected.
    """

    backend_sampling = False
    memory_note: Callable[[], str] = staticmethod(lambda: "")
    rejections: RejectionBuffer | None = None

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
            _require_fitting(rule, drafter, shape)
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
    ) -> GenerationStream:
        """Return a stream that answers the prompt's tokens; nothing runs until it is iterated.

        Seed, prompt and `index` key all random draws: several answers to one prompt have several
        indices. `max_tokens` None goes on until the model ends or the context is full. Without
        `logprobs` events have none, and the device may keep whole rows to itself. Raises
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
        if max_tokens is not None and max_tokens < 0:
            raise OptionError(f"max_tokens is {max_tokens}: give 0 or more, or None for no limit")
        number = whole_number(index)
        if number is None or number < 0:
            raise OptionError(f"index is {index!r}: give the number of the answer, from 0")
        answer = _Answer(self, list(prompt), params, seed, number, max_tokens, logprobs=logprobs)
        return GenerationStream(answer, seed)

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
        _require_as_small(drafter, self.drafter)
        old = self.drafter
        owned = [weights if each is old_weights else each for each in self._owned]
        # Together: whatever interrupts finds one drafter, with its weights.
        self.conversation.drafter, self._owned = drafter, owned
        if drafter.reads_target:  # states of tokens in the cache cannot be had again
            self.conversation.forget(self.target)
        close_all((old, old_weights))

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

    def __init__(self, answer: _Answer, seed: int) -> None:
        self.seed = seed
        # The generator knows the answer, not this stream: no cycle, so dropping the stream ends it.
        self._answer = answer
        self._making = answer.make()

    def __iter__(self) -> GenerationStream:
        return self

    def __next__(self) -> TokenEvent:
        answer = self._answer
        session = answer.session
        answer.clock.come_back()
        # The consumer had control and may have closed the runtime: a step says so.
        while session._step is None or (event := answer.next_event()) is None:
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
            return answer.session.step(self._making)
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
        answer = self._answer
        try:
            answer.clock.come_back()
            while True:
                answer.take_round()
                answer.session.step(self._making)
        except StopIteration:
            return answer.result
        except BaseException:
            self.close()  # or the error's traceback would keep the answer, and the session busy
            raise


class _Answer:
    """What a stream has generated so far, and the generator that goes on with it.

    `make` decodes, a round at a time. What the round says is handed out token by token, as events,
    or at once, without: of a drained stream nobody reads events.
    """

    def __init__(
        self,
        session: Session,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        index: int,
        max_tokens: int | None,
        *,
        logprobs: bool,
    ) -> None:
        self._seed = seed
        self._index = index
        self._logprobs = logprobs
        self.session = session
        self._prompt = prompt
        self._params = params.effective()
        self._max_tokens = max_tokens
        self._counter = RoundCounter()
        self._departures = Departures()
        self._assembler = TextAssembler(params.stop)
        self._keeper = LogprobKeeper()
        # Tokens, and the text that became certain with them: an item is handed out as a whole.
        self._said: list[tuple[Sequence[int], str]] = []
        # The round that is handed out, its number, its tokens' pieces, and how many items there
        # were before it: a tuple, because they change together.
        self._spoken: tuple[Round, int, list[bytes], int] | None = None
        self._cached = 0
        self._finish: FinishReason = "cancelled"
        self.clock = _Clock(0.0, (0.0, 0.0))
        self._stats: SpecStats | None = None

    @property
    def result(self) -> GenerationResult:
        """The answer so far, complete once the stream is exhausted or closed."""
        token_ids = [token for tokens, _ in self._said for token in tokens]
        text = "".join(text for _, text in self._said)
        usage = Usage(len(self._prompt), len(token_ids), self._cached)
        stats = self._stats or self._statistics()
        return GenerationResult(text, token_ids, self._finish, usage, stats, self._seed)

    # -- making it ---------------------------------------------------------------------------------

    def make(self) -> Making:
        """Decode the answer; at every yield it says why it gives back control."""
        session = self.session
        try:
            self.clock = _Clock(time.perf_counter(), session.native_seconds())
            target = self._verifier()
            self._cached = session.turn_to(self._prompt)
            yield "reading"
            for _ in session.read_prompt():
                yield "reading"
            self.clock.prompt_s = self.clock.elapsed()
            yield from self._decode(target)
        except SpecrunError as error:
            session.require_open()  # whatever it met then: that is why
            if isinstance(error, (DecodeMemoryError, OutOfMemoryError)):
                error.add_note(session.memory_note())
            raise
        finally:
            self._conclude()

    def _conclude(self) -> None:
        self._spoken = None  # what was not handed out was not said
        if self._finish == "cancelled":
            # What waited for the rest of a character or a stop string was said.
            self._said.append(((), self._assembler.finish()))
        self._stats = self._statistics()
        if self.session.rejections is not None:
            self.session.rejections.end_answer(self.session.conversation.tokens)
        try:
            self._keeper.finish()
        except SpecrunError:
            # A closed context's rows are gone: nothing of them can be saved.
            if not self.session.closed:
                raise

    def _verifier(self) -> Target:
        """Return what verifies drafts: the target, or the one that sends what laws need."""
        session, params = self.session, self._params
        # Rules that weigh raw laws read whole rows; at temperature 0 any other one is exact.
        rule = session.rule
        by_law = not isinstance(rule, PairRule) and (rule.exact or params.is_greedy)
        reads_rows = session.drafter.reads_logits or session.rejections is not None
        sampled = session.backend_sampling and by_law and not reads_rows
        whole = self._logprobs or not sampled
        needed = None if whole else candidates_needed(params, session.vocabulary.size)
        return sampled_on_device(session.target, needed)

    def _decode(self, target: Target) -> Making:
        session, conversation = self.session, self.session.conversation
        end_tokens = session.vocabulary.end_of_generation
        limits = RoundLimits(
            n_ctx=session.target.n_positions,
            max_nodes=session.target.max_nodes,
            max_tokens=self._max_tokens,
        )
        conversation.noise = SeededNoise.for_answer(self._seed, self._prompt, self._index)
        rounds = self._rounds(target, limits, end_tokens)
        # A full context counts as length, like the token limit.
        finish: FinishReason = "length"
        number = 0
        for this_round in rounds:
            if this_round is None:
                yield "waiting"
                continue
            tokens = this_round.tokens
            pieces = session.vocabulary.pieces(tokens)
            if tokens[-1] in end_tokens:
                pieces[-1], finish = b"", "stop"
            self._count(this_round)
            if session.rejections is not None and this_round.rejected:
                _note_rejected(session.rejections, conversation, this_round)
            self._spoken = this_round, number, pieces, len(self._said)
            yield "round"
            if self._assembler.stopped_by is not None:
                finish = "stop"
                break
            self._keeper.before_evaluation()
            number += 1
        self._finish = finish

    def _rounds(
        self, target: Target, limits: RoundLimits, end_tokens: frozenset[int]
    ) -> Iterator[Round | None]:
        session, conversation, rule = self.session, self.session.conversation, self.session.rule
        if isinstance(rule, SequentialCascade):
            small = small_model(rule, session.drafter)
            settings = SequentialSettings(
                rule, self._params, limits, end_tokens, self._sampler_state()
            )
            return sequential_rounds(session.target, conversation, small, settings)
        state = self._sampler_state()
        return decode_rounds(
            target, conversation, DecodeSettings(rule, self._params, limits, end_tokens, state)
        )

    def _sampler_state(self) -> SamplerState:
        """Return what samplers know before the first token."""
        if "dry" not in self._params.chain:
            return FRESH
        texts = self._params.dry_sequence_breakers
        return SamplerState(sequence_breakers(self.session.vocabulary, texts))

    def _count(self, this_round: Round) -> None:
        if this_round.rows is NOT_EVALUATED:
            self._counter.count_spoken(len(this_round.tokens))
            return
        tree, n_accepted, n_new = this_round.tree, len(this_round.path), len(this_round.tokens)
        if this_round.laws:
            conversation = self.session.conversation
            start = len(conversation.tokens) - n_new
            self._departures.count(this_round.laws, this_round.tokens, conversation.noise, start)
        n_nodes = len(tree.tokens)
        if not n_nodes:
            self._counter.count(0, 0, 0, n_new)
            return
        # A path that was cut at its end token was not refused there.
        tested = n_accepted + (this_round.rejected and this_round.next_token is not None)
        n_candidates, depth = tree.n_candidates, tree.candidate_depth
        self._counter.count(n_candidates, depth, n_accepted, n_new, n_nodes - n_candidates, tested)

    # -- handing it out ----------------------------------------------------------------------------

    def next_event(self) -> TokenEvent | None:
        """Hand out the next token of the round; None: all of them were."""
        spoken = self._spoken
        if spoken is None or self._assembler.stopped_by is not None:
            return None
        this_round, number, pieces, base = spoken
        said = self._said
        index = len(said) - base
        if index == len(pieces):
            return None
        text = self._assembler.push(pieces[index])
        if this_round.is_last and index == len(pieces) - 1:
            text += self._held_back()
        token = this_round.tokens[index]
        origin: Origin = "drafted" if index < len(this_round.path) else "target"
        if self._logprobs and this_round.rows is not NOT_EVALUATED:
            # Read when somebody asks: a softmax for every token would be most of the overhead.
            logits = functools.partial(this_round.rows.logits, this_round.row_before(index))
            event = TokenEvent(text, token, origin, number, logits)
            self._keeper.add(event)
        else:
            event = TokenEvent(text, token, origin, number, None)
        said.append(((token,), text))
        self.clock.hand_out()
        return event

    def take_round(self) -> None:
        """Hand out what is left of the round, if anything, without events."""
        spoken, self._spoken = self._spoken, None
        if spoken is None or self._assembler.stopped_by is not None:
            return
        this_round, _, pieces, base = spoken
        start = len(self._said) - base
        text, count = self._assembler.push_all(pieces[start:])
        if this_round.is_last:
            text += self._held_back()
        self._said.append((this_round.tokens[start : start + count], text))
        self.clock.hand_out()
        self.clock.come_back()

    def _held_back(self) -> str:
        """Return the text that the answer's last token carries beside its own."""
        return self._assembler.finish() if self._assembler.stopped_by is None else ""

    def _statistics(self) -> SpecStats:
        session, counter, clock = self.session, self._counter, self.clock
        wall = clock.elapsed() if clock.started else 0.0
        target_s = drafter_s = 0.0
        if clock.started:
            times = zip(session.native_seconds(), clock.native_before, strict=True)
            target_s, drafter_s = (now - before for now, before in times)
        decoding, n_tokens = wall - clock.prompt_s, sum(len(tokens) for tokens, _ in self._said)
        # The prompt's last token is the first round's root, not part of the prefill; in sequential
        # cascades none of it is.
        lazy = isinstance(session.rule, SequentialCascade)
        evaluated = 0 if lazy else len(self._prompt) - self._cached - 1
        return SpecStats(
            drafter=session.drafter.name,
            rule=session.rule.name,
            exact=session.rule.exact,
            rounds=counter.rounds,
            drafted=counter.drafted,
            accepted=counter.accepted,
            acceptance_rate=counter.acceptance_rate,
            mean_accepted_length=counter.mean_accepted_length,
            acceptance_by_position=tuple(counter.acceptance_by_position),
            tokens_per_second=_rate(n_tokens, decoding),
            prompt_tokens_per_second=_rate(evaluated, clock.prompt_s),
            time_to_first_token_s=clock.first_token_s,
            target_s=target_s,
            drafter_s=drafter_s,
            overhead_s=max(0.0, wall - target_s - drafter_s),
            wall_s=wall,
            drafting=session.drafter.report(),
            non_candidates=counter.non_candidates,
            acceptance_given_prefix=tuple(counter.acceptance_given_prefix),
            tested_by_position=tuple(counter.tested_by_position),
            width=session.target.width,
            total_variation=self._departures.total_variation,
            changed_share=self._departures.changed_share,
        )


def _note_rejected(buffer: RejectionBuffer, conversation: Conversation, this_round: Round) -> None:
    """Keep the row where a round's draft was rejected: the one that its last token came from."""
    if this_round.next_token is None or this_round.rows is NOT_EVALUATED:
        return
    row = this_round.row_before(len(this_round.path))
    buffer.note(len(conversation.tokens) - 2, this_round.rows.logits(row))


def _require_as_small(drafter: Drafter, old: Drafter) -> None:
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


def _require_fitting(rule: Rule | SequentialCascade, drafter: Drafter, shape: Shape) -> None:
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


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None
