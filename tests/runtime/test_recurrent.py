"""Recurrent models: plain decoding and single chains of drafts work over several prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_mamba import write_tiny_mamba

from specrun.runtime import Runtime, SamplingParams, UnsupportedModelError


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_mamba(tmp_path_factory.mktemp("mamba") / "mamba.gguf")


def answer(runtime: Runtime, prompt: list[int]) -> list[int]:
    return runtime.generate(prompt, SamplingParams(temperature=0.0), max_tokens=12).token_ids


def test_plain_decoding_works_and_a_second_prompt_starts_from_a_clean_state(mamba: Path) -> None:
    prompts = [[1, 2, 3, 4, 5], [1, 2, 9, 8], [1, 2, 9, 8, 7, 6]]
    with Runtime(mamba, "none", n_ctx=256, n_threads=1) as runtime:
        assert not runtime.model.can_branch
        answers = [answer(runtime, prompt) for prompt in prompts]
    for prompt, given in zip(prompts, answers, strict=True):
        with Runtime(mamba, "none", n_ctx=256, n_threads=1) as fresh:
            assert answer(fresh, prompt) == given
    assert (
        len({tuple(answer) for answer in answers}) > 1
    )  # a state that ignored the prompt would answer alike


@pytest.mark.parametrize("drafter", ["jacobi(n=3, always=yes)", "prompt-lookup", "auto"])
def test_drafts_change_no_text(mamba: Path, drafter: str) -> None:
    with (
        Runtime(mamba, drafter=drafter, n_ctx=256, n_threads=1) as runtime,
        Runtime(mamba, "none", n_ctx=256, n_threads=1) as plain,
    ):
        for prompt in ([1, 2, 3, 4, 5], [1, 2, 9, 8], [1, 2, 9, 8, 7, 6]):
            assert answer(runtime, prompt) == answer(plain, prompt)


@pytest.mark.parametrize(
    ("drafter", "problem"),
    [
        ("prompt-lookup(branches=2)", "one chain of drafts, and .* may branch"),
        ("draft(FILE)", "cannot take back rejected drafts"),
    ],
)
def test_what_cannot_draft_is_said(mamba: Path, drafter: str, problem: str) -> None:
    with pytest.raises(UnsupportedModelError, match=problem) as caught:
        Runtime(mamba, drafter=drafter.replace("FILE", f'"{mamba}"'), n_ctx=256, n_threads=1)
    assert caught.value.exit_code == 3


def test_a_stream_that_was_abandoned_leaves_it_usable(mamba: Path) -> None:
    with Runtime(mamba, "none", n_ctx=256, n_threads=1) as runtime:
        wanted = answer(runtime, [1, 2, 3])
        stream = runtime.stream([4, 5, 6], SamplingParams(temperature=0.0), max_tokens=12)
        next(stream)
        stream.close()
        assert answer(runtime, [1, 2, 3]) == wanted
