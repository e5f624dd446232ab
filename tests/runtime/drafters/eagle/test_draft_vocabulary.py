"""FR-Spec: an EAGLE head that drafts frequent tokens alone says of them what a whole one says."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.tiny_eagle import random_eagle

from specrun.bindings.errors import MalformedFileError, OptionError, PairError
from specrun.bindings.models.model import Model
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.eagle import EagleHead
from specrun.runtime.drafters.eagle.versions import draft_vocabulary
from specrun.runtime.heads import HeadFile

HIDDEN, VOCAB = 32, 320
FREQUENT = np.random.default_rng(3).permutation(VOCAB)[:40].astype(np.int64)
TOKENS, POSITIONS, CELLS = [3, 1, 4, 1], [0, 1, 2, 3], [0, 1, 2, 3]
STATES = np.random.default_rng(0).normal(size=(4, HIDDEN)).astype(np.float32)
PROMPT = "one two three"


@pytest.fixture
def target(tiny_model: Path):
    with Model(tiny_model) as model:
        yield model


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return random_eagle(HIDDEN).write(tmp_path / "whole.gguf", VOCAB)


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """The same head in a file that names its frequent tokens."""
    return random_eagle(HIDDEN).write(tmp_path / "named.gguf", VOCAB, draft_tokens=FREQUENT)


def logits_of(path: Path, target: Model, draft_tokens: int | None) -> np.ndarray:
    """The head's logits over the target's tokens at four pairs."""
    head = EagleHead(path, target, draft_tokens, ranks=8, whole_rows=True, n_threads=1)
    with closing(head), closing(head.cells(8)) as pairs:
        places = POSITIONS, CELLS, 0, np.tril(np.ones((4, 4), bool))
        rows = pairs.evaluate(TOKENS, STATES, places)
        assert rows.logits is not None
        return np.array(rows.logits)


@pytest.mark.parametrize(("draft_tokens", "kept"), [(None, 40), (24, 24)])
def test_frequent_tokens_have_the_whole_heads_logits_and_others_none(
    target: Model, whole: Path, named: Path, draft_tokens: int | None, kept: int
) -> None:
    every, some = logits_of(whole, target, None), logits_of(named, target, draft_tokens)
    ids = np.sort(FREQUENT[:kept])
    np.testing.assert_array_equal(np.isfinite(some).nonzero()[1].reshape(4, -1), [ids] * 4)
    np.testing.assert_allclose(some[:, ids], every[:, ids], rtol=1e-6)
    assert np.isfinite(every).all()


def test_all_of_a_named_file_are_the_whole_heads(target: Model, whole: Path, named: Path) -> None:
    np.testing.assert_array_equal(logits_of(named, target, 0), logits_of(whole, target, None))


@pytest.mark.parametrize(
    ("shape", "temperature"),
    [("n=4", 0.0), ("depth=3, topk=3, nodes=7", 0.0), ("tree=2x2, sampling=without", 1.0)],
)
def test_only_frequent_tokens_are_drafted(
    tiny_model: Path, named: Path, shape: str, temperature: float
) -> None:
    """As the whole head drafts others with these settings, that is no accident."""
    drafted = {}
    for tokens in ("24", "all"):
        found: set[int] = set()
        expression = f"eagle({named}, {shape}, draft_tokens={tokens})"
        with Runtime(tiny_model, drafter=expression, n_ctx=256, n_threads=1) as rt:
            propose = rt.session.drafter.propose

            def noted(request, propose=propose, found=found):
                tree = propose(request)
                found.update(tree.tokens)
                return tree

            rt.session.drafter.propose = noted  # type: ignore[method-assign]
            params = SamplingParams(temperature=temperature, seed=1)
            rt.generate(PROMPT, params, max_tokens=24)
        drafted[tokens] = found
    frequent = set(FREQUENT[:24].tolist())
    assert drafted["24"] <= frequent
    assert len(drafted["24"]) > 3
    assert not drafted["all"] <= frequent


def test_a_file_that_names_none_drafts_the_lowest_ids_and_what_ends_texts(
    target: Model, whole: Path
) -> None:
    file = HeadFile(whole, "eagle")
    assert draft_vocabulary(file, target) is None
    found = draft_vocabulary(file, target, 20)
    assert found is not None
    assert set(found) == set(range(20)) | set(target.vocabulary.end_of_generation)
    assert (np.diff(found) > 0).all()
    assert draft_vocabulary(file, target, VOCAB) is None


@pytest.mark.parametrize(
    ("listed", "most", "error", "said"),
    [
        (FREQUENT, 41, OptionError, "draft_tokens is 41, and .* names 40: give at most so many"),
        (FREQUENT, 3, OptionError, "draft_tokens is 3: give at least 16, or all"),
        (FREQUENT[:5], None, MalformedFileError, "not a list of at least 16 in I64"),
        (FREQUENT.astype(np.int32), None, MalformedFileError, "of I32"),
        (np.full(40, 7), None, MalformedFileError, "has token 7 twice"),
        (np.arange(VOCAB - 20, VOCAB + 20), None, PairError, f"names token {VOCAB}"),
    ],
)
def test_lists_and_numbers_that_cannot_be(
    target: Model, tmp_path: Path, listed: np.ndarray, most: int | None, error: type, said: str
) -> None:
    path = random_eagle(HIDDEN).write(tmp_path / "e.gguf", VOCAB, draft_tokens=listed)
    with pytest.raises(error, match=said):
        EagleHead(path, target, most, ranks=3, n_threads=1)
