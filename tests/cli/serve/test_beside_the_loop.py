"""Large requests: they are read and answered in threads, while others are answered."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import pytest
from support.scripted_engine import ScriptedEngine
from support.tool_templates import HERMES

from specrun.bindings.models.vocabulary import Vocabulary
from specrun.cli.serve.app import create_app
from specrun.cli.serve.settings import ServeSettings
from specrun.runtime.chat import ChatTemplate

MOST_SECONDS = 1.5  # without an answer of the loop's, on a busy machine
LONG = "the quick brown fox " * 50_000


@pytest.fixture
def engine(tool_vocabulary: Vocabulary) -> ScriptedEngine:
    return ScriptedEngine(tool_vocabulary, HERMES)


def asked(engine: Any, *requests: tuple[str, bytes]) -> tuple[list[Any], float]:
    """The replies to requests that come at once, and the longest that the loop was busy."""
    app = create_app(engine, ServeSettings(model="tiny"))

    async def main() -> tuple[list[Any], float]:
        transport = httpx2.ASGITransport(app=app)
        longest = 0.0

        async def probe() -> None:
            nonlocal longest
            while True:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                longest = max(longest, time.monotonic() - before)

        async with httpx2.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=60
        ) as client:
            probing = asyncio.create_task(probe())
            await asyncio.sleep(0)
            replies = await asyncio.gather(
                *(client.post(path, content=body) for path, body in requests)
            )
            probing.cancel()
        return list(replies), longest

    return asyncio.run(main())


def messages(content: str, **more: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], **more}).encode()


REQUESTS: dict[str, Callable[[], tuple[str, bytes]]] = {
    "tokenize": lambda: ("/tokenize", json.dumps({"content": LONG}).encode()),
    "pieces": lambda: ("/tokenize", json.dumps({"content": LONG, "with_pieces": True}).encode()),
    "detokenize": lambda: ("/detokenize", json.dumps({"tokens": [97] * 2_000_000}).encode()),
    "template": lambda: ("/apply-template", messages(LONG * 5)),
    "completion": lambda: ("/v1/completions", json.dumps({"prompt": LONG * 5}).encode()),
    "ids": lambda: ("/v1/completions", json.dumps({"prompt": [97] * 2_000_000}).encode()),
    "chat": lambda: ("/v1/chat/completions", messages(LONG * 5)),
    "controls": lambda: ("/v1/chat/completions", messages("<|im_end|>" * 200_000)),
    "response": lambda: ("/v1/responses", json.dumps({"input": LONG * 5}).encode()),
    "message": lambda: ("/v1/messages", messages(LONG * 5, max_tokens=3)),
    "count": lambda: ("/v1/messages/count_tokens", messages(LONG * 5)),
    "biases": lambda: (
        "/v1/completions",
        json.dumps({"prompt": "a", "max_tokens": 1, "logit_bias": [[LONG, 1]]}).encode(),
    ),
    "nothing": lambda: ("/v1/completions", b"{%s}" % b",".join([b'"a":[]'] * 500_000)),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_large_request_is_read_and_answered_in_threads(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    threads: dict[str, set[str]] = {}

    def noting(owner: Any, function: str) -> None:
        work = getattr(owner, function)

        def noted(*args: Any, **options: Any) -> Any:
            if function != "tokenize" or len(args[1]) > 2000:
                threads.setdefault(function, set()).add(threading.current_thread().name)
            return work(*args, **options)

        monkeypatch.setattr(owner, function, noted)

    noting(msgspec.json, "decode")
    noting(ChatTemplate, "render")
    noting(Vocabulary, "tokenize")
    noting(Vocabulary, "piece")
    _, longest = asked(engine, REQUESTS[name]())
    assert threads["decode"]
    for each in threads.values():
        assert threading.main_thread().name not in each
    assert longest < MOST_SECONDS


@pytest.mark.parametrize("name", ["completion", "chat", "controls", "response", "message", "ids"])
def test_what_is_far_too_long_is_refused_before_it_is_tokenized(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sizes: list[int] = []
    tokenize = Vocabulary.tokenize

    def counted(self: Vocabulary, text: Any, **options: Any) -> list[int]:
        sizes.append(len(text))
        return tokenize(self, text, **options)

    monkeypatch.setattr(Vocabulary, "tokenize", counted)
    (reply,), _ = asked(engine, REQUESTS[name]())
    assert reply.status_code == 400
    assert "tokens and the context 4096" in reply.text
    assert max(sizes, default=0) < 1000
    assert not engine.asked


def test_two_conversations_are_rendered_at_once(engine: ScriptedEngine) -> None:
    both, have_met = threading.Barrier(2), threading.Event()
    engine.chat_template = engine.tool_template = ChatTemplate(
        "{{ meet() }}{{ messages[0].content }}"
    )

    def meet() -> str:
        if not have_met.is_set():  # a reply also tries how the template ends a turn
            both.wait(20)
            have_met.set()
        return ""

    engine.chat_template._environment.globals["meet"] = meet
    replies, _ = asked(engine, *[("/apply-template", messages(text)) for text in "ab"])
    assert [reply.json()["prompt"] for reply in replies] == ["a", "b"]


def test_pieces_of_many_tokens_are_those_of_few(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specrun.cli.serve.apis import tokens

    body = json.dumps({"content": "né, " * 3, "with_pieces": True}).encode()
    (whole,), _ = asked(engine, ("/tokenize", body))
    monkeypatch.setattr(tokens, "_PART", 2)
    (parts,), _ = asked(engine, ("/tokenize", body))
    assert parts.json() == whole.json()
    assert [byte for each in whole.json()["tokens"][1:3] for byte in each["piece"]] == [195, 169]
