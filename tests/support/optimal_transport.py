"""SpecTr's optimal transport of k draws as a linear programme: an oracle for acceptance.

Sun et al. 2023 (SpecTr), section 3: couplings of k i.i.d. draws from Q with a token from P; what is
maximised is the probability that the token is among the draws. No rule accepts more.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

Probs = npt.NDArray[np.float64]


def best_acceptance(target: Probs, draft: Probs, k: int) -> float:
    """Return the most that any coupling of k draws from `draft` with `target` accepts.

    Variables are pi(draws, token) >= 0, draws as multisets, whose probability is the multinomial's:
    sum over tokens <= P(draws), sum over draws <= target: what is left of both can be coupled
    anyhow. HiGHS, to about 1e-9.
    """
    size = len(target)
    multisets = [*itertools.combinations_with_replacement(range(size), k)]
    chances = dict.fromkeys(multisets, 0.0)
    for draws in itertools.product(range(size), repeat=k):
        chances[tuple(sorted(draws))] += float(np.prod(draft[list(draws)]))
    n = len(multisets)
    gains = np.array([[-float(y in draws) for y in range(size)] for draws in multisets])
    rows = np.kron(np.eye(n), np.ones(size))
    columns = np.tile(np.eye(size), n)
    found = linprog(
        gains.ravel(),
        A_ub=np.vstack([rows, columns]),
        b_ub=np.concatenate([[chances[draws] for draws in multisets], target]),
        bounds=(0.0, None),
        method="highs",
    )
    assert found.success, found.message
    return -float(found.fun)
