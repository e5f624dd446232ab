"""SpecTr's optimal transport of k draws as a linear programme: an oracle for acceptance.

Sun et al. 2023 (SpecTr), section 3: couplings of k i.i.d. draws from Q with a token from P; what is
maximised is the probability that the token is among the draws. No rule accepts more.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

Probs = npt.NDArray[np.float64]


def acceptance_probability(target: Probs, draft: Probs) -> float:
    """Return sum min(P, Q), with which a draw from Q is accepted (Leviathan et al., theorem 3.5).

    No rule accepts one draw more often.
    """
    return min(1.0, float(np.minimum(target, draft).sum()))  # rounding may exceed 1


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


def acceptance_by_draw(target_probs: Probs, draft_laws: Sequence[Probs]) -> list[float]:
    """Return the probability that the exact rule accepts draw 1, 2, ... of a node with these laws.

    SpecInfer (Miao et al. 2023, algorithm 2): with R_1 = P, draw i is reached if all before it were
    rejected and then accepted with a_i = sum min(R_i, Q_i); R_{i+1} = norm((R_i - Q_i)+). So it is
    a_i (1 - a_1) ... (1 - a_{i-1}). The laws must not depend on the draws (with replacement,
    several drafters, point masses as one-hot laws); without replacement they do, and this holds
    given the draws' laws.
    """
    remaining, reached = target_probs, 1.0
    accepted: list[float] = []
    for draft_probs in draft_laws:
        passed = acceptance_probability(remaining, draft_probs)
        accepted.append(reached * passed)
        reached *= 1.0 - passed
        left = np.maximum(remaining - draft_probs, 0.0)
        total = float(left.sum())
        # Nothing is left only where R = Q: the draw was then accepted, and `reached` is 0.
        remaining = left / total if total > 0.0 else remaining
    return accepted


def coverage_bound(target_probs: Probs, draft_probs: Probs, k: int) -> float:
    """Return sum min(P, 1 - (1 - Q)^k), more than which no rule accepts of k i.i.d. draws.

    A token can only be accepted if it was drawn at all (the relaxation of SpecTr's transport
    problem, Sun et al. 2023, in which every token is bounded alone); k = 1 gives sum min(P, Q),
    which is reached.
    """
    return float(np.minimum(target_probs, 1.0 - (1.0 - draft_probs) ** k).sum())
