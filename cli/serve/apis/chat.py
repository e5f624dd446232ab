"""Chat completions: /v1/chat/completions, streamed or whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from specrun.bindings.models.vocabulary import Vocabulary
from specrun.cli.serve.body import checked, one_of, wanted, wrong
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.figures import speculation_of, timings_of, usage_of
from specrun.cli.serve.replies import ReplyForm, answering, event_bytes
from specrun.cli.serve.sampling import AnswerBody, answer_request, with_settings
from specrun.cli.serve.service import AnswerRequest, AnswerService, Delta, ServedAnswer
from specrun.cli.serve.tools import (
    MOST_MESSAGES,
    MOST_TOOLS,
    Message,
    ReasoningFormat,
    call_of,
    first_new,
    input_arguments,
    offered,
    plan_turn,
    text_of,
    tool_choice_of,
)
from specrun.runtime.chat import (
    CallBegun,
    ChatTurn,
    Content,
    Part,
    Reasoning,
    ReplyPlan,
    is_begun_answer,
)
from specrun.runtime.engine import Engine
from specrun.runtime.round import TokenEvent

# -- Requests --------------------------------------------------------------------------------------

_PARTS = 'a text, or parts as {"type": "text", "text": "..."}'
_CALL = '{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{}"}}'
Choices = Annotated[int, Meta(ge=1, le=32)]
Likely = Annotated[int, Meta(ge=0, le=20)]
"""How many likely tokens are listed for each token: OpenAI's limit."""


class StreamOptions(Struct):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None


class OpenAIBody(AnswerBody, kw_only=True):
    """The fields that chat completions and completions share."""

    n: Choices | None = None
    best_of: Choices | None = None
    stream_options: StreamOptions | None = None

    def choices(self) -> int:
        """Return how many choices are made of each prompt."""
        n = self.n or 1
        if self.best_of not in (None, n):
            problem = f"best_of is {self.best_of}: all choices that are made are returned"
            raise RequestError(f"{problem}, so give n alone", "best_of")
        return n


class HistoryFunction(Struct):
    """The function of a call in the history; its arguments are JSON, or an object."""

    name: str
    arguments: Any = None


class HistoryText(Struct):
    """The custom tool of a call in the history, and the text that it was given."""

    name: str
    input: str = ""


class HistoryCall(Struct):
    """A call in the history, of a function or of a custom tool."""

    function: HistoryFunction | None = None
    custom: HistoryText | None = None
    id: Any = None

    def message(self, field: str) -> Message:
        """Return the call for templates; raises `RequestError` that names `field`."""
        if self.custom is not None:
            name, arguments = self.custom.name, input_arguments(self.custom.input)
            return call_of(self.id, name, arguments, f"{field}.custom.input")
        if self.function is None:
            raise wrong(field, None, _CALL)
        own = self.function
        return call_of(self.id, own.name, own.arguments, f"{field}.function.arguments")


_Calls = Annotated[list[Annotated[HistoryCall, wanted(_CALL, whole=True)]], Meta(max_length=128)]
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ChatMessage(Struct):
    """The fields of a message that are read here; templates may read any others, too."""

    role: Annotated[Role, one_of(Role)]
    content: Annotated[str | list[Any] | None, wanted(_PARTS)] = None
    tool_calls: Annotated[_Calls | None, wanted("a list of calls")] = None
    refusal: Any = None


_Message = Annotated[dict[str, Any], wanted("an object with role and content")]
_Messages = Annotated[list[_Message], Meta(max_length=MOST_MESSAGES)]
_Tool = Annotated[dict[str, Any], wanted("a tool")]
_Tools = Annotated[list[_Tool], Meta(max_length=MOST_TOOLS)]
_Kwargs = Annotated[dict[str, Any] | None, wanted('an object, as {"enable_thinking": false}')]
_Continued = bool | Literal["content", "reasoning_content"]
_CONTINUED = "true or false, or content or reasoning_content"


@with_settings
class ChatBody(OpenAIBody, kw_only=True):
    """The body of a chat completion, and of /apply-template."""

    messages: _Messages | None = None
    tools: Annotated[_Tools | None, wanted("a list of functions")] = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    reasoning_format: Annotated[ReasoningFormat | None, one_of(ReasoningFormat)] = None
    include_reasoning: bool | None = None
    chat_template_kwargs: _Kwargs = None
    reasoning_effort: Any = None
    reasoning: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[_Continued | None, wanted(_CONTINUED)] = None
    logprobs: bool | None = None
    top_logprobs: Likely | None = None


def chat_request(body: ChatBody, service: AnswerService) -> AnswerRequest:
    """Return the request of a body; raises `RequestError` that names the field."""
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: give true for it, too", "top_logprobs")
    return answer_request(
        body,
        service,
        turn=chat_turn(body, service.engine),
        n=body.choices(),
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def chat_turn(body: ChatBody, engine: Engine) -> ChatTurn:
    """Return the conversation of a body, with its tools."""
    if not body.messages:
        raise RequestError("messages is missing or empty: give at least one message", "messages")
    for old, value in (("functions", body.functions), ("function_call", body.function_call)):
        if value is not None:
            raise RequestError(f"{old} was replaced by tools in OpenAI's API: give tools", old)
    new = first_new([str(each.get("role")) for each in body.messages])
    messages = [
        _message(each, f"messages[{place}]", is_new=place >= new)
        for place, each in enumerate(body.messages)
    ]
    offer = offered(body.tools)
    names = [tool["function"]["name"] for tool in offer.tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            problem = f"tools[{place}] is named {name!r} as another one: rename it"
            raise RequestError(problem, f"tools[{place}]")
    return plan_turn(
        engine,
        body,
        messages,
        offer,
        tool_choice_of(body.tool_choice),
        parallel=body.parallel_tool_calls is not False,
        level=body.reasoning_effort,
        is_begun=_is_begun(body, messages),
        is_asked=body.add_generation_prompt is not False,
    )


def _is_begun(body: ChatBody, messages: Sequence[Message]) -> bool:
    """Whether the last message goes on: if it is an answer, as in llama-server, or is to."""
    field = "continue_final_message"
    if body.continue_final_message and body.add_generation_prompt:
        problem = f"{field} and add_generation_prompt are both set"
        raise RequestError(f"{problem}: an answer goes on, or another one begins", field)
    if body.continue_final_message and messages[-1].get("tool_calls"):
        raise RequestError(f"{field}: the last message has calls, give their results", field)
    if body.continue_final_message is None and body.add_generation_prompt is not True:
        return is_begun_answer(messages)
    return bool(body.continue_final_message)


def _message(value: Message, where: str, *, is_new: bool) -> Message:
    """Return a message with its content as a text; new ones of the user have to be read."""
    given = checked(value, ChatMessage, where)
    content = given.content
    if content is None and given.role == "assistant":
        content = given.refusal if isinstance(given.refusal, str) else ""
    # "developer" is OpenAI's newer name, which templates do not have.
    own = "system" if given.role == "developer" else given.role
    is_asked = is_new and own == "user"
    text = text_of(content, f"{where}.content", _PARTS, is_new=is_asked)
    message = {**value, "role": own, "content": text}
    message.pop("tool_calls", None)
    if given.tool_calls:  # templates test whether there are some
        message["tool_calls"] = [
            call.message(f"{where}.tool_calls[{place}]")
            for place, call in enumerate(given.tool_calls)
        ]
    return message


# -- Replies ---------------------------------------------------------------------------------------


class OpenAIForm(ReplyForm):
    """The form that chat completions and completions share: how they begin and end."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    """OpenAI's name of the object."""

    def __init__(self, answer: ServedAnswer, body: OpenAIBody) -> None:
        super().__init__(answer, body)
        options = body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._vocabulary = answer.service.engine.vocabulary
        self._begun: set[int] = set()
        self._common = {
            "id": f"{self.id_prefix}-{answer.id}",
            "object": self.kind,
            "created": answer.created,
            "model": answer.service.settings.model,
        }

    def end(self) -> bytes:
        """Return the end of a stream; before it a chunk about usage, if it was requested."""
        done = b"data: [DONE]\n\n"
        if not self._with_usage:
            return done
        return event_bytes({**self._common, "choices": [], **self._summary()}) + done

    def _summary(self) -> dict[str, Any]:
        return {
            "usage": usage_of(self._answer),
            "timings": timings_of(self._answer),
            "specrun": speculation_of(self._answer),
        }


class ChatForm(OpenAIForm):
    """Chat completions and their chunks, as OpenAI writes them."""

    id_prefix, kind = "chatcmpl", "chat.completion.chunk"

    def delta(self, delta: Delta) -> bytes:
        """Return a chunk with a round's text; at the end of a choice one with the reason."""
        request, events = self._answer.request, b""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            events += self._chunk(delta.index, {"role": "assistant", "content": ""})
        if delta.parts or delta.traces or (delta.events and request.logprobs):
            fields = fields_of(delta.parts, request.turn.plan) or {"content": ""}
            events += self._chunk(delta.index, fields, delta=delta)
        if delta.ending is not None:
            events += self._chunk(delta.index, {}, finish=delta.ending.finish)
        return events

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        *,
        delta: Delta | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": content, "finish_reason": finish}
        chunk = {**self._common, "choices": [choice]}
        if delta is not None and self._answer.request.logprobs:
            choice["logprobs"] = chat_logprobs(delta.events, self._vocabulary)
        if delta is not None and delta.traces:
            chunk["specrun"] = {"rounds": delta.traces}
        return event_bytes(chunk)

    def whole(self, choices: Sequence[Delta]) -> object:
        """Return a chat completion."""
        request = self._answer.request
        listed: list[dict[str, Any]] = []
        for choice in choices:
            assert choice.ending is not None
            logprobs = chat_logprobs(choice.events, self._vocabulary) if request.logprobs else None
            fields = fields_of(choice.parts, request.turn.plan)
            for call in fields.get("tool_calls", ()):
                del call["index"]
            message = {"role": "assistant", "content": fields.pop("content", None), **fields}
            entry = {"index": choice.index, "message": message, "logprobs": logprobs}
            listed.append({**entry, "finish_reason": choice.ending.finish})
        common = {**self._common, "object": "chat.completion"}
        return {**common, "choices": listed, **self._summary()}


_FUNCTION, _CUSTOM = ("function", "arguments"), ("custom", "input")
"""The fields of calls: their kind, and their arguments."""


def fields_of(parts: Sequence[Part], plan: ReplyPlan) -> dict[str, Any]:
    """Return the fields of a message, or of a chunk's `delta`, that parts of a reply make."""
    fields: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, Content):
            fields["content"] = fields.get("content", "") + part.text
        elif isinstance(part, Reasoning):
            fields["reasoning_content"] = fields.get("reasoning_content", "") + part.text
        elif isinstance(part, CallBegun):
            kind, text = _CUSTOM if part.name in plan.custom else _FUNCTION
            begun = {"id": plan.new_id(), "type": kind, kind: {"name": part.name, text: ""}}
            calls[part.index] = {"index": part.index, **begun}
        else:
            kind, text = _CUSTOM if part.is_text else _FUNCTION
            call = calls.setdefault(part.index, {"index": part.index, kind: {text: ""}})
            kind, text = _CUSTOM if "custom" in call else _FUNCTION
            call[kind][text] += part.text
    if calls:
        fields["tool_calls"] = [*calls.values()]
    return fields


def chat_logprobs(events: Sequence[TokenEvent], vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the `logprobs` of a chat completion's tokens; one that ends the answer has none."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, piece = vocabulary.label(token), list(vocabulary.piece(token))
        return {"token": text, "logprob": logprob, "bytes": piece}

    content = [
        {
            **entry(event.token_id, event.logprob),
            "top_logprobs": [entry(*likely) for likely in event.top_logprobs()],
        }
        for event in events
        if event.token_id not in vocabulary.end_of_generation
    ]
    return {"content": content, "refusal": None}


chat_completions = answering(ChatBody, chat_request, ChatForm)
