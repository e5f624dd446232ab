"""What the page reads of a stream: the traces of chat completions, and what may be chosen."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient
from support.loopback_server import events_of

QUESTION = [{"role": "user", "content": "What does os.tcgetpgrp do?"}]


def chunks(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": QUESTION, "seed": 7, "max_tokens": 40, **fields}
    return events_of(client, "/v1/chat/completions", **body)


def said(events: list[dict[str, Any]]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def rounds(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for event in events for each in event.get("specrun", {}).get("rounds", [])]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_traces_spell_the_text_and_change_nothing(client: TestClient, temperature: float) -> None:
    traced = chunks(client, temperature=temperature, speculative={"trace": True})
    plain = chunks(client, temperature=temperature)
    assert said(traced) == said(plain) != ""
    assert rounds(plain) == []
    told = rounds(traced)
    assert [each["number"] for each in told] == list(range(len(told)))
    spelled = ""
    for each in told:
        spelled += "".join(each["nodes"][node]["text"] for node in each["path"])
        spelled += each["next_token"]["text"] if each["next_token"] else ""
    assert spelled.removesuffix("<|end|>") == said(traced)


def test_a_round_says_what_the_page_shows(client: TestClient) -> None:
    events = chunks(client, temperature=0.8, speculative={"trace": True})
    for each in rounds(events):
        assert each["drafter"] == "draft"
        assert each["rule"] == "exact"
        assert set(each["seconds"]) == {"target", "drafter", "python", "waiting"}
        assert each["evaluation"]["together"] == 1 + len(each["nodes"])
        assert each["evaluation"]["expected_s"] > 0.0
        for law in each["laws"]:
            assert law["target"]
            assert {*law["target"][0]} == {"token", "text", "probability"}
        for node in each["nodes"]:
            assert 0.0 <= node["target"] <= 1.0
            assert 0.0 < node["draft"] <= 1.0
    with_text = [event for event in events if event["choices"] and said([event])]
    assert all(rounds([event]) for event in with_text), "text comes with the rounds that said it"


def test_requests_choose_drafter_and_rule_from_what_is_offered(client: TestClient) -> None:
    told = client.get("/props").json()["speculative"]
    assert told["drafters"][0] == told["drafter"]
    assert told["rules"][0] == told["accept"] == "exact"
    for drafter in told["drafters"]:
        events = chunks(client, temperature=0, speculative={"trace": True, "drafter": drafter})
        assert {each["drafter"] for each in rounds(events)} == {drafter}
    for rule in told["rules"]:
        events = chunks(client, accept=rule, speculative={"trace": True})
        assert {each["rule"] for each in rounds(events)} == {rule}


def test_answers_side_by_side_tell_their_own_rounds(client: TestClient) -> None:
    events = chunks(client, n=2, speculative={"trace": True}, temperature=1.0)
    for index in (0, 1):
        own = [event for event in events if event["choices"][0]["index"] == index]
        numbers = [each["number"] for each in rounds(own)]
        assert numbers == list(range(len(numbers)))
        assert numbers
