"""What every acceptance rule is: a walk down the draft tree that keeps a path and picks the next token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from specrun.runtime.law import Law
from specrun.runtime.noise import NoiseSource
from specrun.runtime.tree import DraftTree

__all__ = ["Acceptance", "AcceptanceRule", "LawAt"]

LawAt = Callable[[int], Law]
"""The target's transformed law after a node (or ROOT); computed only for nodes a rule visits."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The accepted nodes from the root down, and the target's own token after them.

    `rejected` is True if the walk ended by rejecting every draw of a node (the token is then recovered),
    False if it reached a node without draws (a bonus token).
    """

    path: tuple[int, ...]
    next_token: int
    rejected: bool


class AcceptanceRule(Protocol):
    """Decides one round."""

    name: str
    exact: bool

    def accept(self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int) -> Acceptance:
        """Return what is kept of `tree`.

        `position` is where the first new token will stand; the token at `position + depth` is decided by
        draws keyed with that position.
        """
