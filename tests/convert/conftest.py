"""Shared by the converter's tests: checkpoint folders, and llama.cpp's own logits and text."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.tiny_checkpoints import Tensors, save_checkpoint

from specrun.bindings.contexts import Batch, Context, ContextOptions
from specrun.bindings.models import Model


@pytest.fixture
def logits() -> Callable[..., npt.NDArray[np.float32]]:
    """Llama.cpp's logits after each of the tokens, everything in float32."""

    def evaluate(path: Path, tokens: Sequence[int], n_ctx: int = 64) -> npt.NDArray[np.float32]:
        n = len(tokens)
        options = ContextOptions(
            n_ctx=n_ctx,
            n_outputs=n,
            n_threads=1,
            flash_attention="off",
            cache_type_k="f32",
            cache_type_v="f32",
        )
        with Model(path) as model, Context(model, options) as context:
            batch = Batch(n, 1)
            batch.fill_chain(list(tokens), 0, [0], n)
            rows = context.decode(batch)
            return np.stack([rows.logits(row) for row in range(n)])

    return evaluate


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail tests that were skipped in the comparison of families."""
    report = yield
    if report.skipped and item.path.name == "test_families.py":
        report.outcome, report.longrepr = "failed", "a family's comparison was skipped"
    return report


@pytest.fixture
def greedy_text() -> Callable[[Path, str, int], str]:
    """The most likely continuation of a prompt."""

    def generate(path: Path, prompt: str, length: int) -> str:
        options = ContextOptions(n_ctx=256, n_threads=1, flash_attention="off")
        with Model(path) as model, Context(model, options) as context:
            tokens = model.vocabulary.tokenize(prompt)
            batch = Batch(len(tokens), 1)
            batch.fill_chain(tokens, 0, [0], 1)
            answer: list[int] = []
            for position in range(len(tokens), len(tokens) + length):
                answer.append(int(np.argmax(context.decode(batch).logits(0))))
                batch.fill_one(answer[-1], position)
            return "".join(model.vocabulary.label(token) for token in answer)

    return generate


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes a Hugging Face folder; files may be replaced by name, None leaves one out."""

    def write(
        config: dict[str, Any] | None = None,
        tensors: Tensors | None = None,
        **files: bytes | dict[str, Any] | None,
    ) -> Path:
        return save_checkpoint(tmp_path / "checkpoint", config, tensors, **files)

    return write
