"""Widths of evaluations: batches padded to a cheaper width, and evaluations of one fixed width."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.machine.devices import describe_machine
from specrun.bindings.models.model import Model
from specrun.bindings.models.trial import is_noted, note_fact
from specrun.bindings.threads import available_cores
from specrun.runtime.round.target import (
    CachedText,
    DraftSize,
    EvaluatedRows,
    TargetModel,
    most_tokens,
    target_context_options,
)
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees.layout import FILLER
from specrun.runtime.trees.tree import ROOT, DraftTree

if TYPE_CHECKING:
    from specrun.bindings.contexts.embedding_inputs import EmbeddingInputs

# == Padding =======================================================================================
#
# Kernels of quantized weights may take less time for 8 tokens than for 5. If that was measured,
# a round's evaluation gets tokens that nobody reads. They hang one below the other under the tree's
# last node: so they see it, no node sees them, no sequence is added, and the sequences of all nodes
# stay the same. Acceptance ignores them, and a commit drops them with all else that is deeper than
# the path.
#
# A recurrent state takes them in, and takes them back with the drafts that were refused. So there
# a chain is filled up to as many tokens as the context keeps states for, which costs no memory.


Parents = tuple[int, ...]

Wider = Callable[[int, int], int]
"""Returns how many tokens to evaluate in place of the first number, at most the second."""


def paddings(wider: Wider, widest: int, most: int) -> dict[int, int]:
    """Return the widths from 2 to `widest` that are padded, and to how many, at most `most`."""
    return {n: to for n in range(2, widest + 1) if (to := wider(n, most)) > n}


class PaddedTarget(TargetModel):
    """A target that pads the evaluations of rounds whose width is among `widths`, while they fit.

    If its model keeps a recurrent state, they are no wider than the tokens that it can take back,
    and one.
    """

    def __init__(
        self,
        context: Context,
        widths: Mapping[int, int],
        inputs: EmbeddingInputs | None = None,
    ) -> None:
        super().__init__(context, inputs)
        self._widths = widths
        self._filled: tuple[Parents, Parents] = ((), ())  # the last tree, and as it was evaluated

    def _evaluate_at(self, start: int, tokens: list[int], parents: Parents) -> EvaluatedRows:
        width = self._widths.get(len(tokens), 0)
        # Each node needs a cell, and a position: at the end of the context there are too few.
        fits = 0 < width <= self.context.n_ctx - start
        evaluated = filled(parents, width) if fits else parents
        self._filled = parents, evaluated
        filling = [FILLER] * (len(evaluated) - len(parents))
        return super()._evaluate_at(start, tokens + filling, evaluated)

    def _commit_in_place(self, text: CachedText, tree: DraftTree, path: Sequence[int]) -> None:
        if not tree.parents:
            self._keep_at(text.n_cached, (), ())  # a root alone may have been filled up, too
        super()._commit_in_place(text, tree, path)

    def _keep_at(self, root: int, parents: Parents, path: Sequence[int]) -> None:
        before, evaluated = self._filled
        super()._keep_at(root, evaluated if before == parents else parents, path)


@functools.lru_cache(maxsize=256)
def filled(parents: Parents, width: int) -> Parents:
    """Return a tree whose evaluation, with the root, has `width` tokens; its nodes come first."""
    # The last node is a leaf, because parents come before their children: as the last of all
    # leaves, its path keeps the number of its sequence when it grows.
    return (*parents, *range(len(parents) - 1, width - 2))


# == Fixed shape: evaluations of one width, so that their bits are the same ========================
#
# Kernels round by how many tokens they are given: a quantized product of one row and of five differ
# in the last bits, and activations that are quantized again blow that up. Evaluations of one width
# compute every row alike, wherever it lies among the others, so a text does not depend on its
# drafter. The unused part of a round is filled with nodes that are never accepted, on a sequence
# of their own that no other node sees. Two things go with it:
#
# - Prompts are cut at multiples of a piece's length, whatever was cached of them.
# - Tokens that were generated keep the bits that they were generated with.


MULTIPLE = 4
"""Widths are multiples of it: some kernels treat the rows beyond the last multiple of 4 apart."""

_PIECE = 64  # tokens of a prompt in one evaluation: as in contexts with hidden states
_STEP = 256  # the cells that attention reads grow by so many
_TRIED = 4  # evaluations' worth of tokens that a width is tried with


Shape = int | Literal["free", "pairs", "fixed"]
"""free: evaluations are as wide as needed; pairs: so they are, but none has a single token; fixed:
all have the least width that fits the drafter; a number: all have this width."""


def width_of(shape: Shape, drafter: DraftSize, options: ContextOptions) -> int | None:
    """Return the width of every evaluation, None if it varies.

    Raises `OptionError` for a width that does not hold the drafter's trees and their root, or that
    is none.
    """
    if shape in ("free", "pairs"):
        return None
    n_batch = min(options.n_batch, options.n_ubatch)
    least = -(-(1 + drafter.max_nodes) // MULTIPLE) * MULTIPLE
    width = least if shape == "fixed" else shape
    most = n_batch // MULTIPLE * MULTIPLE
    if isinstance(width, bool) or not isinstance(width, int):
        raise OptionError(f"shape is {shape!r}: give free, pairs, fixed or a width in tokens")
    if not least <= width <= most or width % MULTIPLE:
        why = f"drafts of up to {drafter.max_nodes} tokens and a batch of {n_batch}"
        allowed = f"for {why} give a multiple of {MULTIPLE} from {least} to {most}, or fixed"
        raise OptionError(f"shape is {width}: {allowed}")
    return width


def fixed_shape_options(model: Model, options: ContextOptions, width: int) -> ContextOptions:
    """Return the settings of a context for evaluations of one width, from those of a free one.

    Flash attention adds up cell by cell and leaves out cells that a row does not see, so branches
    beside a path change nothing. Without it, sums are made of lanes whose cells those branches
    shift: then chains are the same to the bit, and trees are refused with `OptionError`. Recurrent
    models are, too (`UnsupportedModelError`).
    """
    _require_branching(model)
    if options.flash_attention == "off" and options.n_sequences > 1:
        problem = "a fixed shape takes trees with flash attention only"
        raise OptionError(f"{problem}: leave out -fa off, or draft chains")
    return dataclasses.replace(
        options,
        n_outputs=max(width, options.n_outputs),
        n_sequences=options.n_sequences + 1,
        flash_attention="off" if options.flash_attention == "off" else "on",
    )


def _require_branching(model: Model) -> None:
    if not model.can_branch:
        kind = f"{model.architecture} models keep a recurrent state"
        raise UnsupportedModelError(f"{kind}, which tokens that fill a shape would change")


class FixedShapeTarget(TargetModel):
    """A target that evaluates `width` tokens at a time while it generates, needed or not.

    Its context has a sequence more than the drafter's trees have leaves, and an output row for
    every token of the width (`fixed_shape_options`).
    """

    width: int

    def __init__(self, context: Context, width: int, inputs: EmbeddingInputs | None = None) -> None:
        super().__init__(context, inputs)
        self.width = width
        self._piece = min(_PIECE, context.n_batch)

    @property
    def n_positions(self) -> int:
        """How long a text may be: the last round has to fit with all that fills it."""
        return self.context.n_ctx - self.width

    def reusable(self, text: CachedText, prompt: Sequence[int], *, states: bool) -> int:
        """Return how many tokens of a prompt are to be taken as they are cached.

        Within an earlier prompt that is a whole number of pieces, so that the bits of a prompt do
        not depend on the cached part. The last token but one is evaluated again in any case: some
        drafters need the state before the first new token, and others are to find the same.
        """
        # The rest of an interrupted round is dropped: more is to be evaluated before any cut.
        self.rewind(text, len(text.tokens))
        shared = min(common_prefix(text.tokens, prompt), len(text.tokens) - 1, len(prompt) - 1)
        shared = max(0, shared - 1)
        if min(shared, text.n_cached) < text.n_prompt:
            return min(shared, text.n_cached) // self._piece * self._piece
        # Generated tokens that are not cached get the bits of their width, as if they were.
        self._catch_up(text, shared)
        return shared

    def _pieces(self, start: int, end: int, most: int) -> Iterator[tuple[int, int]]:
        """Yield where pieces of a prompt begin and end: at multiples of a piece's length."""
        while start < end:
            stop = min(end, (start // self._piece + 1) * self._piece)
            yield start, stop
            start = stop


# -- whether a width is reliable here --------------------------------------------------------------


def require_equal_bits(target: FixedShapeTarget) -> None:
    """Evaluate a text in rounds of several lengths, and compare each token's bits among them.

    So every place in an evaluation is compared with others, for several tokens: if kernels round
    otherwise, activations that are quantized again hide it for every other token. The text lies on
    both sides of a step of the cells that attention reads. A success is stored for the file, the
    machine and all that chooses kernels. Raises `OptionError` if the bits of a row
    depend on its place in the evaluation or on its neighbours.
    """
    path, fact = target.context.model.path, _bits_fact(target)
    if is_noted(path, fact):
        return
    width, room = target.width, target.n_positions
    start = max(0, min(_STEP, room - width) - width * _TRIED // 2)
    end = min(start + width * _TRIED, room)
    vocab_size = target.context.model.vocabulary.size
    # Spread over the vocabulary and not drawn: the same in every trial.
    tokens = [1 + (17 + 7919 * place) % (vocab_size - 1) for place in range(end)]
    text = CachedText(tokens[:start])
    target.prefill(text, start)
    wanted = _bits_of_rounds(target, text, tokens, ())
    for first in ((width // 2,), (1,), (1,) * _TRIED):
        found = _bits_of_rounds(target, text, tokens, first)
        _require_same(wanted, found, width, "their places")
    n_branches = target.context.options.n_sequences - 2
    if n_branches > 0:
        most = min(1 + n_branches, width // 2)
        found = _bits_of_rounds(target, text, tokens, (most,) * _TRIED, branching=True)
        _require_same(wanted, found, width, "other branches")
    target.context.memory.clear()
    note_fact(path, fact)


def _bits_fact(target: FixedShapeTarget) -> str:
    """Return a name for everything that chooses kernels, the file aside."""
    context = target.context
    branches = context.options.n_sequences > 2
    options = dataclasses.replace(context.options, n_ctx=0, n_outputs=1, n_sequences=1)
    threads = options.n_threads or available_cores()
    chosen = [target.width, branches, threads, context.model.n_gpu_layers, repr(options)]
    text = json.dumps([describe_machine(), chosen])
    return f"bits-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _bits_of_rounds(
    target: FixedShapeTarget,
    text: CachedText,
    tokens: Sequence[int],
    first: Sequence[int],
    *,
    branching: bool = False,
) -> list[bytes]:
    """Evaluate the tokens after the prompt in rounds; return a digest of each row's logits.

    The rounds have the lengths of `first`, then as many tokens as there are places. `branching`:
    their tokens but the first have siblings, which are not committed, and the rounds end with
    `first`.
    """
    target.rewind(text, text.n_prompt)
    lengths = itertools.chain(first, () if branching else itertools.repeat(target.width))
    bits: list[bytes] = []
    for length in lengths:
        drafted = [*tokens[len(text.tokens) : len(text.tokens) + length]]
        if not drafted:
            break
        text.tokens.append(drafted.pop(0))
        parents = (*range(ROOT, len(drafted) - 1),)
        siblings = parents if branching else ()
        fillers = (FILLER,) * len(siblings)
        tree = DraftTree.of_points((*drafted, *fillers), (*parents, *siblings))
        rows = target.evaluate(text, tree)
        path = range(len(drafted))
        bits += [_digest(rows.logits(row)) for row in range(len(drafted) + 1)]
        target.commit(text, tree, path)
    return bits


def _digest(logits: npt.NDArray[np.float32]) -> bytes:
    return hashlib.blake2b(logits.tobytes()).digest()


def _require_same(wanted: list[bytes], found: list[bytes], width: int, beside: str) -> None:
    pairs = [*zip(wanted, found, strict=False)]
    differing = sum(ours != theirs for ours, theirs in pairs)
    if differing:
        problem = f"the bits of {differing} of {len(pairs)} tokens depend on {beside}"
        advice = f"give a larger multiple of {MULTIPLE}, or free"
        raise OptionError(f"shape is {width}: tried with this model here, {problem}; {advice}")


def open_target(
    model: Model,
    drafter: DraftSize,
    options: ContextOptions,
    shape: Shape,
    wider: Wider | None = None,
) -> TargetModel:
    """Make the context that verifies a drafter's trees, in evaluations of any or of one width.

    If the width is not fixed, batches are padded to `wider` and cheaper ones, and those of one
    token to two in the shape "pairs". Raises `OptionError` for a width whose bits vary for this
    model here, `UnsupportedModelError` for a recurrent model in any shape but
    free.
    """
    sized = target_context_options(options, drafter)
    width = width_of(shape, drafter, options)
    if width is not None:
        context = Context(model, fixed_shape_options(model, sized, width))
        return _tried_target(context, width, drafter.embedding_inputs)
    most = min(options.n_batch, options.n_ubatch)
    if not model.can_branch:  # a single state that is held (`Memory.hold`) would be lost each time
        most = min(most, 1 + sized.n_rollback * model.can_roll_back)
    padded = paddings(wider, most_tokens(drafter), most) if wider else {}
    if shape == "pairs":
        _require_branching(model)
        padded = {1: 2} | padded
    if not padded:
        return TargetModel(Context(model, sized), drafter.embedding_inputs)
    n_outputs = max(sized.n_outputs, *padded.values())
    context = Context(model, dataclasses.replace(sized, n_outputs=n_outputs))
    return PaddedTarget(context, padded, drafter.embedding_inputs)


def _tried_target(context: Context, width: int, inputs: EmbeddingInputs | None) -> FixedShapeTarget:
    target = FixedShapeTarget(context, width, inputs)
    try:
        require_equal_bits(target)
    except BaseException:  # Ctrl-C as well: the context owns native memory
        context.close()
        raise
    return target
