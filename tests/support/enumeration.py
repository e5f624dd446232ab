"""Trees of every kind, and the exact law of what the shipped loop emits when it verifies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specrun.bench.prove.rules import BranchingNoise, enumerate_law
from specrun.runtime.acceptance import AcceptanceRule
from specrun.runtime.laws import Law, SamplingParams, SeededNoise
from specrun.runtime.laws.samplers import FRESH, SamplerState
from specrun.runtime.round import Drafter, DraftRequest, NoDrafter
from specrun.runtime.round.loop import DecodeSettings, RoundLimits, decode_rounds
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder
from support.scripted import PLAIN, LawTable, ScriptedDrafter, TableTarget, conversation_of, law_of

PROMPT = (0, 1)
TOLERANCE = 1e-12
Propose = Callable[[DraftRequest], DraftTree]


class FixedTable(LawTable):
    """A table with the same law after every prefix."""

    def __init__(self, *probs: float) -> None:
        super().__init__(len(probs), 0)
        self._probs = np.array(probs)

    def __call__(self, prefix: Sequence[int]) -> np.ndarray:
        return self._probs


def chain(drafts: LawTable, length: int) -> Propose:
    """A chain of draws, each from the draft law of its own prefix."""

    def propose(request: DraftRequest) -> DraftTree:
        tree, prefix, parent = TreeBuilder(), list(request.tokens), ROOT
        for _ in range(min(length, request.max_depth)):
            law = law_of(drafts(prefix))
            token = request.noise.choose(law)
            parent = tree.add(parent, token, law)
            prefix.append(token)
        return tree.build()

    return propose


def branching_tree(drafts: LawTable, widths: Sequence[int], replace: bool) -> Propose:
    """SpecInfer's i.i.d. siblings, or Sequoia's draws without replacement."""

    def propose(request: DraftRequest) -> DraftTree:
        tree = TreeBuilder()
        grow(tree, ROOT, list(request.tokens), 0, request)
        return tree.build()

    def grow(
        tree: TreeBuilder, parent: int, prefix: list[int], depth: int, request: DraftRequest
    ) -> None:
        if depth >= min(len(widths), request.max_depth):
            return
        law = law_of(drafts(prefix))
        children: dict[int, int] = {}
        for _ in range(widths[depth]):
            token = request.noise.choose(law)
            children[tree.add(parent, token, law)] = token
            if not replace:
                if len(np.flatnonzero(law.probs)) == 1:
                    break
                law = law.without(token)
        for node, token in children.items():
            grow(tree, node, [*prefix, token], depth + 1, request)

    return propose


def top_k_points(drafts: LawTable, k: int, depth: int) -> Propose:
    """Medusa's and EAGLE-2's trees: the most likely tokens as point masses."""

    def propose(request: DraftRequest) -> DraftTree:
        tree = TreeBuilder()
        frontier = [(ROOT, list(request.tokens))]
        for _ in range(min(depth, request.max_depth)):
            frontier = [
                (tree.add(parent, int(token)), [*prefix, int(token)])
                for parent, prefix in frontier
                for token in np.argsort(-drafts(prefix))[:k]
            ]
        return tree.build()

    return propose


def mixed_tree(drafts: LawTable, seed: int) -> Propose:
    """Arbitrary trees: point masses between draws of several laws, duplicates, hidden nodes, zero
    masses.

    The shape depends on the prefix only, never on what was drawn beside it.
    """

    def propose(request: DraftRequest) -> DraftTree:
        generator = np.random.default_rng([seed, *request.tokens])
        tree = TreeBuilder()
        size = drafts.size
        other = LawTable(size, seed + 77)
        parents = [(ROOT, list(request.tokens))]
        for _ in range(min(2, request.max_depth)):
            parent, prefix = parents[0]
            parents = []
            for _ in range(int(generator.integers(1, 4))):
                kind = int(generator.integers(4))
                if kind == 0:
                    token = int(generator.integers(size))
                    node = tree.add(parent, token)
                elif kind == 1:
                    tree.add_hidden(parent, int(generator.integers(size)))
                    continue
                else:
                    probs = (drafts if kind == 2 else other)(prefix)
                    law = Law(probs) if generator.random() < 0.5 else law_of(probs)
                    token = request.noise.choose(law)
                    node = tree.add(parent, token, law)
                parents.append((node, [*prefix, token]))
            if not parents:
                break
        return tree.build()

    return propose


def wandering_chain(drafts: LawTable, seed: int, depth: int) -> Propose:
    """Draws and point masses in one chain; what was drawn decides where it ends, forks or goes on.

    All of that is allowed: the value of a draw may shape what hangs below it.
    """

    def propose(request: DraftRequest) -> DraftTree:
        tree, prefix, parent = TreeBuilder(), list(request.tokens), ROOT
        for level in range(min(depth, request.max_depth)):
            generator = np.random.default_rng([seed, *prefix])
            law = law_of(drafts(prefix))
            if level > 0 and generator.random() < 0.3:
                break
            if generator.random() < 0.3:
                token = int(generator.integers(drafts.size))
                parent = tree.add(parent, token)
            else:
                token = request.noise.choose(law)
                node = tree.add(parent, token, law)
                if level > 0 and generator.random() < 0.5:
                    tree.add(parent, request.noise.choose(law), law)
                parent = node
            prefix.append(token)
        return tree.build()

    return propose


def two_drafters(drafts: LawTable, others: LawTable) -> Propose:
    """Two i.i.d. draws of each drafter, merged by SpecInfer, and a guess that is a point mass."""

    def propose(request: DraftRequest) -> DraftTree:
        tree = TreeBuilder()
        if request.max_depth < 1:
            return tree.build()
        for table in (drafts, others):
            law = law_of(table(request.tokens))
            for _ in range(2):
                tree.add(ROOT, request.noise.choose(law), law)
        tree.add(ROOT, 1)
        return tree.build()

    return propose


# -- the law of what is emitted --------------------------------------------------------------------


def emitted_law(
    rule: AcceptanceRule,
    propose: Propose | None,
    table: LawTable,
    length: int,
    end_tokens: frozenset[int],
    params: SamplingParams = PLAIN,
    state: SamplerState = FRESH,
) -> dict[tuple[int, ...], float]:
    """Return the exact law of what the shipped loop emits after the prompt."""

    def make() -> Drafter:
        return NoDrafter() if propose is None else ScriptedDrafter(propose)

    return law_with_drafter(rule, make, table, length, end_tokens, params, state)


def law_with_drafter(
    rule: AcceptanceRule,
    make: Callable[[], Drafter],
    table: LawTable,
    length: int,
    end_tokens: frozenset[int] = frozenset(),
    params: SamplingParams = PLAIN,
    state: SamplerState = FRESH,
    prompt: Sequence[int] = PROMPT,
) -> dict[tuple[int, ...], float]:
    """Return the exact law of an answer with a drafter that keeps state from round to round, made
    anew each time."""

    def program(noise: BranchingNoise) -> tuple[int, ...]:
        drafter = make()
        drafter.begin(prompt)
        conversation = conversation_of(drafter, prompt, noise)
        limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=length)
        settings = DecodeSettings(rule, params, limits, end_tokens, state)
        for _ in decode_rounds(TableTarget(table), conversation, settings):
            pass
        return tuple(conversation.tokens[len(prompt) :])

    return enumerate_law(program)


def target_law(
    table: LawTable, length: int, end_tokens: frozenset[int], prompt: Sequence[int] = PROMPT
) -> dict[tuple[int, ...], float]:
    """Return the product of the target's conditional laws, texts ending at the first end token."""
    laws = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for text, probability in laws.items():
            if text and text[-1] in end_tokens:
                longer[text] = probability
                continue
            for token, conditional in enumerate(table([*prompt, *text])):
                if conditional:
                    longer[*text, token] = probability * conditional
        laws = longer
    return laws


def bias(
    rule: AcceptanceRule,
    propose: Propose | None,
    table: LawTable,
    length: int = 3,
    end_tokens: frozenset[int] = frozenset(),
) -> float:
    """Return the largest error of any text's probability."""
    return largest_error(
        emitted_law(rule, propose, table, length, end_tokens), table, length, end_tokens
    )


def drafter_bias(
    rule: AcceptanceRule,
    make: Callable[[], Drafter],
    table: LawTable,
    length: int = 3,
    prompt: Sequence[int] = PROMPT,
) -> float:
    """Return the largest error of any text's probability, with a drafter that keeps state."""
    found = law_with_drafter(rule, make, table, length, prompt=prompt)
    return largest_error(found, table, length, prompt=prompt)


def noted(drafter: Drafter, trees: list[DraftTree]) -> Drafter:
    """Return the drafter, whose proposals are added to `trees`."""
    propose = drafter.propose

    def propose_noted(request: DraftRequest) -> DraftTree:
        trees.append(propose(request))
        return trees[-1]

    drafter.propose = propose_noted  # type: ignore[method-assign]
    return drafter


def largest_error(
    emitted: dict[tuple[int, ...], float],
    table: LawTable,
    length: int,
    end_tokens: frozenset[int] = frozenset(),
    prompt: Sequence[int] = PROMPT,
) -> float:
    """Return the largest error of any text's probability."""
    wanted = target_law(table, length, end_tokens, prompt)
    return max(abs(emitted.get(text, 0.0) - wanted.get(text, 0.0)) for text in {*emitted, *wanted})


def accepted_lengths(
    rule: AcceptanceRule, propose: Propose, table: LawTable, length: int
) -> dict[int, float]:
    """Return the exact law of how many drafted tokens the first round keeps when `length` may
    follow."""

    def program(noise: BranchingNoise) -> int:
        limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=length)
        conversation = conversation_of(ScriptedDrafter(propose), PROMPT, noise)
        rounds = decode_rounds(
            TableTarget(table), conversation, DecodeSettings(rule, PLAIN, limits)
        )
        return len(next(rounds).path)

    return enumerate_law(program)  # type: ignore[return-value]


class RecordsKeys(SeededNoise):
    """Seeded noise that remembers which of its numbers were used."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.used: list[tuple[int, int]] = []

    def _hash(self, index: int) -> int:
        self.used.append((self._position, index))
        return super()._hash(index)


def numbers_used(rule: AcceptanceRule, propose: Propose | None, seed: int) -> list[tuple[int, int]]:
    """Return the key of every number that decided something in an answer of several rounds."""
    noise, table = RecordsKeys(seed), LawTable(3, seed)
    drafter = NoDrafter() if propose is None else ScriptedDrafter(propose)
    limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=24)
    conversation = conversation_of(drafter, PROMPT, noise)
    list(decode_rounds(TableTarget(table), conversation, DecodeSettings(rule, PLAIN, limits)))
    return noise.used


def proposals(size: int, seed: int) -> dict[str, Propose | None]:
    """Return a proposer of every kind; the draft laws are not the target's of the same seed."""
    drafts = LawTable(size, seed + 1000)
    return {
        "plain": None,
        "chain": chain(drafts, 2),
        "i.i.d. siblings": branching_tree(drafts, (3, 1), True),
        "without replacement": branching_tree(drafts, (2, 2), False),
        "point masses": top_k_points(drafts, 2, 2),
        "mixed": mixed_tree(drafts, seed),
        "wandering chain": wandering_chain(drafts, seed, 3),
        "two drafters": two_drafters(drafts, LawTable(size, seed + 2000)),
    }
