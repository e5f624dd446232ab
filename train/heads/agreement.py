"""How often heads guess what the target would say: by depth, among their first 1 and 5 tokens, and
in chains."""

from __future__ import annotations

import torch
from torch import Tensor

_RANKS = 5


def best_tokens(logits: Tensor) -> Tensor:
    """Return the first five tokens [P, 5] of logits [P, vocab], the most likely first."""
    return logits.topk(min(_RANKS, logits.shape[-1]), -1).indices


def shifted(rows: Tensor, by: int, length: int) -> Tensor:
    """Return `rows` [B, T, ...] from position `by` on, cut or filled with zeros to `length`
    positions."""
    moved = rows[:, by : by + length]
    more = torch.zeros(
        rows.shape[0],
        length - moved.shape[1],
        *rows.shape[2:],
        dtype=rows.dtype,
        device=rows.device,
    )
    return torch.cat((moved, more), 1)


class Agreement:
    """Counts agreement with the target's own first choice, for drafts of up to `depth` tokens.

    Each call to `add` brings the chains of one batch: what the target chooses at every depth, and
    how a draft ranks it.
    """

    def __init__(self, depth: int, label: str) -> None:
        self._label = label
        self._first = [0] * depth
        self._five = [0] * depth
        self._count = [0] * depth
        self._chains = 0
        self._accepted = 0

    def add(self, drafted: list[Tensor], chosen: list[Tensor], counted: list[Tensor]) -> None:
        """Add what heads say at P places: for each depth their best tokens [P, 5], the target's
        token [P], and marks [P].

        A chain goes on while its first tokens are right, and is only counted where its whole depth
        is.
        """
        right = torch.ones_like(counted[0])
        whole = torch.stack(counted).all(0)
        self._chains += int(whole.sum())
        for depth, (tokens, token, marks) in enumerate(zip(drafted, chosen, counted, strict=True)):
            best = tokens == token[:, None]
            self._count[depth] += int(marks.sum())
            self._first[depth] += int((best[:, 0] & marks).sum())
            self._five[depth] += int((best.any(-1) & marks).sum())
            right = right & best[:, 0]
            self._accepted += int((right & whole).sum())

    def measures(self) -> dict[str, float]:
        """Return the shares by name, and `tokens a round`: those of a chain that are right, and the
        target's own."""
        found: dict[str, float] = {}
        for depth, count in enumerate(self._count):
            if count:
                found[f"{self._label} {depth + 1} top-1"] = self._first[depth] / count
                found[f"{self._label} {depth + 1} top-5"] = self._five[depth] / count
        if self._chains:
            found["tokens a round"] = 1 + self._accepted / self._chains
        return found
