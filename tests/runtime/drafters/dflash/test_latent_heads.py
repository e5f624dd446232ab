"""Gated and recurrent Markov heads against a numpy reference: rows of every path of a tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.tiny_dflash import TinyDFlash, token_matrices
from support.tiny_models import CHAT, F32

from specrun.bindings.contexts import ContextOptions
from specrun.bindings.errors import MalformedFileError, UnsupportedModelError
from specrun.bindings.models import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.dflash.drafter import BlockDrafter
from specrun.runtime.drafters.dflash.source import BlockState
from specrun.runtime.language import quoted

VARIANTS = [
    TinyDFlash("dspark", head="gated"),
    TinyDFlash("dspark", head="rnn", own_tokens=True),
    TinyDFlash("dspark", head="gated", draft_tokens=70, confidence=False),
    TinyDFlash("dspark", head="rnn", from_anchor=False, draft_tokens=70),
]
LAST, TEXT = 7, 20
# Paths of a tree: node i hangs below PARENTS[i], and has a token of its own.
PARENTS, TOKENS = [-1, -1, 0, 1, 2], [40, 41, 42, 42, 43]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latent") / "target.gguf"
    write_random_llama(path, RandomLlama(**CHAT))
    return path


@pytest.fixture
def model(target: Path) -> Iterator[Model]:
    with Model(target) as opened:
        yield opened


@pytest.mark.parametrize("tiny", VARIANTS, ids=lambda tiny: f"{tiny.head}-{tiny.first}")
def test_rows_are_those_of_the_reference(
    tiny: TinyDFlash, target: Path, model: Model, tmp_path: Path
) -> None:
    drafter = BlockDrafter(tiny.write(tmp_path / "d.gguf", target), model, n_threads=1)
    options = ContextOptions(n_ctx=64, n_threads=1, flash_attention="off")
    options = replace(options, cache_type_k="f32", cache_type_v="f32")
    cells = drafter.cells(options, tiny.n_slots)
    state = BlockState(cells)
    random = np.random.default_rng(5)
    tokens = [*random.integers(0, 300, TEXT).tolist(), LAST]
    features = random.standard_normal((TEXT, 2 * tiny.width)).astype(np.float32)
    state.begin(tokens)
    state.learn(0, features, tokens)
    rows = state.block(tokens, tiny.n_slots)
    assert rows is not None
    states, logits = tiny.block(features, LAST, tiny.block_size, token_matrices(target))
    found = {-1: rows.after(0, [LAST])}
    for depth, nodes in ((1, [0, 1]), (2, [2, 3]), (3, [4])):
        above = [PARENTS[node] for node in nodes]
        answer = rows.after(depth, [TOKENS[node] for node in nodes], parents=above)
        for place, node in enumerate(nodes):
            assert answer.whole is not None
            found[node] = answer
            path, at = [TOKENS[node]], PARENTS[node]
            while at >= 0:
                path, at = [TOKENS[at], *path], PARENTS[at]
            biases = tiny.path_biases(states, [LAST, *path])
            wanted = logits[tiny.first + depth] + biases[-1]
            np.testing.assert_allclose(answer.whole[place], wanted, rtol=1e-4, atol=2e-4)
            if tiny.confidence:
                assert answer.certainties is not None
                sure = tiny.confident(states[tiny.first + depth], TOKENS[node])
                assert answer.certainties[place] == pytest.approx(sure, abs=1e-4)
    assert found[-1].whole is not None
    wanted = logits[tiny.first] + tiny.path_biases(states, [LAST])[0]
    np.testing.assert_allclose(found[-1].whole[0], wanted, rtol=1e-4, atol=2e-4)
    # The best tokens alone, where children are chosen, are those of the same rows.
    again = rows.after(0, [LAST], points=True)
    assert again.highest is not None
    best = again.highest.tokens[0][int(again.highest.logits[0].argmax())]
    assert best == wanted.argmax()
    cells.close()
    drafter.close()


@pytest.mark.parametrize("tiny", VARIANTS, ids=lambda tiny: f"{tiny.head}-{tiny.first}")
@pytest.mark.parametrize("options", ["n=4", "depth=3, topk=2, nodes=6", "n=4, sampling=with"])
def test_the_text_and_the_drafts(
    tiny: TinyDFlash, target: Path, tmp_path: Path, options: str
) -> None:
    path = quoted(str(tiny.write(tmp_path / "d.gguf", target)))
    params = SamplingParams(temperature=0.0, logit_bias={319: float("-inf")})
    texts = []
    for drafter in ("none", f"dflash({path}, {options})"):
        with Runtime(target, drafter, **F32) as runtime:
            result = runtime.generate(list(b"the quick brown fox"), params, max_tokens=16)
        texts.append(list(result.token_ids))
    assert texts[0] == texts[1]
    assert result.stats.drafted > 0


def test_files_that_contradict_themselves(target: Path, model: Model, tmp_path: Path) -> None:
    tiny = VARIANTS[0]
    path = tiny.write(tmp_path / "d.gguf", target, dflash__markov_head__bias=None)
    with pytest.raises(MalformedFileError, match="0 numbers of a gated Markov head"):
        BlockDrafter(path, model)
    other = TinyDFlash("dspark")
    path = other.write(tmp_path / "e.gguf", target, dflash__markov_head_type=7)
    with pytest.raises(UnsupportedModelError, match="Markov head of an unknown type, 7"):
        BlockDrafter(path, model)
