"""Ollama's API: /api/chat and /api/generate, and its clients' look-ups about models.

A body is put into OpenAI's fields, so everything means the same here as there. Ollama's `options`
have llama.cpp's names. Answers are lines of JSON, streamed unless `stream` is false.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from specrun.bindings.errors import TemplateError
from specrun.bindings.memory_breakdown import HOST as HOST_NAME
from specrun.cli.doctor import specrun_version
from specrun.cli.serve.apis.chat import ChatBody, chat_request
from specrun.cli.serve.apis.completions import CompletionBody, completion_request
from specrun.cli.serve.body import GivenBody, ModelBody, checked, wanted, wrong
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.figures import speculation_of, usage_of
from specrun.cli.serve.models import ServedModel
from specrun.cli.serve.replies import (
    ReplyForm,
    answering,
    json_reply,
    line_bytes,
    models_of,
)
from specrun.cli.serve.sampling import FIELDS, AnswerBody
from specrun.cli.serve.service import AnswerRequest, AnswerService, Delta, ServedAnswer
from specrun.cli.terminal.screen import count_text
from specrun.runtime.chat import CallBegun, Content, MoreArguments, Part, Reasoning
from specrun.runtime.round import GenerationResult

_log = logging.getLogger(__name__)

# -- Requests --------------------------------------------------------------------------------------

_Level = Literal["low", "medium", "high", "max"]
_Think = Annotated[bool | _Level | None, wanted("true, false, low, medium or high")]
_Format = Annotated[
    Literal["", "json"] | dict[str, Any] | None, wanted("json, or a JSON schema", whole=True)
]
_Options = Annotated[dict[str, Any] | None, wanted('an object, as {"temperature": 0.7}')]
_Images = Annotated[list[str], wanted("a list of pictures in base64", whole=True)]
_KEEPING = 'seconds or a text, as 300, "5m" or -1 (for ever)'
_Keeping = Annotated[int | float | str | None, wanted(_KEEPING)]
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST = 10 * 365 * 86_400.0  # seconds, after which nobody waits
_OF_LOADING = ("num_ctx", "num_batch", "num_gpu", "num_thread", "main_gpu", "use_mmap", "num_keep")


def _seconds(keeping: float | str) -> float:
    """Return the seconds of "1h30m", "-1" or a number; raises `RequestError` for another text."""
    text = str(keeping).strip()
    with suppress(ValueError):
        if not math.isnan(float(text)):
            return float(text)
    parts = re.findall(r"([\d.]+)(ms|s|m|h)", text)
    sign = -1.0 if text.startswith("-") else 1.0
    if "".join(map("".join, parts)) != text.lstrip("-+") or not parts:
        raise wrong("keep_alive", keeping, _KEEPING)
    try:
        return sign * sum(float(count) * _UNITS[unit] for count, unit in parts)
    except ValueError:
        raise wrong("keep_alive", keeping, _KEEPING) from None


class OllamaBody(AnswerBody, kw_only=True):
    """The fields that both kinds of requests share."""

    stream: bool | None = True
    options: _Options = None
    format: _Format = None
    think: _Think = None
    keep_alive: _Keeping = None

    def note_keeping(self, service: AnswerService) -> None:
        """Let the model stay loaded for the time in the request."""
        if self.keep_alive is not None:
            seconds = _seconds(self.keep_alive)
            service.keep_seconds = None if seconds < 0 else seconds

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
    """A request without a text, by which clients let a model be loaded, or unloaded."""

    def __init__(self, service: AnswerService) -> None:
        super().__init__()
        self._service = service

    def reply(self, fields: dict[str, Any]) -> Response:
        """Return the result, with the fields of an empty answer."""
        reason = "unload" if self._service.keep_seconds == 0 else "load"
        stamp = _stamp(self._service)
        return json_reply({**stamp, **fields, "done": True, "done_reason": reason})


def ollama_chat_request(body: OllamaChat, service: AnswerService) -> AnswerRequest:
    """Return the request of a body; raises `RequestError` that names the field."""
    body.note_keeping(service)
    if not body.messages:
        raise _NothingAsked(service)
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
    body.note_keeping(service)
    if not (body.prompt or body.suffix or body.images):
        raise _NothingAsked(service)
    values = body.shared(service)
    if body.raw or body.suffix:
        values |= {"prompt": body.prompt or "", "suffix": body.suffix}
        return completion_request(checked(values, CompletionBody), service)
    text = body.prompt or ""
    asked = {"role": "user", "content": _with_pictures(text, body.images) if body.images else text}
    system = [{"role": "system", "content": body.system}] if body.system else []
    values |= {"messages": [*system, asked], **body.thinking()}
    return chat_request(checked(values, ChatBody), service)


# -- Replies ---------------------------------------------------------------------------------------


class ChatLines(ReplyForm):
    """Answers of /api/chat in lines, each with a message; calls of tools are whole."""

    media_type, has_comments = "application/x-ndjson", False

    def __init__(self, answer: ServedAnswer, body: OllamaBody) -> None:
        super().__init__(answer, body)
        self._calls: list[tuple[str, list[str]]] = []  # names, and texts of arguments

    def text_fields(self, content: str, thinking: str, calls: list[Any]) -> dict[str, Any]:
        """Return the fields of a line that have its text."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def delta(self, delta: Delta) -> bytes:
        """Return the line of a round; at the end one with calls, and one with the figures."""
        content, thinking = self._texts(delta.parts)
        lines = b""
        if content or thinking:
            lines = self._line(self.text_fields(content, thinking, []))
        if delta.ending is not None:
            if self._calls:
                lines += self._line(self.text_fields("", "", self._whole_calls()))
            lines += self._line({**self.text_fields("", "", []), **self._end(delta.ending.result)})
        return lines

    def whole(self, choices: Sequence[Delta]) -> object:
        """Return the answer as one object."""
        (choice,) = choices
        assert choice.ending is not None
        content, thinking = self._texts(choice.parts)
        fields = self.text_fields(content, thinking, self._whole_calls())
        return {**_stamp(self._answer.service), **fields, **self._end(choice.ending.result)}

    @classmethod
    def refused(cls, error: RequestError) -> bytes:
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


class GenerateLines(ChatLines):
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
    return {"model": service.settings.model, "created_at": _text_of(datetime.now(UTC))}


def _text_of(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


_chat = answering(OllamaChat, ollama_chat_request, ChatLines)
_generate = answering(OllamaGenerate, ollama_generate_request, GenerateLines)


async def chat(request: Request) -> Response:
    """Answer a conversation; one without messages loads or unloads the model."""
    try:
        return await _chat(request)
    except _NothingAsked as nothing:
        return nothing.reply({"message": {"role": "assistant", "content": ""}})


async def generate(request: Request) -> Response:
    """Answer or continue a prompt; without one the model is loaded or unloaded."""
    try:
        return await _generate(request)
    except _NothingAsked as nothing:
        return nothing.reply({"response": ""})


# -- Models ----------------------------------------------------------------------------------------


class _ShowBody(ModelBody):
    name: str | None = None


async def version(_request: Request) -> Response:
    """Return the version."""
    return json_reply({"version": specrun_version()})


async def tags(request: Request) -> Response:
    """Return the models, in a list."""
    models = models_of(request)
    return json_reply({"models": [_described(model) for model in models.models]})


async def running(request: Request) -> Response:
    """Return the models that are loaded, in a list."""
    models = models_of(request)
    listed = [
        {
            **_described(model),
            "expires_at": _expiry(models.seconds_left(model)),
            "size_vram": sum(n for place, n in model.held.items() if place != HOST_NAME),
            "context_length": service.engine.n_ctx,
        }
        for model, service in models.loaded
    ]
    return json_reply({"models": listed})


def _expiry(seconds: float | None) -> str:
    """Return when a model is unloaded without a request; long after all of us, if never."""
    if seconds is None or seconds > _LONGEST:
        return "9999-12-31T23:59:59Z"
    return _text_of(datetime.now(UTC) + timedelta(seconds=max(0.0, seconds)))


async def show(request: Request) -> Response:
    """Return the facts of a model, which need not be loaded."""
    body = (await GivenBody.of(request, _ShowBody)).fields
    models = models_of(request)
    model = models.named(str(body.model or body.name or ""))
    facts, template, capabilities = model.facts, model.facts.template, ["completion"]
    fills = any(name in facts.metadata for name in _FILL_KEYS)
    if model.service is not None:
        engine = model.service.engine
        fills = engine.vocabulary.fill_tokens is not None
        try:
            template = engine.chat_template.source
        except TemplateError:
            template = ""
    if "tools" in template:
        capabilities.append("tools")
    if fills:
        capabilities.append("insert")
    if "think" in template or "reasoning" in template:
        capabilities.append("thinking")
    values = facts.metadata
    arrays = {name: None for name, value in values.items() if not isinstance(value, _PLAIN)}
    described = _described(model)
    return json_reply(
        {
            "modelfile": f"FROM {model.path.name}\n",
            "parameters": "",
            "template": template,
            "details": described["details"],
            "model_info": {**values, **arrays},
            "capabilities": capabilities,
            "modified_at": described["modified_at"],
        }
    )


_PLAIN = (str, int, float, bool)
_FILL_KEYS = ("tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id")
"""Keys of files whose vocabulary can fill in the middle."""


def _described(model: ServedModel) -> dict[str, Any]:
    facts = model.facts
    return {
        "name": model.id,
        "model": model.id,
        "modified_at": datetime.fromtimestamp(facts.modified, UTC).isoformat(),
        "size": facts.n_bytes,
        "digest": facts.digest,
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": facts.architecture,
            "families": [facts.architecture] if facts.architecture else [],
            "parameter_size": count_text(facts.n_params),
            "quantization_level": facts.quantization or "unknown",
        },
    }
