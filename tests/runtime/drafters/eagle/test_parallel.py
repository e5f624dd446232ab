"""P-EAGLE's rows equal a torch reference, and its drafts leave the text as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.target_texts import same_text
from support.tiny_dflash import token_matrices
from support.tiny_eagle3 import TinyEagle3, Variant, random_eagle3
from support.tiny_models import F32

from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.runtime import Runtime
from specrun.runtime.drafters.eagle import Eagle3Head
from specrun.runtime.drafters.eagle.parallel import ParallelState
from specrun.runtime.language import quoted

HIDDEN, VOCAB, MASK, TEXT = 32, 320, 7, 20
VARIANTS = {
    "four layers": Variant(n_layers=4, mask=MASK, own_embedding=True),
    "one, all tokens": Variant(mask=MASK, draft_tokens=None, norm_before_fc=True),
    "normed heads": Variant(n_layers=2, mask=MASK, head_norms=True, fc_norm=True),
}


@pytest.fixture
def target(tiny_deep_model: Path) -> Iterator[Model]:
    with Model(tiny_deep_model) as model:
        yield model


def expected(
    head: TinyEagle3, path: Path, tokens: list[int], features: np.ndarray, n_slots: int
) -> np.ndarray:
    """The logits of a text's block over the target's tokens, [n_slots, vocab]."""
    w, n = head.tensors(), len(tokens) - 1
    embedding, output = (torch.tensor(m, dtype=torch.float64) for m in token_matrices(path))
    ids = [*tokens[1:], *[MASK] * (n_slots - 1)]
    masks = torch.tensor(head.weights["mask_hidden"], dtype=torch.float64).reshape(1, -1)
    rows = torch.cat([torch.tensor(features[:n], dtype=torch.float64), *[masks] * (n_slots - 1)])
    embedded = w.get("embed_tokens.weight", embedding)[ids]
    sees = np.tri(len(ids), dtype=bool)
    read = head.predicted(w, embedded, head.fused(w, rows), range(len(ids)), sees)[1]
    logits = read[n - 1 :] @ w.get("lm_head.weight", output).T
    whole = torch.full((n_slots, VOCAB), -torch.inf, dtype=torch.float64)
    known = head.target_ids
    whole[:, torch.arange(VOCAB) if known is None else torch.tensor(known)] = logits
    return whole.numpy()


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_rows_are_the_references(
    target: Model, tiny_deep_model: Path, tmp_path: Path, variant: Variant
) -> None:
    tiny = random_eagle3(HIDDEN, VOCAB, variant)
    path = tiny.write(tmp_path / "p.gguf", tiny_deep_model)
    head = Eagle3Head(path, target, ranks=1, whole_rows=True, n_threads=1)
    assert head.mask == MASK
    state = ParallelState(head, head.cells(64), 5)
    random = np.random.default_rng(3)
    tokens = random.integers(0, VOCAB, TEXT + 4).tolist()
    features = random.normal(size=(TEXT + 4, 3 * HIDDEN)).astype(np.float32)
    # The text grows by what a round accepts; the masks' cells are written over each time.
    known = 0
    for end in (TEXT, TEXT + 1, TEXT + 4):
        text = tokens[:end]
        state.learn(known, features[known : end - 1], text)
        known = end - 1
        for n_slots in (5, 1, 3):
            rows = state.block(text, n_slots)
            assert rows is not None
            found = np.stack([rows.after(slot, [0]).whole[0] for slot in range(n_slots)])  # type: ignore[index]
            wanted = expected(tiny, tiny_deep_model, text, features, n_slots)
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert state.block(tokens[: TEXT + 2], 2) is None
    state.cells.close()
    head.close()


@pytest.mark.parametrize("options", ["n=4", "depth=3, topk=2, nodes=6", "n=10"])
def test_the_text_is_plain_decodings_own(
    tiny_deep_model: Path, tmp_path: Path, options: str
) -> None:
    tiny = random_eagle3(HIDDEN, VOCAB, VARIANTS["four layers"])
    path = quoted(str(tiny.write(tmp_path / "p.gguf", tiny_deep_model)))
    same_text(tiny_deep_model, f"eagle3({path}, {options})")


def test_accuracies_are_refused(tiny_deep_model: Path, tmp_path: Path) -> None:
    tiny = random_eagle3(HIDDEN, VOCAB, VARIANTS["one, all tokens"])
    path = quoted(str(tiny.write(tmp_path / "p.gguf", tiny_deep_model)))
    with pytest.raises(OptionError, match="accuracy= is of heads"):
        Runtime(tiny_deep_model, f"eagle3({path}, tree=sequoia, accuracy=a.csv)", **F32)
