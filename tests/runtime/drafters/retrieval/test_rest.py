"""REST: exact whatever it retrieves, plain decoding's own text at every temperature, and its
options."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.enumeration import TOLERANCE, drafter_bias, noted
from support.scripted import PLAIN, LawTable
from support.tiny_models import F32

from specrun.bindings.errors import OptionError, PairError
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.drafters.retrieval import (
    ContextIndex,
    RestDrafter,
    build_store,
    with_reference,
)
from specrun.runtime.language import quoted
from specrun.runtime.laws import SeededNoise
from specrun.runtime.planning import CostCurve
from specrun.runtime.round import Drafter, DraftRequest
from specrun.runtime.trees import DraftTree

FREE = CostCurve.flat([1.0] + [0.01] * 64)


def test_frequent_continuations_are_drafted_first_and_others_beside_them():
    text = [7, 8, 1, 0] * 5 + [7, 8, 2, 0] * 2
    drafter = RestDrafter(ContextIndex.of_text(text, 10), nodes=20, costs=FREE)
    drafter.begin([9, 7, 8])
    tree = drafter.propose(DraftRequest([9, 7, 8], PLAIN, SeededNoise(0), 9, 20))
    assert [tree.tokens[draw.node] for draw in tree.draws[-1]] == [1, 2]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", [{"branches": 1}, {"branches": 4, "nodes": 4}], ids=str)
def test_the_law_of_the_text_is_the_targets(seed, options):
    """The shipped loop under every outcome, learning included, to 1e-12."""
    index = ContextIndex.of_text([0, 1, 2, 0, 1, 1, 0, 2, 2, 1, 0, 0, 1, 2, 1], 3)
    trees: list[DraftTree] = []

    def make() -> Drafter:
        return noted(RestDrafter(index, min_match=1, costs=FREE, **options), trees)

    assert drafter_bias(ExactRule(), make, LawTable(3, seed), 4, (0, 1, 2)) < TOLERANCE
    assert sum(map(len, trees)) > 100
    widest = max(len(below) for tree in trees for below in (tree.draws or {}).values())
    assert widest == min(2, options["branches"]) or widest == 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rest") / "target.gguf"
    write_random_llama(path, RandomLlama(vocab_size=400, seed=1, scale=4.0))
    return path


@pytest.fixture(scope="module")
def store(target: Path) -> Path:
    corpus, path = target.with_name("corpus.txt"), target.with_name("its.store")
    corpus.write_text("the quick brown fox, the quick dog\n")
    with Model(target, vocab_only=True) as model:
        build_store([corpus], model.vocabulary, path, model=target.name)
    return path


# -- options ---------------------------------------------------------------------------------------


def test_a_store_for_another_target(store, tiny_small_vocab):
    with pytest.raises(PairError, match="another vocabulary"):
        Runtime(tiny_small_vocab, drafter=f"rest({quoted(str(store))})", **F32)


def test_a_reference_as_an_option_of_the_runtime(target, store):
    corpus = target.with_name("corpus.txt")
    with Runtime(target, drafter="prompt-lookup(n=4)", reference=corpus, **F32) as runtime:
        assert runtime.drafter == f"prompt-lookup(n=4, reference={corpus})"
    with pytest.raises(OptionError, match="not part of none"):
        Runtime(target, "none", reference=corpus, **F32)


REFERENCES: list[tuple[str, str]] = [
    ("prompt-lookup", "prompt-lookup(reference=r.txt)"),
    ("prompt-lookup(n=3)", "prompt-lookup(n=3, reference=r.txt)"),
    (
        "ensemble(draft(a.gguf), prompt-lookup)",
        "ensemble(draft(a.gguf), prompt-lookup(reference=r.txt))",
    ),
]


@pytest.mark.parametrize(("before", "after"), REFERENCES)
def test_a_reference_reaches_every_prompt_lookup(before, after):
    assert with_reference(before, Path("r.txt")) == after


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("draft(a.gguf)", r"ensemble\(draft"),
        ("prompt-lookup(reference=q.txt)", "already"),
        ("none", "leave out"),
    ],
)
def test_a_reference_nobody_reads_is_refused(expression, message):
    with pytest.raises(OptionError, match=message):
        with_reference(expression, Path("r.txt"))
