"""Measurements of the server: malformed bodies, the soak and the cost of a round, in small."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from starlette.testclient import TestClient

from measure.serve.cost import measure_cost
from measure.serve.malformed import VALID, malformed_bodies
from measure.serve.soak import ServeSoakOptions, soak_server
from specrun.cli.serve.app import create_app
from specrun.cli.serve.service import AnswerService
from specrun.cli.serve.settings import ServeSettings
from specrun.runtime.engine import Engine


@pytest.fixture(scope="module")
def demo_engine() -> Iterator[Engine]:
    """The embedded family with two slots."""
    with Engine.demo(slots=2, n_ctx=2048, n_threads=1, trust=True) as engine:
        yield engine


@pytest.fixture
def client(demo_engine: Engine) -> Iterator[TestClient]:
    """A client in this process."""
    app = create_app(demo_engine, ServeSettings(model="demo"))
    with TestClient(app, base_url="http://127.0.0.1:8080") as client:
        yield client


EXPECTED = {200, 400, 413, 501}


@pytest.mark.parametrize("path", VALID)
def test_bodies_begin_as_requests_that_are_understood(client: TestClient, path: str) -> None:
    assert client.post(path, json=VALID[path]).status_code in (200, 501)


def test_malformed_bodies_are_refused_with_a_sentence(client: TestClient) -> None:
    refused = 0
    for path, body in islice(malformed_bodies(seed=1), 400):
        reply = client.post(path, content=body)
        assert reply.status_code in EXPECTED, (path, body, reply.text)
        if reply.status_code != 200:
            refused += 1
            message = reply.json()["error"]["message"]
            assert 5 < len(message) < 500, (path, body, message)
            assert "\n" not in message
    assert refused > 200
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
