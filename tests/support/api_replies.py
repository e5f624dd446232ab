"""What replies of any API say, whole and streamed; and the same question to each of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from support.loopback_server import objects_of

CHAT, RESPONSES, MESSAGES = PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


@dataclass
class Said:
    """The texts, and the names and arguments of the calls."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def add(self, kind: str, text: str) -> None:
        """Add the text of a block or an item, of which none is empty."""
        assert text, kind
        if kind in ("reasoning", "thinking"):
            self.reasoning += text
        else:
            self.content += text


def body_of(path: str, question: str, tools: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """A body that asks a question, with tools in OpenAI's form."""
    functions = [tool["function"] for tool in tools]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": question}], "tools": [*tools]}
    if path == RESPONSES:
        body = {"input": question, "tools": [{"type": "function", **each} for each in functions]}
    elif path == MESSAGES:
        named = ((each["name"], each["parameters"]) for each in functions)
        body |= {"tools": [{"name": name, "input_schema": schema} for name, schema in named]}
        body |= {"max_tokens": 999}
    return body


def said_in(reply: dict[str, Any]) -> Said:
    """What a whole reply says."""
    said = Said()
    if "choices" in reply:
        message = reply["choices"][0]["message"]
        said = Said(message["content"] or "", message.get("reasoning_content", ""))
        called = [each["function"] for each in message.get("tool_calls", ())]
        said.calls = [(each["name"], json.loads(each["arguments"])) for each in called]
    for item in reply.get("output", ()):
        if item["type"] == "function_call":
            said.calls.append((item["name"], json.loads(item["arguments"])))
        else:
            said.add(item["type"], "".join(part["text"] for part in item["content"]))
    for block in reply.get("content", ()):
        if block["type"] == "tool_use":
            said.calls.append((block["name"], block["input"]))
        else:
            said.add(block["type"], block[block["type"]])
    return said


def said_in_stream(stream: str) -> Said:
    """What the events of a stream say together."""
    said, calls = Said(), list[list[str]]()
    for event in objects_of(stream):
        kind, delta = event.get("type", ""), event.get("delta", {})
        if event.get("choices"):
            delta = event["choices"][0]["delta"]
        elif kind == "response.function_call_arguments.done":
            calls.append([event["name"], event["arguments"]])
        elif event.get("content_block", {}).get("type") == "tool_use":
            calls.append([event["content_block"]["name"], ""])
        elif isinstance(delta, str):
            names = {
                "response.output_text.delta": "text",
                "response.reasoning_text.delta": "thinking",
            }
            delta = {names.get(kind, ""): delta}
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
        if "partial_json" in delta:
            calls[-1][1] += delta["partial_json"]
        said.reasoning += delta.get("reasoning_content", "") + delta.get("thinking", "")
        said.content += (delta.get("content") or "") + delta.get("text", "")
    said.calls = [(name, json.loads(arguments)) for name, arguments in calls]
    return said
