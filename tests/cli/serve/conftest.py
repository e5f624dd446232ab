"""A vocabulary of families that call tools, and a client of the embedded family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from support.api_clients import close_clients
from support.loopback_server import client_of, serving
from support.scripted_engine import ScriptedEngine
from support.tool_templates import HERMES

from specrun.bindings.models.model import Model
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.engine import Engine

CONTROLS = (
    "<|im_start|>",
    "<|im_end|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<think>",
    "<|end|>",
)


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    """Close the clients of each test."""
    yield
    close_clients()


@pytest.fixture(scope="session")
def tool_vocabulary(tiny_folder: Path) -> Iterator[Vocabulary]:
    path = tiny_folder / "tools.gguf"
    write_random_llama(path, RandomLlama(vocab_size=320, controls=CONTROLS, width=16, layers=1))
    with Model(path) as model:
        yield model.vocabulary


@pytest.fixture(scope="module")
def silent(tool_vocabulary: Vocabulary) -> Iterator[tuple[ScriptedEngine, str]]:
    """An engine that is to be asked nothing, and where it is served: for what is refused."""
    engine = ScriptedEngine(tool_vocabulary, HERMES)
    with serving(engine) as address:
        yield engine, address


@pytest.fixture(scope="module")
def demo_engine() -> Iterator[Engine]:
    """The embedded family with two slots; a module's tests share what it has cached."""
    others = ("prompt-lookup", "draft(n=3, sampling=argmax)")
    with Engine.demo(slots=2, others=others, n_ctx=2048, n_threads=1, trust=True) as engine:
        yield engine


@pytest.fixture
def client(demo_engine: Engine) -> Iterator[TestClient]:
    """A client in this process."""
    with client_of(demo_engine, model="demo") as client:
        yield client
