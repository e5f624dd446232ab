"""EAGLE-1's sampled trees through the shipped loop, with a head that follows the states it is
given, to 1e-12.

The toy head's states are the texts themselves: the target's state at a position encodes the text up
to it, and a prediction encodes that text with the pair's token. So a state that reaches the wrong
node, a stale one, or a pair with the wrong token changes the draft law of that node, and what the
drafter says it drew from is compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from support.enumeration import PROMPT, TOLERANCE, largest_error
from support.head_chains import PairChainByDepth, eagle_drafter, whole_places
from support.law_pairs import deferral, distance, pi_at, texts_law, token_rule
from support.scripted import PLAIN, LawTable, TableRows, TableTarget, conversation_of

from specrun.bench.prove.rules import BranchingNoise, enumerate_law
from specrun.runtime.acceptance import ExactRule, PairRule, Rule, build_rule
from specrun.runtime.drafters.eagle import EagleRows
from specrun.runtime.drafters.growing import drafter as growing
from specrun.runtime.drafters.growing.draft import Draft
from specrun.runtime.heads import RowPlaces
from specrun.runtime.laws import Law, NoiseSource
from specrun.runtime.round import CachedText
from specrun.runtime.round.loop import DecodeSettings, RoundLimits, decode_rounds
from specrun.runtime.trees import (
    Child,
    DraftTree,
    DynamicShape,
    Propose,
    TreeBuilder,
    TreeSampling,
    parse_topology,
    proposal_scheme,
)

SIZE = 3


def encoded(text: Sequence[int]) -> np.ndarray:
    """A hidden state that is the text: its tokens as the digits of a number."""
    number = 0
    for token in text:
        number = number * (SIZE + 1) + token + 1
    return np.array([float(number)])


def decoded(state: np.ndarray) -> list[int]:
    number, text = int(state[0]), []
    while number:
        number, digit = divmod(number, SIZE + 1)
        text.append(digit - 1)
    return text[::-1]


@dataclass
class FollowingHead(PairChainByDepth):
    """A pair of a text and its next token predicts the longer text, and the table's law after it.

    `texts` remembers what was predicted in which cell: a pair must see exactly the pairs of its own
    text.
    """

    table: LawTable
    texts: dict[int, list[int]] = field(default_factory=dict)
    n_cells: int = 64
    n_params: int = 0
    native_seconds: float = 0.0
    taps: tuple[int, ...] = ()
    whole_rows: bool = True

    def evaluate(
        self, tokens: Sequence[int], states: np.ndarray, places: RowPlaces, **_: object
    ) -> EagleRows:
        positions, cells, sees = whole_places(places)
        texts = [[*decoded(state), token] for state, token in zip(states, tokens, strict=True)]
        self.texts |= dict(zip(cells.tolist(), texts, strict=True))
        for text, position, row in zip(texts, positions.tolist(), sees, strict=True):
            assert (
                position == len(text) - 2
            )  # the pair of the state at j and token j + 1 stands at j
            seen = sorted((self.texts[cell] for cell in np.flatnonzero(row).tolist()), key=len)
            assert seen == [text[: len(prefix)] for prefix in seen]
            assert [len(prefix) for prefix in seen] == list(
                range(len(text) - len(seen) + 1, len(text) + 1)
            )
        probs = np.array([self.table(text) for text in texts])
        ranked = np.argsort(-probs, 1, kind="stable")
        with np.errstate(divide="ignore"):
            logits = np.log(probs)
        predicted = np.stack([encoded(text) for text in texts])
        return EagleRows(
            predicted, ranked.astype(np.int32), np.take_along_axis(logits, ranked, 1), logits
        )

    def close(self) -> None:
        pass


class StatefulRows(TableRows):
    """Rows whose hidden states are the texts up to them."""

    def __init__(self, laws: list[np.ndarray], texts: list[list[int]]) -> None:
        super().__init__(laws)
        self._texts = texts

    def hidden_states(self, wanted: Sequence[int]) -> np.ndarray:
        return np.array([encoded(self._texts[row]) for row in wanted])


class StatefulTarget(TableTarget):
    def __init__(self, table: LawTable) -> None:
        super().__init__(table)
        self._laws = table

    def evaluate(self, text: CachedText, tree: DraftTree) -> StatefulRows:
        super().evaluate(text, tree)
        prefix = list(text.tokens)
        texts = [
            prefix,
            *(
                [*prefix, *(tree.tokens[ancestor] for ancestor in tree.path_to(node))]
                for node in range(len(tree))
            ),
        ]
        return StatefulRows([self._laws(text) for text in texts], texts)


def emitted(
    table: LawTable,
    drafts: LawTable,
    shape: str | DynamicShape,
    sampling: TreeSampling,
    length: int,
    rule: Rule,
    p_min: float = 0.0,
) -> dict[tuple[int, ...], float]:
    """The exact law of an answer, the drafter keeping its pairs from round to round, the prompt's
    learnt first."""

    def program(noise: BranchingNoise) -> tuple[int, ...]:
        tokens = list(PROMPT)
        head = FollowingHead(drafts)
        grown = parse_topology(shape) if isinstance(shape, str) else shape
        drafter = eagle_drafter(head, grown, sampling, p_min)
        drafter.begin(tokens)
        texts = [tokens[: place + 1] for place in range(len(tokens) - 1)]
        drafter.learn_prompt(0, StatefulRows([drafts(text) for text in texts], texts), len(texts))
        limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=length)
        conversation = conversation_of(drafter, tokens, noise)
        for _ in decode_rounds(
            StatefulTarget(table), conversation, DecodeSettings(rule, PLAIN, limits)
        ):
            pass
        return tuple(conversation.tokens[len(PROMPT) :])

    return enumerate_law(program)  # type: ignore[return-value]


def bias(
    shape: str | DynamicShape,
    sampling: TreeSampling,
    seed: int,
    length: int,
    zeros: float = 0.2,
    p_min: float = 0.0,
) -> float:
    table, drafts = LawTable(SIZE, seed, zeros), LawTable(SIZE, seed + 100, zeros)
    found = emitted(table, drafts, shape, sampling, length, ExactRule(), p_min)
    return largest_error(found, table, length)


@pytest.mark.parametrize("sampling", ["with", "without", "argmax"])
@pytest.mark.parametrize(
    ("shape", "length"),
    [
        ("1x1", 4),
        ("3", 3),
        ("2x1", 3),
        ("1x2", 3),
        ("0 1 00 10", 3),
        ("2x2", 2),
        ("0 1 2 00 01 10", 2),
    ],
)
def test_static_trees_give_the_targets_law(sampling: TreeSampling, shape: str, length: int) -> None:
    assert bias(shape, sampling, 0, length) < TOLERANCE


@pytest.mark.parametrize("seed", range(3))
def test_dynamic_trees_give_the_targets_law(seed: int) -> None:
    assert bias(DynamicShape(3, 2, 6), "argmax", seed, 3) < TOLERANCE


@pytest.mark.parametrize("sampling", ["with", "without", "argmax"])
@pytest.mark.parametrize("shape", ["1x1", "2x1"])
def test_a_confidence_stop_keeps_the_targets_law(sampling: TreeSampling, shape: str) -> None:
    assert bias(shape, sampling, 0, 3, p_min=0.5) < TOLERANCE


def test_a_head_that_equals_its_target_is_always_accepted() -> None:
    table = LawTable(SIZE, 4)
    lengths: list[int] = []

    class Counts(ExactRule):
        def accept(self, tree, law_at, noise, position):  # type: ignore[no-untyped-def]
            kept = super().accept(tree, law_at, noise, position)
            lengths.append(len(kept.path) - tree.max_depth)
            return kept

    emitted(table, table, "1x1", "with", 4, Counts())
    assert set(lengths) == {0}


# -- what must not pass ----------------------------------------------------------------------------


def states_the_whole_law(
    builder: TreeBuilder, parent: int, law: Law, count: int, noise: NoiseSource
) -> list[Child]:
    """Draws without replacement, and says of every draw that it came from the whole law."""
    children: list[Child] = []
    left = law
    for _ in range(min(count, len(np.flatnonzero(law.probs)))):
        token = noise.choose(left)
        children.append((builder.add(parent, token, law), token))
        left = left.without(token)
    return children


def sorts_what_it_drew(
    builder: TreeBuilder, parent: int, law: Law, count: int, noise: NoiseSource
) -> list[Child]:
    """Ranks drawn tokens by their own probability, as trees of favourites are ranked."""
    tokens = sorted((noise.choose(law) for _ in range(count)), key=law.probability)
    return [(builder.add(parent, token, law), token) for token in dict.fromkeys(tokens)]


def passes_favourites_off(
    builder: TreeBuilder, parent: int, law: Law, count: int, noise: NoiseSource
) -> list[Child]:
    """Takes the most likely tokens and says that they were drawn."""
    order = np.argsort(-law.probs, kind="stable")[:count]
    tokens = [
        int(token if law.ids is None else law.ids[token])
        for token in order
        if law.probs[token] > 0.0
    ]
    return [(builder.add(parent, token, law), token) for token in tokens]


def forgets_the_law(
    builder: TreeBuilder, parent: int, law: Law, count: int, noise: NoiseSource
) -> list[Child]:
    """Draws from the head's law and says that it was another's: what a state at the wrong node
    would do."""
    other = Law(np.full(SIZE, 1 / SIZE))
    return [
        (builder.add(parent, token, other), token)
        for token in dict.fromkeys(noise.choose(law) for _ in range(count))
    ]


@pytest.mark.parametrize(
    "wrong",
    [states_the_whole_law, sorts_what_it_drew, passes_favourites_off, forgets_the_law],
    ids=lambda value: value.__name__,
)
def test_wrong_draws_are_caught(wrong: Propose, monkeypatch: pytest.MonkeyPatch) -> None:
    def scheme(sampling: TreeSampling) -> Propose:
        return wrong if sampling == "without" else proposal_scheme(sampling)

    monkeypatch.setattr(growing, "proposal_scheme", scheme)
    assert max(bias("2", "without", seed, 2, zeros=0.0) for seed in range(4)) > 1e-2


def swapped(rows: EagleRows) -> EagleRows:
    """The first two predictions of a depth exchanged."""
    order = [1, 0, *range(2, len(rows.states))] if len(rows.states) > 1 else [0]
    logits = None if rows.logits is None else rows.logits[order]
    return EagleRows(rows.states[order], rows.tokens[order], rows.log_probs[order], logits)


def test_states_that_reach_the_wrong_node_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy head notices pairs whose state is another node's: their texts do not continue what
    they see."""
    shipped: Callable[..., EagleRows] = FollowingHead.evaluate
    monkeypatch.setattr(
        FollowingHead,
        "evaluate",
        lambda self, *given, **named: swapped(shipped(self, *given, **named)),
    )
    with pytest.raises(AssertionError):
        bias("2x2x1", "argmax", 0, 4, zeros=0.0)


# -- rules that weigh the head's laws --------------------------------------------------------------

PAIR_RULES = {
    "cascade-opt(alpha=0.3)": deferral("cascade-opt", 0.3),
    "cascade-diff-log(alpha=0.1)": deferral("cascade-diff-log", 0.1),
    "cascade-token-v1(alpha=0.2)": token_rule("cascade-token-v1", 0.2),
    "cascade-token-v3(alpha=0.5)": token_rule("cascade-token-v3", 0.5),
}


def pair_error(rule: str, shape: str, sampling: TreeSampling, length: int) -> float:
    """The largest error of any text's probability against the product of pi."""
    table, drafts = LawTable(SIZE, 1), LawTable(SIZE, 101)
    built = build_rule(rule)
    assert isinstance(built, PairRule)
    found = emitted(table, drafts, shape, sampling, length, built)
    law = pi_at(PAIR_RULES[rule], drafts, table, PLAIN)
    return distance(found, texts_law(law, SIZE, length))


@pytest.mark.parametrize("sampling", ["with", "without", "argmax"])
@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        *((rule, "1x1") for rule in PAIR_RULES),
        ("cascade-opt(alpha=0.3)", "2x1"),
        ("cascade-token-v3(alpha=0.5)", "0 1 00"),
    ],
)
def test_what_comes_out_is_pi_also_after_a_whole_draft(
    rule: str, shape: str, sampling: TreeSampling
) -> None:
    """This head's law depends on the text alone, so that of a text is the product of pi."""
    assert pair_error(rule, shape, sampling, 3) < TOLERANCE


def test_a_last_token_of_the_targets_own_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Draft, "leaf", lambda *_: None)
    assert pair_error("cascade-token-v3(alpha=0.5)", "1x1", "with", 3) > 1e-2
