"""PaSS (Monea et al. 2023) and SPACE (Yi et al. 2024): drafts at look-ahead positions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.embedding_inputs import EmbeddingInputs, check_embedding_inputs
from specrun.bindings.errors import MalformedFileError, OptionError
from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.weights import load_tensors
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, file_of
from specrun.runtime.drafters.growing.drafter import GrowingDrafter
from specrun.runtime.drafters.growing.kept_rows import KeptRows
from specrun.runtime.drafters.growing.source import NodeRows, Source
from specrun.runtime.heads import HeadFile
from specrun.runtime.language import Expression, options_of
from specrun.runtime.laws.transform import Logits
from specrun.runtime.round.drafter import DrafterWeights, DraftRequest, RoundOutcome
from specrun.runtime.trees import Topology
from specrun.runtime.trees.growth import TreeBuilder
from specrun.runtime.trees.tree import ROOT, DraftTree

# == Files of look-ahead embeddings: one a position (PaSS), or a mask token's (SPACE) ==============
#
# Architecture `pass` or `space`; tensor `<kind>.embedding.weight` (h, rows) in F32; metadata
# `<kind>.embedding_length`, `.vocab_size` and `.position_count`, how many positions were trained.
# The rows are `position_count`, or 1 that serves every position.


MOST_POSITIONS = 64


class LookaheadFile:
    """The embeddings of a file, as inputs of its target. Close it before the target.

    Raises PairError for those of another target, UnsupportedModelError for a target that cannot be
    given embeddings, MalformedFileError.
    """

    def __init__(
        self, path: str | os.PathLike[str], kind: str, target: Model, *, n_threads: int = 0
    ) -> None:
        file = HeadFile(path, kind)
        check_embedding_inputs(target)
        file.check_target(target)
        self.path, self.n_params = file.path, file.header.n_parameters
        self.n_positions = file.size("position_count", MOST_POSITIONS)
        name = f"{kind}.embedding.weight"
        rows = file.shape(name)[-1]
        file.require(name, (target.n_embd, rows))
        if rows not in (1, self.n_positions):
            counts = f"{rows} embeddings for {self.n_positions} look-ahead positions"
            raise MalformedFileError(f"{self.path} has {counts}: convert it again")
        if file.type_name(name) != "F32":
            stored = f"{name} as {file.type_name(name)}"
            raise MalformedFileError(f"{self.path} has {stored}, which must be F32: convert again")
        with (
            closing(ComputeDevice(n_threads=1)) as device,
            closing(load_tensors(path, device, [name])) as store,
        ):
            numbers = store.read(name, np.float32).astype(np.float32, copy=False)
        embeddings = numbers.reshape(rows, target.n_embd)
        self._is_shared = rows == 1
        self.inputs = EmbeddingInputs(target, embeddings, n_threads=n_threads)

    def tokens(self, count: int) -> tuple[int, ...]:
        """Return the nodes of the first `count` positions in a tree: ids past the vocabulary."""
        first = self.inputs.n_vocab
        return tuple(first if self._is_shared else first + index for index in range(count))

    def close(self) -> None:
        """Free the graph that looks embeddings up; again does nothing."""
        self.inputs.close()


# == The drafter ===================================================================================
#
# Behind a token the target evaluates n more positions, whose inputs are learnt: the look-ahead
# embeddings of PaSS, a target that stays as it is; or SPACE's mask token, of a target that was
# fine-tuned to read it. At the j-th the target predicts the token j + 1 places ahead, without those
# in between. These are the drafts of the next round, and they cost no evaluation of their own: one
# evaluation verifies the drafts of the last and looks ahead for the next.
#
# The next token is only known after acceptance, so the look-ahead positions must stand below the
# node that will be the last accepted one. SPACE puts a group of them below the root and below every
# candidate: n + (n + 1) n nodes, and each round drafts. PaSS puts one below the last candidate: 2 n
# nodes in a chain, but after a rejection the next round has nothing to verify and only looks ahead.
#
# The positions are nodes that are no candidates: nothing attends to them but their own group, and
# `commit` drops them. Drafts are point masses, or each is drawn from its row's distribution, which
# it keeps.


ParallelSampling = Literal["argmax", "with"]
Below = Literal["every", "last"]
"""Where look-ahead positions stand: below the root and every candidate, or the last one alone."""


def lookahead_nodes(n: int, topk: int, below: Below) -> int:
    """Return the most nodes of a round: candidates, and n positions below each or the last one."""
    candidates = n + topk - 1
    return candidates + n * (candidates + 1 if below == "every" else 1)


class LookaheadSource(Source):
    """Rows of logits at the look-ahead positions below the last token, by the depth of a draft."""

    reads_logits = rows_by_depth = True

    def __init__(self, file: LookaheadFile) -> None:
        self.embedding_inputs, self.n_params = file.inputs, file.n_params
        # The rows, and how many tokens there were.
        self.rows: tuple[list[npt.NDArray[np.float32]], int] = ([], 0)
        self._depth = 0

    def depth_rows(self, request: DraftRequest) -> Sequence[Logits]:
        """Return the rows below this text; none if the last evaluation did not look ahead here."""
        rows, length = self.rows
        return rows if length == len(request.tokens) else []

    def root(self, request: DraftRequest, highest: int) -> NodeRows | None:
        """Return the row of the first position."""
        self._depth, rows = 0, self.depth_rows(request)
        return NodeRows(rows[:1]) if rows else None

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> NodeRows:
        """Return the row of the next position: it does not see drafts."""
        self._depth += 1
        return NodeRows(self.rows[0][self._depth : self._depth + 1])


class ParallelDrafter(GrowingDrafter):
    """Drafts up to `n` tokens from the rows that the last evaluation left at look-ahead positions.

    `sampling` "argmax" drafts the most likely token of each row as a point mass, "with" draws from
    its distribution, transformed as the target's. In addition to the first token of a chain of
    point masses there are the `topk` - 1 next best ones. The first round of an answer only looks
    ahead.
    """

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
        self._rows_source = LookaheadSource(file)
        super().__init__(self._rows_source, Topology.chain(n), sampling=sampling, name=name)
        self._n, self._below, self._lookahead, self._topk = n, below, file.tokens(n), topk
        self.max_nodes = lookahead_nodes(n, topk, below)
        self.max_leaves = n + topk if below == "every" else topk
        self._tree: DraftTree | None = None
        self._groups: dict[int, list[int]] = {}

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
        kept = drafts.rows
        return kept.of(self._tree) if isinstance(kept, KeptRows) else self._tree

    def _drafts(self, request: DraftRequest) -> DraftTree:
        """Return the drafts as a chain; none if the last evaluation did not look ahead here."""
        n_rows = len(self._rows_source.depth_rows(request))
        return super().propose(request.within(n_rows, request.max_nodes))

    def _next_best(self, drafts: DraftTree, request: DraftRequest) -> list[int]:
        """Return the siblings of the first draft, the best first: point masses, like it."""
        count = min(self._topk - 1, request.max_nodes - len(drafts))
        points = self._sampling == "argmax" or request.params.is_greedy
        if count < 1 or not len(drafts) or not points:
            return []
        row = self._rows_source.rows[0][0]
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

    def observe(self, outcome: RoundOutcome) -> None:
        """Copy the rows of the positions below the last accepted node."""
        tree, groups = self._tree, self._groups
        self._forget()
        # A combinator may have verified something else.
        if tree is None or outcome.next_token is None or not outcome.tree.extends(tree):
            return
        group = groups.get(outcome.path[-1] if outcome.path else ROOT, [])
        rows = [np.array(outcome.rows.logits(node + 1)) for node in group]
        self._rows_source.rows = rows, len(outcome.tokens)

    def rewind(self, length: int) -> None:
        """Forget rows of tokens that were only guesses."""
        if length < self._rows_source.rows[1]:
            self._forget()

    def _forget(self) -> None:
        self._tree, self._groups, self._rows_source.rows = None, {}, ([], 0)


# == The builders of `pass(embeddings.gguf, ...)` and `space(mask.gguf, ...)` ======================


_MOST_SIBLINGS = 32


def build_pass(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `pass(FILE, n=all that were trained, below=every, sampling=argmax, topk=1, always=no)`.

    Without `n` it is stopped while it does not pay.
    """
    return _build(expression, env, "pass")


def build_space(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `space(FILE, ...)`, with the options of `pass`."""
    return _build(expression, env, "space")


def _build(expression: Expression, env: DraftEnvironment, kind: str) -> DrafterWeights:
    options = options_of(expression)
    n, is_sized = options.integer("n", 0), options.optional("n") is not None
    below = cast("Below", options.choice("below", list(get_args(Below)), "every"))
    schemes = list(get_args(ParallelSampling))
    sampling = cast("ParallelSampling", options.choice("sampling", schemes, "argmax"))
    topk = options.integer("topk", 1)
    if not 1 <= topk <= _MOST_SIBLINGS:
        raise OptionError(f"{expression}: topk is {topk}: give 1 to {_MOST_SIBLINGS}")
    if topk > 1 and sampling == "with":
        problem = "topk= puts point masses beside the first draft, and sampling=with draws it"
        raise OptionError(f"{expression}: {problem}: leave one of them out")
    path = file_of(expression, env)
    file = LookaheadFile(path, kind, env.target, n_threads=env.context.n_threads)
    try:
        n = _checked_n(expression, n, is_sized, file, env)
        most = env.context.n_batch - 1
        if lookahead_nodes(n, topk, below) > most:
            problem = f"{expression}: look-ahead positions and candidates do not fit a batch of"
            raise OptionError(f"{problem} {most + 1}: give a smaller n, or raise -b")
    except BaseException:
        file.close()
        raise
    name = str(expression)

    def start() -> ParallelDrafter:
        return ParallelDrafter(file, n, below=below, sampling=sampling, topk=topk, name=name)

    pace = env.pace_of(chooses=not is_sized, draws=sampling == "with")
    return DrafterWeights(name, start, [file], pace)


def _checked_n(
    expression: Expression, n: int, given: bool, file: LookaheadFile, env: DraftEnvironment
) -> int:
    """Return how many positions look ahead: all that were trained, unless a number is given."""
    if not given:
        return file.n_positions
    if not 1 <= n <= file.n_positions:
        trained = f"{file.path} was trained for {file.n_positions} look-ahead positions"
        raise OptionError(f"{expression}: n is {n}, and {trained}: give 1 to {file.n_positions}")
    return n
