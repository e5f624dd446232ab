"""The core of `Engine` and `Runtime`: open models, drafters and slots, requests and answers."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from specrun.bindings.errors import ClosedError, OptionError, TemplateError
from specrun.bindings.machine.workers import require_workers
from specrun.runtime.engine.answer import (
    Answer,
    AnswerOptions,
    Request,
    answer_options,
    prompt_tokens,
)
from specrun.runtime.engine.schedule import Load, Schedule
from specrun.runtime.engine.session import Session
from specrun.runtime.engine.streams import GenerationStream
from specrun.runtime.laws.sampling import SamplingParams, random_if_unset
from specrun.runtime.round.results import ChatResult, GenerationResult

if TYPE_CHECKING:
    from typing import Unpack

    from specrun.bindings.models.model import Model
    from specrun.bindings.models.vocabulary import Vocabulary
    from specrun.runtime.chat import ChatTemplate, ReplyReading
    from specrun.runtime.chat.turn import Message, Tool, ToolChoiceValue
    from specrun.runtime.drafters.environment import DraftEnvironment
    from specrun.runtime.engine.keywords import AnswerKeywords, ChatKeywords, SharedKeywords
    from specrun.runtime.engine.opening import RuntimeOptions
    from specrun.runtime.memory import Fitted
    from specrun.runtime.online import RejectionStore

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """The state of an engine, and its work so far (`load`); `cells` of `n_ctx` are used."""

    slots: int
    busy: int
    queued: int
    n_ctx: int
    cells: int
    load: Load


@dataclass(frozen=True, slots=True)
class SlotState:
    """The state of a slot: its drafter, and how many tokens of its text are cached."""

    busy: bool
    drafter: str
    n_tokens: int
    n_cached: int


class EngineCore(ABC):
    """A target, drafters and slots that are open; the subclass decides whose thread steps answers.

    Several slots share a context, in which the draft trees of all are verified in one evaluation. A
    single slot has a context of its own: only there can every evaluation have a fixed shape, a GPU
    send only the best logits, a small model speak alone, a drafter use look-ahead positions, and a
    conversation's cache be kept in a file. `fitted` is the memory plan that layers and context were
    chosen by, None if nothing was to be chosen; `rejections` the store of rejected drafts, if any;
    `contact_line` describes the measurements of a new file, "" if there were none.
    """

    options: RuntimeOptions
    model: Model
    fitted: Fitted | None
    rejections: RejectionStore | None
    contact_line: str

    def _open(
        self,
        target: str | os.PathLike[str] | None,
        drafter: str | None,
        options: Mapping[str, object],
        slots: int = 1,
    ) -> None:
        """Open a target, or the embedded one, with slots."""
        # The import of the modules that open models takes longer than all of the rest.
        from specrun.runtime.engine.opening import open_slots

        self._sessions: Sequence[Session] = ()
        self._requests: list[Answer] = []  # that the schedule does not have yet
        self._template: ChatTemplate | None = None
        self._tool_template: ChatTemplate | None = None
        opened = open_slots(target, drafter, options, slots)
        self.options, self.model, self.fitted = opened.options, opened.model, opened.fitted
        self.contact_line = opened.contact_line
        self.rejections, self._choices, self._owned = (
            opened.rejections,
            opened.choices,
            opened.owned,
        )
        self._sessions = opened.sessions
        self._schedule = Schedule(opened.sessions, opened.shared)

    @abstractmethod
    def close(self) -> None:
        """End all answers with `ClosedError` and free the native memory; again does nothing."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether it was closed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- answering ---------------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[AnswerKeywords],
    ) -> GenerationStream:
        """Return the stream of a continuation of `prompt`, a text or token ids, at once.

        Names of control tokens in a text are control tokens. Options are the fields of
        `AnswerOptions`: `max_tokens`, `index`, `logprobs`, `top_logprobs`, `drafter`, `n_max`,
        `accept` and `trace`. Raises `OptionError` for choices that are not offered or do not fit
        together; `GrammarError` for a grammar that cannot be compiled. An engine begins when a slot
        is free; a runtime when the stream is read, with `BusyError` while another one is.

        For its seed each conversation gets the text that it gets alone, at temperature 0 and with
        drafters of point masses, but for the rounding of batches of another size.
        """
        wanted = answer_options(options)
        return self._submit(self._request(prompt, params, wanted))

    @abstractmethod
    def _submit(self, request: Request) -> GenerationStream:
        """Return the stream of the answer to a request."""

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[AnswerKeywords],
    ) -> GenerationStream:
        """Return the stream of `submit`, with `logprobs` unless they are switched off."""
        options.setdefault("logprobs", True)
        return self.submit(prompt, params, **options)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[AnswerKeywords],
    ) -> GenerationResult:
        """Return the finished continuation of `prompt`; options are those of `submit`."""
        return self.submit(prompt, params, **options).drain()

    def submit_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoiceValue = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[AnswerKeywords],
    ) -> GenerationStream:
        """Return the stream of an answer to {"role", "content"} messages; else as `submit`.

        `text` of its events and of its result is the answer alone: reasoning and calls of `tools`
        (functions in OpenAI's form) have fields of their own (`TokenEvent`, `ChatResult`).
        `tool_choice` is OpenAI's, too: auto, none, required, or a tool that has to be called. Calls
        that have to come, and those of tools with `strict`, follow the tools' schemas.
        `chat_template_kwargs` are variables of the template, as {"enable_thinking": False}. If the
        last message is the assistant's, that answer goes on.
        """
        prompt, reading = self._asked(messages, tools, chat_template_kwargs, tool_choice)
        options["reading"] = reading
        params = SamplingParams() if params is None else params
        if reading.plan.schemas and isinstance(params, SamplingParams):
            params = params.replace(grammar=reading.grammar(params.grammar))
        return self.submit(prompt, params, **options)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatKeywords],
    ) -> GenerationStream:
        """Return the stream of `submit_chat`, with `logprobs` unless they are switched off."""
        options.setdefault("logprobs", True)
        return self.submit_chat(messages, params, **options)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatKeywords],
    ) -> ChatResult:
        """Return the finished answer of `submit_chat`.

        Tokens that the prompt shares with the last conversation are not evaluated again.
        """
        result = self.submit_chat(messages, params, **options).drain()
        assert isinstance(result, ChatResult)
        return result

    def generate_many(
        self,
        prompts: Iterable[str | Sequence[int]],
        params: SamplingParams | None = None,
        **options: Unpack[AnswerKeywords],
    ) -> list[GenerationResult]:
        """Return the continuations of all prompts, in their order; the rest as for `submit`."""
        return list(_results([self.submit(prompt, params, **options) for prompt in prompts]))

    def each_of_many(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        max_tokens: Sequence[int | None],
        indices: Sequence[int],
        **options: Unpack[SharedKeywords],
    ) -> Iterator[GenerationResult]:
        """Yield the continuations of all prompts in turn; each has its own limit and index.

        If one fails, or nobody takes the rest, those that are not done are cancelled.
        """
        asked = zip(prompts, max_tokens, indices, strict=True)
        yield from _results(
            [
                self.submit(prompt, params, max_tokens=most, index=index, **options)
                for prompt, most, index in asked
            ]
        )

    def _request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        options: AnswerOptions,
    ) -> Request:
        """Return a request; raises `OptionError` for choices that are not offered or do not fit."""
        self._require_open()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            given = "**settings" if isinstance(params, Mapping) else "temperature=0.7"
            advice = f"give a SamplingParams, such as SamplingParams({given})"
            raise OptionError(f"the settings of sampling are {params!r}: {advice}")
        tokens = prompt_tokens(self.vocabulary, prompt)
        require_workers(self.options.placement.rpc)
        seed = random_if_unset(self.options.seed if params.seed is None else params.seed)
        return Request(tokens, params, seed, options, *self._choices.find(params, options))

    def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the tokens of a conversation, rendered by the model's chat template.

        If its last message is the assistant's, that answer goes on.
        """
        return self._asked(messages, tools, chat_template_kwargs)[0]

    def _asked(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        template_kwargs: Mapping[str, Any] | None,
        tool_choice: ToolChoiceValue = "auto",
    ) -> tuple[list[int], ReplyReading]:
        """Return the tokens of a conversation, and how the reply to it is read."""
        from specrun.runtime.chat import ReplyReading, ToolChoice, is_begun_answer, turn_of

        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            advice = "give a list of messages, such as [{'role': 'user', 'content': 'hi'}]"
            raise OptionError(f"the conversation is {messages!r}: {advice}")
        choice = ToolChoice.of(tool_choice)
        tools = choice.used(tools)
        template = self.tool_template if tools else self.chat_template
        is_begun, vocabulary = is_begun_answer(messages), self.vocabulary
        turn = turn_of(
            template,
            messages,
            tools,
            choice=choice,
            template_kwargs=template_kwargs,
            is_begun=is_begun,
        )
        text = turn.text(template, vocabulary)
        return text.tokens(vocabulary), ReplyReading(turn.plan, vocabulary, text.end)

    # -- between answers ---------------------------------------------------------------------------

    @abstractmethod
    def require_idle(self) -> None:
        """Raise `BusyError` if no drafter can be swapped now."""

    @abstractmethod
    def _when_idle(self, work: Callable[[], _Result]) -> _Result:
        """Do something when no answer is being made, and return its result."""

    def swap_drafter(self, drafter: str, files: Mapping[str, Path] | None = None) -> None:
        """Draft with another expression by default, with caches of its own.

        `files` are taken for methods that it names without a file, in place of the demo's own. The
        target, its cache and the conversations stay, and so do the texts: drafts only make them
        quicker. The new drafter is opened whole before the old one is closed. A runtime raises
        `BusyError` while an answer is being streamed; an engine waits for the answers under way,
        and requests that come meanwhile wait, too. Those still choose the drafter by the expression
        that the engine was opened with. Raises `OptionError` for a drafter that needs a larger
        context or more states of the target than the first one, and as opening one does; the old
        drafter then stays.
        """
        self._when_idle(lambda: self._swap(drafter, files))

    def _swap(self, drafter: str, files: Mapping[str, Path] | None) -> None:
        from specrun.runtime.engine.opening import loading_with

        # Liu et al. 2023: the drafter changes between answers. Each draw is tested with the
        # distribution that it was drawn from, so never in the middle of one.
        with loading_with(self.options):
            self._choices.swap(drafter, files)
            try:
                for session, drafters in zip(self._sessions, self._choices.slots, strict=True):
                    if session.drafter not in drafters.started.values():
                        session.turn_to_drafter(drafters.get(drafters.own))
            finally:
                self._choices.close_unused()

    def save_session(self, path: str | os.PathLike[str]) -> int:
        """Keep the cache of the conversation so far in a file; return how many tokens it holds.

        `load_session` of another runtime with the same model and settings takes it up: tokens that
        its prompts share with the conversation are then not evaluated again. Errors:
        `session_file`.
        """
        from specrun.runtime.engine.session_file import save_session

        return self._when_idle(lambda: save_session(self._only_session, Path(path)))

    def load_session(self, path: str | os.PathLike[str]) -> int:
        """Take up a kept cache; return how many tokens it holds, 0 if the drafter forbids it.

        A drafter that reads the target's states does: it would need those of the prompt.
        """
        from specrun.runtime.engine.session_file import load_session

        return self._when_idle(lambda: load_session(self._only_session, Path(path)))

    @property
    def _only_session(self) -> Session:
        if len(self._sessions) > 1:
            problem = f"a session file holds one conversation, and there are {len(self._sessions)}"
            raise OptionError(f"{problem} slots: give slots=1")
        return self.session

    # -- its state ---------------------------------------------------------------------------------

    def statistics(self) -> EngineStatistics:
        """Return the present state; numbers may be of neighbouring moments."""
        schedule, alone = self._schedule, self.session.conversation
        shared = schedule.shared
        return EngineStatistics(
            slots=len(self._sessions),
            busy=sum(session.is_busy for session in self._sessions),
            queued=len(schedule.queue) + len(self._requests),
            n_ctx=self.session.target.context.n_ctx,
            cells=alone.n_cached if shared is None else shared.n_cells_used,
            load=schedule.load_now(),
        )

    def slots(self) -> tuple[SlotState, ...]:
        """Return the state of each slot; numbers may be of neighbouring moments."""
        return tuple(
            SlotState(
                session.is_busy,
                session.drafter.name,
                len(session.conversation.tokens),
                session.conversation.n_cached,
            )
            for session in self._sessions
        )

    @property
    def accept(self) -> str:
        """The default acceptance rule, as it was given."""
        return self.options.accept

    # -- open models and drafters ------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The first slot, a runtime's only one; raises `ClosedError` after `close()`.

        An engine's thread owns its slots: while it answers, others may only read facts that stay.
        """
        self._require_open()
        return self._sessions[0]

    def _require_open(self) -> None:
        """Raise `ClosedError` after `close()`."""
        if self.closed:
            raise ClosedError("the runtime is closed")

    @property
    def vocabulary(self) -> Vocabulary:
        """The target's vocabulary."""
        return self.session.vocabulary

    @property
    def n_ctx(self) -> int:
        """How many tokens all conversations together may have cached.

        Of a model with a recurrent state, each of them. llama.cpp rounds it up to a multiple of
        256.
        """
        target = self.session.target
        return target.n_positions if target.context.options.apart else target.context.n_ctx

    @property
    def memory_line(self) -> str:
        """The layers and the context that were chosen for the memory here, and why; else ""."""
        return "" if self.fitted is None else self.fitted.line

    @property
    def environment(self) -> DraftEnvironment:
        """The environment that drafters for the target are built with."""
        return self._choices.environment

    @property
    @abstractmethod
    def drafter(self) -> str:
        """The expression of the drafter of answers that choose none."""

    @property
    def draft_file(self) -> Path:
        """The file of the draft model; raises `OptionError` if the drafter is no draft model."""
        return self._choices.draft_file(self.drafter)

    @property
    def drafters(self) -> tuple[str, ...]:
        """The expressions of all drafters that a request may choose, the default first."""
        return self._choices.names

    @property
    def remark(self) -> str:
        """A note for the user on its drafting; "" if there is none."""
        session = self._sessions[0]
        if session.drafter.max_nodes and not session.target.max_nodes:
            kind = f"{self.model.architecture} models evaluate accepted drafts again"
            slots = f"with {len(self._sessions)} conversations nothing is drafted"
            return f"{kind}, which a single conversation can: {slots}"
        return session.drafter.remark

    @property
    def rules(self) -> list[str]:
        """The acceptance rules that a request may name, the default first."""
        return [*dict.fromkeys([self.options.accept, *self._choices.rules])]

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat template; raises `TemplateError` if the model has none and none was given."""
        if self._template is None:
            from specrun.runtime.chat.template import template_of

            source = self.options.chat_template or self.model.chat_template
            if source is None:
                advice = "give one (--chat-template-file), or continue text (--no-chat-template)"
                raise TemplateError(f"{self.model.path} has no chat template: {advice}")
            self._template = template_of(source, self.vocabulary)
        return self._template

    def set_chat_template(self, source: str) -> None:
        """Use another chat template from now on; raises `TemplateError` if it is none."""
        from specrun.runtime.chat.template import template_of

        self._template = self._tool_template = template_of(source, self.vocabulary)

    @property
    def tool_template(self) -> ChatTemplate:
        """The template of conversations with tools: some models have another one for them."""
        if self._tool_template is None:
            from specrun.runtime.chat.template import template_of

            source = None if self.options.chat_template else self.model.tool_template
            other = source and template_of(source, self.vocabulary)
            self._tool_template = other or self.chat_template
        return self._tool_template


def _results(streams: Sequence[GenerationStream]) -> Iterator[GenerationResult]:
    """Yield the results in turn; cancel those that are not done if that ends early."""
    try:
        for stream in streams:
            yield stream.drain()
    finally:
        for stream in streams:
            stream.close()
