"""What existing drafters know: their likeliest tokens through llama.cpp, and what is left to
learn."""

import numpy as np
import pytest
import torch

from specrun.bindings.errors import ClosedError, OptionError, PairError
from specrun.train.distillation.coverage import (
    ExistingDrafters,
    covered_positions,
    folder_vocabulary,
)


@pytest.fixture(scope="module")
def drafters(family, draft_gguf):
    target = folder_vocabulary(family.target)
    with ExistingDrafters([draft_gguf] * 2, target, n_ctx=200, n_threads=1) as opened:
        yield opened


def test_their_tokens_are_those_that_torch_finds(drafters, draft):
    text = np.random.default_rng(0).integers(4, 300, 150).tolist()  # longer than one evaluation
    with torch.no_grad():
        logits = draft.module(input_ids=torch.tensor([text])).logits[0]
    best = logits.topk(2, -1).values
    # llama.cpp keeps keys and values in half precision.
    sure = (best[:, 0] - best[:, 1]).numpy() > 0.02
    assert sure.mean() > 0.3
    found = drafters.top_tokens(text)
    assert found.shape == (2, 150)
    for row in found:
        assert (row == logits.argmax(-1).numpy())[sure].all()


def test_texts_do_not_leak_into_each_other(drafters):
    first = drafters.top_tokens([5, 6, 7])
    drafters.top_tokens([8, 9, 10, 11])
    assert np.array_equal(drafters.top_tokens([5, 6, 7]), first)


def test_too_long_a_text_is_refused(drafters):
    with pytest.raises(OptionError, match="a text of 201 tokens for drafters opened for 200"):
        drafters.top_tokens([5] * 201)


def test_a_position_is_covered_if_any_drafter_is_right():
    target_top = torch.tensor([1, 2, 3, 4])
    tops = np.array([[1, 0, 0, 4], [1, 2, 0, 0]])
    covered = covered_positions(target_top, tops)
    assert covered.tolist() == [True, True, False, True]
    assert covered_positions(target_top, tops[:1]).tolist() == [True, False, False, True]


def test_a_drafter_of_another_vocabulary_is_refused(family, tiny_model):
    with pytest.raises(PairError, match=r"token \d+ is .* for the target"):
        ExistingDrafters([tiny_model], folder_vocabulary(family.target), n_ctx=64, n_threads=1)


def test_closed_drafters_say_nothing(family, draft_gguf):
    opened = ExistingDrafters([draft_gguf], folder_vocabulary(family.target), n_ctx=64, n_threads=1)
    opened.close()
    opened.close()
    with pytest.raises(ClosedError):
        opened.top_tokens([5])
