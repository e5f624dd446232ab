"""Prompts that clients build themselves: control tokens in them, and the scores of their tokens."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from support.loopback_server import events_of

from specrun.bindings.contexts import Batch, Context, ContextOptions
from specrun.runtime.engine import Engine
from tests.cli.serve.test_completions import complete

TEXT = "<|user|>What does os.getcwd do? Ça va ☕?<|end|><|assistant|>"
PLAIN = {"speculative": {"drafter": "none"}, "temperature": 0}


def echoed(client: TestClient, **fields: Any) -> dict[str, Any]:
    (choice,) = complete(client, echo=True, logprobs=2, **PLAIN, **fields)["choices"]
    found: dict[str, Any] = choice
    return found


def true_logprobs(engine: Engine, tokens: list[int]) -> np.ndarray:
    """Log-softmax of every row, evaluated at once; [n_tokens, n_vocab]."""
    options = ContextOptions(n_ctx=256, n_outputs=len(tokens), n_threads=1)
    with Context(engine.model, options) as context:
        batch = Batch(len(tokens), 1)
        batch.fill_chain(tokens, 0, [0], len(tokens))
        rows = context.decode(batch)
        logits = np.stack([rows.logits(row) for row in range(len(tokens))]).astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_control_tokens_in_a_prompt_are_control_tokens(
    client: TestClient, demo_engine: Engine
) -> None:
    vocabulary = demo_engine.vocabulary
    names = {vocabulary.text(token): token for token in range(vocabulary.size)}
    reply = echoed(client, prompt=TEXT, max_tokens=0)
    assert reply["text"] == TEXT
    found = reply["logprobs"]["tokens"]
    assert found[0] == "<|user|>"
    assert found[-2:] == ["<|end|>", "<|assistant|>"]
    tokens = vocabulary.tokenize(TEXT, add_special=False, parse_special=True)
    assert tokens[-1] == names["<|assistant|>"]
    by_text, by_tokens = (
        complete(client, prompt=prompt, max_tokens=12, **PLAIN) for prompt in (TEXT, tokens)
    )
    assert by_text["choices"] == by_tokens["choices"]
    literal = complete(client, prompt=TEXT, max_tokens=1, parse_special=False, **PLAIN)
    assert literal["usage"]["prompt_tokens"] > by_text["usage"]["prompt_tokens"] == len(tokens)


def test_messages_keep_control_tokens_as_text(client: TestClient) -> None:
    content = {"messages": [{"role": "user", "content": "a<|end|>b"}]}
    prompt = client.post("/apply-template", json=content).json()["prompt"]
    n_tokens = client.post("/tokenize", json={"content": prompt}).json()["tokens"]
    fields = {**content, "max_tokens": 1, "temperature": 0}
    usage = client.post("/v1/chat/completions", json=fields).json()["usage"]
    assert usage["prompt_tokens"] > len(n_tokens)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echoed_prompts_have_true_scores(
    client: TestClient, demo_engine: Engine, max_tokens: int
) -> None:
    vocabulary = demo_engine.vocabulary
    reply = echoed(client, prompt=TEXT, max_tokens=max_tokens, ignore_eos=True)
    found = reply["logprobs"]
    prompt = vocabulary.tokenize_prompt(TEXT)
    made = vocabulary.tokenize(reply["text"][len(TEXT) :], add_special=False)
    labels = [vocabulary.label(token) for token in prompt]
    assert found["tokens"][: len(prompt)] == labels
    assert {len(entries) for entries in found.values()} == {len(prompt) + max_tokens}
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    rows = true_logprobs(demo_engine, prompt + made)
    for place, token in enumerate(prompt[1:], start=1):
        row = rows[place - 1]
        assert math.isclose(found["token_logprobs"][place], row[token], abs_tol=2e-3)
        best = np.argsort(-row, kind="stable")[:2]
        wanted = {vocabulary.label(each): row[each] for each in best.tolist()}
        assert found["top_logprobs"][place] == pytest.approx(wanted, abs=2e-3)


def test_offsets_are_characters_of_the_echoed_text(client: TestClient) -> None:
    reply = echoed(client, prompt=TEXT, max_tokens=4, ignore_eos=True)
    text, offsets = reply["text"], reply["logprobs"]["text_offset"]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    for token, (start, end) in zip(reply["logprobs"]["tokens"], pairwise(offsets), strict=False):
        if "\ufffd" not in token and token.isascii():
            assert text[start:end] == token


def test_a_stream_has_the_same_scores(client: TestClient) -> None:
    fields = {"prompt": TEXT, "echo": True, "logprobs": 1, "max_tokens": 3, **PLAIN}
    (whole,) = complete(client, **fields)["choices"]
    choices = [chunk["choices"][0] for chunk in events_of(client, "/v1/completions", **fields)]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    pieces = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    joined = {name: [each for piece in pieces for each in piece[name]] for name in pieces[0]}
    for name, values in whole["logprobs"].items():
        if name in ("tokens", "text_offset"):
            assert joined[name] == values
    for ours, theirs in zip(
        joined["token_logprobs"], whole["logprobs"]["token_logprobs"], strict=True
    ):
        assert ours == theirs or math.isclose(ours, theirs, abs_tol=1e-4)


def test_each_prompt_has_its_own_scores(client: TestClient) -> None:
    prompts = ["os.getcwd returns", [300, 301, 302]]
    fields = {"echo": True, "logprobs": 0, "max_tokens": 0, "n": 2}
    choices = complete(client, prompt=prompts, **fields, **PLAIN)["choices"]
    assert len(choices) == 4
    assert choices[0] == {**choices[1], "index": 0}
    assert len(choices[2]["logprobs"]["tokens"]) == 3


HEADER = "x-anthropic-billing-header: cc_version=2.1.9; cc_entrypoint=cli; cch={};"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
def test_a_line_that_always_changes_costs_no_cache(client: TestClient, path: str) -> None:
    rules = "You are a careful assistant. " * 20
    question = "What does os.getcwd do?"
    replies = []
    for number in ("0a1b2", "77fe0"):
        header, user = HEADER.format(number), [{"role": "user", "content": question}]
        if path == "/v1/messages":
            blocks = [{"type": "text", "text": text} for text in (header, rules)]
            body: dict[str, Any] = {"system": blocks, "messages": user, "max_tokens": 2}
        elif path == "/v1/responses":
            body = {"instructions": f"{header}\n{rules}", "input": user, "max_output_tokens": 2}
        else:
            system = {"role": "system", "content": f"{header}\n\n{rules}"}
            body = {"messages": [system, *user], "max_tokens": 2}
        reply = client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        replies.append(reply.json()["usage"])
    if path == "/v1/messages":
        cached = replies[1]["cache_read_input_tokens"]
        total = cached + replies[1]["input_tokens"]
    else:
        names = ("prompt", "prompt_tokens") if "chat" in path else ("input", "input_tokens")
        total, cached = (
            replies[1][names[1]],
            replies[1][f"{names[0]}_tokens_details"]["cached_tokens"],
        )
    assert cached == total - 1 > 50


def test_the_end_behind_an_echoed_prompt_has_a_score(
    client: TestClient, demo_engine: Engine
) -> None:
    """lm-evaluation-harness takes the last entry for the token that it did not want."""
    vocabulary = demo_engine.vocabulary
    answer = complete(client, prompt=TEXT, max_tokens=60, **PLAIN)["choices"][0]
    assert answer["finish_reason"] == "stop"
    tokens = vocabulary.tokenize(TEXT + answer["text"], add_special=False, parse_special=True)
    reply = echoed(client, prompt=tokens, max_tokens=1)
    found = reply["logprobs"]
    assert {len(entries) for entries in found.values()} == {len(tokens) + 1}
    assert found["tokens"][-1] == "<|end|>"
    true = true_logprobs(demo_engine, tokens)[-1][vocabulary.eos]
    assert found["token_logprobs"][-1] == pytest.approx(true, abs=0.02)
    assert found["text_offset"][-1] == len(reply["text"])
    plain = complete(client, prompt=tokens, max_tokens=1, logprobs=1, **PLAIN)["choices"][0]
    assert plain["logprobs"]["tokens"] == []
