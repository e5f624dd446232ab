"""Invariant 3: plain decoding's own text, at temperature 0 for every drafter, and at any
temperature for drafters of point masses. F32 weights and cache, where batches round like single
tokens to 1e-5; the models' logit margins are far larger.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_models import F32

from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.language import quoted

LENGTH = 48


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    write_random_llama(folder / "target.gguf", RandomLlama(vocab_size=400, seed=1, scale=4.0))
    write_random_llama(
        folder / "drafter.gguf", RandomLlama(vocab_size=400, seed=1, layers=2, scale=3.0)
    )
    return folder / "target.gguf", folder / "drafter.gguf"


def run(
    pair: tuple[Path, Path], drafter: str, params: SamplingParams, index: int = 0
) -> tuple[list[int], float | None]:
    target, draft = pair
    expression = drafter.replace("FILE", quoted(str(draft)))
    with Runtime(target, drafter=expression, **F32) as runtime:
        prompt = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]
        result = runtime.generate(prompt, params, max_tokens=LENGTH, index=index)
    assert len(result.token_ids) == LENGTH or result.finish_reason == "stop"
    return result.token_ids, result.stats.acceptance_rate


DETERMINISTIC = [
    "draft(FILE, n=4, sampling=argmax)",
    "prompt-lookup",
    "prompt-lookup(n=8, min_ngram=1)",
]
SAMPLED = ["draft(FILE, n=1)", "draft(FILE, n=5)", "draft(FILE, n=5, p_min=0.3)"]
PENALTIES = {"repeat_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}


@pytest.mark.parametrize("drafter", DETERMINISTIC + SAMPLED)
@pytest.mark.parametrize("extra", [{}, PENALTIES], ids=["plain", "penalties"])
def test_greedy_text_is_plain_text(
    pair: tuple[Path, Path], drafter: str, extra: dict[str, float]
) -> None:
    params = SamplingParams(temperature=0.0, **extra)
    wanted, _ = run(pair, "none", params)
    got, accepted = run(pair, drafter, params)
    assert got == wanted
    if drafter.startswith("draft") and not extra:
        assert accepted  # a pair that never agrees would prove nothing


@pytest.mark.parametrize("drafter", DETERMINISTIC)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_point_masses_keep_the_text_at_any_temperature(
    pair: tuple[Path, Path], drafter: str, seed: int, temperature: float
) -> None:
    """Texts of six tokens: they repeat themselves, so that prompt lookup's drafts are kept too, and
    prove something."""
    few = dict.fromkeys(range(40, 46), 30.0)
    params = SamplingParams(
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=seed,
        logit_bias=few,
        **PENALTIES,
    )
    wanted, _ = run(pair, "none", params, index=seed)
    got, accepted = run(pair, drafter, params, index=seed)
    assert got == wanted
    assert accepted


def test_sampled_drafts_do_not_keep_the_text(pair: tuple[Path, Path]) -> None:
    """Negative control: the equality above is a property of point masses, not of this model."""
    params = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    assert run(pair, "draft(FILE, n=5)", params)[0] != run(pair, "none", params)[0]


def test_the_same_seed_gives_the_same_text_and_another_seed_another(
    pair: tuple[Path, Path],
) -> None:
    params = SamplingParams(temperature=1.0, seed=11)
    first, _ = run(pair, "draft(FILE, n=5)", params)
    assert run(pair, "draft(FILE, n=5)", params)[0] == first
    assert run(pair, "draft(FILE, n=5)", params.replace(seed=12))[0] != first


def test_a_confidence_stop_shortens_greedy_drafts_too(pair: tuple[Path, Path]) -> None:
    """At temperature 0 the law is a point mass: the confidence must be read from the law before
    it."""
    target, draft = pair
    drafted = []
    for p_min in (0.0, 0.5, 1.0):
        expression = f"draft({quoted(str(draft))}, n=5, p_min={p_min})"
        with Runtime(target, drafter=expression, n_ctx=256, n_threads=1) as runtime:
            drafted.append(
                runtime.generate(
                    [3, 1, 4], SamplingParams(temperature=0.0), max_tokens=24
                ).stats.drafted
            )
    assert drafted[0] > drafted[1] >= drafted[2] == 0
