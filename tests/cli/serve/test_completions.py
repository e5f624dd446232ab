"""Completions and chat completions: the engine's own texts, true log-probabilities, usage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.loopback_server import events_of

from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.chat import chat_tokens
from specrun.runtime.engine import Engine

QUESTION = "What does shutil.copytree do?"
MESSAGES = [{"role": "user", "content": QUESTION}]
ANSWER = "Recursively copy a directory tree and return the destination directory."
PLAIN = {"speculative": {"drafter": "none"}}


@pytest.fixture(scope="module")
def plain() -> Iterator[Runtime]:
    with Runtime.demo("none", n_ctx=2048, n_threads=1, trust=True) as runtime:
        yield runtime


def ask(client: TestClient, path: str, **fields: Any) -> dict[str, Any]:
    reply = client.post(path, json=fields)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def complete(client: TestClient, **fields: Any) -> dict[str, Any]:
    return ask(client, "/v1/completions", **fields)


def test_a_chat_is_answered_by_the_target(client: TestClient) -> None:
    reply = ask(client, "/v1/chat/completions", messages=MESSAGES, temperature=0)
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER}
    assert choice["finish_reason"] == "stop"
    assert reply["specrun"]["exact"] is True


def test_a_stream_has_an_event_a_round_and_the_same_text(client: TestClient) -> None:
    options = {"include_usage": True}
    fields = {"messages": MESSAGES, "temperature": 0, "stream_options": options}
    *chunks, last = events_of(client, "/v1/chat/completions", **fields)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert last["choices"] == []
    # The role, a chunk a round at most (slow readers get several in one), and the reason.
    assert len(chunks) <= last["specrun"]["rounds"] + 2
    assert last["specrun"]["tokens_per_round"] > 1.5


POINT_MASSES = ("none", "prompt-lookup", "draft(n=3, sampling=argmax)")


@pytest.mark.parametrize(
    ("drafter", "fields"),
    [
        (None, {"temperature": 0}),  # at another temperature only its law is the target's
        *((drafter, {"temperature": 0}) for drafter in POINT_MASSES),
        *((drafter, {"temperature": 1.0, "seed": 7}) for drafter in POINT_MASSES),
    ],
)
def test_texts_are_those_of_plain_decoding(
    client: TestClient, plain: Runtime, drafter: str | None, fields: dict[str, Any]
) -> None:
    prompt = "def copy(src, dst):"
    params = SamplingParams(**fields)
    wanted = plain.generate(prompt, params, max_tokens=24)
    speculative = {} if drafter is None else {"speculative": {"drafter": drafter}}
    reply = complete(client, prompt=prompt, max_tokens=24, **fields, **speculative)
    assert reply["choices"][0]["text"] == wanted.text
    assert reply["usage"]["completion_tokens"] == wanted.usage.completion_tokens
    if drafter is not None:
        assert reply["specrun"]["drafter"] == drafter


def test_seeds_are_reported_and_repeat_the_answer(client: TestClient) -> None:
    fields = {"prompt": "os.", "max_tokens": 12, "temperature": 1.5, **PLAIN}
    first = complete(client, **fields)
    again = complete(client, **fields, seed=first["specrun"]["seed"])
    other = complete(client, **fields, seed=first["specrun"]["seed"] + 1)
    texts = [reply["choices"][0]["text"] for reply in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]


def test_choices_have_noise_of_their_own(client: TestClient, plain: Runtime) -> None:
    fields = {"prompt": ["os.", "import "], "n": 2, "seed": 5, "temperature": 1.5, "max_tokens": 8}
    reply = complete(client, **fields, **PLAIN)
    texts = [choice["text"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    params = SamplingParams(temperature=1.5, seed=5)
    wanted = [
        plain.stream(prompt, params, max_tokens=8, index=index).drain().text
        for prompt in ("os.", "import ")
        for index in range(2)
    ]
    assert texts == wanted
    assert texts[0] != texts[1]


def test_streamed_choices_come_apart(client: TestClient) -> None:
    fields = {"prompt": "os.", "n": 3, "seed": 5, "temperature": 1.5, "max_tokens": 8, **PLAIN}
    texts, ends = ["", "", ""], 0
    for chunk in events_of(client, "/v1/completions", **fields):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        ends += choice["finish_reason"] is not None
    assert ends == 3
    assert texts == [choice["text"] for choice in complete(client, **fields)["choices"]]


def test_log_probabilities_are_the_targets_under_speculation(
    client: TestClient, plain: Runtime, demo_engine: Engine
) -> None:
    prompt = chat_tokens(demo_engine.chat_template, demo_engine.vocabulary, MESSAGES)
    params = SamplingParams(temperature=1.6, seed=4, top_k=0, top_p=1.0, min_p=0.0)
    events = plain.stream(prompt, params, max_tokens=24, logprobs=True, top_logprobs=3)
    ends = demo_engine.vocabulary.end_of_generation
    wanted = [
        (event.logprob, event.top_logprobs()) for event in events if event.token_id not in ends
    ]
    fields = {"temperature": 1.6, "seed": 4, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 24}
    speculative = {"drafter": "draft(n=3, sampling=argmax)"}
    reply = complete(client, prompt=prompt, **fields, logprobs=3, speculative=speculative)
    assert reply["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 3
    found = reply["choices"][0]["logprobs"]
    values = [value for value, _ in wanted]
    assert found["token_logprobs"] == pytest.approx(values, abs=5e-3)
    assert min(values) < -0.5  # they are not all 0, as a server that forgot them would say
    for likely, (_, best) in zip(found["top_logprobs"], wanted, strict=True):
        assert list(likely.values()) == pytest.approx([value for _, value in best], abs=2e-2)
    text = reply["choices"][0]["text"]
    assert [text[at:][:1] for at in found["text_offset"]] == [t[:1] for t in found["tokens"]]


def test_chat_log_probabilities_are_the_same_streamed(client: TestClient) -> None:
    fields = {"messages": MESSAGES, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = ask(client, "/v1/chat/completions", **fields)["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in whole) == ANSWER
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in whole)
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole)
    streamed = [
        entry
        for chunk in events_of(client, "/v1/chat/completions", **fields)
        for entry in chunk["choices"][0].get("logprobs", {"content": ()})["content"]
    ]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole]
    for entry, other in zip(streamed, whole, strict=True):
        assert entry["logprob"] == pytest.approx(other["logprob"], abs=2e-3)


def test_usage_counts_drafts_and_what_was_cached(client: TestClient) -> None:
    fields = {"messages": [{"role": "user", "content": "What does os.getcwd do? Say it."}]}
    for n_cached in (False, True):
        reply = ask(client, "/v1/chat/completions", **fields, temperature=0)
        usage, timings = reply["usage"], reply["timings"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 1) >= n_cached
        details = usage["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == timings["draft_n_accepted"] > 0
        drafted = sum(details.values())
        assert drafted == timings["draft_n"]


def test_nothing_is_drafted_where_a_request_asks_for_none(client: TestClient) -> None:
    for fields in (PLAIN, {"speculative.drafter": "none"}, {"speculative.n_max": 0}):
        reply = complete(client, prompt="Recursively copy", max_tokens=8, temperature=0, **fields)
        assert reply["timings"]["draft_n"] == 0
    reply = complete(client, prompt="Recursively copy", max_tokens=8, temperature=0)
    assert reply["timings"]["draft_n"] > 0


def test_stop_texts_end_an_answer_and_are_left_out(client: TestClient) -> None:
    for streamed in (False, True):
        fields = {"messages": MESSAGES, "temperature": 0, "stop": ["tree and"]}
        if streamed:
            chunks = events_of(client, "/v1/chat/completions", **fields)
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            reason = chunks[-1]["choices"][0]["finish_reason"]
        else:
            choice = ask(client, "/v1/chat/completions", **fields)["choices"][0]
            text, reason = choice["message"]["content"], choice["finish_reason"]
        assert (text, reason) == ("Recursively copy a directory ", "stop")


def test_lengths_end_an_answer(client: TestClient) -> None:
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        reply = complete(client, prompt="Recursively copy", temperature=0, **{name: 3})
        assert reply["usage"]["completion_tokens"] == 3
        assert reply["choices"][0]["finish_reason"] == "length"


def test_prompts_may_be_tokens_and_are_echoed(client: TestClient, demo_engine: Engine) -> None:
    text = "Recursively copy"
    tokens = demo_engine.vocabulary.tokenize(text)
    fields = {"max_tokens": 4, "temperature": 0, "echo": True}
    reply = complete(client, prompt=[text, tokens], **fields)
    first, second = (choice["text"] for choice in reply["choices"])
    assert first == second
    assert first.startswith(text)
    chunks = events_of(client, "/v1/completions", prompt=tokens, **fields)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == first


def test_biases_forbid_and_force_tokens(client: TestClient, demo_engine: Engine) -> None:
    fields = {"prompt": "Recursively", "max_tokens": 1, "temperature": 0}
    usual = complete(client, **fields)["choices"][0]["text"]
    (token,) = demo_engine.vocabulary.tokenize(usual, add_special=False)
    for bias in ({str(token): -100}, [[token, False]], [[usual, False]]):
        assert complete(client, **fields, logit_bias=bias)["choices"][0]["text"] != usual
    forced = complete(client, **fields, logit_bias={"300": 10**400})["choices"][0]["text"]
    assert forced == demo_engine.vocabulary.piece(300).decode()


def test_samplers_have_the_names_of_llama_cpp(client: TestClient, plain: Runtime) -> None:
    settings = {
        "temperature": 1.2,
        "top_k": 30,
        "typical_p": 0.9,
        "xtc_probability": 0.3,
        "dry_multiplier": 0.8,
        "repeat_penalty": 1.1,
        "dynatemp_range": 0.2,
        "samplers": ["penalties", "top_k", "typ_p", "xtc", "temperature", "dry"],
    }
    wanted = plain.generate("os.", SamplingParams(**settings, seed=3), max_tokens=12)
    reply = complete(client, prompt="os.", max_tokens=12, seed=3, **settings, **PLAIN)
    assert reply["choices"][0]["text"] == wanted.text
    names = {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2}
    adaptive = SamplingParams(mirostat=2, mirostat_ent=3.0, mirostat_lr=0.2, seed=3)
    wanted = plain.generate("os.", adaptive, max_tokens=12)
    reply = complete(client, prompt="os.", max_tokens=12, seed=3, **names, **PLAIN)
    assert reply["choices"][0]["text"] == wanted.text


def test_unknown_fields_are_ignored_and_null_is_nothing(client: TestClient) -> None:
    fields = {"prompt": "os.", "max_tokens": 2, "cache_prompt": True, "user": "me", "temp": 7}
    assert complete(client, **fields, stop=None, temperature=None, tools=None)["choices"]
