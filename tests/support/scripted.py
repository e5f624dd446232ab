"""A target and drafters without a model: laws by prefix, and trees of every kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from specrun.runtime.language import quoted
from specrun.runtime.laws import Law, NoiseSource, SamplingParams
from specrun.runtime.round import CachedText, Conversation, Drafter, DraftRequest, GenerationResult
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.trees import DraftTree

PLAIN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


class LawTable:
    """A fixed random law over `size` tokens for every prefix; some entries are zero."""

    def __init__(self, size: int, seed: int, zeros: float = 0.2, sharpness: float = 1.5) -> None:
        self.size = size
        self._seed = seed
        self._zeros = zeros
        self._sharpness = sharpness
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, prefix: Sequence[int]) -> np.ndarray:
        key = tuple(prefix)
        if key not in self._known:
            generator = np.random.default_rng([self._seed, len(key), *key])
            weights = np.exp(self._sharpness * generator.standard_normal(self.size))
            weights[generator.random(self.size) < self._zeros] = 0.0
            if not weights.any():
                weights[0] = 1.0
            self._known[key] = weights / weights.sum()
        return self._known[key]

    def rows(self, prefixes: Sequence[Sequence[int]]) -> TableRows:
        """The rows that a target has after these prefixes."""
        return TableRows([*map(self, prefixes)])


class TableRows:
    """Rows whose softmax is the table's law, in float64 so that enumeration is exact to 1e-12."""

    def __init__(self, laws: list[np.ndarray]) -> None:
        self._laws = laws

    def logits(self, row: int) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.log(self._laws[row])

    def hidden_states(self, wanted: Sequence[int]) -> np.ndarray:
        raise NotImplementedError

    def nextn_state(self, row: int) -> np.ndarray:
        raise NotImplementedError


def outcome_of(
    tokens: Sequence[int], tree: DraftTree, path: tuple[int, ...], next_token: int
) -> RoundOutcome:
    """Return the outcome of a round whose rows nobody looks at."""
    rows = TableRows([np.full(2, 0.5)] * (len(tree) + 1))
    return RoundOutcome(tokens, tree, path, next_token, rows)  # type: ignore[arg-type]


class TableTarget:
    """A target that reads its laws from a table and checks that commits are paths of the evaluated
    tree."""

    def __init__(self, table: LawTable) -> None:
        self._table = table
        self._evaluated: tuple[list[int], DraftTree] | None = None

    def evaluate(self, text: CachedText, tree: DraftTree) -> TableRows:
        assert text.n_cached < len(text.tokens)
        prefix = list(text.tokens)
        nodes = [
            [*prefix, *(tree.tokens[ancestor] for ancestor in tree.path_to(node))]
            for node in range(len(tree))
        ]
        self._evaluated = prefix, tree
        return self._table.rows([prefix, *nodes])

    def catch_up(self, text: CachedText) -> TableRows:
        assert text.n_cached < len(text.tokens)
        text.n_cached = len(text.tokens)
        return self._table.rows([text.tokens])

    def commit(self, text: CachedText, tree: DraftTree, path: Sequence[int]) -> None:
        assert self._evaluated == (text.tokens, tree)
        assert list(path) == tree.path_to(path[-1] if path else -1)
        text.commit(tree.tokens[node] for node in path)
        self._evaluated = None


class TableDraftModel(TableTarget):
    """A draft model for cascades; counts its evaluations and writes down when it is closed."""

    n_positions = 64
    max_nodes = 32
    native_seconds = 0.5
    n_params, depth_params = 7, 7.0
    kept = None

    def __init__(self, table: LawTable) -> None:
        super().__init__(table)
        self.evaluations = 0
        self.closed = False

    def rewind(self, text: CachedText, length: int) -> None:
        text.cut(length)

    def prefill(self, text: CachedText, end: int) -> None:
        text.n_cached = max(text.n_cached, end)

    def evaluate(self, text: CachedText, tree: DraftTree) -> TableRows:
        self.evaluations += 1
        return super().evaluate(text, tree)

    def close(self) -> None:
        self.closed = True


def conversation_of(drafter: Drafter, prompt: Sequence[int], noise: NoiseSource) -> Conversation:
    """A conversation at the end of a prompt, which the target has cached but for its last token."""
    conversation = Conversation(drafter, prompt, noise)
    conversation.n_cached = len(prompt) - 1
    return conversation


class ScriptedDrafter(Drafter):
    """Proposes whatever a function of the request returns."""

    name = "scripted"

    def __init__(self, propose: Callable[[DraftRequest], DraftTree], max_nodes: int = 0) -> None:
        self._propose, self.max_nodes = propose, max_nodes

    def propose(self, request: DraftRequest) -> DraftTree:
        return self._propose(request)


def law_of(probs: np.ndarray) -> Law:
    """A law on its support only, so that sparse and dense laws meet in every test."""
    ids = np.flatnonzero(probs)
    return Law(probs[ids], ids)


def asking_first_member(drafter: str, tried: GenerationResult, folder: Path) -> str:
    """The expression of an `auto` that is told to ask its first member in every round.

    `tried` is an answer of it, whose log names the members.
    """
    log = folder / "choices.json"
    always = {**tried.stats.drafting, "choices": [[0, 1000]], "depths": [[0, 1000]]}
    log.write_text(json.dumps(always), encoding="utf-8")
    return f"{drafter[:-1]}, replay={quoted(str(log))})"
