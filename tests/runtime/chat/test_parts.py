"""Parts that a text model cannot read are told in words; the texts within them are kept."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from specrun.bindings.errors import OptionError
from specrun.runtime.chat import is_unreadable, part_text
from specrun.runtime.chat.parts import content_text

PNG = "data:image/png;base64,iVBORw0KGgo="
NOTES = base64.b64encode("Nötes.".encode()).decode()
PARTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "text", "text": "Hi."}, "Hi."),
    ({"type": "output_text", "text": "Hi.", "annotations": []}, "Hi."),
    ({"type": "refusal", "refusal": "I cannot."}, "I cannot."),
    ({"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}, "[image: image/png]"),
    ({"type": "image_url", "image_url": {"url": "https://a/b.png"}}, "[image: https://a/b.png]"),
    ({"type": "input_image", "image_url": PNG}, "[image: image/png]"),
    ({"type": "input_image", "file_id": "file-1"}, "[image: file-1]"),
    (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}},
        "[image: image/png]",
    ),
    ({"type": "image", "source": {"type": "url", "url": "https://a"}}, "[image: https://a]"),
    ({"type": "image", "data": "x", "mimeType": "image/webp"}, "[image: image/webp]"),
    ({"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}, "[audio: wav]"),
    ({"type": "video_url", "video_url": {"url": "https://a"}}, "[video: https://a]"),
    (
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf,x"}},
        "[file: a.pdf, application/pdf]",
    ),
    (
        {"type": "input_file", "filename": "a.txt", "file_data": f"data:text/plain;base64,{NOTES}"},
        "[file: a.txt, text/plain]\nNötes.",
    ),
    ({"type": "input_file", "filename": "a.md", "file_data": NOTES}, "[file: a.md]\nNötes."),
    (
        {
            "type": "document",
            "title": "T",
            "source": {"type": "text", "media_type": "text/plain", "data": "All of it."},
        },
        "[document: T, text/plain]\nAll of it.",
    ),
    (
        {
            "type": "document",
            "title": "T",
            "source": {"type": "base64", "media_type": "application/pdf", "data": "x"},
        },
        "[document: T, application/pdf]",
    ),
    (
        {
            "type": "document",
            "source": {
                "type": "content",
                "content": [
                    {"type": "text", "text": "A."},
                    {"type": "image", "source": {"type": "url", "url": "https://a"}},
                ],
            },
        },
        "[document]\nA.\n[image: https://a]",
    ),
    (
        {
            "type": "search_result",
            "source": "https://a",
            "title": "A",
            "content": [{"type": "text", "text": "It rains."}],
        },
        "[search result: A, https://a]\nIt rains.",
    ),
    (
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "rain"}},
        '[server tool use: web_search, {"query": "rain"}]',
    ),
    (
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s",
            "content": [{"type": "web_search_result", "title": "Rain", "url": "https://a"}],
        },
        "[web search tool result]\n[web search result: Rain, https://a]",
    ),
    (
        {
            "type": "web_search_tool_result",
            "content": {"type": "web_search_tool_result_error", "error_code": "too_many"},
        },
        "[web search tool result]\n[web search tool result error]\ntoo_many",
    ),
    (
        {
            "type": "code_execution_tool_result",
            "content": {
                "type": "code_execution_result",
                "stdout": "1",
                "stderr": "no",
                "content": [],
            },
        },
        "[code execution tool result]\n[code execution result]\n1\nno",
    ),
    (
        {
            "type": "mcp_tool_result",
            "tool_use_id": "m",
            "content": [{"type": "text", "text": "A."}],
        },
        "[mcp tool result]\nA.",
    ),
    ({"type": "tool_reference", "tool_name": "add"}, "[tool reference: add]"),
    ({"type": "container_upload", "file_id": "f"}, "[file: f]"),
    ({"type": "thinking", "thinking": "Hm.", "signature": ""}, ""),
    ({"type": "redacted_thinking", "data": "x"}, ""),
    (
        {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "rain"}},
        '[web search call: {"type": "search", "query": "rain"}]',
    ),
    (
        {
            "type": "file_search_call",
            "queries": ["rain"],
            "results": [{"filename": "a.txt", "text": "It rains.", "score": 0.5}],
        },
        '[file search call: ["rain"]]\n[result: a.txt]\nIt rains.',
    ),
    (
        {
            "type": "code_interpreter_call",
            "code": "print(1)",
            "outputs": [{"type": "logs", "logs": "1"}, {"type": "image", "url": "https://a"}],
        },
        "[code interpreter call: print(1)]\n[logs]\n1\n[image: https://a]",
    ),
    ({"type": "image_generation_call", "result": "x" * 99}, "[image generation call]"),
    (
        {"type": "mcp_call", "name": "add", "server_label": "s", "arguments": "{}", "output": "3"},
        "[mcp call: add, s, {}]\n3",
    ),
    (
        {"type": "mcp_list_tools", "server_label": "s", "tools": [{"name": "add"}]},
        "[mcp list tools: s]\n[tool: add]",
    ),
    ({"type": "item_reference", "id": "msg_1"}, "[item reference: msg_1]"),
    (
        {"type": "resource", "resource": {"uri": "file:///a", "mimeType": "text/x", "text": "A."}},
        "[resource: text/x, file:///a]\nA.",
    ),
    ({"type": "of_tomorrow"}, "[of tomorrow]"),
    ({"type": ["text"], "text": "Hi."}, "[['text']]\nHi."),
]


@pytest.mark.parametrize(("part", "text"), PARTS, ids=lambda value: str(value)[:40])
def test_a_part_is_told_in_words(part, text):
    assert part_text(part) == text


def test_texts_follow_each_other_and_words_have_lines_of_their_own():
    picture = {"type": "image", "source": {"type": "url", "url": "https://a"}}
    parts = [{"type": "text", "text": text} for text in ("Lo", "ok:", "Nice?")]
    assert content_text(parts) == "Look:Nice?"
    assert content_text([*parts[:2], picture, parts[2]]) == "Look:\n[image: https://a]\nNice?"
    assert content_text([picture, picture]) == "[image: https://a]\n[image: https://a]"


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image_url", "image_url": {"url": PNG}}, True),
        ({"type": "input_file", "filename": "a.pdf", "file_data": "x"}, True),
        ({"type": "input_file", "filename": "a.txt", "file_data": NOTES}, False),
        ({"type": "text", "text": ""}, False),
        ({"type": "document", "source": {"type": "text", "data": "A."}}, False),
    ],
)
def test_what_has_no_text_is_unreadable(part, expected):
    assert is_unreadable(part) is expected


@pytest.mark.parametrize("content", [None, 3, ["hi"], {"type": "text"}])
def test_what_is_no_content_is_refused(content):
    with pytest.raises(OptionError, match="must be text"):
        content_text(content)
