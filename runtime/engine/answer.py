"""An answer to a request: rounds of the loop, their text and events, and its statistics.

A schedule makes it step by step (`schedule`), in its reader's thread or in an engine's.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from specrun.bindings.errors import (
    DecodeMemoryError,
    OptionError,
    OutOfMemoryError,
    SpecrunError,
)
from specrun.runtime.acceptance import PairRule, Rule, SequentialCascade
from specrun.runtime.engine.streams import Mailbox
from specrun.runtime.laws.noise import SeededNoise
from specrun.runtime.laws.samplers import FRESH, SamplerState, sequence_breakers
from specrun.runtime.laws.sampling import (
    SamplingParams,
    setting_named,
    unknown_option,
    whole_number,
)
from specrun.runtime.round.backend_laws import candidates_needed, sampled_on_device
from specrun.runtime.round.drafter import Drafter
from specrun.runtime.round.loop import (
    NOT_EVALUATED,
    Conversation,
    DecodeSettings,
    Round,
    RoundLimits,
    decode_rounds,
)
from specrun.runtime.round.results import (
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
from specrun.runtime.round.target import Target
from specrun.runtime.round.text import TextAssembler
from specrun.runtime.trees.tree import count_candidates

# Grammars, traces and sequential cascades are imported by answers that have them.
if TYPE_CHECKING:
    from specrun.bindings.models.vocabulary import Vocabulary
    from specrun.runtime.chat import ReplyReading
    from specrun.runtime.drafters.combinators.guided import GuidedDrafter
    from specrun.runtime.engine.choices import DrafterKey
    from specrun.runtime.engine.session import Session
    from specrun.runtime.engine.trace import RoundTrace, Tracer
    from specrun.runtime.grammar.compiled import CompiledGrammar
    from specrun.runtime.grammar.state import GrammarState
    from specrun.runtime.online import RejectionNotes

Stage = Literal["reading", "waiting", "masking", "round"]
"""The reason why an answer gave back control. reading: a piece of its prompt was read; waiting: a
draft or a tree waits for an evaluation that conversations share; masking: its grammar is still
computing which tokens may follow; round: there is a round to hand out."""

Making = Generator[Stage, None, None]
"""The generator of an answer; its state is the only record of whether it has begun and ended."""

_PATIENCE = 0.02  # seconds that other conversations may wait for a grammar's answer


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How one answer is made: the keywords of `Runtime.stream` and `Engine.submit`.

    An answer of `max_tokens` None goes on until the model ends it or the context is full. Random
    draws depend on seed, prompt and `index`: with one seed, indices 0, 1, ... give independent
    answers to one prompt. With `logprobs` events have log-probabilities; without, a GPU may keep
    whole rows to itself. With `top_logprobs` they also have those of so many most likely tokens.
    `drafter` and `accept` are among those that were opened; None: the default ones. A round drafts
    at most `n_max` nodes; 0: none. `trace` records every round, which changes no token but takes
    time. `reading` takes the text apart into reasoning, answer and tool calls, as for chats. Raises
    `OptionError` for a number that makes no sense.
    """

    max_tokens: int | None = None
    index: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    drafter: str | None = None
    n_max: int | None = None
    accept: str | None = None
    trace: bool = False
    reading: ReplyReading | None = None

    def __post_init__(self) -> None:
        for name, advice in (
            ("max_tokens", "give a whole number of tokens from 0, or None for no limit"),
            ("index", "give the number of the answer, from 0"),
            ("top_logprobs", "give how many most likely tokens to tell of, 0 or more"),
            ("n_max", "give how many tokens to draft at most, from 0"),
        ):
            value = getattr(self, name)
            count = whole_number(value)
            if value is None and name in ("max_tokens", "n_max"):
                continue
            if count is None or count < 0:
                raise OptionError(f"{name} is {value!r}: {advice}")
            object.__setattr__(self, name, count)  # an int, also if numpy's was given


def answer_options(options: Mapping[str, Any]) -> AnswerOptions:
    """Return the options of an answer; `OptionError` for an unknown one names the nearest."""
    known = [field.name for field in dataclasses.fields(AnswerOptions)]
    for name, value in options.items():
        setting = None if name in known else setting_named(name)
        if setting is not None:
            advice = f"did you mean SamplingParams({setting}={value!r})?"
            raise OptionError(f"an answer has no option {name!r}: {advice}")
        if name not in known:
            raise unknown_option(name, known, "an answer")
    return AnswerOptions(**options)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt, and how it is to be answered; `drafter` and `rule` None are the session's own."""

    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    options: AnswerOptions
    drafter: DrafterKey | None = None
    rule: Rule | SequentialCascade | None = None


def prompt_tokens(vocabulary: Vocabulary, prompt: str | Sequence[int]) -> list[int]:
    """Return a prompt's tokens: a text's, or the ids themselves if they are tokens.

    Names of control tokens in a text are control tokens: see `Vocabulary.tokenize_prompt`.
    Raises `OptionError` for anything else.
    """
    if isinstance(prompt, str):
        return vocabulary.tokenize_prompt(prompt)
    if isinstance(prompt, bytes | bytearray | memoryview):  # each byte would be a token
        problem = f"the prompt is of {type(prompt).__name__}, which is neither a text nor tokens"
        raise OptionError(f"{problem}: decode it, as in prompt.decode()")
    try:
        given = list(prompt)
    except TypeError:
        raise OptionError(f"the prompt is {prompt!r}: give a text or token ids") from None
    size, tokens = vocabulary.size, []
    for place, value in enumerate(given):
        token = whole_number(value)
        if token is None:
            advice = "a prompt is a text, or token ids, which are whole numbers"
            raise OptionError(f"prompt token {place} is {value!r}: {advice}")
        if not 0 <= token < size:
            there = f"the vocabulary of {size} tokens"
            raise OptionError(f"prompt token {place} is {token}, outside {there}")
        tokens.append(token)
    return tokens


class AnswerStatistics:
    """The clock and the counters of an answer.

    The clock leaves out the time that a stream's consumer takes for tokens: `left` is when it was
    given the last one, None while the answer goes on.
    """

    def __init__(self) -> None:
        self.first_token_s: float | None = None
        self.left: float | None = None
        self.unsaid = 0  # accepted tokens behind the end of the answer
        self._started = self._elsewhere = self._prompt_s = 0.0
        self._native_before = (0.0, 0.0)
        self._n_read = 0  # tokens of the prompt that were evaluated before the first round
        self._graphs_before: int | None = None
        self._counter, self._departures = RoundCounter(), Departures()
        # Depths and candidates of the tree that was counted last, with `count_candidates` of them.
        self._counted: tuple[tuple[int, ...], tuple[bool, ...], tuple[int, int]] = (), (), (0, 0)

    def start(self, session: Session) -> None:
        """Start the clock."""
        self._native_before = session.native_seconds()
        self._started = time.perf_counter()

    def end_prompt(self, session: Session, n_read: int) -> None:
        """Note that the prompt was read, so many tokens of it by evaluation."""
        self._n_read, self._prompt_s = n_read, self.elapsed()
        self._graphs_before = session.target.graphs_reused

    def elapsed(self) -> float:
        """Return the seconds so far."""
        now = time.perf_counter() if self.left is None else self.left
        return now - self._started - self._elsewhere

    def note_token(self, now: float) -> None:
        """Note that the consumer has a token: the first one stops a clock."""
        if self.first_token_s is None:
            self.first_token_s = now - self._started - self._elsewhere

    def come_back(self) -> None:
        """Note that the runtime goes on."""
        left = self.left
        if left is not None:
            self.left = None
            self._elsewhere += time.perf_counter() - left

    def count(self, this_round: Round, conversation: Conversation) -> None:
        """Count a round, as a whole or not at all, wherever Ctrl-C may come."""
        if this_round.rows is NOT_EVALUATED:
            self._counter.count_spoken(len(this_round.new))
            return
        tree, n_accepted, n_new = this_round.tree, len(this_round.path), len(this_round.new)
        if this_round.laws:
            start = len(conversation.tokens) - n_new
            self._departures.count(this_round.laws, this_round.new, conversation.noise, start)
        if not tree.tokens:
            self._counter.kinds[0, 0, 0, n_new, 0, 0] += 1
            return
        tested, depths, candidates = n_accepted, tree.depths, tree.is_candidate
        # A path that was cut at its end token was not refused there.
        if this_round.rejected and this_round.next_token is not None:
            tested += 1
        known, known_candidates, counted = self._counted
        if known is not depths or known_candidates is not candidates:
            counted = count_candidates(depths, candidates)
            self._counted = depths, candidates, counted
        n_candidates, depth = counted
        others = len(depths) - n_candidates
        self._counter.kinds[n_candidates, depth, n_accepted, n_new, others, tested] += 1

    @property
    def evaluated(self) -> tuple[int, int]:
        """How many rounds the target evaluated, and their tokens, the roots included."""
        counter = self._counter
        rounds, spoken = counter.rounds, counter.spoken
        return rounds, rounds + counter.drafted - spoken + counter.non_candidates

    def summary(self, answer: Answer, n_tokens: int) -> SpecStats:
        """Return the statistics of an answer that has so many tokens so far."""
        session, counter = answer.session, self._counter
        wall = target_s = drafter_s = 0.0
        if self._started:
            wall = self.elapsed()
            times = zip(session.native_seconds(), self._native_before, strict=True)
            target_s, drafter_s = (now - before for now, before in times)
        reused, before = session.target.graphs_reused, self._graphs_before
        guided = answer.guided
        accepted, drafted = counter.accepted - self.unsaid, counter.drafted
        return SpecStats(
            drafter=answer.drafter.name,
            rule=answer.rule.name,
            exact=answer.rule.exact,
            rounds=counter.rounds,
            drafted=drafted,
            accepted=accepted,
            acceptance_rate=accepted / drafted if drafted else None,
            mean_accepted_length=counter.mean_accepted_length,
            acceptance_by_position=tuple(counter.acceptance_by_position),
            tokens_per_second=_rate(n_tokens, wall - self._prompt_s),
            prompt_tokens_per_second=_rate(self._n_read, self._prompt_s),
            time_to_first_token_s=self.first_token_s,
            target_s=target_s,
            drafter_s=drafter_s,
            overhead_s=max(0.0, wall - target_s - drafter_s),
            wall_s=wall,
            drafting=answer.drafter.report(),
            non_candidates=counter.non_candidates,
            acceptance_given_prefix=tuple(counter.acceptance_given_prefix),
            tested_by_position=tuple(counter.tested_by_position),
            width=session.target.width,
            total_variation=self._departures.total_variation,
            changed_share=self._departures.changed_share,
            rebuilt=None
            if reused is None or before is None
            else max(0, counter.rounds - max(0, reused - before)),
            forced=0 if guided is None else guided.forced,
            forced_accepted=0 if guided is None else guided.forced_accepted,
        )


class Answer(Mailbox):
    """An answer so far, the generator that continues it, and the mailbox that its reader empties.

    `make` decodes, a round at a time, in the slot that `attach` gave it. A round is handed out
    token by token, as events, or at once without: nobody reads the events of a drained stream. If
    the reader is another thread, each round goes into the mailbox (`post`).

    A schedule uses the rest: its `number` in order of admission; its `stage`; `reads_again`, which
    reads a text again whose cells were taken; and `making`, which only an engine keeps here. A
    stream that steps its answer keeps the generator itself, so that to drop the stream ends it.
    """

    session: Session
    rule: Rule | SequentialCascade
    drafter: Drafter
    statistics: AnswerStatistics

    def __init__(self, request: Request, vocabulary: Vocabulary) -> None:
        super().__init__()
        options, params = request.options, request.params
        self.request = request
        self._logprobs = options.logprobs or options.top_logprobs > 0
        self._prompt = [*request.prompt]
        self._params = params.effective()
        self._grammar: CompiledGrammar | None = None
        if params.grammar is not None:
            from specrun.runtime.grammar.compiled import compiled

            # Before anything is evaluated: the compiler's errors are raised at once.
            self._grammar = compiled(params.grammar, vocabulary)
        self._place: GrammarState | None = None  # where the text begins under it
        self.guided: GuidedDrafter | None = None  # drafts the grammar's forced tokens
        self._tracer: Tracer | None = None
        if options.trace:
            from specrun.runtime.engine.trace import Tracer

            self._tracer = Tracer(vocabulary, greedy=params.is_greedy)
        self.traced: list[RoundTrace] = []
        self._assembler, self._stops = TextAssembler(params.stop), bool(params.stop)
        self._keeper = LogprobKeeper()
        # Tokens, and the text that became certain with them: an item is handed out as a whole.
        self._said: list[tuple[Sequence[int], str]] = []
        # The round that is handed out, its number, its tokens' pieces, and how many items there
        # were before it: a tuple, because they change together. None: nothing is left of it.
        self.spoken: tuple[Round, int, list[bytes], int] | None = None
        self._n_top = options.top_logprobs
        self._finish: FinishReason = "cancelled"
        self._stats: SpecStats | None = None  # once it has ended
        self.hand_out: Callable[[], None] | None = None  # while the next round is evaluated
        self.number = 0
        self.stage: Stage | None = None
        self.reads_again: Iterator[None] | None = None
        self.making: Making | None = None

    def attach(self, session: Session) -> Making:
        """Take a slot; return the generator that makes the answer there, from its beginning."""
        self.session, self.rule = session, self.request.rule or session.rule
        self.drafter, self.statistics = session.drafter_of(self.request), AnswerStatistics()
        self.stage, self.reads_again = None, None
        return self.make()

    @property
    def result(self) -> GenerationResult:
        """The answer so far, complete once the stream is exhausted or closed."""
        token_ids = [token for tokens, _ in self._said for token in tokens]
        text = "".join(text for _, text in self._said)
        usage = Usage(len(self._prompt), len(token_ids), self.n_cached)
        stats = self._stats or self.statistics.summary(self, len(token_ids))
        return GenerationResult(text, token_ids, self._finish, usage, stats, self.request.seed)

    # -- making it ---------------------------------------------------------------------------------

    def make(self) -> Making:
        """Decode the answer; each yielded stage is the reason for giving back control."""
        session, request, conversation = self.session, self.request, self.session.conversation
        try:
            self.drafter = session.drafter_of(request)  # it may have been swapped meanwhile
            session.turn_to_drafter(self.drafter)
            self.rule = request.rule or session.rule
            self.statistics.start(session)
            target = self._verifier()
            self.n_cached = conversation.turn_to(session.target, self._prompt)
            yield "reading"
            n_read = 0
            # In a sequential cascade the target reads the prompt when it is needed.
            if not isinstance(self.rule, SequentialCascade):
                # The prompt's last token is the first round's root.
                n_read = len(self._prompt) - 1 - self.n_cached
                for _ in conversation.read_prompt(session.target):
                    yield "reading"
            if self._tracer is not None:
                self._tracer.begin(len(conversation.tokens), self._seconds())
            self.statistics.end_prompt(session, n_read)
            yield from self._decode(target)
        except SpecrunError as error:
            if self.hand_out is not None:  # tokens that were decided before it
                self.hand_out()
            session.require_open()  # its closing is the cause of whatever was raised
            if isinstance(error, (DecodeMemoryError, OutOfMemoryError)):
                error.add_note(session.memory_note())
            raise
        finally:
            self._conclude()

    def _conclude(self) -> None:
        if self.spoken is not None:  # tokens that were not handed out are no part of the answer
            this_round, _, _, base = self.spoken
            self._leave_out(this_round, len(self._said) - base)
        if self._finish == "cancelled":
            # Text that waited for the rest of a character or a stop string is part of it.
            self._said.append(((), self._assembler.finish()))
        n_tokens = sum(len(tokens) for tokens, _ in self._said)
        self._stats = self.statistics.summary(self, n_tokens)
        if self._place is not None:
            self._place.close()
        if self.session.rejections is not None:
            self.session.rejections.end_answer(self.session.conversation.tokens)
        if self.session.answers is not None:
            self.session.answers.add(self.session.conversation.tokens, len(self._prompt))
        try:
            self._keeper.finish()
        except SpecrunError:
            # A closed context's rows are gone: nothing of them can be saved.
            if not self.session.closed:
                raise

    def _verifier(self) -> Target:
        """Return the target that verifies drafts: whole rows, or only the best logits of them."""
        session, params, rule = self.session, self._params, self.rule
        # Rules that weigh raw distributions read whole rows; at temperature 0 any other one is
        # exact.
        by_law = not isinstance(rule, PairRule) and (rule.exact or params.is_greedy)
        reads_rows = self.drafter.reads_logits or session.rejections is not None
        sampled = session.backend_sampling and by_law and not reads_rows
        whole = self._logprobs or not sampled
        needed = None if whole else candidates_needed(params, session.vocabulary.size)
        return sampled_on_device(session.target, needed)

    def _decode(self, target: Target) -> Making:
        session, conversation = self.session, self.session.conversation
        options, end_tokens = self.request.options, session.vocabulary.end_of_generation
        limits = RoundLimits(
            n_ctx=session.target.n_positions,
            max_nodes=session.target.max_nodes,
            max_tokens=options.max_tokens,
            n_max=options.n_max,
        )
        seed = self.request.seed
        conversation.noise = SeededNoise.for_answer(seed, self._prompt, options.index)
        rounds = self._rounds(target, limits, end_tokens)
        # A full context counts as length, like the token limit.
        finish: FinishReason = "length"
        number, pieces_of, rejections = 0, session.vocabulary.pieces, session.rejections
        for this_round in rounds:
            if this_round is None:
                yield "waiting" if self.guided is None or self.guided.may_draft else "masking"
                continue
            if self.hand_out is not None:  # the last round, if it was not evaluated on a device
                self.hand_out()
            tokens = this_round.new
            pieces = pieces_of(tokens)
            if tokens[-1] in end_tokens:
                pieces[-1] = b""
            if this_round.is_whole:
                finish = "stop"
            self.statistics.count(this_round, conversation)
            if rejections is not None and this_round.rejected:
                note_rejected(rejections, conversation, this_round)
            self.spoken = this_round, number, pieces, len(self._said)
            if self._tracer is not None:
                self._trace(self._tracer)
            yield "round"
            if self._stops and self._assembler.stopped_by is not None:
                finish = "stop"
                break
            self._keeper.before_evaluation()
            number += 1
        self._finish = finish

    def _rounds(
        self, target: Target, limits: RoundLimits, end_tokens: frozenset[int]
    ) -> Iterator[Round | None]:
        session, params, rule = self.session, self._params, self.rule
        if self._grammar is not None:
            # Other conversations must not wait for it.
            patience = _PATIENCE if session.settles else None
            self._place = self._grammar.start(len(self._prompt), patience)
            if not isinstance(rule, SequentialCascade):
                from specrun.runtime.drafters.combinators.guided import GuidedDrafter

                self.guided = GuidedDrafter(self.drafter, session.costs)
        state = FRESH
        if self._grammar is not None or "dry" in params.chain:
            texts = params.dry_sequence_breakers if "dry" in params.chain else ()
            breakers = sequence_breakers(session.vocabulary, texts)
            state = SamplerState(breakers, grammar=self._place)
        witness = None if self._tracer is None else self._tracer.witness
        settings = DecodeSettings(rule, params, limits, end_tokens, state, witness, self.guided)
        if isinstance(rule, SequentialCascade):
            from specrun.runtime.engine.sequential import sequential_rounds, small_model

            small = small_model(rule, self.drafter)
            return sequential_rounds(session.target, session.conversation, small, settings)
        return decode_rounds(target, session.conversation, settings)

    # -- traces ------------------------------------------------------------------------------------

    def _seconds(self) -> tuple[float, float, float]:
        """Return the native seconds of target and drafter so far, and those of all own work."""
        own = self.statistics.elapsed if self.session.clock is None else self.session.clock
        return (*self.session.native_seconds(), own())

    def _trace(self, tracer: Tracer) -> None:
        """Add the trace of the round that is to be handed out."""
        n_tokens = len(self.session.conversation.tokens)
        trace = tracer.trace(n_tokens, self.result.stats, self.session.cost_of, self._seconds)
        if trace is not None:
            self.traced.append(trace)

    # -- handing it out ----------------------------------------------------------------------------

    def take_here(self) -> TokenEvent | None:
        """Hand out the next token to a reader that makes the steps; None: one has to come first."""
        if self.statistics.left is not None:
            self.statistics.come_back()
        # The consumer had control and may have closed the runtime: a step then raises.
        if self.spoken is None or self.session.closed:
            return None
        return self.next_event()

    def post(self) -> None:
        """Put the round into the mailbox if its reader is another thread; its traces always."""
        traced, self.traced = self.traced, []
        if self.session.settles:
            self.put([*iter(self.next_event, None)], traced)
        elif traced:
            self.put((), traced)

    @property
    def may_wait(self) -> bool:
        """Whether a round may be handed out while a device evaluates the next one.

        Not if its text decides whether there is one, nor if its rows are read.
        """
        return (
            self.session.target.context.waits_for_device
            and not self._params.stop
            and not self._logprobs
        )

    @property
    def is_at_end(self) -> bool:
        """Whether there is no round after the one that is to be handed out."""
        return self.spoken is not None and self.spoken[0].is_last

    def next_event(self) -> TokenEvent | None:
        """Hand out the next token of the round; None: all of them were."""
        spoken = self.spoken
        if spoken is None:
            return None
        this_round, number, pieces, base = spoken
        said, statistics = self._said, self.statistics
        index = len(said) - base
        left = len(pieces) - index
        if not left or (self._stops and self._assembler.stopped_by is not None):
            self._leave_out(this_round, index)
            return None
        text = self._assembler.push(pieces[index])
        ends: FinishReason | None = None
        if left == 1 and this_round.is_last:
            text += self._held_back()
            ends = "stop" if this_round.is_whole else "length"
        if self._stops and self._assembler.stopped_by is not None:
            ends = "stop"
        token = this_round.new[index]
        origin: Origin = "drafted" if index < len(this_round.path) else "target"
        if self._logprobs and this_round.rows is not NOT_EVALUATED:
            # Read on demand: a softmax for every token would be most of the overhead.
            event = TokenEvent(text, token, origin, number, this_round, index, self._n_top, ends)
            if self.session.settles:
                event.settle()
            else:
                self._keeper.current.append(weakref.ref(event))
        else:
            event = TokenEvent(text, token, origin, number, None, 0, 0, ends)
        said.append(((token,), text))
        if left == 1:
            self.spoken = None
        statistics.left = now = time.perf_counter()
        if statistics.first_token_s is None:
            statistics.note_token(now)
        return event

    def take_round(self) -> None:
        """Hand out the rest of the round, if any, without events."""
        spoken, self.spoken = self.spoken, None
        if spoken is None or self._assembler.stopped_by is not None:
            return
        this_round, _, pieces, base = spoken
        start = len(self._said) - base
        text, count = self._assembler.push_all(pieces[start:])
        if this_round.is_last:
            text += self._held_back()
        self._said.append((this_round.new[start : start + count], text))
        self._leave_out(this_round, start + count)
        self.statistics.note_token(time.perf_counter())
        self.statistics.left = None

    def _leave_out(self, this_round: Round, n_said: int) -> None:
        """Forget the tokens of a round but so many: accepted ones among them are not counted."""
        self.spoken = None
        accepted = this_round.new if this_round.rows is NOT_EVALUATED else this_round.path
        self.statistics.unsaid = max(0, len(accepted) - n_said)

    def _held_back(self) -> str:
        """Return the text that was held back until the answer's last token."""
        return self._assembler.finish() if self._assembler.stopped_by is None else ""


def note_rejected(notes: RejectionNotes, conversation: Conversation, this_round: Round) -> None:
    """Note the row of a rejected draft: the one that the round's last token came from."""
    if this_round.next_token is None or this_round.rows is NOT_EVALUATED:
        return
    notes.note(len(conversation.tokens) - 2, this_round.logits_of(len(this_round.path)))


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None
