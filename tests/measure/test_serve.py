"""Measurements of the server: malformed bodies, the soak and the cost of a round, in small."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.loopback_server import client_of
from support.tool_templates import HERMES

from measure.serve.cost import measure_cost
from measure.serve.malformed import VALID, malformed_bodies
from measure.serve.soak import ServeSoakOptions, soak_server
from specrun.cli.serve.service import AnswerService
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.engine import Engine


@pytest.fixture(scope="module")
def demo_engine() -> Iterator[Engine]:
    """The embedded family with two slots."""
    with Engine.demo(slots=2, n_ctx=2048, n_threads=1, trust=True) as engine:
        yield engine


CONTROLS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|end|>")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of a tiny model that calls tools and fills gaps."""
    path = tmp_path_factory.mktemp("malformed") / "model.gguf"
    shape = {"vocab_size": 320, "width": 16, "layers": 1, "context": 1024}
    write_random_llama(path, RandomLlama(**shape, controls=CONTROLS, chat_template=HERMES))
    with Engine(path, "none", slots=1, n_ctx=1024, n_threads=1, trust=True) as engine:
        with client_of(engine) as client:
            yield client


@pytest.mark.parametrize("path", VALID)
def test_bodies_begin_as_requests_that_are_understood(client: TestClient, path: str) -> None:
    assert client.post(path, json=VALID[path]).status_code == 200


def test_malformed_bodies_are_refused_with_a_sentence(client: TestClient) -> None:
    """In the form of their API."""
    refused = 0
    for path, body in islice(malformed_bodies(seed=1), 1200):
        reply = client.post(path, content=body)
        assert reply.status_code in (200, 400, 413, 501), (path, body, reply.text)
        if reply.status_code != 200:
            refused += 1
            payload = reply.json()
            message = payload["error"]["message"]
            assert 5 < len(message) < 500, (path, body, message)
            assert "\n" not in message
            assert ("type" in payload) is (path == "/v1/messages")
    assert refused > 600
    assert client.get("/health").status_code == 200


def test_malformed_bodies_are_the_same_for_a_seed() -> None:
    first, again, other = (list(islice(malformed_bodies(seed), 50)) for seed in (1, 1, 2))
    assert first == again != other


def test_a_soak_passes_and_says_what_it_did(demo_engine: Engine) -> None:
    steps: list[str] = []
    result = soak_server(demo_engine, ServeSoakOptions(48, 24, 12), steps.append)
    assert result.failures == []
    assert result.passed
    assert (result.requests, result.left > 1, result.malformed > 5) == (48, True, True)
    assert result.statuses[200] > 10
    assert steps


def test_a_soak_sees_defects(demo_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(AnswerService, "_require_room", broken)
    result = soak_server(demo_engine, ServeSoakOptions(20, 0, 0), lambda _: None)
    assert not result.passed
    assert any("status 500" in failure for failure in result.failures)


def test_the_cost_of_a_round_is_measured_beside_bare_streams() -> None:
    results = measure_cost(40, 3, 1, lambda _: None)
    assert [result.api for result in results] == ["completions", "chat"]
    for result in results:
        assert result.bare_us > 0
        assert result.paced_us > 0
        assert result.ratio == result.server_us / result.paced_us
