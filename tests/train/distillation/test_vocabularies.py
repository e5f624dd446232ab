"""Whose vocabulary is the target's: the first that differs is named."""

import json
import shutil
from pathlib import Path

import pytest

from specrun.bindings.errors import FileMissingError, PairError
from specrun.bindings.models.model import Model
from specrun.train.distillation.coverage import (
    ModelVocabulary,
    check_same_vocabulary,
    folder_vocabulary,
    gguf_vocabulary,
)


def vocabulary(*texts, name="draft"):
    return ModelVocabulary(Path(name), texts)


def test_equal_vocabularies_fit():
    assert check_same_vocabulary(vocabulary("a", "b"), vocabulary("a", "b")) == 2


def test_the_first_token_that_differs_is_named():
    with pytest.raises(
        PairError, match=r"draft cannot draft for big: token 1 is 'b' for the target and 'x' for"
    ) as caught:
        check_same_vocabulary(vocabulary("a", "b", "c", name="big"), vocabulary("a", "x", "y"))
    assert caught.value.exit_code == 4


def test_ids_without_a_token_may_differ():
    assert check_same_vocabulary(vocabulary("a", None), vocabulary("a", "<extra>")) == 2
    assert check_same_vocabulary(vocabulary("a", "b", "c"), vocabulary("a", "b")) == 2


def test_too_many_missing_tokens_are_refused():
    many = [str(n) for n in range(200)]
    with pytest.raises(PairError, match="the target has 200 tokens, the drafter 50; at most 128"):
        check_same_vocabulary(vocabulary(*many), vocabulary(*many[:50]))
    assert check_same_vocabulary(vocabulary(*many), vocabulary(*many[:72])) == 72


def test_folder_and_file_of_one_tokenizer_have_the_same_vocabulary(family, draft_gguf):
    with Model(draft_gguf, vocab_only=True) as model:
        file, folder = gguf_vocabulary(model), folder_vocabulary(family.target)
        assert check_same_vocabulary(folder, file) == 300


def test_a_folder_with_another_token(family, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(family.draft, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    first, second = sorted(ids, key=ids.get)[270:272]
    ids[first], ids[second] = ids[second], ids[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        PairError, match=f"token 270 is {first!r} for the target and {second!r} for the drafter"
    ):
        check_same_vocabulary(folder_vocabulary(family.target), folder_vocabulary(other))


def test_a_missing_folder(tmp_path):
    with pytest.raises(FileMissingError, match="there is no folder"):
        folder_vocabulary(tmp_path / "nowhere")
