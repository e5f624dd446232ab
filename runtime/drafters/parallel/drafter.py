"""PaSS (Monea et al. 2023) and SPACE (Yi et al. 2024): the target drafts at look-ahead positions.

Behind a token the target evaluates n more positions, whose inputs are learnt: the look-ahead
embeddings of PaSS, a target that stays as it is; or SPACE's mask token, of a target that was
fine-tuned to read it. At the j-th the target says the token j + 1 places ahead, without those in
between. These are the drafts of the next round, and they cost no evaluation of their own: one
evaluation verifies the drafts of the last and looks ahead for the next.

What comes next is only known after acceptance, so the look-ahead positions must stand below the
node that will be the last accepted one. SPACE puts a group of them below the root and below every
candidate: n + (n + 1) n nodes, and each round drafts. PaSS puts one below the last candidate: 2 n
nodes in a chain, but after a rejection the next round has nothing to verify and only looks ahead.

The positions are nodes that are no candidates: nothing attends to them but their own group, and
`commit` drops them. Drafts are point masses, or each is drawn from its row's law, which it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from specrun.runtime.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.drafters.kept_rows import KeptRows, RowMemory
from specrun.runtime.drafters.parallel.lookahead_file import LookaheadFile
from specrun.runtime.law import Law
from specrun.runtime.transform import Logits, penalty_window, transformed_law
from specrun.runtime.tree import ROOT, DraftTree, TreeBuilder
from specrun.runtime.trees import draft_chain

ParallelSampling = Literal["argmax", "with"]
Below = Literal["every", "last"]
"""Where look-ahead positions stand: below the root and every candidate, or the last one alone."""


def lookahead_nodes(n: int, topk: int, below: Below) -> int:
    """Return the most nodes of a round: candidates, and n positions below each or the last one."""
    candidates = n + topk - 1
    return candidates + n * (candidates + 1 if below == "every" else 1)


class LookaheadRows(KeptRows):
    """What look-ahead positions said, by the depth of a draft: they do not see what is drafted."""

    def __init__(self, memory: RowMemory, rows: Sequence[Logits]) -> None:
        super().__init__(memory, copies=False)
        self._said = rows

    def _found(self, node: int) -> Logits | None:
        tree = self._tree
        if node != ROOT and not tree.is_candidate[node]:
            return None
        depth = 0 if node == ROOT else tree.depths[node]
        return self._said[depth] if depth < len(self._said) else None


class ParallelDrafter(Drafter):
    """Drafts up to `n` tokens that the last evaluation said at look-ahead positions.

    `sampling` "argmax" drafts the most likely token of each row as a point mass, "with" draws from
    its law, transformed as the target's. Beside the first token of a chain of point masses stand
    the `topk` - 1 next best ones. The first round of an answer only looks ahead.
    """

    reads_logits = True
    keeps_rows = True

    def __init__(
        self,
        file: LookaheadFile,
        n: int,
        *,
        below: Below = "every",
        sampling: ParallelSampling = "argmax",
        topk: int = 1,
        name: str = "pass",
    ) -> None:
        self.name, self._n, self._below, self._sampling = name, n, below, sampling
        self._file, self._lookahead = file, file.tokens(n)
        self.embedding_inputs = file.inputs
        every = below == "every"
        self._topk = topk
        self.max_nodes = lookahead_nodes(n, topk, below)
        self.max_leaves = n + topk if every else topk
        self._tree: DraftTree | None = None
        self._groups: dict[int, list[int]] = {}
        # Rows of logits at the positions below the last token, and how many tokens there were.
        self._rows: tuple[list[npt.NDArray[np.float32]], int] = ([], 0)
        self._row_memory = RowMemory()

    def begin(self, tokens: Sequence[int]) -> None:
        """Forget the last answer's rows."""
        self._forget()

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the drafts of the last round's rows, with new positions to look ahead."""
        drafts = self._drafts(request)
        builder, node, path = TreeBuilder(), ROOT, [ROOT]
        for index, token in enumerate(drafts.tokens):
            node = builder.add(node, token, drafts.draws[index - 1][0].law)
            path.append(node)
        depths = {node: depth for depth, node in enumerate(path)}
        for token in self._next_best(drafts, request):
            depths[builder.add(ROOT, token)] = 1
        self._groups = {}
        for above in path[-1:] if self._below == "last" else depths:
            group = self._look_ahead(builder, above, depths[above], request)
            self._groups[above] = group
        self._tree = builder.build()
        if request.keep in ("nothing", "points"):
            return self._tree
        rows, length = self._rows
        said = rows if length == len(request.tokens) else []
        return LookaheadRows(self._row_memory, said).of(self._tree)

    def _next_best(self, drafts: DraftTree, request: DraftRequest) -> list[int]:
        """Return what stands beside the first draft, the best first: point masses, like it."""
        count = min(self._topk - 1, request.max_nodes - len(drafts))
        points = self._sampling == "argmax" or request.params.is_greedy
        if count < 1 or not len(drafts) or not points:
            return []
        row = self._rows[0][0]
        count = min(count, len(row) - 1)
        best = np.sort(np.argpartition(row, len(row) - count - 1)[-count - 1 :])  # ties: lower ids
        ranked = best[np.argsort(-row[best], kind="stable")].tolist()
        return [token for token in ranked if token != drafts.tokens[0]][:count]

    def _look_ahead(
        self, builder: TreeBuilder, node: int, depth: int, request: DraftRequest
    ) -> list[int]:
        """Add positions below a node, as many as there is room for; return their nodes."""
        count = min(self._n, request.max_depth - depth, request.max_nodes - len(builder))
        group: list[int] = []
        for token in self._lookahead[: max(0, count)]:
            node = builder.add_hidden(node, token)
            group.append(node)
        return group

    def _drafts(self, request: DraftRequest) -> DraftTree:
        """Return the drafts as a chain; none where the last evaluation did not look ahead here."""
        rows, length = self._rows
        if length != len(request.tokens):
            return DraftTree()
        params = request.params

        def law_after(drafted: list[int]) -> Law:
            window = penalty_window(request.tokens, drafted, params)
            return transformed_law(rows[len(drafted)], params, window, request.state)

        return draft_chain(
            law_after,
            request.noise,
            length,
            most=min(len(rows), request.max_depth, request.max_nodes),
            points=self._sampling == "argmax" or params.is_greedy,
            end_tokens=request.end_tokens,
        )

    def observe(self, outcome: RoundOutcome) -> None:
        """Copy the rows of the positions below the last accepted node."""
        tree, groups = self._tree, self._groups
        self._forget()
        # A combinator may have verified something else.
        if tree is None or outcome.next_token is None or not outcome.tree.extends(tree):
            return
        group = groups.get(outcome.path[-1] if outcome.path else ROOT, [])
        rows = [np.array(outcome.rows.logits(node + 1)) for node in group]
        self._rows = rows, len(outcome.tokens)

    def rewind(self, length: int) -> None:
        """Forget rows of tokens that were only guesses."""
        if length < self._rows[1]:
            self._forget()

    def _forget(self) -> None:
        self._tree, self._groups, self._rows = None, {}, ([], 0)

    @property
    def n_params(self) -> int:
        """The embeddings' numbers."""
        return self._file.n_params

    @property
    def depth_params(self) -> float:
        """None: the target's own evaluation drafts."""
        return 0.0
