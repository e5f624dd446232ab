"""Embeddings: pooled final states of a model that says how, and 501 from all others."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from starlette.testclient import TestClient
from support.loopback_server import client_of
from support.target_texts import final_states
from support.tiny_models import CHAT, F32

from specrun.bindings.contexts.context import TextEmbedder
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.models.model import Model
from specrun.convert import random_model
from specrun.runtime.engine import Engine

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, in a file that says that its states are pooled: the last is taken."""
    describe = random_model._describe

    def described(*arguments: Any) -> Any:
        metadata = describe(*arguments)
        metadata.count("llama.pooling_type", 3)
        return metadata

    path = tmp_path_factory.mktemp("pooled") / "pooled.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_model, "_describe", described)
        random_model.write_random_llama(path, random_model.RandomLlama(**CHAT))
    return path


@pytest.fixture
def asked(pooled: Path) -> Iterator[TestClient]:
    with Engine(pooled, "none", slots=1, context=ContextOptions(**F32)) as engine:
        with client_of(engine) as client:
            yield client


def unit(vector: np.ndarray) -> np.ndarray:
    return cast("np.ndarray", vector / np.linalg.norm(vector))


@pytest.mark.parametrize("n_batch", [4, 512])
@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_states_are_pooled_as_the_file_says(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, pooling: str, n_batch: int
) -> None:
    monkeypatch.setattr(Model, "pooling", pooling)
    states = final_states(tiny_model, TEXT, F32)
    wanted = {"mean": states.mean(axis=0), "first": states[0], "last": states[-1]}[pooling]
    options = ContextOptions(**{**F32, "n_batch": n_batch})
    with Model(tiny_model) as model, TextEmbedder(model, options) as embedder:
        for _ in range(2):  # nothing of the first is left
            assert embedder.embed(TEXT) == pytest.approx(unit(wanted), abs=1e-5)
        assert embedder.embed(TEXT[1:]) != pytest.approx(unit(wanted), abs=1e-3)


def test_files_say_how_states_are_pooled(pooled: Path, tiny_model: Path) -> None:
    with Model(pooled) as model, Model(tiny_model) as other:
        assert (model.pooling, other.pooling) == ("last", None)


def test_a_model_of_embeddings_still_shows_the_state_of_each_token(
    pooled: Path, tiny_model: Path
) -> None:
    assert final_states(pooled, TEXT, F32) == pytest.approx(final_states(tiny_model, TEXT, F32))


def test_embeddings_are_given_as_openai_does(asked: TestClient, pooled: Path) -> None:
    body = {"input": ["Hello", TEXT]}
    reply = asked.post("/v1/embeddings", json=body).json()
    assert reply["usage"]["prompt_tokens"] > 3
    vectors = [np.array(entry["embedding"]) for entry in reply["data"]]
    assert [np.linalg.norm(vector) for vector in vectors] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert vectors[1] == pytest.approx(unit(final_states(pooled, TEXT, F32)[-1]), abs=1e-5)
    packed = asked.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()
    for entry, vector in zip(packed["data"], vectors, strict=True):
        bytes_ = base64.b64decode(entry["embedding"])
        assert np.frombuffer(bytes_, "<f4") == pytest.approx(vector, abs=1e-6)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [10**9]}, "prompt"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a " * 5000}, None),
    ],
)
def test_what_cannot_be_embedded_is_refused(
    asked: TestClient, body: dict[str, Any], param: str | None
) -> None:
    reply = asked.post("/v1/embeddings", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_models_that_write_texts_make_none(client: TestClient) -> None:
    reply = client.post("/v1/embeddings", json={"input": "a"})
    assert reply.status_code == 501
    assert "makes no embeddings" in reply.json()["error"]["message"]
