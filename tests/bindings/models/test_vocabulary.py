"""Vocabularies: every text comes back, control tokens only if wanted, comparison token by
token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.bindings.errors import ClosedError, OptionError
from specrun.bindings.models import Model, Vocabulary
from specrun.convert.random_model import RandomLlama, synthetic_vocabulary, write_random_llama
from specrun.convert.tokenizer import NORMAL, USER_DEFINED, BytePairVocabulary


@pytest.fixture(scope="module")
def model(tiny_model) -> Iterator[Model]:
    with Model(tiny_model) as opened:
        yield opened


@pytest.fixture(scope="module")
def vocabulary(model) -> Vocabulary:
    return model.vocabulary


NASTY = {
    "empty": "",
    "plain": "What does shutil.copytree do?",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 🇯🇵 é ﷽",
    "scripts": "русский 中文 العربية עברית ไทย 한국어 हिन्दी",
    "code": "def f(x: int) -> str:\n\treturn f'{x:>10}'  # ok?\r\n",
    "spaces": " a  b   c    \t\t d \n\n\n e \u00a0 \u2003 f ",
    "only-spaces": " \n \t  ",
    "controls-in-text": "<|user|>hi<|end|><|unknown|>",
    "zero-byte": "a\0b",
    "edges-of-unicode": "\u0000\u007f\u0080\u07ff\u0800\uffff\U00010000\U0010ffff",
    "long": "ab" * 5000,
}


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY)
def test_text_survives_tokenization(vocabulary, text):
    assert vocabulary.detokenize(vocabulary.tokenize(text)) == text


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.text())
def test_any_text_survives_tokenization(vocabulary, text):
    tokens = vocabulary.tokenize(text)
    assert all(0 <= token < vocabulary.size for token in tokens)
    assert vocabulary.detokenize(tokens) == text


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.text() | st.text("ab <|user>\n") | st.sampled_from(["<|user|>" * 9, "\u2581" * 50]))
def test_no_text_has_fewer_tokens_than_its_bytes_say(vocabulary, text):
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=True)
    assert vocabulary.fewest_tokens(text) <= len(tokens)
    assert vocabulary.fewest_tokens(text) > 0 or not text


def test_a_vocabulary_that_leaves_bytes_out_says_nothing_of_lengths(open_vocabulary):
    whole = synthetic_vocabulary(300)
    assert open_vocabulary(whole).fewest_tokens("a" * 1000) > 0
    place = whole.tokens.index("a")
    gaps = open_vocabulary(changed(whole, {place: "no byte"}))
    assert gaps.fewest_tokens("a" * 1000) == 0


def test_a_lone_surrogate_does_not_crash(vocabulary):
    assert vocabulary.detokenize(vocabulary.tokenize("a\ud800b")) == "a?b"


def test_a_character_is_split_over_byte_pieces(vocabulary):
    tokens = vocabulary.tokenize("😀")
    assert len(tokens) == 4
    assert b"".join(map(vocabulary.piece, tokens)) == "😀".encode()
    assert vocabulary.detokenize(tokens[:2]) == "\ufffd"


def test_what_a_user_typed_is_not_parsed_as_control_tokens(vocabulary):
    tokens = vocabulary.tokenize("<|end|>")
    assert not vocabulary.end_of_generation & set(tokens)
    assert vocabulary.detokenize(tokens) == "<|end|>"


def test_control_tokens_are_parsed_when_asked_for(vocabulary):
    tokens = vocabulary.tokenize("<|user|>a<|end|>", parse_special=True)
    assert [vocabulary.label(token) for token in tokens] == ["<|user|>", "a", "<|end|>"]


def test_control_tokens_stand_for_nothing_in_text(vocabulary):
    (end,) = vocabulary.end_of_generation
    assert vocabulary.piece(end) == b""
    assert vocabulary.label(end) == vocabulary.text(end) == "<|end|>"
    assert vocabulary.detokenize([*b"a", end, *b"b"]) == "ab"


def test_special_texts_are_the_control_tokens(vocabulary):
    assert set(vocabulary.special_texts) == {"<|user|>", "<|assistant|>", "<|end|>"}


@pytest.mark.parametrize("token", [-1, 320, 2**31])
@pytest.mark.parametrize("method", ["piece", "label", "text"])
def test_a_token_outside_is_refused(vocabulary, method, token):
    with pytest.raises(OptionError, match="outside the vocabulary of 320 tokens"):
        getattr(vocabulary, method)(token)


@pytest.fixture(scope="module")
def open_vocabulary(tmp_path_factory):
    """Opens models with a vocabulary of their own; all are closed at the end."""
    folder = tmp_path_factory.mktemp("vocabularies")
    models: list[Model] = []

    def build(vocabulary: BytePairVocabulary) -> Vocabulary:
        path = folder / f"{len(models)}.gguf"
        write_random_llama(
            path, RandomLlama(width=8, heads=1, kv_heads=1, layers=1, ffn=8, vocabulary=vocabulary)
        )
        models.append(Model(path))
        return models[-1].vocabulary

    yield build
    for model in models:
        model.close()


def changed(vocabulary: BytePairVocabulary, tokens: dict[int, str], **others) -> BytePairVocabulary:
    fields = {name: getattr(vocabulary, name) for name in BytePairVocabulary.__dataclass_fields__}
    fields["tokens"] = tuple(
        tokens.get(index, token) for index, token in enumerate(vocabulary.tokens)
    )
    return BytePairVocabulary(**{**fields, **others})


def test_the_first_difference_is_found_from_a_start_on(open_vocabulary):
    base = synthetic_vocabulary(300)
    plain = open_vocabulary(base)
    other = open_vocabulary(changed(base, {2: "two", 280: "other"}))
    assert plain.first_difference(plain, 0) is None
    assert plain.first_difference(other, 0) == 2
    assert plain.first_difference(other, 3) == 280
    assert plain.first_difference(other, 281) is None


def test_only_the_common_tokens_are_compared(open_vocabulary):
    base = synthetic_vocabulary(300)
    more = BytePairVocabulary(
        (*base.tokens, "more"), (*base.types, NORMAL), base.merges, base.special_ids
    )
    small, large = open_vocabulary(base), open_vocabulary(more)
    assert small.first_difference(large, 0) is None
    assert large.first_difference(small, 0) is None


def test_a_user_defined_token_is_text_not_a_control_token(open_vocabulary):
    """Gemma has runs of newlines as such tokens: taking them apart would change ordinary
    prompts."""
    base = synthetic_vocabulary(300)
    types = (*base.types[:290], USER_DEFINED, *base.types[291:])
    vocabulary = open_vocabulary(changed(base, {290: "\n\n"}, types=types))
    assert 290 in vocabulary.tokenize("a\n\nb")
    assert "\n\n" not in vocabulary.special_texts


@pytest.mark.parametrize(("adds", "expected"), [(True, 1), (False, 0)])
def test_bos_is_added_as_the_file_says(open_vocabulary, adds, expected):
    vocabulary = open_vocabulary(changed(synthetic_vocabulary(300), {}, add_bos=adds))
    assert vocabulary.adds_bos is adds
    assert vocabulary.tokenize("ab").count(vocabulary.bos) == expected
    assert vocabulary.tokenize("ab", add_special=False).count(vocabulary.bos) == 0


def test_a_vocabulary_is_closed_with_its_model(tiny_model):
    model = Model(tiny_model)
    vocabulary = model.vocabulary
    model.close()
    for call in (
        lambda: vocabulary.tokenize("a"),
        lambda: vocabulary.label(3),
        lambda: vocabulary.bos,
    ):
        with pytest.raises(ClosedError):
            call()


@pytest.fixture(scope="module", params=[True, False], ids=["bos", "no-bos"])
def ending(request, tmp_path_factory) -> Iterator[Model]:
    """A model whose file has an eos put behind every text, and a bos before it or not."""
    base = synthetic_vocabulary(300, controls=("<s>", "<|end|>"))
    own = {"bos": 298, "eos": 299}
    vocabulary = BytePairVocabulary(
        base.tokens, base.types, base.merges, own, add_bos=request.param, add_eos=True
    )
    path = tmp_path_factory.mktemp("ending") / "ending.gguf"
    sizes = {"width": 8, "heads": 1, "kv_heads": 1, "layers": 1, "ffn": 8}
    write_random_llama(path, RandomLlama(**sizes, vocabulary=vocabulary))
    with Model(path) as opened:
        yield opened


def test_a_prompt_has_its_control_tokens_one_bos_and_no_eos(ending: Model) -> None:
    vocabulary = ending.vocabulary
    first = [298] if vocabulary.adds_bos else []
    assert vocabulary.adds_eos
    assert vocabulary.tokenize("hi")[-1] == 299  # as embedders read it
    plain = vocabulary.tokenize("hi", add_special=False)
    assert vocabulary.tokenize_prompt("hi") == [*first, *plain]
    assert vocabulary.tokenize_prompt("") == first
    assert vocabulary.tokenize_prompt("<s>hi") == [298, *plain]
    assert vocabulary.tokenize_prompt("<|end|>hi") == [*first, 299, *plain]
    assert vocabulary.tokenize_prompt("hi<|end|>") == [*first, *plain, 299]
    literal = vocabulary.tokenize("<s>hi", add_special=False)
    assert 298 not in literal
    assert vocabulary.tokenize_prompt("<s>hi", parse_special=False) == [*first, *literal]
