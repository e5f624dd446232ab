"""Common evaluations that are filled up to a cheaper width: same texts, same cells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.tiny_models import F32, fresh_logits

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.contexts.rows import Rows
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import SamplingParams
from specrun.runtime.engine import Engine, GenerationStream, SharedEvaluation
from specrun.runtime.planning import CostCurve, save_curve
from specrun.runtime.trees import DraftTree

WIDTH = 24
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 23, WIDTH, 64)
# Everything from two tokens on costs more than 24.
TIMES = (1.0, *(1.5,) * 8, 1.1, 9.0)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, [2, 7, 1, 8, 2, 8] * 4, [5, 5, 6, 5, 5, 6] * 3]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target that pads, the same without a curve, and a draft model beside each."""
    folder = tmp_path_factory.mktemp("filled")
    for name in ("padded", "free"):
        path = folder / f"{name}.gguf"
        write_random_llama(path, RandomLlama(vocab_size=64, layers=2, scale=4.0, seed=8))
        path.write_bytes(path.read_bytes() + b"\0" * len(name))
    write_random_llama(folder / "draft.gguf", RandomLlama(vocab_size=64, layers=1, scale=4.0))
    curve = CostCurve(SIZES, TIMES, TIMES, (0.0,) * len(SIZES))
    save_curve(curve, folder / "padded.gguf", ContextOptions(**F32), 0)
    return folder / "padded.gguf", folder / "free.gguf"


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many tokens each evaluation of several texts had."""
    found = list[int]()
    decode = SharedEvaluation._decode

    def noted(self: SharedEvaluation, *given: object) -> Rows:
        rows = decode(self, *given)  # type: ignore[arg-type]
        found.append(self._rows.n_tokens)
        return rows

    monkeypatch.setattr(SharedEvaluation, "_decode", noted)
    return found


def _tokens(stream: GenerationStream) -> list[int]:
    for _ in stream:
        pass
    return stream.result.token_ids


def said(path: Path, drafter: str, temperature: float) -> list[list[int]]:
    expression = drafter.replace("FILE", f'"{path.parent / "draft.gguf"}"')
    with Engine(path, expression, slots=3, **{**F32, "n_ctx": 512}) as engine:
        params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(3)]
        pairs = zip(PROMPTS, params, strict=True)
        streams = [engine.submit(prompt, p, max_tokens=30) for prompt, p in pairs]
        return [_tokens(stream) for stream in streams]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "drafter",
    ["none", "draft(FILE, n=3)", "draft(FILE, tree=2x2)", "prompt-lookup(min_ngram=1, branches=3)"],
)
def test_texts_together_are_the_same_in_batches_that_are_filled_up(
    files: tuple[Path, Path], widths: list[int], drafter: str, temperature: float
) -> None:
    """Of fixed drafts the same with drawn ones; of planned ones where they are points."""
    padded = said(files[0], drafter, temperature)
    assert WIDTH in widths
    assert all(width == 1 or width >= WIDTH for width in widths)
    widths.clear()
    assert said(files[1], drafter, temperature) == padded
    assert WIDTH not in widths


def test_rows_and_cells_are_those_of_a_fresh_evaluation(files: tuple[Path, Path]) -> None:
    """After answers of three texts the cells in use are theirs alone, and so are the next rows."""
    drafter = f'draft("{files[0].parent / "draft.gguf"}", tree=2x2)'
    with Engine(files[0], drafter, slots=3, **{**F32, "n_ctx": 512}) as engine:
        streams = [engine.submit(p, SamplingParams(seed=2), max_tokens=40) for p in PROMPTS]
        for stream in streams:
            _tokens(stream)
        shared = engine._schedule.shared
        assert shared is not None
        for slot in shared.slots:
            text = slot.text
            assert text.tokens
            assert slot.evaluate(text, DraftTree()) is None
            shared.evaluate([slot])
            rows = slot.evaluate(text, DraftTree())
            assert rows is not None
            wanted = fresh_logits(engine.model, text.tokens)[-1]
            np.testing.assert_allclose(rows.logits(0), wanted, atol=1e-4)
        memory: Context = shared.context
        assert memory.memory.last_position(shared.parking + 1) == -1


def test_a_context_that_is_nearly_full_is_not_filled_up(
    files: tuple[Path, Path], widths: list[int]
) -> None:
    with Engine(files[0], "none", slots=2, **{**F32, "n_ctx": 256}) as engine:
        greedy = SamplingParams(temperature=0.0)
        streams = [engine.submit([7] * 100, greedy, max_tokens=27) for _ in range(2)]
        found = [_tokens(stream) for stream in streams]
    assert found[0] == found[1]
    assert {2, WIDTH} <= set(widths)
