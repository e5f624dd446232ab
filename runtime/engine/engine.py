"""The engine: a target and drafters that answer several conversations at once, in a thread."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrun.bindings.contexts.context import Context
from specrun.bindings.errors import ClosedError, OptionError, TemplateError
from specrun.bindings.machine.placement import placing
from specrun.bindings.models.trial import trusting_files
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime.demo import demo_drafters, demo_target
from specrun.runtime.drafters.batching import DraftMeeting
from specrun.runtime.engine.opening import (
    RuntimeOptions,
    draft_file_of,
    opening,
    parse_options,
    prompt_tokens,
)
from specrun.runtime.engine.request_options import Choices
from specrun.runtime.engine.schedule import Load, Request, Schedule, Seat
from specrun.runtime.engine.session import Session, require_count, require_length
from specrun.runtime.engine.slots import SharedEvaluation, SlotClock
from specrun.runtime.engine.streams import EngineStream
from specrun.runtime.grammar.compiled import compiled
from specrun.runtime.laws.sampling import SamplingParams, random_if_unset
from specrun.runtime.online import open_rejections
from specrun.runtime.round.drafter import Owned, close_all
from specrun.runtime.round.results import GenerationResult

if TYPE_CHECKING:
    from specrun.runtime.chat.template import ChatTemplate, Message


# == Statistics of an engine and its slots =========================================================


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """What an engine does now, and has done (`load`); `cells` of `n_ctx` are used."""

    slots: int
    busy: int
    queued: int
    n_ctx: int
    cells: int
    load: Load


@dataclass(frozen=True, slots=True)
class SlotState:
    """What a slot does: its drafter, and of how many tokens of its text keys are cached."""

    busy: bool
    drafter: str
    n_tokens: int
    n_cached: int


# == Online speculative decoding: the drafter is replaced between answers ==========================
#
# Liu et al. 2023: what drafts changes between answers. Each draw is tested with the law that it was
# drawn from, so a swap waits until no conversation is in the middle of an answer; requests that
# come meanwhile wait, too. Whoever swaps waits for both.


class DrafterSwap:
    """One swap that is asked for: the new expression, and how it ended."""

    def __init__(self, drafter: str, files: Mapping[str, Path] | None) -> None:
        self._drafter, self._files = drafter, files
        self._ended, self._problem = threading.Event(), list[BaseException]()

    def make(self, choices: Choices, schedule: Schedule) -> None:
        """Swap now, in the engine's thread, where no answer is being made."""
        try:
            replaced = choices.swap(self._drafter, self._files)
            try:
                for seat in schedule.seats:
                    if seat.session.drafter in replaced:
                        seat.session.draft_with(seat.drafters.get(choices.own))
            finally:
                close_all(replaced)
        except BaseException as problem:  # whoever waits is told
            self.end(problem)
            return
        self._ended.set()

    def end(self, problem: BaseException) -> None:
        """Tell whoever waits why there was no swap."""
        self._problem.append(problem)
        self._ended.set()

    def wait(self) -> None:
        """Wait for it; raises why it could not be."""
        self._ended.wait()
        if self._problem:
            raise self._problem[0]


class DrafterSwaps:
    """The swaps that are asked for; whoever asks and whoever makes them are different threads."""

    def __init__(self) -> None:
        self.asked: list[DrafterSwap] = []

    def ask(self, drafter: str, files: Mapping[str, Path] | None) -> DrafterSwap:
        """Note a swap, for whoever waits for it."""
        swap = DrafterSwap(drafter, files)
        self.asked.append(swap)
        return swap

    def make_if_idle(self, choices: Choices, schedule: Schedule, options: RuntimeOptions) -> None:
        """Admit no more answers while a swap is asked for; make it once none is under way."""
        schedule.admits = not self.asked
        if schedule.admits or any(not seat.is_idle for seat in schedule.seats):
            return
        trust = trusting_files() if options.trust else nullcontext()
        with trust, placing(options.placement):
            while self.asked:
                self.asked.pop(0).make(choices, schedule)
        schedule.admits = True

    def end(self, problem: BaseException) -> None:
        """Tell all that wait why there is no swap."""
        while self.asked:
            self.asked.pop(0).end(problem)


# == The engine ====================================================================================
#
# Each slot is a session with a conversation of its own; their draft trees are verified in one
# evaluation. The loop, the rules and the noise are those of `Runtime`, which is one such session.


@dataclass(frozen=True, slots=True)
class Offer:
    """An engine's own drafter, and what else requests may choose."""

    drafter: str
    others: Sequence[str]
    rules: Sequence[str]


class Engine:
    """Answers several conversations at once. Any thread, and any event loop, may `submit`.

    `n_ctx` tokens are shared by all slots: a conversation takes what it needs, at most the length
    that the model was trained for, and what idle ones still hold of their texts goes when others
    need it; 0 is that length for every slot, or as much of it as there is memory for
    (`memory_line`). A drafter's expression is as for `Runtime`;
    every slot drafts with a drafter of its own, all with the same weights. A request may choose
    "none", one of the drafters `others`, in full or by the name of its method where only one has
    it, and another acceptance rule: any exact one where `accept` is exact, any that is not where
    one of those is among `rules`. Further options are those of `RuntimeOptions`. Close it, or use
    it as a context manager.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        drafter: str | None = "none",
        *,
        slots: int = 4,
        others: Sequence[str] = (),
        rules: Sequence[str] = (),
        **options: Any,  # noqa: ANN401 - the fields of RuntimeOptions and its context
    ) -> None:
        offer = Offer(drafter or "none", others, rules)
        self._open(Path(target), offer, slots, parse_options(options), {})

    @classmethod
    def demo(
        cls,
        drafter: str = "draft",
        *,
        slots: int = 4,
        others: Sequence[str] = (),
        rules: Sequence[str] = (),
        **options: Any,  # noqa: ANN401
    ) -> Engine:
        """Open the embedded family; paths may be left out of drafters, as in "draft(n=3)"."""
        engine, offer = cls.__new__(cls), Offer(drafter, others, rules)
        engine._open(demo_target(), offer, slots, parse_options(options), demo_drafters())
        return engine

    def _open(
        self,
        target: Path,
        offer: Offer,
        slots: int,
        options: RuntimeOptions,
        files: dict[str, Path],
    ) -> None:
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise OptionError(f"slots is {slots!r}: give how many conversations go on at once")
        if options.shape != "free":
            why = "every round of several conversations has a width of its own"
            raise OptionError(f"shape is {options.shape!r}: {why}; leave it free, or use Runtime")
        if options.backend_sampling == "on":
            raise OptionError("backend_sampling is for one conversation at a time: use Runtime")
        self.options = options
        clock, meeting = SlotClock(), DraftMeeting(slots)
        with (
            ExitStack() as owned,
            opening(target, offer.drafter, options, files, clock, meeting) as opened,
        ):
            choices = Choices(opened, slots, offer.others, offer.rules)
            owned.callback(choices.close)
            n_ctx = options.context.n_ctx or opened.environment.context.n_ctx * slots
            context = Context(opened.model, choices.context_options(opened.model, slots, n_ctx))
            owned.callback(context.close)
            longest = min(n_ctx, opened.environment.context.n_ctx)
            shared = SharedEvaluation(context, slots, longest, opened.environment.known, clock)
            self.rejections = open_rejections(options.learn, opened.model)
            seats = []
            for drafters, own in zip(choices.slots, shared.slots, strict=True):
                drafter = drafters.get(choices.own)
                session = Session(own, drafter, opened.rule, opened.model.vocabulary)
                session.memory_note = opened.memory_note
                session.settles = True  # whoever reads them does so while others are evaluated
                own.hold(session.conversation)
                if self.rejections is not None:
                    session.rejections = self.rejections.buffer.notes()
                seats.append(Seat(session, own, drafters))
            self._schedule = Schedule(shared, seats, meeting)
            self._choices, self.model, self.fitted = choices, opened.model, opened.fitted
            kept = [] if self.rejections is None else [self.rejections]
            self._owned: tuple[Owned, ...] = (
                *(choices, context, opened.weights, opened.model),
                *kept,
            )
            owned.pop_all()
        self._template: ChatTemplate | None = None
        self._tool_template: ChatTemplate | None = None
        self._changed = threading.Condition()
        self._requests: list[Request] = []
        self._swaps = DrafterSwaps()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="specrun engine", daemon=True)
        self._thread.start()

    # -- answering ---------------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        index: int = 0,
        logprobs: bool = False,
        top_logprobs: int = 0,
        drafter: str | None = None,
        n_max: int | None = None,
        accept: str | None = None,
        trace: bool = False,
    ) -> EngineStream:
        """Ask for a continuation of `prompt`, a text or token ids; return its stream at once.

        With `logprobs` events tell their log-probability, with `top_logprobs` also those of so many
        most likely tokens. `drafter`, `accept`: of those that the engine has (see there), None its
        own. `n_max` is how many tokens a round drafts at most, 0 none. Raises `OptionError` for
        what there is not, and for what does not fit together.

        For its seed each conversation gets the text that it gets alone, at temperature 0 and with
        drafters of point masses, but for what batches of another size round otherwise. With
        `trace` the stream has a trace of every round, which changes nothing but takes time. Raises
        `GrammarError` for a grammar that cannot be compiled.
        """
        params = params or SamplingParams()
        choice = self._choices.find(params, drafter, n_max, accept)
        n_top, most = require_count(top_logprobs), require_length(max_tokens)
        tokens = prompt_tokens(self.vocabulary, prompt)
        if params.grammar is not None:  # here, where nobody else waits for it; it is kept
            compiled(params.grammar, self.vocabulary)
        seed = random_if_unset(self.options.seed if params.seed is None else params.seed)
        stream = EngineStream(seed)
        request = Request(
            tokens,
            params,
            seed,
            index,
            most,
            logprobs,
            stream.listener,
            choice,
            n_top,
            trace,
        )
        with self._changed:
            self._require_open()
            self._requests.append(request)
            self._changed.notify()
        return stream

    def submit_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        index: int = 0,
        logprobs: bool = False,
        top_logprobs: int = 0,
        drafter: str | None = None,
        n_max: int | None = None,
        accept: str | None = None,
        trace: bool = False,
    ) -> EngineStream:
        """Ask for an answer to {"role", "content"} messages; the rest as for `submit`."""
        return self.submit(
            self.chat_prompt(messages),
            params,
            max_tokens=max_tokens,
            index=index,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            drafter=drafter,
            n_max=n_max,
            accept=accept,
            trace=trace,
        )

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation, rendered by the model's chat template."""
        from specrun.runtime.chat.template import chat_tokens

        return chat_tokens(self.chat_template, self.vocabulary, messages)

    def generate_many(
        self,
        prompts: Iterable[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        drafter: str | None = None,
        n_max: int | None = None,
        accept: str | None = None,
    ) -> list[GenerationResult]:
        """Return the continuations of all prompts, in their order; the rest as for `submit`."""
        asked = list(prompts)
        rooms, indices = [max_tokens] * len(asked), [0] * len(asked)
        return list(
            self.each_of_many(
                asked,
                params,
                max_tokens=rooms,
                indices=indices,
                drafter=drafter,
                n_max=n_max,
                accept=accept,
            )
        )

    def each_of_many(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        max_tokens: Sequence[int | None],
        indices: Sequence[int],
        drafter: str | None = None,
        n_max: int | None = None,
        accept: str | None = None,
    ) -> Iterator[GenerationResult]:
        """Yield the continuations of all prompts in turn; each has its own limit and index.

        Where one fails, or nobody takes the rest, those that are not done are cancelled.
        """
        streams = [
            self.submit(
                prompt,
                params,
                max_tokens=most,
                index=index,
                drafter=drafter,
                n_max=n_max,
                accept=accept,
            )
            for prompt, most, index in zip(prompts, max_tokens, indices, strict=True)
        ]
        try:
            for stream in streams:
                yield stream.result
        finally:
            for stream in streams:
                stream.cancel()

    def swap_drafter(self, drafter: str, files: Mapping[str, Path] | None = None) -> None:
        """Draft with another expression in place of the engine's own, as `Runtime.swap_drafter`.

        Waits until no conversation is in the middle of an answer; requests that come meanwhile wait
        for it. They still choose it by the expression that the engine was opened with.
        """
        with self._changed:
            self._require_open()
            swap = self._swaps.ask(drafter, files)
            self._changed.notify()
        swap.wait()

    def require_idle(self) -> None:
        """Do nothing: swaps wait until no answer is being made."""

    # -- what is open ------------------------------------------------------------------------------

    @property
    def vocabulary(self) -> Vocabulary:
        """The target's vocabulary."""
        return self.model.vocabulary

    @property
    def n_ctx(self) -> int:
        """How many tokens all conversations together may have cached."""
        return self._schedule.shared.context.n_ctx

    @property
    def memory_line(self) -> str:
        """What was chosen of layers and context for the memory that is here; "" if nothing was."""
        return "" if self.fitted is None else self.fitted.line

    @property
    def drafter(self) -> str:
        """The expression of its own drafter: of requests that choose none."""
        return self._choices.own_drafter

    @property
    def draft_file(self) -> Path:
        """The file of its own draft model; raises `OptionError` where something else drafts."""
        return draft_file_of(self.drafter, self._choices.environment)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closing

    @property
    def drafters(self) -> tuple[str, ...]:
        """The expressions of all drafters that a request may choose, its own first."""
        return self._choices.names

    @property
    def rules(self) -> list[str]:
        """The acceptance rules that a request may name, its own first."""
        return [*dict.fromkeys([self.options.accept, *self._choices.rules])]

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat template; raises `TemplateError` if the model has none and none was given."""
        if self._template is None:
            from specrun.runtime.chat.template import template_of

            source = self.options.chat_template or self.model.chat_template
            if source is None:
                raise TemplateError(f"{self.model.path} has no chat template: give one")
            self._template = template_of(source, self.vocabulary)
        return self._template

    @property
    def tool_template(self) -> ChatTemplate:
        """The template of conversations with tools: some models have another one for them."""
        if self._tool_template is None:
            from specrun.runtime.chat.template import template_of

            source = None if self.options.chat_template else self.model.tool_template
            other = source and template_of(source, self.vocabulary)
            self._tool_template = other or self.chat_template
        return self._tool_template

    def statistics(self) -> EngineStatistics:
        """Return what goes on now; numbers may be of neighbouring moments."""
        schedule = self._schedule
        return EngineStatistics(
            slots=len(schedule.seats),
            busy=sum(not seat.is_idle for seat in schedule.seats),
            queued=schedule.n_queued + len(self._requests),
            n_ctx=self.n_ctx,
            cells=schedule.shared.n_cells_used,
            load=dataclasses.replace(schedule.load),
        )

    def slots(self) -> tuple[SlotState, ...]:
        """Return what each slot does now; numbers may be of neighbouring moments."""
        return tuple(
            SlotState(
                not seat.is_idle,
                seat.session.drafter.name,
                len(seat.target.text.tokens),
                seat.target.text.n_cached,
            )
            for seat in self._schedule.seats
        )

    def close(self) -> None:
        """End all answers with `ClosedError` and free the native memory; again does nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closing:
            raise ClosedError("the engine is closed")

    # -- its thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        """Take requests and let the schedule turn, until the engine is closed."""
        schedule = self._schedule
        why: BaseException = ClosedError("the engine was closed while an answer was being made")
        try:
            while self._take_requests():
                self._swaps.make_if_idle(self._choices, schedule, self.options)
                schedule.turn()
        except BaseException as problem:  # a defect: nobody is to wait for ever
            why = problem
            raise
        finally:
            with self._changed:
                self._closing = True
                for request in self._requests:
                    schedule.add(request)
                self._requests = []
            self._swaps.end(ClosedError("the engine was closed before its drafter was swapped"))
            schedule.close(why)
            close_all(self._owned)

    def _take_requests(self) -> bool:
        """Wait until there is something to do; return False where the engine is to be closed."""
        schedule = self._schedule
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._requests or self._swaps.asked or not schedule.is_idle
            )
            taken, self._requests = self._requests, []
            for request in taken:
                schedule.add(request)
            return not self._closing
