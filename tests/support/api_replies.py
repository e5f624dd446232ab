"""What replies of any API say, whole and streamed; and the same question to each of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specrun.bench.prove import tool_requests as prove

CHAT, RESPONSES, MESSAGES = PATHS = tuple(prove.PATHS.values())


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
        # Clients tell an answer that only calls by null, and an empty one by "".
        assert message["content"] or message["content"] == (None if called else "")
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


def said_in_stream(path: str, stream: bytes) -> Said:
    """What the events of a stream say together; its items end as they grew."""
    said, (api,) = Said(), [api for api, own in prove.PATHS.items() if own == path]
    for item in prove.read_stream(api, stream).items:
        if item.kind == "call":
            said.calls.append((item.name, json.loads(item.text)))
        else:
            said.add(item.kind, item.text)
    return said
