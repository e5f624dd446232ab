"""What existing drafters get right, position by position: SpecInfer's boosting trains the next on
the rest.

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
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specrun.bindings.batch import Batch
from specrun.bindings.context import Context
from specrun.bindings.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.model import Model
from specrun.train.distillation.vocabularies import (
    ModelVocabulary,
    check_same_vocabulary,
    gguf_vocabulary,
)

_ROWS_AT_ONCE = 64  # 32 MB of logits with a vocabulary of 128k tokens

TopTokens = npt.NDArray[np.int64]


class ExistingDrafters:
    """GGUF drafters, evaluated by this runtime. Owns native memory: use it as a context manager or
    call `close()`."""

    def __init__(
        self, paths: Sequence[Path], target: ModelVocabulary, *, n_ctx: int, n_threads: int = 0
    ) -> None:
        """Open the drafters, with room for texts of `n_ctx` tokens.

        Raises PairError if the vocabulary of one is not the target's, and as Model and Context do.
        """
        self._stack = contextlib.ExitStack()
        self._contexts: list[Context] = []
        self.n_ctx = n_ctx
        with contextlib.ExitStack() as opening:
            for path in paths:
                model = opening.enter_context(Model(path))
                check_same_vocabulary(target, gguf_vocabulary(model))
                options = ContextOptions(
                    n_ctx=n_ctx, n_batch=_ROWS_AT_ONCE, n_outputs=_ROWS_AT_ONCE, n_threads=n_threads
                )
                self._contexts.append(opening.enter_context(Context(model, options)))
            self._stack = opening.pop_all()

    def __enter__(self) -> ExistingDrafters:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the native memory; calling it again does nothing."""
        self._stack.close()

    def top_tokens(self, text: Sequence[int]) -> TopTokens:
        """Return each drafter's most likely token after each token of a text:
        [n_drafters, len(text)]."""
        if len(text) > self.n_ctx:
            raise OptionError(f"a text of {len(text)} tokens for drafters opened for {self.n_ctx}")
        found = np.zeros((len(self._contexts), len(text)), np.int64)
        for row, context in enumerate(self._contexts):
            context.memory.clear()
            batch = Batch(_ROWS_AT_ONCE, 1)
            for start in range(0, len(text), _ROWS_AT_ONCE):
                piece = list(text[start : start + _ROWS_AT_ONCE])
                batch.fill_chain(piece, start, [0], len(piece))
                rows = context.decode(batch)
                found[row, start : start + len(piece)] = [
                    int(rows.logits(i).argmax()) for i in range(len(piece))
                ]
        return found


def covered_positions(target_top: Tensor, drafter_tops: TopTokens) -> Tensor:
    """Return whether any drafter's most likely token is the target's: [n] and [n_drafters, n] to
    bool [n]."""
    tops = torch.from_numpy(drafter_tops).to(target_top.device)
    return (tops == target_top[None]).any(0)


def position_weights(covered: Tensor, covered_weight: float) -> Tensor:
    """Return what each position counts in the loss: 1 where no drafter is right, `covered_weight`
    where one is."""
    return torch.where(covered, covered_weight, 1.0)
