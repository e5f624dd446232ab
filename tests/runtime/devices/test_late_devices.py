"""A device that answers late: the same text, and time that is counted to the end of its work."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.every_drafter import named
from support.slow_link import slow_link
from support.tiny_models import F32

from specrun.bindings.contexts import context as module
from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.machine.placement import Placement, placing
from specrun.bindings.models.model import Model
from specrun.runtime import Runtime, SamplingParams

PROMPT = list(b"to be, or not to be")


@pytest.mark.parametrize(
    "drafter",
    [
        "none",
        "draft(FILE:twin, n=3, sampling=argmax)",
        "medusa(FILE:medusa, tree=2x1)",
        "auto(draft(FILE:twin, sampling=argmax), prompt-lookup(min_ngram=1), none)",
    ],
)
def test_a_late_device_gives_the_same_text(
    files: dict[str, Path], worker: str, drafter: str
) -> None:
    params = SamplingParams(temperature=0.8, seed=3, top_k=0, top_p=1.0, min_p=0.0)
    settings = {**F32, "n_gpu_layers": "all", "n_gpu_layers_draft": "all"}
    texts = []
    with slow_link(worker, 0.002) as (late, _):
        for options in ({"devices": ["none"]}, {"rpc": [late]}):
            with Runtime(files["shallow"], named(drafter, files), **settings, **options) as runtime:
                texts.append(runtime.generate(PROMPT, params, max_tokens=8).token_ids)
    assert texts[0] == texts[1]


class Counting:
    """llama.cpp's functions, with a count of how often each is called."""

    def __init__(self, native: object) -> None:
        self._native = native
        self.counts: dict[str, int] = {}

    def __getattr__(self, name: str) -> object:
        self.counts[name] = self.counts.get(name, 0) + 1
        return getattr(self._native, name)


@pytest.mark.parametrize("place", ["CPU", "worker"])
def test_work_is_waited_for_where_it_is_not_done_when_the_call_returns(
    files: dict[str, Path], worker: str, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Once an evaluation on a device, never on the CPU, though this build knows devices."""
    placement = Placement(rpc=(worker,) if place == "worker" else ())
    with (
        placing(placement),
        Model(files["shallow"], n_gpu_layers=-1) as model,
        Context(model, ContextOptions(**F32)) as context,
    ):
        counting = Counting(context._native)
        monkeypatch.setattr(context, "_native", counting)
        batch = Batch(context.n_batch, 1)
        for position in range(3):
            batch.fill_one(5, position)
            context.decode(batch)
    assert counting.counts["llama_decode"] == 3
    assert counting.counts.get("llama_synchronize", 0) == (3 if place == "worker" else 0)


def test_native_time_ends_with_the_work(
    files: dict[str, Path], worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that only llama_synchronize moves on: what it takes is the evaluation's."""
    now = [0.0]
    with (
        placing(Placement(rpc=(worker,))),
        Model(files["shallow"], n_gpu_layers=-1) as model,
        Context(model, ContextOptions(**F32)) as context,
    ):
        wait = context._native.llama_synchronize

        class Native(Counting):
            def llama_synchronize(self, handle: object) -> None:
                wait(handle)
                now[0] += 2.0

        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
        monkeypatch.setattr(context, "_native", Native(context._native))
        batch = Batch(context.n_batch, 1)
        batch.fill_one(5, 0)
        context.decode(batch)
        assert context.native_seconds == 2.0
