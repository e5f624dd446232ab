"""Existing drafters beside which a new one learns, and vocabularies that must be the same."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError, PairError
from specrun.bindings.models.model import Model
from specrun.convert.checkpoint import open_checkpoint
from specrun.convert.tokenizer import UNUSED, read_vocabulary

# == Vocabularies of target and drafter ============================================================


# As for drafting: embeddings are rounded up to different numbers of rows within a family.
_MAX_SIZE_DIFFERENCE = 128


@dataclass(frozen=True, slots=True)
class ModelVocabulary:
    """A model's tokens by id; None stands for an id that is no token."""

    path: Path
    tokens: Sequence[str | None]


def folder_vocabulary(folder: Path) -> ModelVocabulary:
    """Return the vocabulary of a Hugging Face folder, as a GGUF file of it would state them.

    Raises FileMissingError, MalformedFileError or UnsupportedModelError, as converting the folder
    would.
    """
    found = read_vocabulary(open_checkpoint(folder))
    pairs = zip(found.tokens, found.types, strict=True)
    return ModelVocabulary(folder, [None if kind == UNUSED else text for text, kind in pairs])


def gguf_vocabulary(model: Model) -> ModelVocabulary:
    """Return the vocabulary of an open GGUF model."""
    found = model.vocabulary
    return ModelVocabulary(model.path, [found.text(token) for token in range(found.size)])


def check_same_vocabulary(target: ModelVocabulary, draft: ModelVocabulary) -> int:
    """Return how many ids both models have; raise PairError with the first token that differs.

    Ids that stand for no token in one of them may be anything in the other, and one may have up to
    128 more of them.
    """
    pair = f"{draft.path} cannot draft for {target.path}"
    sizes = len(target.tokens), len(draft.tokens)
    for token, (ours, theirs) in enumerate(zip(target.tokens, draft.tokens, strict=False)):
        if ours != theirs and None not in (ours, theirs):
            raise PairError(
                f"{pair}: token {token} is {ours!r} for the target and {theirs!r} for the drafter. "
                "Use a drafter of the same model family"
            )
    if max(sizes) - min(sizes) > _MAX_SIZE_DIFFERENCE:
        raise PairError(
            f"{pair}: the target has {sizes[0]} tokens, the drafter {sizes[1]}; "
            f"at most {_MAX_SIZE_DIFFERENCE} may be missing. Use a drafter of the same model family"
        )
    return min(sizes)


# == Existing drafters' right guesses by position: SpecInfer's boosting trains on the rest =========
#
# Miao et al. 2023, "SpecInfer", section 3 (collective boost-tuning): drafters of one tree need not
# be good alone, they should cover the target's tokens together. They are trained one after the
# other, each on the tokens that those before it miss. There samples are dropped whose next tokens a
# drafter generates as the target does; here positions are, so that a text of which a drafter has
# learnt the easy half still teaches the other half.


_ROWS_AT_ONCE = 64  # 32 MB of logits with a vocabulary of 128k tokens

TopTokens = npt.NDArray[np.int64]


class ExistingDrafters(contextlib.ExitStack[None]):
    """GGUF drafters, evaluated by this runtime. Owns native memory: close it, or use `with`."""

    def __init__(
        self, paths: Sequence[Path], target: ModelVocabulary, *, n_ctx: int, n_threads: int = 0
    ) -> None:
        """Open the drafters, with room for texts of `n_ctx` tokens.

        Raises PairError if the vocabulary of one is not the target's, and as Model and Context do.
        """
        super().__init__()
        self.n_ctx = n_ctx
        self._contexts: list[Context] = []
        rows = _ROWS_AT_ONCE
        options = ContextOptions(n_ctx=n_ctx, n_batch=rows, n_outputs=rows, n_threads=n_threads)
        with contextlib.ExitStack() as opening:  # closes the opened ones if one of them fails
            for path in paths:
                model = opening.enter_context(Model(path))
                check_same_vocabulary(target, gguf_vocabulary(model))
                context = Context(model, options)
                self._contexts.append(opening.enter_context(context))
            self.push(opening.pop_all())

    def top_tokens(self, text: Sequence[int]) -> TopTokens:
        """Return each drafter's most likely token after each token: [n_drafters, len(text)]."""
        if len(text) > self.n_ctx:
            raise OptionError(f"a text of {len(text)} tokens for drafters opened for {self.n_ctx}")
        found = np.zeros((len(self._contexts), len(text)), np.int64)
        for row, context in enumerate(self._contexts):
            context.memory.clear()
            batch = Batch(_ROWS_AT_ONCE, 1)
            for start in range(0, len(text), _ROWS_AT_ONCE):
                piece = list(text[start : start + _ROWS_AT_ONCE])
                # Every token gives a row: positions are compared one by one.
                batch.fill_chain(piece, start, [0], len(piece))
                rows = context.decode(batch)
                found[row, start : start + len(piece)] = [
                    int(rows.logits(i).argmax()) for i in range(len(piece))
                ]
        return found


def covered_positions(target_top: Tensor, drafter_tops: TopTokens) -> Tensor:
    """Return whether any drafter's token [n_drafters, n] is the target's [n]: bool [n]."""
    tops = torch.from_numpy(drafter_tops).to(target_top.device)
    return (tops == target_top[None]).any(0)
