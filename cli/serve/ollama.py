"""Ollama's API: /api/chat and /api/generate, and what its clients look up about models.

A body is put into OpenAI's fields, so everything means the same here as there. Ollama's `options`
have llama.cpp's names. Answers are lines of JSON, streamed unless `stream` is false.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Any, Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from specrun.bindings.errors import TemplateError
from specrun.cli.doctor import specrun_version
from specrun.cli.serve.body import checked, read_body, wanted
from specrun.cli.serve.chat import ChatBody, chat_request
from specrun.cli.serve.completions import CompletionBody, completion_request
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.figures import speculation_of, usage_of
from specrun.cli.serve.replies import (
    EndedChoice,
    LinesForm,
    answering,
    json_reply,
    line_bytes,
    parts_of,
)
from specrun.cli.serve.sampling import FIELDS, AnswerBody
from specrun.cli.serve.service import AnswerRequest, AnswerService, Delta, ServedAnswer
from specrun.cli.terminal.screen import count_text
from specrun.runtime.chat import CallBegun, Content, MoreArguments, Part, Reasoning
from specrun.runtime.planning import describe_file
from specrun.runtime.round import GenerationResult

_log = logging.getLogger(__name__)

# -- Requests -------------------------------------------------------------------------------------

_Level = Literal["low", "medium", "high", "max"]
_Think = Annotated[bool | _Level | None, wanted("true, false, low, medium or high")]
_Format = Annotated[
    Literal["", "json"] | dict[str, Any] | None, wanted("json, or a JSON schema", whole=True)
]
_Options = Annotated[dict[str, Any] | None, wanted('an object, as {"temperature": 0.7}')]
_Images = Annotated[list[str], wanted("a list of pictures in base64", whole=True)]
_OF_LOADING = ("num_ctx", "num_batch", "num_gpu", "num_thread", "main_gpu", "use_mmap", "num_keep")


class OllamaBody(AnswerBody, kw_only=True):
    """The fields that both kinds of requests share."""

    stream: bool | None = True
    options: _Options = None
    format: _Format = None
    think: _Think = None

    def shared(self, service: AnswerService) -> dict[str, Any]:
        """Return the fields of OpenAI's that follow from these."""
        options = self.options or {}
        values = {name: value for name, value in options.items() if name in FIELDS}
        if "num_predict" in options:
            length = options["num_predict"]
            values["max_tokens"] = -1 if length == -2 else length  # -2: until the context is full
        if isinstance(self.format, dict):
            values["response_format"] = {"type": "json_schema", "schema": self.format}
        elif self.format:
            values["response_format"] = {"type": "json_object"}
        room, asked = service.engine.n_ctx, options.get("num_ctx")
        if isinstance(asked, int) and asked > room:
            _log.info("num_ctx is %d, and the server's context has %d tokens (-c)", asked, room)
        unknown = set(options) - set(FIELDS) - {"num_predict", *_OF_LOADING}
        if unknown:
            _log.info("options that are not known here: %s", ", ".join(sorted(unknown)))
        return values

    def thinking(self) -> dict[str, Any]:
        """Return OpenAI's fields for how much is thought."""
        if isinstance(self.think, str):
            return {"reasoning_effort": self.think}
        kind = "enabled" if self.think else "disabled"
        return {} if self.think is None else {"thinking": {"type": kind}}


class OllamaChat(OllamaBody, kw_only=True):
    """The body of /api/chat."""

    messages: Annotated[list[dict[str, Any]] | None, wanted("a list of messages")] = None
    tools: Annotated[list[dict[str, Any]] | None, wanted("a list of functions")] = None


class OllamaGenerate(OllamaBody, kw_only=True):
    """The body of /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: Any = None
    raw: bool | None = None
    images: _Images | None = None


class _NothingAsked(Exception):
    """A request without a text, by which clients let a model be loaded."""


def ollama_chat_request(body: OllamaChat, service: AnswerService) -> AnswerRequest:
    """Return the request of a body; raises `RequestError` that names the field."""
    if not body.messages:
        raise _NothingAsked
    messages = [_message(each, place) for place, each in enumerate(body.messages)]
    values = {"messages": messages, **body.shared(service), **body.thinking()}
    if body.tools:
        values["tools"] = body.tools
    return chat_request(checked(values, ChatBody), service)


def _message(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    """Return a message in OpenAI's form: pictures are parts, calls have ids in their order."""
    own = {name: value for name, value in message.items() if name not in ("images", "thinking")}
    if message.get("thinking"):
        own["reasoning_content"] = message["thinking"]
    if message.get("images"):
        own["content"] = _with_pictures(message.get("content") or "", message["images"])
    if message.get("tool_name"):
        own["name"] = message["tool_name"]
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        own["tool_calls"] = [
            {"id": f"call_{place}_{number}", **call} if isinstance(call, dict) else call
            for number, call in enumerate(calls)
        ]
    return own


def _with_pictures(text: str, pictures: Sequence[str]) -> list[dict[str, Any]]:
    urls = [{"url": f"data:image;base64,{picture}"} for picture in pictures]
    return [{"type": "text", "text": text}, *({"type": "image_url", "image_url": u} for u in urls)]


def ollama_generate_request(body: OllamaGenerate, service: AnswerService) -> AnswerRequest:
    """Return the request of a body; raises `RequestError` that names the field."""
    if body.context:
        problem = "context is not kept here: send the conversation to /api/chat"
        raise RequestError(problem, "context")
    if body.template:
        problem = "template is not read here: start the server with --chat-template-file"
        raise RequestError(problem, "template")
    if not (body.prompt or body.suffix or body.images):
        raise _NothingAsked
    values = body.shared(service)
    if body.raw or body.suffix:
        values |= {"prompt": body.prompt or "", "suffix": body.suffix}
        return completion_request(checked(values, CompletionBody), service)
    text = body.prompt or ""
    asked = {"role": "user", "content": _with_pictures(text, body.images) if body.images else text}
    system = [{"role": "system", "content": body.system}] if body.system else []
    values |= {"messages": [*system, asked], **body.thinking()}
    return chat_request(checked(values, ChatBody), service)


# -- Replies --------------------------------------------------------------------------------------


class OllamaForm(LinesForm):
    """Answers in lines; calls of tools are whole. Subclasses put the text into the line."""

    def __init__(self, answer: ServedAnswer, _body: OllamaBody) -> None:
        super().__init__(answer)
        self._calls: list[tuple[str, list[str]]] = []  # names, and texts of arguments

    def text_fields(self, content: str, thinking: str, calls: list[Any]) -> dict[str, Any]:
        """Return the fields of a line that have its text."""
        raise NotImplementedError

    def delta(self, delta: Delta) -> bytes:
        """Return the line of a round; at the end one with calls, and one with the figures."""
        content, thinking = self._texts(delta.parts)
        lines = b""
        if content or thinking:
            lines = self._line(self.text_fields(content, thinking, []))
        if delta.result is not None:
            if self._calls:
                lines += self._line(self.text_fields("", "", self._whole_calls()))
            lines += self._line({**self.text_fields("", "", []), **self._end(delta.result)})
        return lines

    def whole(self, choices: Sequence[EndedChoice]) -> object:
        """Return the answer as one object."""
        (choice,) = choices
        content, thinking = self._texts(parts_of(choice.reply))
        fields = self.text_fields(content, thinking, self._whole_calls())
        return {**_stamp(self._answer.service), **fields, **self._end(choice.result)}

    def failed(self, error: RequestError) -> bytes:
        """Return the line of an answer that cannot go on."""
        return line_bytes({"error": str(error)})

    def _line(self, fields: dict[str, Any]) -> bytes:
        return line_bytes({**_stamp(self._answer.service), "done": False, **fields})

    def _texts(self, parts: Sequence[Part]) -> tuple[str, str]:
        content = thinking = ""
        for part in parts:
            if isinstance(part, Content):
                content += part.text
            elif isinstance(part, Reasoning):
                thinking += part.text
            elif isinstance(part, CallBegun):
                self._calls.append((part.name, []))
            elif isinstance(part, MoreArguments):
                self._calls[part.index][1].append(part.text)
        return content, thinking

    def _whole_calls(self) -> list[Any]:
        return [
            {"function": {"index": index, "name": name, "arguments": _arguments("".join(texts))}}
            for index, (name, texts) in enumerate(self._calls)
        ]

    def _end(self, result: GenerationResult) -> dict[str, Any]:
        stats, usage = result.stats, usage_of(self._answer)
        whole, read = stats.wall_s, min(stats.time_to_first_token_s or 0.0, stats.wall_s)
        return {
            "done": True,
            "done_reason": "length" if result.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(whole),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(read),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(whole - read),
            "specrun": speculation_of(self._answer),
        }


class ChatLines(OllamaForm):
    """Lines of /api/chat: the text is in a message."""

    def text_fields(self, content: str, thinking: str, calls: list[Any]) -> dict[str, Any]:
        """Return the message."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class GenerateLines(OllamaForm):
    """Lines of /api/generate: the text is the response."""

    def text_fields(self, content: str, thinking: str, calls: list[Any]) -> dict[str, Any]:
        """Return the response."""
        return {"response": content, **({"thinking": thinking} if thinking else {})}


def _arguments(text: str) -> object:
    """Return the object that a call's arguments are; a text that was cut stays a text."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return text


def _nanoseconds(seconds: float) -> int:
    return max(0, round(1e9 * seconds))


def _stamp(service: AnswerService) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": service.settings.model, "created_at": now}


_chat = answering(OllamaChat, ollama_chat_request, ChatLines)
_generate = answering(OllamaGenerate, ollama_generate_request, GenerateLines)


async def chat(request: Request) -> Response:
    """Answer a conversation; one without messages gets that the model is loaded."""
    try:
        return await _chat(request)
    except _NothingAsked:
        message = {"role": "assistant", "content": ""}
        return _loaded(request, {"message": message})


async def generate(request: Request) -> Response:
    """Answer or continue a prompt; without one that the model is loaded."""
    try:
        return await _generate(request)
    except _NothingAsked:
        return _loaded(request, {"response": ""})


def _loaded(request: Request, fields: dict[str, Any]) -> Response:
    common = _stamp(request.app.state.service)
    return json_reply({**common, **fields, "done": True, "done_reason": "load"})


# -- Models ---------------------------------------------------------------------------------------


class _ShowBody(Struct):
    model: str | None = None
    name: str | None = None


async def version(_request: Request) -> Response:
    """Return the version."""
    return json_reply({"version": specrun_version()})


async def tags(request: Request) -> Response:
    """Return the model, in a list."""
    return json_reply({"models": [_model(request)]})


async def running(request: Request) -> Response:
    """Return the model that is loaded, in a list."""
    model = _model(request)
    never = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0}
    context = {"context_length": request.app.state.service.engine.n_ctx}
    return json_reply({"models": [{**model, **never, **context}]})


async def show(request: Request) -> Response:
    """Return the facts of the model, if it is the one that is asked for."""
    body, _ = await read_body(request, _ShowBody, lambda *_: None)
    service: AnswerService = request.app.state.service
    name, own = (body.model or body.name or "").removesuffix(":latest"), service.settings.model
    if name != own.removesuffix(":latest"):
        problem = f"model {name!r} not found: this server has {own!r}"
        raise RequestError(problem, "model", status=HTTPStatus.NOT_FOUND)
    engine, capabilities = service.engine, ["completion"]
    try:
        template = engine.chat_template.source
    except TemplateError:
        template = ""
    if "tools" in template:
        capabilities.append("tools")
    if engine.vocabulary.fill_tokens is not None:
        capabilities.append("insert")
    if "think" in template or "reasoning" in template:
        capabilities.append("thinking")
    facts = engine.model.header.metadata
    arrays = {name: None for name, value in facts.items() if not isinstance(value, _PLAIN)}
    model = _model(request)
    return json_reply(
        {
            "modelfile": f"FROM {engine.model.path.name}\n",
            "parameters": "",
            "template": template,
            "details": model["details"],
            "model_info": {**facts, **arrays},
            "capabilities": capabilities,
            "modified_at": model["modified_at"],
        }
    )


_PLAIN = (str, int, float, bool)


def _model(request: Request) -> dict[str, Any]:
    service: AnswerService = request.app.state.service
    model = service.engine.model
    state = model.path.stat()
    return {
        "name": service.settings.model,
        "model": service.settings.model,
        "modified_at": datetime.fromtimestamp(state.st_mtime, UTC).isoformat(),
        "size": state.st_size,
        "digest": describe_file(model.path)["sha256_of_ends"],
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": model.architecture,
            "families": [model.architecture],
            "parameter_size": count_text(model.n_params),
            "quantization_level": model.header.file_type_name or "unknown",
        },
    }
