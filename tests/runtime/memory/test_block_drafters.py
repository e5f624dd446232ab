"""Block drafters in a plan: what llama.cpp allocates for their contexts, which read the target."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.tiny_dflash import Generation, TinyDFlash
from support.tiny_models import CHAT

from specrun.bindings.contexts import ContextOptions
from specrun.bindings.memory_breakdown import HOST as HOST_NAME
from specrun.bindings.memory_breakdown import Breakdown, memory_breakdown
from specrun.bindings.models import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.drafters.dflash.drafter import BlockDrafter
from specrun.runtime.memory import MemoryCounts, PlanRequest, PlanSettings, count_plan, parts_of


@pytest.mark.parametrize("own_tokens", [False, True])
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("generation", ["dflash", "dflash2", "dspark"])
def test_a_block_drafter_is_counted(
    tmp_path: Path, generation: Generation, window: int, own_tokens: bool
) -> None:
    """Weights, cells and graphs to the byte, with those cells that a block has behind the text.

    So is the context that lends it the target's matrices; with a window there are fewer cells.
    """
    target = tmp_path / "target.gguf"
    tiny = TinyDFlash(generation, block_size=16, own_tokens=own_tokens)
    write_random_llama(target, RandomLlama(**CHAT))
    path = tiny.write(tmp_path / "drafter.gguf", target)
    options = ContextOptions(n_ctx=1000, n_threads=1)
    with Model(target) as model:
        drafter = BlockDrafter(path, model, n_threads=1)
        few = dataclasses.replace(options, n_ctx=window or 1000)
        cells = drafter.cells(few, tiny.n_slots)
        real = memory_breakdown(cells._context)[HOST_NAME]
        lent = (
            Breakdown() if drafter._lender is None else memory_breakdown(drafter._lender)[HOST_NAME]
        )
        cells.close()
        drafter.close()
    parts = parts_of(target, f"dflash({path}{f', window={window}' if window else ''})", options)
    assert [part.title for part in parts] == ["target", "block drafter"]
    with MemoryCounts() as counts:
        plan = count_plan(PlanRequest(tuple(parts), (), (), ()), PlanSettings(1000, 0), counts)
    found = {row.kind: sum(row.by_place.values()) for row in plan.rows if row.part != "target"}
    assert found["weights"] == real.weights
    assert found["keys and values"] == real.cells + lent.cells
    assert found["compute"] == pytest.approx(real.compute + lent.compute, rel=0.05)
    assert (lent.cells > 0) is not own_tokens
