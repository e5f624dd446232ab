"""REST: exact whatever it retrieves, plain decoding's own text at every temperature, and its
options."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.enumeration import TOLERANCE
from support.retrieval_laws import retrieval_bias
from support.scripted import PLAIN, LawTable
from support.tiny_models import F32

from specrun.bindings.errors import FileMissingError, MalformedFileError, OptionError, PairError
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import GenerationResult, Runtime, SamplingParams
from specrun.runtime.drafters.retrieval import (
    ContextIndex,
    RestDrafter,
    build_store,
    with_reference,
)
from specrun.runtime.language import quoted
from specrun.runtime.laws import SeededNoise
from specrun.runtime.planning import CostCurve
from specrun.runtime.round import DraftRequest

FREE = CostCurve.flat([1.0] + [0.01] * 64)
PENALTIES = {"repeat_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}


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
    error, nodes, widest = retrieval_bias(
        lambda: RestDrafter(index, min_match=1, costs=FREE, **options),
        LawTable(3, seed),
        (0, 1, 2),
        4,
    )
    assert error < TOLERANCE
    assert nodes > 100
    assert widest == min(2, options["branches"]) or widest == 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rest") / "target.gguf"
    write_random_llama(path, RandomLlama(vocab_size=400, seed=1, scale=4.0))
    return path


def answer(
    target: Path, drafter: str, params: SamplingParams, **options: object
) -> GenerationResult:
    with Runtime(target, drafter=drafter, **F32, **options) as runtime:
        return runtime.generate([3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4], params, max_tokens=48)


@pytest.fixture(scope="module")
def store(target: Path) -> Path:
    """A datastore of what the target says, with other things in between: some drafts are right,
    some wrong."""
    texts = [
        answer(target, "none", SamplingParams(temperature=t, seed=s)).text
        for t, s in ((0.0, 0), (1.0, 1))
    ]
    corpus, path = target.with_name("corpus.txt"), target.with_name("its.store")
    # What is said in bytes that are no text cannot be stored; the rest is.
    corpus.write_text(
        "\n".join([*texts, texts[0][::-1], texts[0]]), encoding="utf-8", errors="replace"
    )
    with Model(target, vocab_only=True) as model:
        build_store([corpus], model.vocabulary, path, model=target.name)
    return path


@pytest.mark.parametrize("extra", [{}, PENALTIES], ids=["plain", "penalties"])
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "drafter",
    [
        "rest(STORE, min_match=1)",
        "prompt-lookup(min_ngram=1, nodes=8)",
        "prompt-lookup(min_ngram=1, reference=TEXT)",
    ],
)
def test_the_text_is_plain_decodings_own(target, store, drafter, seed, temperature, extra):
    params = SamplingParams(temperature=temperature, seed=seed, **extra)
    expression = drafter.replace("STORE", quoted(str(store))).replace(
        "TEXT", quoted(str(target.with_name("corpus.txt")))
    )
    wanted, got = answer(target, "none", params), answer(target, expression, params)
    assert got.token_ids == wanted.token_ids
    if temperature == 0.0 and not extra:
        assert got.stats.drafted


def test_rest_beside_other_drafters(target, store):
    params = SamplingParams(temperature=0.8, seed=3)
    expression = f"ensemble(rest({quoted(str(store))}, min_match=1), prompt-lookup(min_ngram=1))"
    assert answer(target, expression, params).token_ids == answer(target, "none", params).token_ids


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("rest", "name the datastore"),
        ("rest(STORE, places=0)", "places is 0"),
        ("rest(STORE, min_match=17)", "min_match is 17"),
        ("rest(STORE, n=0)", "n is 0"),
        ("rest(STORE, m=3)", "no option 'm'"),
        ("rest(STORE, nodes=600)", "nodes"),
        ("rest(STORE, STORE)", "1 unnamed"),
    ],
)
def test_options_that_make_no_sense(target, store, expression, message):
    with pytest.raises(OptionError, match=message):
        Runtime(target, drafter=expression.replace("STORE", quoted(str(store))), **F32)


@pytest.mark.parametrize(
    ("content", "error"),
    [(None, FileMissingError), (b"", MalformedFileError), (b"GGUF" * 2000, MalformedFileError)],
)
def test_a_file_that_is_no_store(target, tmp_path, content, error):
    if content is not None:
        (tmp_path / "x.store").write_bytes(content)
    with pytest.raises(error, match=r"x\.store"):
        Runtime(target, drafter=f"rest({quoted(str(tmp_path / 'x.store'))})", **F32)


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
