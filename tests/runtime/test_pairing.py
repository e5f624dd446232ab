"""Pairs: what does not fit is refused by name, what nearly fits works to the same text."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_models import F32

from specrun.bindings.errors import PairError, UnsupportedModelError
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, synthetic_vocabulary, write_random_llama
from specrun.convert.tokenizer import NORMAL, BytePairVocabulary
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.language import quoted
from specrun.runtime.models import check_draftable, check_pair

SIZE = 400
END = SIZE - 1
BASE = synthetic_vocabulary(SIZE)
PROMPT = list(b"the quick brown fox")
WARM = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def changed(**changes) -> BytePairVocabulary:
    fields = {name: getattr(BASE, name) for name in BytePairVocabulary.__dataclass_fields__}
    tokens = changes.pop("tokens", {})
    fields["tokens"] = tuple(tokens.get(token, text) for token, text in enumerate(BASE.tokens))
    return BytePairVocabulary(**{**fields, **changes})


def resized(size: int) -> BytePairVocabulary:
    """The first `size` tokens of the base, or more tokens after them; the end token stays where it
    is, if there."""
    extra = tuple(f"extra{index}" for index in range(max(0, size - SIZE)))
    specials = BASE.special_ids if size >= SIZE else {"bos": 0, "eos": 0}
    # Only merges whose tokens exist: a pair stands for the token both parts make.
    tokens = (*BASE.tokens, *extra)[:size]
    merges = tuple(merge for merge in BASE.merges if merge.replace(" ", "") in tokens)
    return BytePairVocabulary(
        tokens, (*BASE.types, *(NORMAL,) * len(extra))[:size], merges, specials
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def write(folder):
    written: dict[str, Path] = {}

    def write_model(name: str, vocabulary: BytePairVocabulary, **shape) -> Path:
        if name not in written:
            written[name] = folder / f"{name}.gguf"
            spec = RandomLlama(
                **{"width": 16, "layers": 1, "scale": 2.0, **shape}, vocabulary=vocabulary
            )
            write_random_llama(written[name], spec)
        return written[name]

    return write_model


@pytest.fixture(scope="module")
def target(write) -> Path:
    return write("target", BASE, width=32, layers=2, scale=3.0)


def check(target: Path, drafter: Path) -> None:
    with Model(target) as ours, Model(drafter) as theirs:
        check_pair(ours, theirs)


REFUSED = {
    "a token": (changed(tokens={300: "other"}), ["token 300", repr(BASE.tokens[300]), "'other'"]),
    "the first compared token": (changed(tokens={5: "five"}), ["token 5", "'five'"]),
    "the first of several": (
        changed(tokens={310: "later", 305: "sooner"}),
        ["token 305", "'sooner'"],
    ),
    "the last token": (
        changed(tokens={END: "<|fin|>"}),
        [f"token {END}", "'<|fin|>'", "'<|end|>'"],
    ),
    "adding bos": (changed(add_bos=True), ["bos", "target False", "drafter True"]),
    "adding eos": (changed(add_eos=True), ["eos", "drafter True"]),
    "129 tokens fewer": (resized(SIZE - 129), ["400 tokens", "271", "128"]),
    "129 tokens more": (resized(SIZE + 129), ["400 tokens", "529", "128"]),
}


@pytest.mark.parametrize(("vocabulary", "named"), REFUSED.values(), ids=REFUSED)
def test_a_drafter_that_does_not_fit_is_refused_by_its_first_difference(
    write, target, request, vocabulary, named
):
    drafter = write(request.node.callspec.id, vocabulary)
    with pytest.raises(PairError) as caught:
        check(target, drafter)
    assert caught.value.exit_code == 4
    for words in (*named, str(drafter), str(target)):
        assert words in str(caught.value)


def test_different_bos_tokens_matter_only_where_they_are_added(write):
    first = write("bos 1", changed(add_bos=True, special_ids={"bos": 1, "eos": END}))
    two = write("bos 2", changed(add_bos=True, special_ids={"bos": 2, "eos": END}))
    with pytest.raises(PairError, match=r"bos tokens differ .target 1, drafter 2"):
        check(first, two)
    check(write("silent bos 1", changed(special_ids={"bos": 1, "eos": END})), write("target", BASE))


def test_another_kind_of_vocabulary_is_refused(target, monkeypatch):
    with Model(target) as ours, Model(target) as theirs:
        monkeypatch.setattr(theirs.vocabulary, "kind", "SPM")
        with pytest.raises(PairError, match="kind BPE, the drafter's SPM"):
            check_pair(ours, theirs)


ACCEPTED = {
    "the same": BASE,
    "the first five tokens": changed(tokens={token: f"word{token}" for token in range(5)}),
    "128 tokens fewer": resized(SIZE - 128),
    "128 tokens more": resized(SIZE + 128),
}


@pytest.mark.parametrize("vocabulary", ACCEPTED.values(), ids=ACCEPTED)
def test_what_llama_accepts_is_accepted(write, target, request, vocabulary):
    check(target, write(f"accepted {request.node.callspec.id}", vocabulary))


@pytest.mark.parametrize("sampling", ["with", "argmax"])
@pytest.mark.parametrize("size", [SIZE - 128, SIZE, SIZE + 128], ids=["fewer", "equal", "more"])
def test_a_pair_of_unequal_size_answers_as_plain_decoding(write, target, size, sampling):
    drafter = write(f"size {size}", resized(size))
    greedy = SamplingParams(
        temperature=0.0, logit_bias={END: float("-inf"), 350: 30.0, 351: 30.0, 399 - 128: -5.0}
    )
    # Tokens beyond the smaller vocabulary stand in the prompt and are favoured in the answer.
    prompt = [*PROMPT, 380, 390, *PROMPT, 398]
    with Runtime(target, "none", **F32) as runtime:
        plain = runtime.generate(prompt, greedy, max_tokens=40)
    with Runtime(
        target, f"draft({quoted(str(drafter))}, n=4, sampling={sampling})", **F32
    ) as runtime:
        result = runtime.generate(prompt, greedy, max_tokens=40)
        sampled = runtime.generate(prompt, WARM, max_tokens=60)
    assert result.token_ids == plain.token_ids
    assert {350, 351} & set(plain.token_ids)
    assert result.stats.drafted > 0
    assert all(0 <= token < SIZE for token in sampled.token_ids)


def test_a_larger_drafter_never_proposes_a_token_the_target_lacks(write, target, monkeypatch):
    drafter = write(f"size {SIZE + 128}", resized(SIZE + 128))
    with Runtime(target, f"draft({quoted(str(drafter))}, n=4)", **F32) as runtime:
        proposals = []
        propose = runtime.session.drafter.propose
        monkeypatch.setattr(
            runtime.session.drafter,
            "propose",
            lambda request: proposals.append(propose(request)) or proposals[-1],
        )
        runtime.generate(PROMPT, WARM.replace(temperature=5.0), max_tokens=60)
    drafted = [token for tree in proposals for token in tree.tokens]
    assert len(drafted) > 40
    assert max(drafted) < SIZE


def test_a_recurrent_or_hybrid_model_is_refused_for_drafting(write, target, monkeypatch):
    drafter = write(f"size {SIZE}", resized(SIZE))
    rolls_back = {target: True, drafter: False}
    monkeypatch.setattr(Model, "can_branch", property(lambda model: rolls_back[model.path]))
    with pytest.raises(UnsupportedModelError, match="recurrent or hybrid") as caught:
        Runtime(target, f"draft({quoted(str(drafter))})", **F32)
    assert caught.value.exit_code == 3
    assert str(drafter) in str(caught.value)


@pytest.mark.parametrize("drafter", ["prompt-lookup(always=yes)", "jacobi(n=3)", "none"])
def test_a_target_that_drops_no_part_says_the_same(target, monkeypatch, drafter):
    with Runtime(target, "none", seed=0, **F32) as runtime:
        expected = [
            runtime.generate(prompt, max_tokens=8).token_ids
            for prompt in (PROMPT, PROMPT[:9], PROMPT)
        ]
    monkeypatch.setattr(Model, "can_branch", property(lambda model: False))
    with Runtime(target, drafter, seed=0, **F32) as runtime:
        assert [
            runtime.generate(prompt, max_tokens=8).token_ids
            for prompt in (PROMPT, PROMPT[:9], PROMPT)
        ] == expected


def test_every_ordinary_target_is_draftable(target):
    with Model(target) as model:
        check_draftable(model)
