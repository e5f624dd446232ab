"""Bodies as clients write them: loose numbers, half characters, other encodings, double slashes."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest
from support.loopback_server import client_of
from support.scripted_engine import ScriptedEngine
from support.tool_templates import HERMES

from specrun.bindings.models.vocabulary import Vocabulary
from specrun.cli.serve.settings import Bounds

ASK = [{"role": "user", "content": "Hi."}]


def sent(
    vocabulary: Vocabulary,
    body: bytes | dict[str, Any],
    path: str = "/v1/completions",
    headers: dict[str, str] | None = None,
    **settings: Any,
) -> tuple[Any, Any]:
    """The reply, and what the engine was asked."""
    engine: Any = ScriptedEngine(vocabulary, HERMES)
    with client_of(engine, **settings) as client:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = client.post(path, content=data, headers=headers)
    return reply, engine.asked[0] if engine.asked else None


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"max_tokens": 16.0}, "max_tokens", 16),
        ({"max_tokens": "16"}, "max_tokens", 16),
        ({"n_predict": -1.0}, "max_tokens", None),
        ({"temperature": "0.7"}, "temperature", 0.7),
        ({"temperature": -1}, "temperature", 0.0),
        ({"temperature": "-0.5"}, "temperature", 0.0),
        ({"top_k": 40.0}, "top_k", 40),
        ({"top_k": -1}, "top_k", 0),
        ({"seed": 7.0}, "seed", 7),
        ({"repeat_last_n": 8.0}, "repeat_last_n", 8),
        ({"dry_sequence_breakers": '["\\n", ":", "\\"", "*"]'}, "dry_sequence_breakers", None),
        ({"dry_sequence_breakers": '"\\n", ":", "\\"", "*"'}, "dry_sequence_breakers", None),
        ({"dry_sequence_breakers": ["\n", ":", '"', "*"]}, "dry_sequence_breakers", None),
        ({"dry_sequence_breakers": "["}, "dry_sequence_breakers", ("[",)),
        ({"dry_sequence_breakers": ";"}, "dry_sequence_breakers", (";",)),
        ({"dry_sequence_breakers": ""}, "dry_sequence_breakers", ()),
        ({"logit_bias": {"50256": -100, "5": 1}}, "logit_bias", {5: 1.0}),
        ({"logit_bias": [[10**9, False], [5, 1]]}, "logit_bias", {5: 1.0}),
    ],
)
def test_what_has_one_meaning_is_understood(tool_vocabulary, fields, name, value):
    reply, asked = sent(tool_vocabulary, {"prompt": "a", **fields})
    assert reply.status_code == 200, reply.text
    if name == "dry_sequence_breakers" and value is None:
        value = ("\n", ":", '"', "*")
    assert getattr(asked if name == "max_tokens" else asked.params, name) == value


@pytest.mark.parametrize("stream", ["true", 1, "1"])
def test_true_may_be_one(tool_vocabulary, stream):
    reply, _ = sent(tool_vocabulary, {"prompt": "a", "stream": stream})
    assert reply.headers["content-type"].startswith("text/event-stream")


HALVES = [
    (rb'"a\ud83d b"', "a\ufffd b"),
    (rb'"a\ude00 b"', "a\ufffd b"),
    (rb'"\ud83d\ude00"', "\N{GRINNING FACE}"),
    (rb'"\ude00\ud83d\ude00\uD83D"', "\ufffd\N{GRINNING FACE}\ufffd"),
    (rb'"\\ud83d"', "\\ud83d"),
    (rb'"\\\ud83d"', "\\\ufffd"),
    (b'"a\xed\xa0\xbd b"', "a\ufffd b"),
]


@pytest.mark.parametrize(("text", "expected"), HALVES)
def test_half_a_character_is_replaced(tool_vocabulary, text, expected):
    body = b'{"messages": [{"role": "user", "content": ' + text + b"}]}"
    reply, asked = sent(tool_vocabulary, body, "/v1/chat/completions")
    assert reply.status_code == 200, reply.text
    assert expected in tool_vocabulary.detokenize(asked.prompt)


def test_half_a_character_in_arguments_is_replaced(tool_vocabulary):
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a": "x\\ud83d"}'}}
    talk = [*ASK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "b"}]
    reply, asked = sent(tool_vocabulary, {"messages": talk}, "/v1/chat/completions")
    assert reply.status_code == 200, reply.text
    assert '"a": "x' in tool_vocabulary.detokenize(asked.prompt)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
def test_a_mark_before_the_body_is_read(tool_vocabulary, encoding):
    body = json.dumps({"prompt": "é a"}, ensure_ascii=False).encode(encoding)
    reply, asked = sent(tool_vocabulary, body)
    assert reply.status_code == 200, reply.text
    assert tool_vocabulary.detokenize(asked.prompt) == "é a"


BODY = json.dumps({"prompt": "a b"}).encode()


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("x-gzip", gzip.compress(BODY, mtime=0)),
        ("GZIP", gzip.compress(BODY, mtime=0)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", raw_deflate(BODY)),
        ("identity", BODY),
        ("deflate, gzip", gzip.compress(zlib.compress(BODY), mtime=0)),
        ("gzip", gzip.compress(BODY[:4], mtime=0) + gzip.compress(BODY[4:], mtime=0)),
    ],
)
def test_a_compressed_body_is_read(tool_vocabulary, name, data):
    reply, asked = sent(tool_vocabulary, data, headers={"Content-Encoding": name})
    assert reply.status_code == 200, reply.text
    assert tool_vocabulary.detokenize(asked.prompt) == "a b"


@pytest.mark.parametrize("name", ["br", "compress", "gzip, br"])
def test_another_compression_is_refused_by_name(tool_vocabulary, name):
    reply, _ = sent(tool_vocabulary, BODY, headers={"Content-Encoding": name})
    assert reply.status_code == 415
    assert "gzip" in reply.headers["accept-encoding"]
    assert "gzip" in reply.json()["error"]["message"]


@pytest.mark.parametrize("data", [BODY, gzip.compress(BODY, mtime=0)[:-9], b"\x1f\x8bx", b""])
def test_what_is_not_compressed_as_it_says_is_refused(tool_vocabulary, data):
    reply, _ = sent(tool_vocabulary, data, headers={"Content-Encoding": "gzip"})
    assert reply.status_code == 400
    assert "gzip" in reply.json()["error"]["message"]


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_a_small_body_that_becomes_large_is_refused(tool_vocabulary, pack):
    name = "gzip" if pack is gzip.compress else "deflate"
    data = pack(pack(b" " * 50_000_000))
    bounds = Bounds(body_bytes=1 << 20)
    headers = {"Content-Encoding": f"{name}, {name}"}
    reply, _ = sent(tool_vocabulary, data, headers=headers, bounds=bounds)
    assert reply.status_code == 413


@pytest.mark.parametrize(
    "path",
    [
        "/v1//completions",
        "//v1/completions",
        "/v1/completions/",
        "/v1/v1/completions",
        "//completions",
        "/completions//",
    ],
)
def test_an_address_that_was_joined_carelessly_is_found(tool_vocabulary, path):
    reply, asked = sent(tool_vocabulary, {"prompt": "a"}, f"http://127.0.0.1:8080{path}")
    assert reply.status_code == 200, reply.text
    assert asked is not None
