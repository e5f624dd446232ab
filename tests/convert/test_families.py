"""Every family: converted, it computes what transformers computes and splits text as transformers does.

None of this may be skipped: `conftest.py` makes a skip here a failure.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import tiny_families
from tiny_families import FAMILIES, SENTENCEPIECE, Built, Family, transformers_logits
from tiny_tokenizers import NASTY, TEMPLATE
from transformers import AutoTokenizer

from specrun.bindings.model import Model
from specrun.convert import convert_checkpoint
from specrun.convert.families import known_architectures

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], tuple[Built, Path]]:
    """Each family's checkpoint and its GGUF file, made when first asked for."""
    folder = tmp_path_factory.mktemp("families")
    known: dict[str, tuple[Built, Path]] = {}

    def get(family: Family) -> tuple[Built, Path]:
        if family.name not in known:
            made = tiny_families.build(family, folder / family.name)
            output = folder / f"{family.name}.gguf"
            pre = None if family.tokenizer in SENTENCEPIECE else family.tokenizer
            convert_checkpoint(made.folder, output, outtype="f32", pre=pre)
            known[family.name] = made, output
        return known[family.name]

    return get


def relative_error(found: npt.NDArray[np.float32], wanted: npt.NDArray[np.float32]) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def tokens_of(length: int) -> list[int]:
    return [(7 * i * i + 3 * i + 11) % 600 for i in range(length)]


def test_every_architecture_is_compared() -> None:
    compared = {f"{family.architecture}ForCausalLM" for family in FAMILIES}
    assert compared == set(known_architectures()) - {"LLaMAForCausalLM"}  # an old spelling of Llama


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_logits_are_transformers(built, logits, family: Family) -> None:
    made, output = built(family)
    wrongs = []
    for length in family.lengths:
        tokens = tokens_of(length)
        found = logits(output, tokens, n_ctx=256 if length <= 256 else 512)
        wanted = transformers_logits(made, tokens)
        assert np.isfinite(found).all()
        assert relative_error(found, wanted) < TOLERANCE
        wrongs.append(relative_error(found, transformers_logits(made, tokens, wrong=True)))
    assert max(wrongs) > 20 * TOLERANCE  # the comparison would have noticed


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_text_is_split_as_transformers_does(built, family: Family) -> None:
    made, output = built(family)
    tokenizer = AutoTokenizer.from_pretrained(made.folder)
    with Model(output) as model:
        vocabulary = model.vocabulary
        assert vocabulary.size == 608
        for text in (*NASTY.splitlines(keepends=True), NASTY, " a", "a  b", "<tool> a"):
            if family.tokenizer == "newer llama":  # llama.cpp adds a space behind special words, and before spaces
                text = text.lstrip(" ").replace("<", "(")
            wanted = tokenizer(text).input_ids
            found = vocabulary.tokenize(text, parse_special=True)
            assert found == wanted, text
        assert vocabulary.adds_bos == (tokenizer("a").input_ids[0] == tokenizer.bos_token_id)
        assert vocabulary.eos == tokenizer.eos_token_id
        assert tokenizer.bos_token_id in (None, vocabulary.bos)
        assert model.chat_template == TEMPLATE
