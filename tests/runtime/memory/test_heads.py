"""Heads in a plan: their weights, cells and graphs against what ggml allocates for them."""

from __future__ import annotations

import ctypes

import pytest

from specrun.bindings.contexts import ContextOptions
from specrun.bindings.ggml import graph
from specrun.bindings.library import native_function
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.demo import demo_drafters, demo_target
from specrun.runtime.heads import KeyValueCache
from specrun.runtime.memory import parts_of
from specrun.runtime.memory.count import HeadPart

QUESTION = "What does os.path.join do, and when would somebody use it? "


class Allocated:
    """Bytes of the graphs that are there, of the most there were, and of cells."""

    def __init__(self) -> None:
        self.graphs: dict[int, int] = {}
        self.peak = self.cells = 0


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> Allocated:
    found = Allocated()
    pointers = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p
    size = native_function("ggml_backend_sched_get_buffer_size", *pointers)
    make, close = graph.Graph.__init__, graph.Graph.close
    make_cache = KeyValueCache.__init__

    def counted(self: graph.Graph, *arguments: object, **options: object) -> None:
        make(self, *arguments, **options)  # type: ignore[arg-type]
        backends = self._device.backends
        found.graphs[id(self)] = sum(size(self._scheduler, backend) for backend in backends)
        found.peak = max(found.peak, sum(found.graphs.values()))

    def closed(self: graph.Graph) -> None:
        found.graphs.pop(id(self), None)
        close(self)

    def cached(self: KeyValueCache, *arguments: object) -> None:
        make_cache(self, *arguments)  # type: ignore[arg-type]
        found.cells += 2 * 4 * self.sizes.kv_size * (self.n_cells + 1)

    monkeypatch.setattr(graph.Graph, "__init__", counted)
    monkeypatch.setattr(graph.Graph, "close", closed)
    monkeypatch.setattr(KeyValueCache, "__init__", cached)
    return found


@pytest.mark.parametrize("drafter", ["eagle(depth=6, topk=8, nodes=60)", "eagle3"])
def test_cells_exactly_and_graphs_with_room(allocated: Allocated, drafter: str) -> None:
    """A text that fills the context: as much as the graphs ever take."""
    part = parts_of(demo_target(), drafter, ContextOptions(), demo_drafters())[1]
    assert isinstance(part, HeadPart)
    with Runtime.demo(drafter, n_ctx=1024, n_threads=1) as runtime:
        params, ask = SamplingParams(temperature=0.0), QUESTION * 52
        result = runtime.chat([{"role": "user", "content": ask}], params, max_tokens=24)
        assert 900 < result.usage.prompt_tokens < 1024
    assert allocated.cells == part.cells(1024)
    assert allocated.peak <= part.compute(1024) <= 3 * allocated.peak


def test_weights_are_those_of_the_file() -> None:
    for name, path in demo_drafters().items():
        if name in ("draft", "pass"):  # a model; embeddings on the host
            continue
        part = parts_of(demo_target(), name, ContextOptions(), demo_drafters())[1]
        assert isinstance(part, HeadPart)
        # Behind the header, whose accuracies and names take some kilobytes.
        assert 0.9 * path.stat().st_size < part.weights < 1.01 * path.stat().st_size
