"""The engine: a target and drafters that answer several conversations at once, in a thread.

Each slot is a session with a conversation of its own; their draft trees are verified in one
evaluation. The loop, the rules and the noise are those of `Runtime`, which is one such session.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrun.bindings.context import Context
from specrun.bindings.context_options import ContextOptions
from specrun.bindings.errors import ClosedError, OptionError, TemplateError, UnsupportedModelError
from specrun.bindings.vocabulary import Vocabulary
from specrun.runtime.acceptance import SequentialCascade
from specrun.runtime.demo import demo_drafters, demo_target
from specrun.runtime.drafter import Drafter, Owned, close_all, make_all
from specrun.runtime.engine.schedule import Load, Request, Schedule, Seat
from specrun.runtime.engine.slots import SharedEvaluation, SlotClock
from specrun.runtime.engine.streams import EngineStream
from specrun.runtime.grammar.compiled import compiled
from specrun.runtime.opening import (
    OpenModels,
    RuntimeOptions,
    opening,
    parse_options,
    prompt_tokens,
)
from specrun.runtime.results import GenerationResult
from specrun.runtime.sampling import SamplingParams, random_if_unset
from specrun.runtime.session import Session
from specrun.runtime.target import target_context_options

if TYPE_CHECKING:
    from specrun.runtime.chat_template import ChatTemplate, Message

MOST_SEQUENCES = 256
"""llama.cpp's limit (LLAMA_MAX_SEQ): every path of every slot's tree is a sequence."""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """What an engine does now, and has done (`load`); `cells` of `n_ctx` are used."""

    slots: int
    busy: int
    queued: int
    n_ctx: int
    cells: int
    load: Load


class Engine:
    """Answers several conversations at once. Any thread, and any event loop, may `submit`.

    `n_ctx` tokens are shared by all slots: a conversation takes what it needs, at most the length
    that the model was trained for, and what idle ones still hold of their texts goes when others
    need it; 0 is that length for every slot. A drafter's expression is as for `Runtime`;
    every slot drafts with a drafter of its own, all with the same weights. Further options are
    those of `RuntimeOptions`. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        drafter: str | None = "none",
        *,
        slots: int = 4,
        **options: Any,  # noqa: ANN401 - the fields of RuntimeOptions and its context
    ) -> None:
        self._open(Path(target), drafter or "none", slots, parse_options(options), {})

    @classmethod
    def demo(cls, drafter: str = "draft", *, slots: int = 4, **options: Any) -> Engine:  # noqa: ANN401
        """Open the embedded family; paths may be left out of `drafter`, as in "draft(n=3)"."""
        engine = cls.__new__(cls)
        engine._open(demo_target(), drafter, slots, parse_options(options), demo_drafters())
        return engine

    def _open(
        self,
        target: Path,
        drafter: str,
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
        if options.learn:
            raise OptionError("learn is for one conversation at a time: use Runtime")
        self.options = options
        clock = SlotClock()
        with ExitStack() as owned, opening(target, drafter, options, files, clock) as opened:
            if isinstance(opened.rule, SequentialCascade):
                why = "lets the small model speak alone, one conversation at a time"
                raise OptionError(f"{opened.rule.name} {why}: use Runtime")
            drafters = make_all([opened.weights.start] * slots)
            owned.callback(close_all, drafters)
            if drafters[0].embedding_inputs is not None:
                why = "drafts at positions that are no tokens, which a batch has alone"
                raise OptionError(f"{drafters[0].name} {why}: use Runtime")
            n_ctx = options.context.n_ctx or opened.environment.context.n_ctx * slots
            context = Context(opened.model, _context_options(opened, drafters[0], slots, n_ctx))
            owned.callback(context.close)
            longest = min(n_ctx, opened.environment.context.n_ctx)
            shared = SharedEvaluation(context, slots, longest, opened.environment.known, clock)
            seats = []
            for each, own in zip(drafters, shared.slots, strict=True):
                session = Session(own, each, opened.rule, opened.model.vocabulary)
                own.hold(session.conversation)
                seats.append(Seat(session, own))
            self._schedule = Schedule(shared, seats)
            self.model = opened.model
            self._owned: tuple[Owned, ...] = (*drafters, context, opened.weights, opened.model)
            owned.pop_all()
        self._template: ChatTemplate | None = None
        self._changed = threading.Condition()
        self._requests: list[Request] = []
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
    ) -> EngineStream:
        """Ask for a continuation of `prompt`, a text or token ids; return its stream at once.

        For its seed each conversation gets the text that it gets alone, at temperature 0 and with
        drafters of point masses, but for what batches of another size round otherwise. Raises
        `GrammarError` for a grammar that cannot be compiled.
        """
        params = params or SamplingParams()
        tokens = prompt_tokens(self.vocabulary, prompt)
        if params.grammar is not None:  # here, where nobody else waits for it; it is kept
            compiled(params.grammar, self.vocabulary)
        seed = random_if_unset(self.options.seed if params.seed is None else params.seed)
        stream = EngineStream(seed)
        request = Request(tokens, params, seed, index, max_tokens, logprobs, stream.listener)
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
    ) -> EngineStream:
        """Ask for an answer to {"role", "content"} messages."""
        from specrun.runtime.chat_template import chat_tokens

        tokens = chat_tokens(self.chat_template, self.vocabulary, messages)
        return self.submit(tokens, params, max_tokens=max_tokens, index=index, logprobs=logprobs)

    def generate_many(
        self,
        prompts: Iterable[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
    ) -> list[GenerationResult]:
        """Return the continuations of all prompts, in their order."""
        streams = [self.submit(prompt, params, max_tokens=max_tokens) for prompt in prompts]
        try:
            return [stream.result for stream in streams]
        except BaseException:  # one failed, or Ctrl-C: nobody waits for the others
            for stream in streams:
                stream.cancel()
            raise

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
    def drafter(self) -> str:
        """The expression of the drafter in use."""
        return self._schedule.seats[0].session.drafter.name

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat template; raises `TemplateError` if the model has none and none was given."""
        if self._template is None:
            from specrun.runtime.chat_template import template_of

            source = self.options.chat_template or self.model.chat_template
            if source is None:
                raise TemplateError(f"{self.model.path} has no chat template: give one")
            self._template = template_of(source, self.vocabulary)
        return self._template

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
            schedule.close(why)
            close_all(self._owned)

    def _take_requests(self) -> bool:
        """Wait until there is something to do; return False where the engine is to be closed."""
        schedule = self._schedule
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._requests or not schedule.is_idle)
            taken, self._requests = self._requests, []
            for request in taken:
                schedule.add(request)
            return not self._closing


def _context_options(
    opened: OpenModels, drafter: Drafter, slots: int, n_ctx: int
) -> ContextOptions:
    """Return the settings of a context in which every slot verifies trees of such a drafter."""
    own = target_context_options(opened.environment.context, drafter)
    model = opened.model
    if slots > 1 and not model.can_branch:
        kind = f"{model.architecture} models keep a recurrent state"
        raise UnsupportedModelError(f"{kind}: they answer one conversation at a time (slots=1)")
    n_sequences, n_outputs = own.n_sequences * slots, own.n_outputs * slots
    if n_sequences > MOST_SEQUENCES:
        has = f"{drafter.name} drafts trees of up to {own.n_sequences} paths"
        most = MOST_SEQUENCES // own.n_sequences
        problem = f"{has}, and llama.cpp has {MOST_SEQUENCES} sequences"
        raise OptionError(f"{problem}: take at most {most} slots, not {slots}, or smaller trees")
    if n_outputs > own.n_batch:
        problem = f"{slots} slots evaluate up to {n_outputs} tokens at once, a batch has"
        raise OptionError(f"{problem} {own.n_batch}: raise n_batch, or take fewer slots")
    return dataclasses.replace(own, n_ctx=n_ctx, n_sequences=n_sequences, n_outputs=n_outputs)
