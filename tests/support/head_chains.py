"""Greedy chains of a head token by token: the reference for chains in one graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specrun.runtime.heads import ChainTokens, RowPiece, RowPlaces


class PairChainByDepth:
    """For heads over pairs: `chain` made of `evaluate_features` and `evaluate`."""

    def chain(self, piece: RowPiece, n: int, *, probabilities: bool = False) -> ChainTokens:
        return pair_chain(self, piece.tokens, piece.rows, piece.position, piece.count, n)

    def tree(self, *given: object) -> None:
        """No tree in one graph: it is grown depth by depth."""


def whole_places(places: RowPlaces) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions, cells, and all cells that each row sees."""
    positions, cells, seen, sees = places
    whole = np.hstack([np.ones((len(sees), seen), bool), sees])
    return np.array(positions), np.array(cells), whole


def pair_chain(
    head: Any, tokens: Sequence[int], features: np.ndarray, position: int, count: int, n: int
) -> ChainTokens:
    m = len(tokens)
    places = range(position, position + m), range(count, count + m), count, np.tri(m, dtype=bool)
    rows = head.evaluate_features(tokens, features, places)
    drafted, log_probs = [int(rows.tokens[-1, 0])], [rows.log_probs[-1, 0]]
    for depth in range(n - 1):
        cell = count + m + depth
        place = [position + m + depth], [cell], cell, np.ones((1, 1), bool)
        rows = head.evaluate([drafted[-1]], rows.states[-1:], place)
        drafted.append(int(rows.tokens[0, 0]))
        log_probs.append(rows.log_probs[0, 0])
    return ChainTokens(drafted, np.array(log_probs))


def hydra_chain(
    head: Any, states: np.ndarray, position: int, count: int, token: int, n: int
) -> ChainTokens:
    state = head.states(states, position, count)[-1]
    path, log_probs = [token], []
    for _ in range(n):
        best = head.best_laws(state, [path])
        path.append(int(best.tokens[0, 0]))
        log_probs.append(best.log_probs[0, 0])
    return ChainTokens(path[1:], np.array(log_probs))
