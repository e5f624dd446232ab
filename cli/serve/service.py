"""Answers of a server: requests become streams of the engine, read round by round.

All APIs share it: the bound of the queue, prompts, grammars, seeds, the choices of a request side
by side, and the end of answers that nobody reads any more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any, Literal, NamedTuple
from weakref import WeakSet

from msgspec import Meta, Struct

from specrun.bench.text_scores import TokenScore, score_text
from specrun.bindings.errors import (
    ClosedError,
    ContextFullError,
    OptionError,
    SpecrunError,
    TemplateError,
)
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.lanes import GRAMMARS, REQUESTS
from specrun.cli.serve.settings import ServeSettings
from specrun.cli.serve.tools import CustomInputs
from specrun.runtime.chat import (
    CallBegun,
    ChatText,
    ChatTurn,
    Part,
    ReplyPlan,
    ReplyReading,
    require_room,
    too_long,
)
from specrun.runtime.engine import Engine, GenerationStream, RoundTrace
from specrun.runtime.grammar import Grammar, GrammarError, warn_once
from specrun.runtime.grammar.compiled import compiled
from specrun.runtime.laws import SamplingParams, random_if_unset
from specrun.runtime.round import FinishReason, GenerationResult, TokenEvent

# -- Requests --------------------------------------------------------------------------------------


Prompt = str | tuple[int, ...]
"""A text, or its tokens."""


class Speculation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an answer is drafted; None: as the server does. `trace`: with all draft trees."""

    drafter: str | None = None
    n_max: Annotated[int, Meta(ge=0, le=1024)] | None = None
    accept: str | None = None
    trace: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """A request for an answer: the `turn` of a conversation, or `prompts` that are continued.

    There are `n` choices for each prompt; choice k of prompt i is number i * n + k. `max_tokens`
    None goes on until the model ends or the context is full. `logprobs`: with the target's
    log-probabilities, `top_logprobs`: with those of so many likely tokens; `scores_prompts` for
    those of the prompts' own tokens, too. In prompts that are texts, names of control tokens are
    control tokens unless `parse_special` is False, and a bos is added if `adds_bos`.
    """

    turn: ChatTurn = field(default_factory=ChatTurn)
    prompts: Sequence[Prompt] = ()
    parse_special: bool = True
    adds_bos: bool = True
    scores_prompts: bool = False
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    speculative: Speculation = field(default_factory=Speculation)


# -- Prompts ---------------------------------------------------------------------------------------
#
# A text that is longer than the context by its bytes alone is refused before it is tokenized.


_SHORT = 2_000  # characters that are tokenized faster than a thread is woken


@dataclass(frozen=True, slots=True)
class Prompts:
    """The tokens of a request's prompts; `end` is how a template ended the conversation's text.

    Of an answer that was begun, it is the end before that.
    """

    tokens: list[list[int]]
    end: str = ""


class PromptReader:
    """Turns messages and texts into tokens, by the target's template and vocabulary."""

    def __init__(self, engine: Engine, template_kwargs: Mapping[str, Any]) -> None:
        self._engine = engine
        self._template_kwargs = template_kwargs

    async def read(self, request: AnswerRequest) -> Prompts:
        """Return the tokens of each prompt.

        Raises `TemplateError` if messages do not fit the template, and `ContextFullError` if a
        prompt by its bytes alone does not fit in the context.
        """
        engine, longest = self._engine, self._engine.n_ctx
        if not request.turn.messages:
            return Prompts(await self.texts(request.prompts, longest, self._reader_of(request)))
        if engine.options.chat_template is None and engine.model.chat_template is None:
            problem = "this model has no chat template, which messages need"
            advice = "continue a prompt (/v1/completions), or give the server --chat-template-file"
            raise RequestError(f"{problem}: {advice}", "messages")
        return await REQUESTS.run(lambda: self._conversation(request, longest))

    async def texts(
        self, prompts: Sequence[Prompt], longest: int, tokenize: Callable[[str], list[int]]
    ) -> list[list[int]]:
        """Return the tokens of texts, by `tokenize`, and of prompts that are tokens already.

        Raises `ContextFullError` for one that by its bytes alone has more than `longest` tokens.
        """
        if sum(map(len, prompts)) <= _SHORT:
            return self._texts(prompts, longest, tokenize)
        return await REQUESTS.run(lambda: self._texts(prompts, longest, tokenize))

    def _reader_of(self, request: AnswerRequest) -> Callable[[str], list[int]]:
        vocabulary, special = self._engine.vocabulary, request.parse_special
        if request.adds_bos:
            return lambda text: vocabulary.tokenize_prompt(text, parse_special=special)
        return lambda text: vocabulary.tokenize(text, add_special=False, parse_special=special)

    async def rendered(self, request: AnswerRequest) -> str:
        """Return the text that the template makes of the messages."""
        return await REQUESTS.run(lambda: self._rendered(request).text)

    def _rendered(self, request: AnswerRequest, longest: int | None = None) -> ChatText:
        engine, turn = self._engine, request.turn
        template = engine.tool_template if turn.tools else engine.chat_template
        return turn.text(template, engine.vocabulary, self._template_kwargs, longest)

    async def hopeless(self, request: AnswerRequest) -> RequestError | None:
        """Return the error for instructions that alone are longer than the context.

        Agents shorten a conversation when they read that it is too long, and repeat the request:
        for ever, if their own instructions and tools do not fit.
        """
        turn, n_ctx = request.turn, self._engine.n_ctx
        first = [*itertools.takewhile(lambda each: each["role"] == "system", turn.messages)]
        if not (first or turn.tools):
            return None
        asked = [*first, {"role": "user", "content": ""}]
        alone = dataclasses.replace(request, turn=dataclasses.replace(turn, messages=asked))
        try:
            prompts = await REQUESTS.run(lambda: self._conversation(alone, n_ctx))
            if len(prompts.tokens[0]) <= n_ctx:
                return None
        except ContextFullError:  # by its bytes alone
            pass
        except TemplateError:
            return None
        problem = f"the instructions and tools alone have more tokens than the context, {n_ctx}"
        advice = "raise it (-c), take a model of a longer one, or offer fewer tools"
        return RequestError(f"{problem}: {advice}", code="instructions_too_long")

    def _conversation(self, request: AnswerRequest, longest: int) -> Prompts:
        text = self._rendered(request, longest)
        return Prompts([text.tokens(self._engine.vocabulary)], text.end)

    def _texts(
        self, prompts: Sequence[Prompt], longest: int, tokenize: Callable[[str], list[int]]
    ) -> list[list[int]]:
        vocabulary = self._engine.vocabulary
        for prompt in prompts:
            if isinstance(prompt, str):
                require_room(vocabulary, [prompt], longest)
            elif len(prompt) > longest:
                raise too_long(len(prompt), longest)
        read: list[list[int]] = []
        for prompt in prompts:
            tokens = tokenize(prompt) if isinstance(prompt, str) else list(prompt)
            if not tokens:
                problem = "prompt is empty, and this model has no token to begin a text with"
                raise OptionError(problem)
            unknown = next((token for token in tokens if not 0 <= token < vocabulary.size), None)
            if unknown is not None:
                problem = f"prompt has the token {unknown}, and the model {vocabulary.size} tokens"
                raise RequestError(problem, "prompt")
            read.append(tokens)
        return read


# -- Grammars of replies: of calls, and of a text that is bound ------------------------------------

_MOST_FAULTS = 256


class GrammarReader:
    """Makes the grammars of replies for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, is_closing: Callable[[], bool]) -> None:
        self._vocabulary, self._is_closing = vocabulary, is_closing
        self._faults: dict[Grammar, str] = {}  # of tools: clients send them with every request

    async def of_reply(
        self, plan: ReplyPlan, asked: Grammar | None, prompt_end: str
    ) -> Grammar | None:
        """Return the grammar of a reply, compiled; None for any text: see `ReplyReading`.

        Raises `RequestError` if another grammar and calls both bind the text, or if one cannot be
        compiled.
        """

        def of(plan: ReplyPlan) -> Grammar | None:
            return ReplyReading(plan, self._vocabulary, prompt_end).grammar(asked)

        try:
            reply = await REQUESTS.run(lambda: of(plan))
        except GrammarError:
            raise
        except OptionError as error:
            raise RequestError(str(error), "tool_choice") from None
        if reply is None:
            return None
        if asked is not None and reply.source == asked.source:
            return await self._requested(reply)
        try:
            return await self._without_fault(reply)
        except GrammarError as error:
            if asked is not None and not plan.must_call:
                await self._requested(asked)  # the fault may be its own
            loosened = await self._without_faults(plan, error)
        again = await REQUESTS.run(lambda: of(loosened))
        assert again is not None
        try:
            return await self._compiled(again)
        except GrammarError as error:
            raise _unforced(error) from None

    async def _requested(self, asked: Grammar) -> Grammar:
        try:
            return await self._compiled(asked)
        except GrammarError as error:
            field = "response_format" if asked.kind == "json-schema" else "grammar"
            raise RequestError(f"{field}: {error}", field) from None

    async def _without_faults(self, plan: ReplyPlan, error: GrammarError) -> ReplyPlan:
        """Return the plan without the schemas that cannot be compiled: others may be called.

        Raises `RequestError` if the fault is in none of them, or in all that may be called.
        """
        schemas: dict[str, Any] = {}
        for name, schema in plan.schemas.items():
            fields = schema if isinstance(schema, dict) else {}
            try:
                await self._without_fault(Grammar.json_schema({"type": "object", **fields}))
            except GrammarError as fault:
                warn_once(f"calls of {name} do not follow its schema: {fault}")
                schemas[name] = _unbound(fields)
        if not schemas or (plan.must_call and len(schemas) == len(plan.schemas)):
            raise _unforced(error)
        return dataclasses.replace(plan, schemas={**plan.schemas, **schemas})

    async def _without_fault(self, grammar: Grammar) -> Grammar:
        """Compile a grammar unless that failed before; raises `GrammarError`."""
        if (known := self._faults.get(grammar)) is not None:
            raise GrammarError(known)
        try:
            return await self._compiled(grammar)
        except GrammarError as error:
            self._faults[grammar] = str(error)
            if len(self._faults) > _MOST_FAULTS:
                del self._faults[next(iter(self._faults))]
            raise

    async def _compiled(self, grammar: Grammar) -> Grammar:
        gone = threading.Event()

        def is_wanted() -> bool:
            return not (gone.is_set() or self._is_closing())

        try:
            await GRAMMARS.run(lambda: compiled(grammar, self._vocabulary, is_wanted))
        except ClosedError:
            raise ClosedError("the server is shutting down") from None
        finally:
            gone.set()
        return grammar


def _unforced(error: GrammarError) -> RequestError:
    return RequestError(f"a call of these tools cannot be forced: {error}", "tools")


def _unbound(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with the same names, whose values are free."""
    properties, required = schema.get("properties"), schema.get("required")
    free: dict[str, Any] = {}
    for name, value in properties.items() if isinstance(properties, dict) else ():
        is_text = isinstance(value, dict) and value.get("type") == "string"
        free[name] = {"type": "string"} if is_text else {}
    names = required if isinstance(required, list) else []
    named = [name for name in names if isinstance(name, str) and name in free]
    return {"type": "object", "properties": free, "required": named}


# -- Answers ---------------------------------------------------------------------------------------

Finish = Literal["stop", "length", "tool_calls", "abort"]
"""Why a choice ended; "abort", as vLLM calls it, if the server cut it short."""
_FINISHES: dict[FinishReason, Finish] = {"stop": "stop", "length": "length", "cancelled": "abort"}


class Ending(NamedTuple):
    """The end of a choice: its result, and why it ended."""

    result: GenerationResult
    finish: Finish


@dataclass(frozen=True, slots=True)
class Delta:
    """The new text and tokens of a choice since its last delta, or its end.

    `parts` are the text by reasoning, content and calls; `traces` are those of its rounds, if they
    were requested. The last delta of a choice has its `ending`, and as text the rest that was held
    back. A choice that is whole is one delta, too.
    """

    index: int
    text: str
    parts: Sequence[Part] = ()
    events: Sequence[TokenEvent] = ()
    traces: Sequence[RoundTrace] = ()
    ending: Ending | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class ServedAnswer:
    """The choices of a request while they are made; `results` are those that have ended.

    `n_thought` are the tokens of their reasoning, which the reply may leave out.
    """

    service: AnswerService
    request: AnswerRequest
    prompts: Prompts
    streams: Sequence[GenerationStream]
    scores: Sequence[Sequence[TokenScore]] = ()  # of each prompt, if they were requested
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    results: dict[int, GenerationResult] = field(default_factory=dict)
    n_thought: int = 0

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Yield the deltas of the choices, one a round; raises the error that ended a choice.

        Leaving it early frees the slots within a round.
        """
        try:
            async for delta in _merged([self._choice(k) for k in range(len(self.streams))]):
                if delta.ending is not None:
                    self.results[delta.index] = delta.ending.result
                    for observe in self.service.observers:
                        observe(delta.ending.result)
                yield delta
        finally:
            self.cancel()

    async def _choice(self, index: int) -> AsyncIterator[Delta]:
        stream, length, called = self.streams[index], 0, False
        vocabulary = self.service.engine.vocabulary
        plan = self.request.turn.plan
        reader = ReplyReading(plan, vocabulary, self.prompts.end).reader()
        inputs = CustomInputs(plan.custom)
        async for events in stream.rounds():
            text = "".join([event.text for event in events])
            length += len(text)
            parts = inputs.take(reader.read([(each.token_id, each.text) for each in events]))
            called = called or any(isinstance(part, CallBegun) for part in parts)
            if reader.done:
                stream.cancel()
            yield Delta(index, text, parts, events, stream.take_traces())
        try:
            result = await stream.wait()
        except SpecrunError as problem:
            if self.service.is_closing:
                raise ClosedError("the server ended before the answer had begun") from problem
            raise
        rest = result.text[length:]
        finish, has_all_calls = _FINISHES[result.finish_reason], reader.done
        parts = reader.finish(rest, is_cut=finish == "length")
        called = called or any(isinstance(part, CallBegun) for part in parts)
        if has_all_calls or (called and finish == "stop"):
            finish = "tool_calls"
        parts = inputs.take(parts, is_end=True)
        self.n_thought += len(vocabulary.tokenize(reader.thought, add_special=False))
        yield Delta(index, rest, parts, ending=Ending(result, finish))

    def cancel(self) -> None:
        """End the tokens, and forget the answer."""
        for stream in self.streams:
            stream.cancel()
        self.service.answers.discard(self)


class AnswerService:
    """The answers of an engine, as many as its slots and the queue hold."""

    def __init__(self, engine: Engine, settings: ServeSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.prompts = PromptReader(engine, settings.template_kwargs)
        self._grammars = GrammarReader(engine.vocabulary, lambda: self.is_closing)
        self.is_closing = False
        self.keep_seconds = settings.idle_seconds
        """How long the model stays loaded when it is idle; None: for ever."""
        self.observers: list[Callable[[GenerationResult], None]] = []
        self.answers: WeakSet[ServedAnswer] = WeakSet()
        """Those under way. Weak: one that lost its reader counts no more, and its streams end."""

    @property
    def n_choices(self) -> int:
        """How many choices are being made, or wait."""
        return sum(len(answer.streams) for answer in self.answers)

    async def begin(self, request: AnswerRequest) -> ServedAnswer:
        """Let the engine begin or queue an answer; raises `RequestError` if the queue is full."""
        self._require_room(max(1, len(request.prompts)) * request.n)
        try:
            prompts = await self.prompts.read(request)
            longest = max(map(len, prompts.tokens))
            if longest > self.engine.n_ctx:  # at once, not when its turn comes
                raise too_long(longest, self.engine.n_ctx)
        except ContextFullError as error:
            raise await self.prompts.hopeless(request) or error from None
        asked, plan = request.params.grammar, request.turn.plan
        grammar = await self._grammars.of_reply(plan, asked, prompts.end)
        scores = await self._scores(request, prompts)
        self._require_room(len(prompts.tokens) * request.n)  # others came meanwhile
        seed = random_if_unset(request.params.seed)
        params = request.params.replace(seed=seed, grammar=grammar)
        speculative = request.speculative
        try:
            streams = [
                self.engine.submit(
                    prompt,
                    params,
                    max_tokens=request.max_tokens,
                    index=index,
                    logprobs=request.logprobs,
                    top_logprobs=request.top_logprobs,
                    drafter=speculative.drafter,
                    n_max=speculative.n_max,
                    accept=speculative.accept,
                    trace=bool(speculative.trace),
                )
                for prompt in prompts.tokens
                for index in range(request.n)
            ]
        except OptionError as error:  # all else was looked at before
            raise RequestError(str(error), "speculative") from None
        answer = ServedAnswer(self, request, prompts, streams, scores)
        self.answers.add(answer)
        return answer

    async def _scores(
        self, request: AnswerRequest, prompts: Prompts
    ) -> Sequence[Sequence[TokenScore]]:
        """Return the scores of the prompts' own tokens, if they were requested."""
        if not request.scores_prompts:
            return ()
        model, options = self.engine.model, self.engine.options.context
        return [
            await REQUESTS.run(
                functools.partial(score_text, model, options, tokens, request.top_logprobs)
            )
            for tokens in prompts.tokens
        ]

    def _require_room(self, n_more: int) -> None:
        if self.is_closing:
            raise ClosedError("the server is shutting down")
        most = self.engine.statistics().slots + self.settings.bounds.queue
        if self.n_choices + n_more > most:
            problem = f"{self.n_choices} answers are being made or wait, {most} are the most"
            status = HTTPStatus.SERVICE_UNAVAILABLE
            raise RequestError(f"{problem}: try again soon", status=status, retry_after=2)

    async def close(self) -> None:
        """Begin no more answers; end those that do not within the settings' seconds."""
        self.is_closing = True
        deadline = time.monotonic() + self.settings.drain_seconds
        while self.answers and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.end_all()

    def end_all(self) -> None:
        """End all answers now, with the reason "abort"."""
        for answer in self.answers:
            for stream in answer.streams:
                stream.cancel()


async def _merged(sources: Sequence[AsyncIterator[Delta]]) -> AsyncIterator[Delta]:
    """Yield the deltas of all sources as they come; raises the first error of one."""
    if len(sources) == 1:
        async for delta in sources[0]:
            yield delta
        return
    queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(len(sources))

    async def pump(source: AsyncIterator[Delta]) -> None:
        try:
            async for delta in source:
                await queue.put(delta)
            await queue.put(None)
        except Exception as problem:
            await queue.put(problem)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
