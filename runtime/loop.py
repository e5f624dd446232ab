"""The one decoding loop: draft, verify, accept, commit, observe. Every method and rule runs through it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specrun.runtime.acceptance.rule import AcceptanceRule
from specrun.runtime.drafters.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.law import Law
from specrun.runtime.noise import NoiseSource
from specrun.runtime.planning.limits import RoundLimits
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.target import EvaluatedRows, Target
from specrun.runtime.transform import penalty_window, transformed_law
from specrun.runtime.tree import ROOT, DraftTree

__all__ = ["Round", "decode_rounds"]


@dataclass(frozen=True, slots=True)
class Round:
    """One round's result: the accepted tokens in order, then the target's own (None after an end token).

    `rows` are the target's rows (0 for the root, node + 1 for a node), valid until the next round starts.
    """

    tree: DraftTree
    path: tuple[int, ...]
    next_token: int | None
    rejected: bool
    rows: EvaluatedRows

    @property
    def tokens(self) -> list[int]:
        """All tokens the round produced, in order."""
        accepted = [self.tree.tokens[node] for node in self.path]
        return accepted if self.next_token is None else [*accepted, self.next_token]

    def node_before(self, index: int) -> int:
        """Return the node (or ROOT) whose law decided the round's `index`-th token."""
        return ROOT if index == 0 else self.path[index - 1]

    def row_before(self, index: int) -> int:
        """Return the row whose law decided the round's `index`-th token."""
        return self.node_before(index) + 1


def decode_rounds(
    target: Target,
    drafter: Drafter,
    rule: AcceptanceRule,
    noise: NoiseSource,
    params: SamplingParams,
    tokens: list[int],
    limits: RoundLimits,
    end_tokens: frozenset[int],
) -> Iterator[Round]:
    """Yield rounds until an end token, the token limit or the end of the context.

    `tokens` are all committed tokens, of which the target has cached all but the last; the list grows with
    every round. State is consistent at each yield: a consumer may stop there.
    """
    while (allowance := limits.next_round(len(tokens))) is not None:
        start = len(tokens)
        request = DraftRequest(
            tokens, params, noise.for_drafting(start), allowance.max_depth, allowance.max_nodes, end_tokens
        )
        tree = drafter.propose(request)
        allowance.check(tree, drafter.name)
        rows = target.evaluate(tokens[-1], tree)

        def law_at(node: int, tree: DraftTree = tree, rows: EvaluatedRows = rows) -> Law:
            path = [tree.tokens[one] for one in tree.path_to(node)] if params.has_penalties else ()
            return transformed_law(rows.logits(node + 1), params, penalty_window(tokens, path, params))

        accepted = rule.accept(tree, law_at, noise, start)
        path, next_token = _cut_at_end(tree, accepted.path, accepted.next_token, end_tokens)
        target.commit(path)
        tokens.extend(tree.tokens[node] for node in path)
        if next_token is not None:
            tokens.append(next_token)
        drafter.observe(RoundOutcome(tokens, tree, path, next_token, rows))
        limits.spend(len(tokens) - start)
        yield Round(tree, path, next_token, accepted.rejected, rows)
        if tokens[-1] in end_tokens:
            return


def _cut_at_end(
    tree: DraftTree, path: tuple[int, ...], next_token: int, end_tokens: frozenset[int]
) -> tuple[tuple[int, ...], int | None]:
    """Return the path up to its first end token, after which nothing is generated."""
    for index, node in enumerate(path):
        if tree.tokens[node] in end_tokens:
            return path[: index + 1], None
    return path, next_token
