"""Drafters that tell their own rows, and the laws pi of the literature, dense and by its
formulas."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from specrun.runtime.acceptance import PairRule
from specrun.runtime.laws import Law, SamplingParams
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import DraftTree
from support.enumeration import PROMPT, Propose, law_with_drafter
from support.scripted import PLAIN, LawTable, ScriptedDrafter

Pi = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""From q, p, S(q), S(p) to pi, all [n_vocab]."""


# -- what tokens are drawn from, by hand -----------------------------------------------------------


def transformed(law: np.ndarray, params: SamplingParams) -> np.ndarray:
    """S(law): top-p on the untempered law, then temperature; greedy is one token."""
    if params.temperature == 0.0:
        return np.eye(len(law))[law.argmax()]
    order = np.argsort(-law, kind="stable")
    before = np.concatenate([[0.0], law[order].cumsum()[:-1]])
    kept = np.zeros(len(law))
    kept[order[before < params.top_p]] = 1.0
    weights = (law * kept) ** (1.0 / params.temperature)
    return weights / weights.sum()


class TransformedTable(LawTable):
    """A table's laws as tokens are drawn from them."""

    def __init__(self, table: LawTable, params: SamplingParams) -> None:
        self.size, self._table, self._params = table.size, table, params

    def __call__(self, prefix: Sequence[int]) -> np.ndarray:
        return transformed(self._table(prefix), self._params)


# -- drafters --------------------------------------------------------------------------------------


class TableRowsBelow:
    """What a drafter with a table says at the places of its tree, also after its last token."""

    def __init__(self, drafts: LawTable, prefix: Sequence[int], tree: DraftTree) -> None:
        self._drafts, self._prefix, self._tree = drafts, list(prefix), tree

    def logits(self, node: int) -> np.ndarray:
        path = [self._tree.tokens[above] for above in self._tree.path_to(node)]
        with np.errstate(divide="ignore"):
            return np.log(self._drafts([*self._prefix, *path]))


class TellingDrafter(ScriptedDrafter):
    """Proposes what a function returns, and tells the rows of the table that it drafts from."""

    keeps_rows = True

    def __init__(self, propose: Propose, drafts: LawTable) -> None:
        super().__init__(propose)
        self._drafts = drafts

    def propose(self, request: DraftRequest) -> DraftTree:
        tree = super().propose(request)
        assert request.keep != "nothing"
        return dataclasses.replace(tree, rows=TableRowsBelow(self._drafts, request.tokens, tree))


# -- the laws --------------------------------------------------------------------------------------


def deferral(kind: str, alpha: float) -> Pi:
    """pi = (1 - delta) S(q) + delta S(p): delta from the raw laws."""

    def entropy(law: np.ndarray) -> float:
        return -float(sum(x * np.log(x) for x in law if x > 0))

    def pi(q: np.ndarray, p: np.ndarray, sq: np.ndarray, sp: np.ndarray) -> np.ndarray:
        distance = 0.5 * np.abs(sp - sq).sum()
        delta = {
            "cascade-chow": q.max() < 1 - alpha,
            "cascade-diff": q.max() < p.max() - alpha,
            "cascade-opt": q.max() < p.max() - alpha * distance,
            "cascade-diff-log": entropy(q) > entropy(p) + alpha,
            "cascade-opt-log": entropy(q) > entropy(p) + alpha * distance,
        }[kind]
        return (1 - delta) * sq + delta * sp

    return pi


def token_specific(refused: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Pi:
    """pi(v) = S(q)(v) (1 - r(v)) + S(p)(v) sum_u r(u) S(q)(u)."""

    def pi(q: np.ndarray, p: np.ndarray, sq: np.ndarray, sp: np.ndarray) -> np.ndarray:
        r = refused(q, p).astype(float)
        return sq * (1 - r) + sp * (r * sq).sum()

    return pi


def token_rule(kind: str, alpha: float) -> Pi:
    return token_specific(
        {
            "cascade-token-v1": lambda q, p: q < p.max() - alpha,
            "cascade-token-v2": lambda q, p: p < p.max() - alpha,
            "cascade-token-v3": lambda q, p: p < p.max() * (1 - alpha),
        }[kind]
    )


def top_beta(beta: int, tau: float) -> Pi:
    def refused(q: np.ndarray, p: np.ndarray) -> np.ndarray:
        rank = np.array([(p > value).sum() for value in p])
        with np.errstate(divide="ignore"):
            return (rank >= beta) | (np.log(p.max()) - np.log(p) > tau)

    return token_specific(refused)


# -- what comes out --------------------------------------------------------------------------------


def pi_at(
    pi: Pi,
    drafts: LawTable,
    table: LawTable,
    params: SamplingParams,
) -> Callable[[Sequence[int]], np.ndarray]:
    """pi after a prefix."""

    def law(prefix: Sequence[int]) -> np.ndarray:
        q, p = drafts(prefix), table(prefix)
        return pi(q, p, transformed(q, params), transformed(p, params))

    return law


def texts_law(
    law: Callable[[Sequence[int]], np.ndarray], size: int, length: int
) -> dict[tuple[int, ...], float]:
    """The product of a law over texts of a length."""
    found = {}
    for text in itertools.product(range(size), repeat=length):
        probability = 1.0
        for place, token in enumerate(text):
            if probability:
                probability *= float(law([*PROMPT, *text[:place]])[token])
        found[text] = probability
    return found


def distance(first: dict, other: dict) -> float:
    return max(abs(first.get(text, 0.0) - other.get(text, 0.0)) for text in {*first, *other})


def pair_error(
    rule: PairRule,
    pi: Pi,
    shape: Callable[[LawTable], Propose],
    drafts: LawTable,
    table: LawTable,
    params: SamplingParams = PLAIN,
    length: int = 3,
) -> float:
    """The largest error of any text's probability in the shipped loop, against the formula.

    `shape` draws from the table that it is given: the transformed one, as drafters do.
    """
    propose = shape(TransformedTable(drafts, params))
    emitted = law_with_drafter(
        rule, lambda: TellingDrafter(propose, drafts), table, length, frozenset(), params
    )
    wanted = texts_law(pi_at(pi, drafts, table, params), table.size, length)
    return distance(emitted, wanted)


def dense(law: Law, size: int) -> np.ndarray:
    return law.aligned_to(Law(np.zeros(size)))
