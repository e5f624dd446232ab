"""`window=`: a head that sees the last positions alone drafts as one that was given no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_dflash import TinyDFlash
from support.tiny_eagle3 import random_eagle3
from support.tiny_models import CHAT, F32

from specrun.bindings.contexts import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime
from specrun.runtime.drafters.dflash.drafter import BlockDrafter
from specrun.runtime.drafters.dflash.source import BlockState
from specrun.runtime.drafters.eagle import Eagle3Head, EagleState

TEXT = 60


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("window")
    target = folder / "target.gguf"
    write_random_llama(target, RandomLlama(**{**CHAT, "layers": 6}))
    block = TinyDFlash("dspark").write(folder / "block.gguf", target)
    head = random_eagle3(32, 320).write(folder / "eagle3.gguf", target)
    return {"target": target, "dflash": block, "eagle3": head}


class Shown:
    """What a state says after a text of random tokens and features."""

    def __init__(self, state: Any, width: int, ahead: int) -> None:
        random = np.random.default_rng(4)
        self.tokens = random.integers(6, 300, TEXT + 1).tolist()
        self.rows = random.standard_normal((TEXT, width)).astype(np.float32)
        self.state = state
        self.state.begin(self.tokens[:1])

    def learn(self, first: int, last: int) -> None:
        self.state.learn(first, self.rows[first:last], self.tokens[: last + 1])

    def after(self, length: int) -> Any:
        tokens = self.tokens[: length + 1]
        if isinstance(self.state, BlockState):
            rows = self.state.block(tokens, 3)
            assert rows is not None
            return np.concatenate([rows.after(0, tokens[-1:]).whole or []])
        row = self.state.root(tokens)
        assert row is not None
        return row.log_probs


@pytest.fixture(params=["dflash", "eagle3"])
def states(request: pytest.FixtureRequest, files: dict[str, Path]) -> Iterator[Any]:
    """Makes states with a window of one kind of heads, each with cells of its own."""
    kind, opened = request.param, []
    with Model(files["target"]) as model:
        if kind == "dflash":
            head: Any = BlockDrafter(files[kind], model, n_threads=1)
        else:
            head = Eagle3Head(files[kind], model, ranks=5, n_threads=1)

        def made(window: int) -> Shown:
            if kind == "dflash":
                cells = head.cells(ContextOptions(**{**F32, "n_ctx": window or 128}), 3)
                state: Any = BlockState(cells, window)
            else:
                cells = head.cells(128)
                state = EagleState(cells, window)
            opened.append(cells)
            return Shown(state, len(head.file.taps if kind == "dflash" else head.taps) * 32, 0)

        with closing(head):
            yield made
            for cells in opened:
                cells.close()


def test_drafts_are_those_of_a_head_that_knows_no_more(states: Any) -> None:
    """However the text came in, and wherever its first positions were dropped."""
    for step in (1, 7, 30):
        windowed = states(12)
        for first in range(0, TEXT, step):
            windowed.learn(first, min(first + step, TEXT))
            if first % 3 == 0:
                windowed.after(min(first + step, TEXT))  # rows go into cells now and then
        base = windowed.state.base
        assert TEXT - 12 <= base <= TEXT - 9
        fresh, whole = states(0), states(0)
        fresh.learn(base, TEXT)
        whole.learn(0, TEXT)
        found = windowed.after(TEXT)
        assert np.abs(found - fresh.after(TEXT)).max() < 1e-5
        assert np.abs(found - whole.after(TEXT)).max() > 1e-3  # the control: the rest was seen


def test_an_interrupt_while_cells_move_leaves_nothing_known(
    states: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = states(12)
    shown.learn(0, 12)
    shown.after(12)
    state, drop = shown.state, shown.state._drop

    def interrupted(n: int, position: int) -> None:
        drop(n, position)
        raise KeyboardInterrupt

    monkeypatch.setattr(state, "_drop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shown.learn(12, 13)
    monkeypatch.setattr(state, "_drop", drop)
    assert state.count == 0
    shown.learn(13, TEXT)
    fresh = states(0)
    fresh.learn(state.base, TEXT)
    assert np.abs(shown.after(TEXT) - fresh.after(TEXT)).max() < 1e-5


def test_a_window_of_nothing_is_refused(files: dict[str, Path]) -> None:
    for name in ("dflash", "eagle3"):
        with pytest.raises(OptionError, match="window is 0: give at least 1"):
            Runtime(files["target"], drafter=f"{name}({files[name]}, window=0)", **F32)
