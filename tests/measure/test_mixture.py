"""`measure mixture` on a small mixture: rounds as wide as asked, bytes by chance, both arms."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import results_of
from support.commands import run_measure as run

from measure.mixture.measurement import MixtureOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.gguf import read_header
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.planning import expected_experts

MIXTURE = {"experts": 4, "experts_used": 2}


def test_rounds_are_as_wide_as_asked_and_bytes_follow_from_the_experts(tmp_path: Path) -> None:
    """Of 4 experts 2 tokens read 3 by chance, where each of them uses 2."""
    line = "mixture --size 30M --experts 4 --experts-used 2 -n 6 -r 1 --width 1,2 -t 1 --json"
    found = results_of(run(f"{line} --folder", tmp_path))
    assert not list(tmp_path.iterdir())
    arms = [("none", 1), ("jacobi(n=1, always=yes)", 2), ("auto", 0)]
    assert [(row["drafter"], row["width"]) for row in found] == 2 * arms
    assert [row["arm"] for row in found] == 3 * ["this machine"] + 3 * ["worker, experts here"]
    layers = MixtureOptions(n_bytes=30_000_000, **MIXTURE).model.layers
    norms, attention = 4 * 2 * 1024, 2 * (2 * 1024**2 + 2 * 1024 * 512)
    router, experts = 4 * 4 * 1024, layers * 2 * 3 * 4 * 1024 * 512
    dense = 2 * 4096 * 1024 + 4 * 1024 + layers * (norms + attention + router)
    assert expected_experts(4, 2, 2) == pytest.approx(3.0)
    ratio = (dense + experts * 3 / 4) / (dense + experts * 2 / 4)
    assert [row["by_bytes"] for row in found[:2]] == pytest.approx([1.0, ratio], rel=1e-3)


def test_a_random_mixture_says_how_many_experts_it_has(tmp_path: Path) -> None:
    path = tmp_path / "mixture.gguf"
    write_random_llama(path, RandomLlama(**MIXTURE))
    header = read_header(path)
    assert header.metadata["llama.expert_count"] == 4
    assert header.metadata["llama.expert_used_count"] == 2
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    assert sorted(shapes["blk.0.ffn_down_exps.weight"]) == sorted((4, 32, 64))
    for used in (0, 5):
        with pytest.raises(OptionError, match=f"a token uses {used} of 4 experts"):
            RandomLlama(experts=4, experts_used=used)
