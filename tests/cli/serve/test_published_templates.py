"""The table of families against chat templates that others have published.

They are no part of this repository: `SPECRUN_TEMPLATES` names a folder of `*.jinja`, such as
`models/templates` of llama.cpp. What a template writes as history is what its model says.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.loopback_server import client_of
from support.replies import chat_text, read_reply
from support.scripted_engine import ScriptedEngine

from specrun.runtime.chat import ChatTemplate, for_template, syntax_of
from specrun.runtime.chat.families import GENERIC

FOLDER = Path(os.environ.get("SPECRUN_TEMPLATES", "/nowhere"))
PATHS = sorted(FOLDER.glob("*.jinja"))
pytestmark = pytest.mark.skipif(
    not PATHS, reason="SPECRUN_TEMPLATES names no folder of published chat templates"
)


def function_tool(name: str, **properties: str) -> dict[str, Any]:
    described = {
        key: {"type": kind, "description": f"The {key}."} for key, kind in properties.items()
    }
    schema = {"type": "object", "properties": described, "required": [*properties]}
    function = {"name": name, "description": f"The {name}.", "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [function_tool("get_weather", city="string"), function_tool("add", a="integer", b="object")]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
CALLS = [("get_weather", {"city": "Paris"}), ("add", {"a": 3, "b": {"k": ["x", True, None]}})]
MADE = [
    {"id": f"call0000{k}", "type": "function", "function": {"name": name, "arguments": arguments}}
    for k, (name, arguments) in enumerate(CALLS)
]
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "The question."},
    {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": MADE},
    {"role": "tool", "tool_call_id": "call00000", "content": "dry"},
    {"role": "tool", "tool_call_id": "call00001", "content": "7"},
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_what_a_published_template_writes_is_read(tool_vocabulary, path):
    source = path.read_text()
    syntax = syntax_of(source) or GENERIC
    template = ChatTemplate(source, bos="<s>", eos="</s>")
    variables = {"functions": json.dumps(TOOLS)} if "functions" in template.names else {}
    history = for_template(HISTORY, syntax)
    text = chat_text(template, tool_vocabulary, history, tools=TOOLS, variables=variables).text
    turn = text.rpartition("The question.")[2]
    assert "7" in turn
    if syntax.at_start:  # a call without a mark: at the begin of a message only
        place = min(turn.find(each) for each in ('{"', "get_weather\n") if each in turn)
        turn = turn[place:]
    reply = read_reply(syntax, [turn], SCHEMAS)
    calls = [(call.name, json.loads(call.arguments)) for call in reply.calls]
    assert calls[:1] == CALLS[:1]
    assert calls == CALLS or syntax.form.separator is None


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_an_agents_turns_with_a_published_template(tool_vocabulary, path):
    """Calls in the model's own form are handed out, and sent back with their results."""
    source = path.read_text()
    syntax = syntax_of(source) or GENERIC
    calls = CALLS if syntax.form.separator is not None else CALLS[:1]
    engine: Any = ScriptedEngine(tool_vocabulary, source, [syntax.form.written(calls), "Done."])
    engine.n_ctx = 100_000
    asked: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "The question."},
    ]
    with client_of(engine) as client:
        body = {"messages": asked, "tools": TOOLS, "reasoning_effort": "high"}
        reply = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        made = [call["function"] for call in reply["tool_calls"]]
        assert [(call["name"], json.loads(call["arguments"])) for call in made] == calls
        assert reply["content"] is None
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"result {k}"}
            for k, call in enumerate(reply["tool_calls"])
        ]
        body |= {"messages": [*asked, reply, *results], "reasoning_effort": "none"}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    prompt = tool_vocabulary.detokenize(engine.asked[-1].prompt)
    for text in ("Be brief.", "The question.", *(result["content"] for result in results)):
        assert text in prompt
