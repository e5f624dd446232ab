"""llama_decode fails at every evaluation of an answer in turn: the next answer is a fresh one's.

The code is given back in place of llama.cpp's own, before or after it has run: whatever a failure
leaves in the memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.tiny_mamba import write_tiny_mamba
from support.tiny_models import F32

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.memory import Memory
from specrun.bindings.errors import DecodeError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.round import CachedText, TargetModel

pytest.importorskip("torch")
from support.every_drafter import named

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
OTHER = [*PROMPT[:9], 7, 9]
CODES = [(-3, True), (1, False), (-3, False), (2, True), (-2, True), (-1, False)]
"""What llama_decode returns, and whether after having run."""
CASES = [
    ("mamba", "none"),
    ("mamba", "jacobi(n=3, always=yes)"),
    ("hybrid", "none"),
    ("hybrid", "mtp(n=3)"),
    ("lfm2", "jacobi(n=3, always=yes)"),
    ("nemotron_h", "jacobi(n=3, always=yes)"),
    ("shallow", "none"),
    ("shallow", "draft(FILE:twin, n=3)"),
    ("shallow", "draft(FILE:twin, tree=2x2)"),
    ("shallow", "cascade(draft(FILE:twin, n=4), draft(FILE:small, n=2))"),
    ("shallow", "eagle(FILE:eagle, n=3)"),
    ("shallow", "dflash(FILE:dflash, n=3)"),
    ("shallow", "dflash(FILE:dflash2, n=3)"),
    ("shallow", "dflash(FILE:dspark, tree=2x2)"),
    ("nextn", "mtp(n=3)"),
    ("nextn", "mtp(tree=2x2)"),
    ("two blocks", "mtp(tree=2x2)"),
    ("two blocks", "mtp(n=2)"),
    ("gemma4", "mtp(FILE:assistant, tree=2x2)"),
]


@pytest.fixture(scope="module")
def files(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("failed decodes")
    return {**files, "mamba": write_tiny_mamba(folder / "mamba.gguf")}


class FailingNative:
    """The native library, whose `at`-th evaluation from now on fails with a code."""

    def __init__(self, native: Any, at: int, code: int, *, after: bool) -> None:
        self._native, self._left, self._code, self._after = native, at, code, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    @property
    def failed(self) -> bool:
        return self._left <= 0

    def llama_decode(self, handle: Any, batch: Any) -> int:
        self._left -= 1
        if self._left != 0:
            return int(self._native.llama_decode(handle, batch))
        if self._after:
            self._native.llama_decode(handle, batch)
        return self._code


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FailingNative]]:
    """Every context evaluates with what stands in this list, if anything does."""
    failing: list[FailingNative] = []
    decode = Context.decode

    def decoding(context: Context, batch: Any) -> Any:
        if not failing:
            return decode(context, batch)
        with monkeypatch.context() as patch:
            patch.setattr(context, "_native", failing[0])
            return decode(context, batch)

    monkeypatch.setattr(Context, "decode", decoding)
    yield failing
    failing.clear()


def said(runtime: Runtime, prompt: list[int]) -> list[int]:
    return runtime.generate(prompt, GREEDY, max_tokens=6).token_ids


def after_each_failure(
    runtime: Runtime, fails: list[FailingNative], codes: Sequence[tuple[int, bool]]
) -> list[list[int]]:
    """The answers to the same prompt, after each evaluation of an answer has failed once."""
    answers = []
    for code, after in codes:
        at, failed = 0, True
        while failed:
            at += 1
            failing = FailingNative(runtime.session.target.context._native, at, code, after=after)
            fails.append(failing)
            with contextlib.suppress(DecodeError):
                said(runtime, PROMPT)
            fails.clear()
            failed = failing.failed
            answers.append(said(runtime, PROMPT))
            runtime.session.forget()
        assert at > 3
    return answers


@pytest.mark.parametrize(("target", "drafter"), CASES)
def test_the_answer_after_a_failed_evaluation_is_that_of_a_fresh_session(
    files: dict[str, Path],
    fails: list[FailingNative],
    target: str,
    drafter: str,
    whole_sweep: bool,
) -> None:
    with Runtime(files[target], named(drafter, files), **F32) as runtime:
        wanted = said(runtime, PROMPT)
        runtime.session.forget()
        answers = after_each_failure(runtime, fails, CODES if whole_sweep else CODES[:2])
        assert answers == [wanted] * len(answers)
        # Nor does it leave anything behind where the next text departs.
        after = said(runtime, OTHER)
        runtime.session.forget()
        assert after == said(runtime, OTHER) != wanted


def test_a_text_that_believes_in_a_cleared_memory_is_caught(
    files: dict[str, Path], fails: list[FailingNative], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the memory says that it holds whatever the text says."""
    rewind = TargetModel.rewind

    def believing(target: TargetModel, text: CachedText, length: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Memory, "last_position", lambda *_: text.n_cached - 1)
            rewind(target, text, length)

    with Runtime(files["hybrid"], "none", **F32) as runtime:
        wanted = said(runtime, PROMPT)
        runtime.session.forget()
        monkeypatch.setattr(TargetModel, "rewind", believing)
        answers = after_each_failure(runtime, fails, CODES[:1])
        assert answers != [wanted] * len(answers)
