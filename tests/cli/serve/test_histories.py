"""Earlier turns with pictures, files and other servers' tools are read, by every API."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from support.loopback_server import client_of, objects_of
from support.scripted_engine import ScriptedEngine
from support.tool_templates import HERMES

from specrun.bindings.models.vocabulary import Vocabulary
from specrun.cli.serve import tools

PNG = "data:image/png;base64,iVBORw0KGgo="
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
ASK = {"role": "user", "content": "Rain in Paris?"}
AND = {"role": "user", "content": "And now?"}
SAID = {"role": "assistant", "content": "Dry."}
PATHS = {
    "chat": ("/v1/chat/completions", "messages"),
    "responses": ("/v1/responses", "input"),
    "messages": ("/v1/messages", "messages"),
}


def posted(
    vocabulary: Vocabulary, api: str, talk: object, *script: str, **body: Any
) -> tuple[Any, str]:
    """The reply, and the prompt with control tokens by their names."""
    engine: Any = ScriptedEngine(vocabulary, HERMES, script or ("Hello.",))
    path, field = PATHS[api]
    with client_of(engine) as client:
        reply = client.post(path, json={field: talk, "max_tokens": 500, **body})
    tokens = engine.asked[0].prompt if engine.asked else []
    names = [vocabulary.piece(each) or vocabulary.label(each).encode() for each in tokens]
    return reply, b"".join(names).decode()


def in_order(text: str, parts: Sequence[str]) -> bool:
    place = 0
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


CALL = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
TALKS: dict[str, tuple[str, list[Any], list[str]]] = {
    "a picture in a result": (
        "messages",
        [
            ASK,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {"a": 1}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t",
                        "content": [{"type": "text", "text": "Look:"}, PICTURE],
                    }
                ],
            },
        ],
        ['{"name": "look", "arguments": {"a": 1}}', "Look:\n[image: image/png]\n</tool_response>"],
    ),
    "a picture of an earlier question": (
        "messages",
        [{"role": "user", "content": [PICTURE, {"type": "text", "text": "What?"}]}, SAID, AND],
        ["[image: image/png]\nWhat?", "Dry.", "And now?"],
    ),
    "blocks of servers' tools": (
        "messages",
        [
            ASK,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    {
                        "type": "server_tool_use",
                        "id": "s",
                        "name": "web_search",
                        "input": {"query": "rain"},
                    },
                    {
                        "type": "web_search_tool_result",
                        "tool_use_id": "s",
                        "content": [
                            {"type": "web_search_result", "title": "Rain", "url": "https://a"}
                        ],
                    },
                    {"type": "text", "text": "Dry."},
                ],
            },
            AND,
        ],
        ["I look.\n[server tool use: web_search", "https://a]\nDry.<|im_end|>", "And now?"],
    ),
    "documents with a text, asked about now": (
        "messages",
        [
            {
                "role": "user",
                "content": [
                    {"type": "document", "source": {"type": "text", "data": "All of it."}},
                    {
                        "type": "search_result",
                        "source": "https://a",
                        "title": "A",
                        "content": [{"type": "text", "text": "It rains."}],
                    },
                    {"type": "text", "text": "So?"},
                ],
            }
        ],
        ["All of it.", "[search result: A, https://a]\nIt rains.\nSo?"],
    ),
    "a result without a content": (
        "messages",
        [
            ASK,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}, *[]]},
        ],
        ["<tool_response>\n\n</tool_response>"],
    ),
    "a picture in a result of a function": (
        "chat",
        [
            ASK,
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c", **CALL}]},
            {
                "role": "tool",
                "tool_call_id": "c",
                "content": [
                    {"type": "text", "text": "Look:"},
                    {"type": "image_url", "image_url": {"url": PNG}},
                ],
            },
        ],
        ["Look:\n[image: image/png]\n</tool_response>"],
    ),
    "refusals": (
        "chat",
        [
            ASK,
            {"role": "assistant", "content": None, "refusal": "I cannot."},
            ASK,
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "Not I."}]},
            AND,
        ],
        ["I cannot.", "Not I.", "And now?"],
    ),
    "a custom tool's call": (
        "chat",
        [
            ASK,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "a\n+b"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "done"},
        ],
        ['{"name": "patch", "arguments": {"input": "a\\n+b"}}', "done"],
    ),
    "texts as parts": ("chat", [{"role": "user", "content": ["Rain", " in Paris?"]}], ["Rain in"]),
    "custom calls as items": (
        "responses",
        [
            ASK,
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "a\n+b"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
            {
                "type": "custom_tool_call_output",
                "call_id": "d",
                "output": [{"type": "input_text", "text": "more"}],
            },
        ],
        ['{"name": "patch", "arguments": {"input": "a\\n+b"}}', "done", "more"],
    ),
    "shells as items": (
        "responses",
        [
            ASK,
            {
                "type": "local_shell_call",
                "call_id": "c",
                "action": {"type": "exec", "command": ["ls"]},
                "status": "completed",
            },
            {"type": "local_shell_call_output", "id": "c", "output": '{"stdout": "a.txt"}'},
            {"type": "shell_call", "call_id": "d", "action": {"commands": ["pwd"]}},
            {
                "type": "shell_call_output",
                "call_id": "d",
                "output": [{"stdout": "/home", "stderr": "", "outcome": {"type": "exit"}}],
            },
            {"type": "apply_patch_call", "call_id": "e", "operation": {"path": "b.txt"}},
            {"type": "apply_patch_call_output", "call_id": "e", "status": "completed"},
        ],
        ['{"name": "local_shell"', '"command": ["ls"]', "a.txt", '"pwd"', "/home", '"b.txt"'],
    ),
    "screenshots as items": (
        "responses",
        [
            ASK,
            {"type": "computer_call", "call_id": "c", "action": {"type": "click", "x": 3}},
            {
                "type": "computer_call_output",
                "call_id": "c",
                "output": {"type": "computer_screenshot", "image_url": PNG},
            },
        ],
        ['"arguments": {"type": "click", "x": 3}', "[screenshot: image/png]"],
    ),
    "what servers did, as items": (
        "responses",
        [
            ASK,
            {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"},
            {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "rain"}},
            {"type": "file_search_call", "queries": ["rain"], "results": [{"text": "It rains."}]},
            {"type": "code_interpreter_call", "code": "1+1", "outputs": None},
            {"type": "image_generation_call", "id": "i", "result": "xxxx"},
            {"type": "mcp_list_tools", "server_label": "s", "tools": [{"name": "add"}]},
            {"type": "mcp_call", "name": "add", "arguments": "{}", "output": "three"},
            {"type": "item_reference", "id": "msg_7"},
            {
                "type": "message",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "Dry.", "annotations": []},
                    {"type": "refusal", "refusal": "No more."},
                ],
            },
            AND,
        ],
        [
            "assistant\n[web search call:",
            "It rains.",
            "1+1",
            "[image generation call]",
            "add",
            "three",
            "msg_7",
            "Dry.\nNo more.<|im_end|>",
            "And now?",
        ],
    ),
    "a picture in an output": (
        "responses",
        [
            ASK,
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_image", "image_url": PNG}],
            },
        ],
        ["[image: image/png]\n</tool_response>"],
    ),
    "a picture of an earlier input": (
        "responses",
        [{"role": "user", "content": [{"type": "input_image", "image_url": PNG}]}, SAID, AND],
        ["[image: image/png]", "Dry.", "And now?"],
    ),
    "an empty input": ("responses", [], ["user\n<|im_end|>"]),
}


@pytest.mark.parametrize(("api", "talk", "parts"), TALKS.values(), ids=TALKS)
def test_earlier_turns_are_read(tool_vocabulary, api, talk, parts):
    reply, prompt = posted(tool_vocabulary, api, talk)
    assert reply.status_code == 200, reply.text
    assert in_order(prompt, parts), prompt
    assert "base64" not in prompt


def test_an_empty_input_with_instructions_asks_by_them(tool_vocabulary):
    reply, prompt = posted(tool_vocabulary, "responses", [], instructions="Say hello.")
    assert reply.status_code == 200, reply.text
    assert prompt.endswith("Say hello.<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("api", "part"),
    [
        ("chat", {"type": "image_url", "image_url": {"url": PNG}}),
        ("responses", {"type": "input_image", "image_url": PNG}),
        ("messages", PICTURE),
        ("chat", {"type": "text"}),
    ],
)
def test_what_is_asked_now_has_to_be_read(tool_vocabulary, api, part):
    reply, _ = posted(tool_vocabulary, api, [ASK, SAID, {"role": "user", "content": [part]}])
    assert reply.status_code == 400
    assert "[2].content[0]" in reply.json()["error"]["message"]


# -- tools -----------------------------------------------------------------------------------------

HOSTED: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "web_search"}, {"type": "mcp", "server_label": "s"}],
    "responses": [
        *({"type": kind} for kind in ("web_search", "web_search_preview", "local_shell", "shell")),
        {"type": "image_generation", "output_format": "png"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "file_search", "vector_store_ids": ["x"]},
        {"type": "mcp", "server_label": "s", "server_url": "https://a"},
        {"type": "tool_search"},
        {"type": "computer_use_preview", "display_width": 1},
        {
            "type": "namespace",
            "name": "later",
            "tools": [{"type": "function", "name": "f", "parameters": {}, "defer_loading": True}],
        },
    ],
    "messages": [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "mcp_toolset", "mcp_server_name": "s"},
    ],
}
OWN: dict[str, dict[str, Any]] = {
    "chat": {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
    "responses": {"type": "function", "name": "add", "parameters": {"type": "object"}},
    "messages": {"name": "add", "input_schema": {"type": "object"}},
}


@pytest.mark.parametrize("api", HOSTED)
def test_tools_that_servers_run_are_passed_over(tool_vocabulary, caplog, api):
    tools._said.cache_clear()
    with caplog.at_level(logging.WARNING):
        reply, prompt = posted(tool_vocabulary, api, [ASK], tools=[*HOSTED[api], OWN[api]])
        again, _ = posted(tool_vocabulary, api, [ASK], tools=HOSTED[api])
    assert (reply.status_code, again.status_code) == (200, 200), reply.text
    assert prompt.count('"name": "add"') == 1
    said = [record for record in caplog.records if "passed over" in record.getMessage()]
    assert len(said) == len(HOSTED[api])


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "web_search_preview"},
        {"type": "custom", "name": "patch"},
        {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "custom", "name": "patch"}, {"type": "web_search"}],
        },
    ],
)
def test_choices_of_such_tools_are_understood(tool_vocabulary, choice):
    tools = [{"type": "web_search"}, {"type": "custom", "name": "patch"}]
    reply, _ = posted(tool_vocabulary, "responses", [ASK], tools=tools, tool_choice=choice)
    assert reply.status_code == 200, reply.text


PATCH = '*** Begin Patch\n+a "b" \\ é\n*** End Patch'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
CALLED = json.dumps({"name": "patch", "arguments": {"input": PATCH}}, ensure_ascii=False)
SAYS = f"I write.\n<tool_call>\n{CALLED}\n</tool_call>"


def test_a_custom_tool_is_called_with_a_text_in_responses(tool_vocabulary):
    tools = [{"type": "custom", "name": "patch", "description": "Write.", "format": GRAMMAR}]
    reply, prompt = posted(tool_vocabulary, "responses", [ASK], SAYS, tools=tools)
    assert 'start: \\"*** Begin Patch\\"' in prompt
    text, call = reply.json()["output"]
    assert text["content"][0]["text"] == "I write."
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", PATCH)
    assert call["id"].startswith("ctc_")
    back = [
        ASK,
        text,
        call,
        {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"},
    ]
    again, prompt = posted(tool_vocabulary, "responses", back, tools=tools)
    assert again.status_code == 200, again.text
    assert in_order(prompt, ["I write.", '"arguments": {"input": "*** Begin', "done"])
    streamed, _ = posted(tool_vocabulary, "responses", [ASK], SAYS, tools=tools, stream=True)
    events = objects_of(streamed.text)
    given = [each for each in events if "custom_tool_call_input" in each["type"]]
    assert "".join(each.get("delta", "") for each in given) == given[-1]["input"] == PATCH
    assert given[-1]["type"] == "response.custom_tool_call_input.done"
    assert not [each for each in events if "function_call" in each["type"]]
    assert events[-1]["response"]["output"][1]["input"] == PATCH


def test_a_custom_tool_is_called_with_a_text_in_chat_completions(tool_vocabulary):
    custom = {"name": "patch", "format": {"type": "grammar", "grammar": GRAMMAR}}
    tools = [{"type": "custom", "custom": custom}, OWN["chat"]]
    reply, _ = posted(tool_vocabulary, "chat", [ASK], SAYS, tools=tools)
    (choice,) = reply.json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": PATCH})
    assert choice["finish_reason"] == "tool_calls"
    streamed, _ = posted(tool_vocabulary, "chat", [ASK], SAYS, tools=tools, stream=True)
    deltas = [each["choices"][0]["delta"] for each in objects_of(streamed.text)]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["type"] == "custom"
    assert "".join(call["custom"]["input"] for call in calls) == PATCH


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a b"}', "a b"),
        ('{"input": "a\\n', "a"),
        ('{"input": {"a": 1}}', '{"a": 1}'),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ("{}", ""),
        ("no json", "no json"),
    ],
)
def test_the_text_of_a_custom_tool(arguments, text):
    assert tools._input_in(arguments).rstrip("\n") == text


def test_functions_of_a_namespace_are_called_by_their_names(tool_vocabulary):
    inner = [{"type": "function", "name": "find", "parameters": {"type": "object"}}]
    tools = [{"type": "namespace", "name": "mcp__notes__", "tools": inner}]
    says = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    reply, _ = posted(tool_vocabulary, "responses", [ASK], says, tools=tools)
    (call,) = reply.json()["output"]
    assert (call["name"], call["namespace"]) == ("find", "mcp__notes__")


def test_a_custom_tool_of_messages_is_a_function(tool_vocabulary):
    tools = [{"type": "custom", "name": "patch"}]
    says = '<tool_call>\n{"name": "patch", "arguments": {"a": 1}}\n</tool_call>'
    reply, _ = posted(tool_vocabulary, "messages", [ASK], says, tools=tools)
    (block,) = reply.json()["content"]
    assert (block["type"], block["input"]) == ("tool_use", {"a": 1})
