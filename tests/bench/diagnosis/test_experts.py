"""Experts that rounds of a mixture read, and what `specrun why` says of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.commands import run
from support.tiny_nextn import write_tiny_glm4moe

from specrun.bench.diagnosis.experts import ExpertReads, expert_reads
from specrun.bindings.contexts import ContextOptions
from specrun.bindings.gguf import read_header
from specrun.bindings.models import Model
from specrun.runtime.planning import expected_experts

OPTIONS = ContextOptions(n_ctx=256, n_threads=1)
TEXTS = [[(7 * place) % 320 for place in range(40)]]


def reads(path: Path, width: int) -> ExpertReads:
    with Model(path) as model:
        found = expert_reads(model, OPTIONS, TEXTS, width)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_glm4moe(tmp_path_factory.mktemp("mixture") / "glm.gguf")


def test_tokens_that_choose_alike_read_no_more_experts(tmp_path: Path) -> None:
    found = reads(write_tiny_glm4moe(tmp_path / "alike.gguf", preference=1e4), 4)
    assert (found.n_experts, found.n_used, found.width) == (3, 2, 4)
    assert (found.read, found.evaluations) == (2.0, 10)
    assert found.by_chance == pytest.approx(3 * (1 - (1 / 3) ** 4))
    assert found.share == found.plain_share
    assert found.traffic == 1.0


def test_a_router_is_counted_and_the_weights_follow(mixture: Path) -> None:
    one, four = reads(mixture, 1), reads(mixture, 4)
    assert (one.read, one.evaluations) == (2.0, 24)
    assert 2.0 < four.read <= 3.0
    tensors = {tensor.name: tensor.n_bytes for tensor in read_header(mixture).tensors}
    with Model(mixture) as model:  # without the NextN block, which a plain round does not read
        whole = model.n_bytes - tensors["token_embd.weight"]
        routed = sum(size for name, size in tensors.items() if re.search("_exps", name))
        routed *= model.n_bytes / sum(tensors.values())
    for found in (one, four):
        wanted = (whole - routed + routed * found.read / 3) / whole
        assert found.share == pytest.approx(wanted)
    assert four.traffic == pytest.approx(four.share / one.share)


def test_texts_shorter_than_a_round_are_told_by_chance(mixture: Path) -> None:
    found = reads(mixture, 64)
    assert (found.read, found.evaluations) == (expected_experts(3, 2, 64), 0)


def test_dense_models_read_no_experts(tiny_model: Path) -> None:
    with Model(tiny_model) as model:
        assert expert_reads(model, OPTIONS, TEXTS, 4) is None


def test_why_says_how_many_experts_a_round_reads(mixture: Path) -> None:
    line = "why --drafter prompt-lookup --temp 0 -n 16 --repetitions 1 --seconds 0.05 -t 1 -c 256"
    done = run(f"{line} --no-chat-template -p abcabcabc --json", "-m", mixture)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["experts"]
    assert (found["n_experts"], found["n_used"]) == (3, 2)
    assert 2.0 <= found["read"] <= 3.0
    assert found["evaluations"] > 0
    told = run(f"{line} --no-chat-template -p abcabcabc -v", "-m", mixture)
    assert re.search(r"a round of \d+ tokens reads [23]\.\d of 3 in a layer \(counted", told.stdout)
    assert re.search(r"of all weights, a token \d+ %", told.stdout)
