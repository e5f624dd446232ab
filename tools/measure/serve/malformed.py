"""Malformed bodies: valid requests, mutated in their values, their structure and their bytes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

_MESSAGES = [{"role": "user", "content": "What does os.getcwd do?"}]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}}}
_CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
VALID: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {
        "prompt": "os.",
        "max_tokens": 2,
        "temperature": 0.5,
        "n": 1,
        "stop": ["x"],
        "logprobs": 1,
        "logit_bias": {"5": 1.0},
        "seed": 3,
        "stream": False,
        "samplers": ["top_k", "temperature"],
        "speculative": {"drafter": "none", "n_max": 2},
    },
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
        "max_completion_tokens": 2,
        "top_p": 0.9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"a": 1},
        "response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}},
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "reasoning_format": "auto",
    },
    "/completions": {"prompt": "os.", "max_tokens": 2, "grammar": 'root ::= "a" | "b"'},
    "/v1/responses": {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "tools": [{"type": "function", **_FUNCTION}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "look"}]},
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 2,
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "x"},
                    {"type": "tool_use", "id": "t", "name": "look", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t",
                        "content": [{"type": "text", "text": "x"}],
                    },
                    {"type": "text", "text": "So?"},
                ],
            },
        ],
        "tools": [{"name": "look", "input_schema": _FUNCTION["parameters"]}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "stop_sequences": ["x"],
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "max_tokens": 2,
    },
    "/tokenize": {"content": "os.", "with_pieces": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": {"messages": _MESSAGES},
    "/infill": {
        "input_prefix": "a",
        "input_suffix": "b",
        "input_extra": [{"filename": "f", "text": "x"}],
        "prompt": "",
        "n_predict": 2,
    },
}
"""A request for each path, which the server answers or says that its model cannot."""

_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**200, 1e308, -0.0, 0.5),
    *("", "x", "\x00", "\ud800", "\u202e", "<|user|>", "a" * 5000, "{{ 7 * 7 }}"),
    *([], {}, [[]], [None], [{}], [1, "a"], {"a": {"b": []}}, {"": ""}, [[1, 2], [3]]),
    *("required", "<|end|>", {"type": "text"}, {"name": []}, {**_CALL, "name": "look"}),
)
_RAW = (b"NaN", b"Infinity", b"1e999", b"-", b"01", b'"\\ud800"', b'"\xff"', b"{", b"]", b'"')


def malformed_bodies(seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield paths and bodies without end, the same ones for a seed."""
    source = random.Random(seed)
    ways = (_odd_values, _odd_values, _odd_values, _odd_bytes, _cut, _deep, _raw_value, _noise)
    while True:
        path = source.choice(list(VALID))
        yield path, source.choice(ways)(dict(VALID[path]), source)


def _written(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


def _odd_values(body: dict[str, Any], source: random.Random) -> bytes:
    """Replace one to three values, at any depth, and leave out some of them."""
    changed = json.loads(_written(body))
    for _ in range(source.randrange(1, 4)):
        place: Any = changed
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = source.choice(keys)
            inner = place[key]
            if isinstance(inner, dict | list) and inner and source.random() < 0.5:
                place = inner
                continue
            if source.random() < 0.25:
                del place[key]
            else:
                place[key] = copy.deepcopy(source.choice(_ODD))
            break
    return _written(changed)


def _odd_bytes(body: dict[str, Any], source: random.Random) -> bytes:
    """Change, put in or take out some bytes."""
    data = bytearray(_written(body))
    for _ in range(source.randrange(1, 6)):
        at = source.randrange(len(data))
        what = source.randrange(3)
        if what == 0:
            data[at] = source.randrange(256)
        elif what == 1:
            data.insert(at, source.randrange(256))
        elif len(data) > 1:
            del data[at]
    return bytes(data)


def _cut(body: dict[str, Any], source: random.Random) -> bytes:
    data = _written(body)
    return data[: source.randrange(len(data))]


def _deep(body: dict[str, Any], source: random.Random) -> bytes:
    """Nest a value of some field deeply."""
    depth = source.choice((10, 64, 65, 500, 20_000))
    first, last = source.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return _with_raw(body, source, depth * first + b"1" + depth * last)


def _raw_value(body: dict[str, Any], source: random.Random) -> bytes:
    return _with_raw(body, source, source.choice(_RAW))


def _with_raw(body: dict[str, Any], source: random.Random, raw: bytes) -> bytes:
    """Return the body with these bytes as the value of a field."""
    name = source.choice(list(body))
    marked = _written({**body, name: "@here@"})
    return marked.replace(b'"@here@"', raw)


def _noise(_body: dict[str, Any], source: random.Random) -> bytes:
    return source.randbytes(source.randrange(200))
