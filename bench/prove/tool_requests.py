"""Requests with tools, in the forms of three APIs, and the contents of their streams of events.

One conversation is written as OpenAI's chat completions, OpenAI's responses and Anthropic's
messages have it. A stream of any of them is read as items: reasoning, content and calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from specrun.bindings.errors import SpecrunError

Body = dict[str, Any]
Api = Literal["chat completions", "responses", "messages"]
PATHS: dict[Api, str] = {
    "chat completions": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
LIKELY = 3  # tokens of each place whose log-probabilities are listed


# == Conversations =================================================================================


@dataclass(frozen=True, slots=True)
class ToolCase:
    """A conversation with tools, and how they may be called.

    `asks` are the user's texts. Between two of them the model called `called`, a tool's name and
    its arguments, and read `result`. `tool` names the only tool that may be called.
    """

    name: str
    asks: Sequence[str]
    called: tuple[str, Mapping[str, Any]] | None = None
    result: str = ""
    required: bool = True
    strict: bool = True
    tool: str | None = None
    several: bool = True
    thinks: bool = False
    temperature: float = 0.0


def _object(**properties: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON schemas
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


_TEXT = {"type": "string", "maxLength": 24}
TOOLS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "get_weather": (
        "The weather of the next days.",
        _object(
            city={"type": "string", "enum": ["Paris", "Rome", "New York"]},
            unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
            days={"type": "integer", "minimum": 1, "maximum": 14},
        ),
    ),
    "write_file": (
        "Write a file.",
        _object(path=_TEXT, content={"type": "string", "maxLength": 80}),
    ),
    "search": (
        "Search the notes.",
        _object(
            query=_TEXT,
            filters=_object(
                tags={"type": "array", "items": {"enum": ["new", "old", "own"]}, "maxItems": 3},
                exact={"type": "boolean"},
            ),
        ),
    ),
}
_WEATHER = "What will the weather be in Rome in the next 3 days, in Celsius?"
_WRITE = "Write a file notes/list.py that has a list of the first five prime numbers."
_AGAIN = "Write the same to notes/again.py, too, and search the notes for 'prime numbers'."
_WRITTEN = ("write_file", {"path": "notes/list.py", "content": "primes = [2, 3, 5, 7, 11]\n"})
CASES = (
    ToolCase("after a call", (_WRITE, _AGAIN), _WRITTEN, "written: notes/list.py"),
    ToolCase("free to call", (_WEATHER,), required=False, strict=False),
    ToolCase("behind reasoning", (_WRITE,), strict=False, thinks=True, temperature=0.6),
    ToolCase("a named tool", (_WRITE,), tool="search", several=False),
    ToolCase("strict", (_WRITE, _AGAIN), _WRITTEN, "written", required=False, temperature=0.9),
    ToolCase("sampled freely", (_WRITE,), required=False, strict=False, temperature=1.0),
)
"""The most telling first: an API's check may have time for these alone."""


def request_body(api: Api, case: ToolCase, seed: int, max_tokens: int) -> Body:
    """Return the body of a request for a stream; temperature and seed are the case's, whole."""
    body: Body = {
        "model": "any",
        "stream": True,
        "temperature": case.temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": seed,
        "chat_template_kwargs": {"enable_thinking": case.thinks},
    }
    return body | _OF_API[api](case, max_tokens)


def _of_chat(case: ToolCase, max_tokens: int) -> Body:
    messages: list[Body] = [{"role": "user", "content": case.asks[0]}]
    if case.called is not None:
        name, arguments = case.called
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": "call_000000001", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": case.result})
    messages += [{"role": "user", "content": text} for text in case.asks[1:]]
    named = {"type": "function", "function": {"name": case.tool}}
    return {
        "messages": messages,
        "tools": [
            {"type": "function", "function": {**function, "parameters": schema}}
            for function, schema in _functions(case)
        ],
        "tool_choice": named if case.tool else "required" if case.required else "auto",
        "parallel_tool_calls": case.several,
        "max_tokens": max_tokens,
        "logprobs": True,
        "top_logprobs": LIKELY,
    }


def _of_responses(case: ToolCase, max_tokens: int) -> Body:
    items: list[Body] = [{"role": "user", "content": case.asks[0]}]
    if case.called is not None:
        name, arguments = case.called
        call = {"call_id": "call_000000001", "name": name, "arguments": json.dumps(arguments)}
        items.append({"type": "function_call", **call})
        output = {"call_id": call["call_id"], "output": case.result}
        items.append({"type": "function_call_output", **output})
    items += [{"role": "user", "content": text} for text in case.asks[1:]]
    named = {"type": "function", "name": case.tool}
    return {
        "input": items,
        "tools": [
            {"type": "function", **function, "parameters": schema}
            for function, schema in _functions(case)
        ],
        "tool_choice": named if case.tool else "required" if case.required else "auto",
        "parallel_tool_calls": case.several,
        "max_output_tokens": max_tokens,
    }


def _of_messages(case: ToolCase, max_tokens: int) -> Body:
    messages: list[Body] = [{"role": "user", "content": case.asks[0]}]
    if case.called is not None:
        name, arguments = case.called
        use = {"type": "tool_use", "id": "toolu_1", "name": name, "input": arguments}
        messages.append({"role": "assistant", "content": [use]})
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": case.result}
        more = [{"type": "text", "text": text} for text in case.asks[1:]]
        messages.append({"role": "user", "content": [result, *more]})
    choice: Body = {"type": "any" if case.required else "auto"}
    if case.tool:
        choice = {"type": "tool", "name": case.tool}
    return {
        "messages": messages,
        "tools": [{**function, "input_schema": schema} for function, schema in _functions(case)],
        "tool_choice": {**choice, "disable_parallel_tool_use": not case.several},
        "max_tokens": max_tokens,
    }


def _functions(case: ToolCase) -> Iterator[tuple[Body, dict[str, Any]]]:
    for name, (description, schema) in TOOLS.items():
        yield {"name": name, "description": description, "strict": case.strict}, schema


_OF_API: dict[Api, Callable[[ToolCase, int], Body]] = {
    "chat completions": _of_chat,
    "responses": _of_responses,
    "messages": _of_messages,
}


# == Streams =======================================================================================


class Item(NamedTuple):
    """A part of a reply: "reasoning", "content" or "call", which has a tool's name."""

    kind: str
    name: str
    text: str


@dataclass(slots=True)
class Stream:
    """The content of a stream of events, without ids, times and its rounds.

    `scores` are log-probabilities: of each token and of the likeliest there, the first first.
    """

    items: list[Item] = field(default_factory=list)
    finish: str = ""
    scores: list[tuple[float, ...]] = field(default_factory=list)

    def add(self, kind: str, text: str, name: str = "", *, begins: bool = False) -> None:
        """Add a text to the last item, or as a new one."""
        if not begins and self.items and self.items[-1].kind == kind:
            last = self.items[-1]
            self.items[-1] = last._replace(text=last.text + text)
        else:
            self.items.append(Item(kind, name, text))

    @property
    def calls(self) -> list[Item]:
        """The calls, in order."""
        return [item for item in self.items if item.kind == "call"]


def read_stream(api: Api, events: bytes) -> Stream:
    """Return the content of a stream's events; raises `SpecrunError` for a contradiction."""
    stream = Stream()
    for payload in _payloads(events):
        _READERS[api](stream, payload)
    if not stream.finish:
        raise SpecrunError(f"a stream of {api} ends without a reason")
    return stream


def _payloads(events: bytes) -> Iterator[Body]:
    """Yield the JSON objects of server-sent events."""
    for line in events.decode().splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _read_chunk(stream: Stream, chunk: Body) -> None:
    for choice in chunk.get("choices", ()):
        delta = choice["delta"]
        for name, kind in (("reasoning_content", "reasoning"), ("content", "content")):
            if delta.get(name):
                stream.add(kind, delta[name])
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            name = function.get("name", "")
            stream.add("call", function.get("arguments", ""), name, begins="name" in function)
        stream.finish = choice["finish_reason"] or stream.finish
        for entry in (choice.get("logprobs") or {}).get("content", ()):
            likely = [each["logprob"] for each in entry["top_logprobs"]]
            stream.scores.append((entry["logprob"], *likely))


_KINDS = {"message": "content", "function_call": "call"}


def _read_event(stream: Stream, event: Body) -> None:
    kind = event["type"].removeprefix("response.")
    if kind == "output_item.added":
        item = event["item"]
        own = _KINDS.get(item["type"], item["type"])
        stream.add(own, "", item.get("name", ""), begins=True)
    elif kind.endswith(".delta"):
        stream.add(stream.items[-1].kind, event["delta"])
    elif kind == "output_item.done":
        item, last = event["item"], stream.items[-1]
        whole = item.get("arguments")
        if whole is None:
            whole = "".join(part["text"] for part in item["content"])
        if whole != last.text:
            raise SpecrunError(f"an item ends as {whole!r}, and its events make {last.text!r}")
    elif kind in ("completed", "incomplete"):
        stream.finish = kind


def _read_block(stream: Stream, event: Body) -> None:
    kind = event["type"]
    if kind == "content_block_start":
        block = event["content_block"]
        own = {"text": "content", "thinking": "reasoning", "tool_use": "call"}[block["type"]]
        stream.add(own, "", block.get("name", ""), begins=True)
    elif kind == "content_block_delta":
        delta = event["delta"]
        texts = (delta.get(name) for name in ("text", "thinking", "partial_json"))
        stream.add(stream.items[-1].kind, next(text for text in texts if text is not None))
    elif kind == "message_delta":
        stream.finish = event["delta"]["stop_reason"]


_READERS: dict[Api, Callable[[Stream, Body], None]] = {
    "chat completions": _read_chunk,
    "responses": _read_event,
    "messages": _read_block,
}
