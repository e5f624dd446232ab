"""Existing drafters' right guesses by position: SpecInfer's boosting trains on the rest.

Miao et al. 2023, "SpecInfer", section 3 (collective boost-tuning): drafters of one tree need not be
good alone, they should cover together what the target says. They are trained one after the other,
each on what those before it miss. There samples are dropped whose next tokens a drafter generates
as the target does; here positions are, so that a text of which a drafter knows the easy half still
teaches the other half.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.train.distillation.vocabularies import (
    ModelVocabulary,
    check_same_vocabulary,
    gguf_vocabulary,
)

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
        with contextlib.ExitStack() as opening:  # closes what was opened if one of them fails
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


def position_weights(covered: Tensor, covered_weight: float) -> Tensor:
    """Return what each position counts in the loss: `covered_weight` where a drafter is right."""
    return torch.where(covered, covered_weight, 1.0)
