"""Drafts that fill the block: the text's own continuation in the room that a drafter leaves.

An evaluation of 9 tokens may take no longer than one of 5. The places that a drafter with a model
leaves empty then go to prompt lookup: behind the likeliest node of its draft, and beside the root.
Each node is weighed by its chance, the value of a token, and the cost of a wider evaluation. All of
that depends on counts and on the costs that were known when the model was opened, not on the clock.

**Exactness.** The filled tokens are point masses, and they come after the drafter's own draws of a
node: whatever these drew, the residual that they leave is the distribution of the next token, and
a point mass tested against it keeps that. So with the token-wise rule their place may depend on all
that was drawn. Block verification judges a chain of draws as a whole, up to the first node with
several: there nothing may branch because of a draw. So beside drawn tokens the root gets
its point mass, or does not, before they are drawn. Behind a chain anything may follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specrun.runtime.drafters.batching import MOST_SEQUENCES, DraftMeeting
from specrun.runtime.drafters.combinators.members import MembersDrafter, first_path, outcome_for
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.likely_trees import Guess
from specrun.runtime.drafters.retrieval import PromptLookupDrafter
from specrun.runtime.planning import MOST_DRAFTED, CostCurve, MatchAcceptance
from specrun.runtime.round.drafter import Drafter, DrafterWeights, DraftRequest, RoundOutcome
from specrun.runtime.trees import MAX_NODES
from specrun.runtime.trees.tree import ROOT, DraftTree, Draw, depths_below

_USUAL = 0.75  # the chance of a drafter's token, before anything is known of it
_DEPTHS = 16  # of a path whose tokens are judged one by one; deeper ones are as the last
_BESIDE = 0.5  # the chance from which the root gets a point mass beside the draws
_GAIN = 1.1  # times its cost, which a node is to be worth
_MEMORY = 0.98  # of rounds, in the worth of a token


class FilledDrafter(MembersDrafter):
    """Proposes its drafter's tree, and fills the block with the continuations of similar text.

    `curve` is the cost of evaluations, which conversations that draft at a `meeting` share. If the
    target cannot branch (`branches`) it drafts one chain, and no more tokens than the drafter may.
    Owns both.
    """

    def __init__(
        self,
        drafter: Drafter,
        lookup: PromptLookupDrafter,
        curve: CostCurve,
        *,
        branches: bool = True,
        most: int = MAX_NODES,
        meeting: DraftMeeting | None = None,
    ) -> None:
        super().__init__([drafter, lookup], name=drafter.name)
        self.waits, self._meeting = drafter.waits, meeting
        self._drafter, self._lookup, self._curve = drafter, lookup, curve
        self._branches = branches
        self.max_leaves = drafter.max_leaves + branches
        self.max_filled = max(0, min(lookup.max_nodes, most - drafter.max_nodes)) * branches
        self.max_nodes = drafter.max_nodes + self.max_filled
        self.keeps_rows = drafter.keeps_rows
        self._accepted = MatchAcceptance([[_USUAL]] * _DEPTHS)  # by depth of the favourite path
        self._tokens = self._rounds = 1.0  # of the last rounds: tokens, and plain rounds they took
        self._own: DraftTree | None = None
        self._path: tuple[int, ...] = ()
        self._n_filled = 0
        # A round's request, the continuation of its text, whether that stands beside draws, and the
        # drafter's part of the request: one object, which identifies the prepared draft.
        self._asked: tuple[DraftRequest, list[Guess], bool, DraftRequest] | None = None

    def begin(self, tokens: Sequence[int]) -> None:
        """Forget the counts of another text."""
        super().begin(tokens)
        self._own, self._path, self._n_filled, self._asked = None, (), 0, None
        self._accepted.forget()
        self._tokens = self._rounds = 1.0

    def prepare(self, request: DraftRequest) -> bool:
        """Let the drafter evaluate with those of other conversations."""
        return not self.waits or self._drafter.prepare(self._asked_of(request)[-1])

    def _asked_of(
        self, request: DraftRequest
    ) -> tuple[DraftRequest, list[Guess], bool, DraftRequest]:
        """Return the decisions of a round before anything is drawn (`_asked`)."""
        if self._asked is None or self._asked[0] is not request:
            guesses = self._lookup.guesses(request) if request.max_nodes > 0 else []
            beside = self._branches and bool(guesses) and guesses[0].probability >= _BESIDE
            most = min(self._drafter.max_nodes, request.max_nodes - beside)
            self._asked = request, guesses, beside, request.within(request.max_depth, most)
        return self._asked

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the drafter's tree, filled up."""
        _, guesses, beside, within = self._asked_of(request)
        self._asked = None
        own = self._drafter.propose(within)
        self._own, self._path = own, first_path(own)
        if request.max_nodes == 0 or request.keep != "nothing" or not all(own.is_candidate):
            return own
        draws = any(draw.law is not None for below in own.draws.values() for draw in below)
        chances = [self._chance(depth) for depth in range(len(self._path))]
        filling = _Filling(own, self._path, chances)
        if not draws or beside:
            filling.merge(guesses, branches=self._branches, decided=draws)
        if not filling.is_ahead:
            filling.hang(self._beyond(request))
        # Beside draws, how many others there are must not decide which text comes.
        k = self._meeting.n_drafting if self._meeting and not draws else 1
        tree = filling.tree(self._worth(filling.nodes(), request.max_nodes - len(own), k))
        self._n_filled += len(tree) - len(own)
        return tree

    def _beyond(self, request: DraftRequest) -> list[Guess]:
        """Return the possible continuation of the likeliest path."""
        assert self._own is not None
        path = [self._own.tokens[node] for node in self._path]
        if not path or path[-1] in request.end_tokens or len(path) >= request.max_depth:
            return []
        return self._lookup.guesses_beyond(request, path)

    def _chance(self, depth: int) -> float:
        return self._accepted.chance(min(depth, _DEPTHS - 1))

    def _worth(self, guesses: Sequence[Guess], room: int, n_texts: int) -> int:
        """Return how many of these nodes, the first ones, are worth their cost.

        That is an equal part of an evaluation that so many conversations share.
        """

        def seconds(n: int) -> float:
            return self._curve.seconds(n_texts * n) / n_texts

        n = 1 + len(self._own or ())
        token = seconds(1) * min(1.0, self._rounds / self._tokens)
        here, worth, best, most = seconds(n), 0.0, 0, 0.0
        for count, guess in enumerate(guesses[:room], 1):
            worth += token * guess.probability
            left = worth - _GAIN * max(0.0, seconds(n + count) - here)
            if left > most:
                best, most = count, left
        return best

    def read_along(self, tokens: Sequence[int], end: int) -> None:
        """Pass on."""
        self._drafter.read_along(tokens, end)

    def observe(self, outcome: RoundOutcome) -> None:
        """Tell both the outcome of the round, the drafter as if the tree had been its own."""
        own, self._own = self._own, None
        if own is None:
            self._drafter.observe(outcome)
            self._lookup.observe(outcome)
            return
        accepted = set(outcome.path)
        for depth, node in enumerate(self._path):
            self._accepted.learn((min(depth, _DEPTHS - 1),), 0 if node in accepted else None)
            if node not in accepted:
                break
        width = 1 + len(outcome.tree)
        self._tokens = _MEMORY * self._tokens + outcome.n_new
        self._rounds = _MEMORY * self._rounds + self._curve.seconds(width) / self._curve.seconds(1)
        self._lookup.observe(outcome)
        if len(own) < len(outcome.tree):
            places = {node: node for node in range(ROOT, len(own))}
            outcome = outcome_for(outcome, own, places)
        self._drafter.observe(outcome)

    def report(self) -> dict[str, object]:
        """Return the drafter's report, and how many tokens were filled in."""
        filled = {"filled": self._n_filled} if self._n_filled else {}
        return {**self._drafter.report(), **filled}


class _Filling:
    """Nodes that may be added to a drafter's tree: their chances, and where they hang.

    `path` is the tree's favourite one, `chances` those of its tokens, each given those before it. A
    node's parent is one of the tree, or an added one, counted on from these.
    """

    def __init__(self, own: DraftTree, path: Sequence[int], chances: Sequence[float]) -> None:
        self._own, self._path, self._chances = own, path, chances
        self._added: list[Guess] = []
        self._decided: int | None = None  # the token that is a draw of the root in any case
        self.is_ahead = not path
        """Whether the continuation contains the whole favourite path."""

    def merge(self, guesses: Sequence[Guess], *, branches: bool, decided: bool) -> None:
        """Add the continuation of the text, but for the nodes that are there already.

        Without `branches` only nodes that are no second children. `decided`: the first is to be a
        draw of the root, also if the drafter drew the same token.
        """
        own, path = self._own, self._path
        children = {(above, own.tokens[node]): node for node, above in enumerate(own.parents)}
        depths = {ROOT: 0, **{node: depth for depth, node in enumerate(path, 1)}}
        places, shares = {ROOT: ROOT}, {ROOT: 1.0}
        self._decided = guesses[0].token if decided else None
        for number, guess in enumerate(guesses):
            if guess.parent not in places:
                continue
            above, share = places[guess.parent], shares[guess.parent]
            known = children.get((above, guess.token))
            if known is None:
                depth = depths.get(above, len(path)) if above < len(own) else len(path)
                if depth < len(path):  # the drafter goes on another way there
                    before = 1.0 if guess.parent == ROOT else guesses[guess.parent].probability
                    share *= _instead(guess.probability / before, self._chances[depth])
                if not branches and above in own.draws:
                    continue
                known = self._add(share * guess.probability, above, guess.token)
            elif path and known == path[-1]:
                self.is_ahead = True
            places[number], shares[number] = known, share

    def hang(self, guesses: Sequence[Guess]) -> None:
        """Add the continuation of the favourite path."""
        reached, places = math.prod(self._chances), {ROOT: self._path[-1]}
        for number, guess in enumerate(guesses):
            chance, above = reached * guess.probability, places[guess.parent]
            places[number] = self._add(chance, above, guess.token)

    def _add(self, chance: float, parent: int, token: int) -> int:
        self._added.append(Guess(chance, parent, token))
        return len(self._own) + len(self._added) - 1

    def _order(self) -> list[int]:
        """Return the added nodes: the decided ones, then the most likely first.

        Parents come before their children, which are no likelier.
        """
        added = self._added
        return sorted(range(len(added)), key=lambda i: (not self._is_decided(i), -added[i][0]))

    def _is_decided(self, number: int) -> bool:
        guess = self._added[number]
        return guess.parent == ROOT and guess.token == self._decided

    def nodes(self) -> list[Guess]:
        """Return the nodes that may be added, in their order."""
        return [self._added[number] for number in self._order()]

    def tree(self, count: int) -> DraftTree:
        """Return the tree with the first `count` nodes, and with the decided ones."""
        own, n = self._own, len(self._own)
        tokens, parents, draws = [*own.tokens], [*own.parents], dict(own.draws)
        places, order = {node: node for node in range(ROOT, n)}, self._order()
        if order and self._is_decided(order[0]):
            count = max(count, 1)
        elif self._decided is not None:  # the drafter drew it, too
            same = next(d.node for d in draws[ROOT] if tokens[d.node] == self._decided)
            draws[ROOT] = [*draws[ROOT], Draw(same, None)]
        for number in order[:count]:
            _, above, token = self._added[number]
            parent, node = places[above], len(tokens)
            places[n + number] = node
            tokens.append(token)
            parents.append(parent)
            draws[parent] = [*draws.get(parent, ()), Draw(node, None)]
        return DraftTree(tuple(tokens), *depths_below(tuple(parents)), draws)


def _instead(guess: float, drafted: float) -> float:
    """Return the rest of a guess's chance if a token of this chance was drafted instead.

    At most one of them is right: each is weighed by how likely the other is to be wrong.
    """
    both = guess * drafted
    return (1.0 - drafted) / (1.0 - both) if both < 1.0 else 0.0


def fill(weights: DrafterWeights, env: DraftEnvironment) -> DrafterWeights:
    """Return weights whose drafters, if they evaluate models, are filled up from the text."""
    curve, meeting = env.known, env.meeting
    # Of several conversations none evaluates more than it would without.
    most = min(MAX_NODES if meeting is None else MOST_DRAFTED, env.context.n_batch - 1)
    n_texts = 1 if meeting is None else meeting.n_texts

    def start() -> Drafter:
        drafter = weights.start()
        if not drafter.depth_params:  # it finds its drafts in texts itself, or decodes plainly
            return drafter
        lookup = PromptLookupDrafter(
            num_draft_tokens=MOST_DRAFTED, branches=1, answers=env.answers, costs=curve
        )
        lookup.begins_alike = weights.pace != "compared"
        fits = n_texts * (drafter.max_leaves + 1) < MOST_SEQUENCES - 1
        branches = env.target.can_branch and fits
        return FilledDrafter(drafter, lookup, curve, branches=branches, most=most, meeting=meeting)

    return DrafterWeights(weights.name, start, [weights], weights.pace)
