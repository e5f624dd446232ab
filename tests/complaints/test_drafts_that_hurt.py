"""What users of other runtimes report of drafting, each with an input of our own.

Numbers without a name are issues of ggml-org/llama.cpp. Every test has the drafter that ships with
the embedded pair, unless the report is about another one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.tiny_models import F32

from specrun import Engine, OptionError, Runtime, SamplingParams, SpecrunError
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.models.model import Model
from specrun.cli.serve.app import create_app
from specrun.cli.serve.settings import ServeSettings
from specrun.runtime.demo import demo_drafters, demo_target
from specrun.runtime.memory import Loading, LoadOptions, fit_here

COLD = SamplingParams(temperature=0.0)
ASKED = ["What does shutil.copytree do?", "What does os.getcwd do?", "How do I sort a list?"]
DRAFTERS = [
    "draft(n=4)",
    "draft(n=3, sampling=argmax)",
    "draft(tree=2x2x1)",
    "medusa",
    "eagle(n=4)",
    "eagle3(n=4)",
    "prompt-lookup(always=yes)",
    "relay(draft@2, prompt-lookup@3)",
    "ensemble(draft, prompt-lookup)",
    "auto",
]
LENGTH = 24
OPTIONS: dict[str, Any] = {**F32, "n_ctx": 1024, "trust": True}


def texts(runtime: Runtime | Engine, params: SamplingParams, **options: Any) -> list[str]:
    return [
        runtime.chat([{"role": "user", "content": text}], params, max_tokens=LENGTH, **options).text
        for text in ASKED
    ]


@pytest.fixture(scope="module")
def plain() -> list[str]:
    with Runtime.demo("none", **OPTIONS) as runtime:
        return texts(runtime, COLD)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    others = ("prompt-lookup", "draft(n=3, sampling=argmax)")
    with Engine.demo("draft(n=4)", slots=3, others=others, **{**OPTIONS, "n_ctx": 3072}) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[TestClient]:
    with TestClient(create_app(engine, ServeSettings(model="demo"))) as client:
        client.base_url = client.base_url.copy_with(host="127.0.0.1")
        yield client


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_text_at_temperature_0_is_plain_decodings(drafter: str, plain: list[str]) -> None:
    """27407, 23302: with MTP or a draft model, answers at temperature 0 differ."""
    with Runtime.demo(drafter, **OPTIONS) as runtime:
        assert texts(runtime, COLD) == plain


def test_conversations_at_once_do_not_leak_into_one_another(
    engine: Engine, plain: list[str]
) -> None:
    """27296: with MTP, drafts of one request end up in another's text."""
    streams = [
        engine.submit_chat([{"role": "user", "content": text}], COLD, max_tokens=LENGTH)
        for text in ASKED * 3
    ]
    assert [stream.drain().text for stream in streams] == plain * 3
    assert all(stream.drain().stats.accepted > 0 for stream in streams)


def test_log_probabilities_are_the_targets_under_drafts(client: TestClient) -> None:
    """27972: the log-probability of every drafted token is 0."""
    body = {"messages": [{"role": "user", "content": ASKED[0]}], "temperature": 0, "logprobs": True}

    def logprobs(n_max: int) -> list[float]:
        sent = {**body, "speculative": {"n_max": n_max}, "max_tokens": LENGTH}
        (choice,) = client.post("/v1/chat/completions", json=sent).json()["choices"]
        return [each["logprob"] for each in choice["logprobs"]["content"]]

    without, with_drafts = logprobs(0), logprobs(4)
    assert with_drafts == pytest.approx(without, abs=1e-3)
    assert min(with_drafts) < -0.01


def test_calls_are_whole_under_drafts(client: TestClient) -> None:
    """27296, vllm 46118: arguments of calls are cut or mixed when MTP drafts them."""
    tool = {
        "type": "function",
        "function": {
            "name": "copy",
            "parameters": {
                "type": "object",
                "properties": {"to": {"enum": ["a", "b"]}, "n": {"enum": [1, 22, 333]}},
                "required": ["to", "n"],
                "additionalProperties": False,
            },
        },
    }
    body = {
        "messages": [{"role": "user", "content": "Copy it."}],
        "tools": [tool],
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 60,
        "stream": True,
    }

    def streamed(n_max: int) -> str:
        sent = {**body, "speculative": {"n_max": n_max}}
        lines = client.post("/v1/chat/completions", json=sent).text.split("\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        calls = [
            call["function"]["arguments"]
            for event in events
            for choice in event["choices"]
            for call in choice["delta"].get("tool_calls", ())
        ]
        return "".join(calls)

    assert streamed(4) == streamed(0)
    assert json.loads(streamed(4)).keys() == {"to", "n"}


def test_a_grammar_binds_drafted_tokens_too(client: TestClient) -> None:
    """vllm 40875: structured outputs are broken while drafts are on."""
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["x", "yy"]}, "n": {"enum": [1, 20]}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    body = {"messages": [{"role": "user", "content": ASKED[1]}], "response_format": form}
    for n_max in (0, 4):
        for seed in range(3):
            sent = {**body, "temperature": 1, "seed": seed, "speculative": {"n_max": n_max}}
            (choice,) = client.post("/v1/chat/completions", json=sent).json()["choices"]
            found = json.loads(choice["message"]["content"])
            assert (found["name"] in ("x", "yy"), found["n"] in (1, 20)) == (True, True)


def test_counts_are_those_of_the_text(client: TestClient) -> None:
    """Reported of several servers: tokens and accepted drafts do not add up under speculation."""
    body = {"messages": [{"role": "user", "content": ASKED[0]}], "temperature": 0, "logprobs": True}
    reply = client.post("/v1/chat/completions", json=body).json()
    n_tokens = len(reply["choices"][0]["logprobs"]["content"])
    timings, usage = reply["timings"], reply["usage"]
    assert usage["completion_tokens"] == n_tokens + 1  # with the token that ends the answer
    assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]
    tokens = timings["draft_n_accepted"] + reply["specrun"]["rounds"]
    assert tokens - n_tokens in (1, 2)  # the round of an accepted end has no further token


def test_a_request_switches_drafts_off_or_chooses_others(client: TestClient) -> None:
    """Wished for in several reports: a server drafts for all requests or for none."""
    body = {"messages": [{"role": "user", "content": ASKED[0]}], "temperature": 0}
    for asked, drafter in (({"n_max": 0}, 0), ({"drafter": "none"}, 0), ({"n_max": 2}, 2)):
        reply = client.post("/v1/chat/completions", json={**body, "speculative": asked}).json()
        assert (reply["timings"]["draft_n"] > 0) == (drafter > 0)
    chosen = {"drafter": "prompt-lookup"}
    reply = client.post("/v1/chat/completions", json={**body, "speculative": chosen}).json()
    assert reply["specrun"]["drafter"] == "prompt-lookup"


@pytest.mark.parametrize(
    ("drafter", "sentence"),
    [
        ("drft", "there is no drafter 'drft': did you mean 'draft'?"),
        ("draft(nothing.gguf)", "there is no file nothing.gguf"),
        ("mtp", "has no NextN blocks"),
        ("relay(draft@2, nothing@3)", "there is no drafter 'nothing'"),
    ],
)
def test_a_drafter_that_cannot_be_used_is_named(drafter: str, sentence: str) -> None:
    """27342, lmstudio 2100: a drafter that is not recognised is left out without a word."""
    with pytest.raises(SpecrunError) as caught:
        Runtime.demo(drafter, **OPTIONS)
    assert sentence in str(caught.value)


def test_chained_drafters_end_and_are_all_used(plain: list[str]) -> None:
    """27342, 23268: of two drafters one is dropped, or both loop without an end."""
    text = "Return the current working directory. " * 8 + "Return the current"
    with Runtime.demo("relay(prompt-lookup(always=yes)@2, draft@3)", **OPTIONS) as runtime:
        ends = dict.fromkeys(runtime.vocabulary.end_of_generation, -math.inf)
        endless = COLD.replace(logit_bias=ends)
        result = runtime.generate(text, endless, max_tokens=LENGTH)
    with Runtime.demo("none", **OPTIONS) as runtime:
        assert result.text == runtime.generate(text, endless, max_tokens=LENGTH).text
    assert len(result.stats.acceptance_by_position) > 2  # behind the first one's two tokens


def test_the_memory_plan_counts_the_drafter() -> None:
    """23472, 25465: the fit leaves the draft model out, and memory runs out later."""
    fitted = [
        fit_here(Loading(demo_target(), drafter, LoadOptions(ContextOptions()), demo_drafters()))
        for drafter in ("none", "draft")
    ]
    alone, pair = (
        sum(sum(row.by_place.values()) for row in each.plan.rows)
        for each in fitted
        if each is not None
    )
    with Model(demo_drafters()["draft"], vocab_only=True) as model:
        weights = model.path.stat().st_size
    assert pair - alone > 0.8 * weights


def test_drawn_drafts_gain_above_temperature_0() -> None:
    """27694, ds4 951: drafts that are compared with a sample gain nothing above temperature 0."""
    warm = SamplingParams(temperature=2.0, seed=3, top_k=0, top_p=1.0, min_p=0.0)
    rates = {}
    for sampling in ("with", "argmax"):
        with Runtime.demo(f"draft(n=4, sampling={sampling})", **OPTIONS) as runtime:
            drawn = [
                runtime.generate(text, warm, max_tokens=48, index=index).stats
                for text in ASKED
                for index in range(4)
            ]
        rates[sampling] = sum(each.accepted for each in drawn) / sum(each.rounds for each in drawn)
    assert rates["with"] > 1.3 * rates["argmax"]


def test_a_rule_that_is_not_exact_says_so(engine: Engine) -> None:
    """Others trade the distribution for speed by default; here that has to be asked for."""
    result = engine.generate(ASKED[0], COLD, max_tokens=4)
    assert (result.stats.exact, result.stats.rule) == (True, "exact")
    with pytest.raises(OptionError, match="typical"):
        engine.generate(ASKED[0], COLD, max_tokens=4, accept="typical")
