"""P-EAGLE (Hui et al. 2026): EAGLE-3's head drafts all tokens at once, from pairs of a mask.

The pair of the last token and the features before it predicts the first token. Behind it stand
pairs of a mask token and learnt features, each of which predicts one token further, whatever was
drafted before: so they are evaluated together, and their rows are a block's (`drafters/dflash`).
Their cells are written over by the next evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.batching import ContextPart
from specrun.runtime.drafters.dflash.file import Blocks
from specrun.runtime.drafters.dflash.rows import BlockRows, MarginalRows
from specrun.runtime.drafters.dflash.source import SlotState, build_blocks
from specrun.runtime.drafters.eagle.head import EagleRows, PairCells
from specrun.runtime.drafters.eagle.versions import Eagle3Head, trained_window
from specrun.runtime.drafters.environment import DraftEnvironment, model_file_of
from specrun.runtime.drafters.states_source import seen_window
from specrun.runtime.drafters.tree_options import TreeOptions
from specrun.runtime.heads import MOST_CHAIN_ROWS, HeadFile, RowPiece
from specrun.runtime.language import Expression, options_of
from specrun.runtime.round.drafter import DrafterWeights


@dataclass(slots=True)
class ParallelCells:
    """One conversation's pairs of a head, and behind them those of its mask."""

    head: Eagle3Head
    pairs: PairCells
    n_slots: int
    part: ContextPart | None = None

    @property
    def n_cells(self) -> int:
        """How many pairs of a text there is room for."""
        return self.pairs.n_cells - self.n_slots

    @property
    def native_seconds(self) -> float:
        """Time in the graphs of this conversation."""
        return self.pairs.native_seconds

    def put(self, piece: RowPiece) -> EagleRows:
        """Put real pairs into cells, each of which sees all before it."""
        return self._evaluate(piece, 0)

    def block(self, piece: RowPiece, n_slots: int) -> MarginalRows:
        """Evaluate a text's last pairs and those of the mask: the rows of so many tokens."""
        rows = self._evaluate(piece, n_slots - 1).logits
        assert rows is not None
        return MarginalRows(list(rows[len(piece) - 1 :]))

    def _evaluate(self, piece: RowPiece, n_masks: int) -> EagleRows:
        mask, features = self.head.mask, self.head.mask_features
        assert mask is not None
        assert features is not None
        tokens = [*piece.tokens, *[mask] * n_masks]
        given = np.concatenate([piece.rows, *[features] * n_masks]) if n_masks else piece.rows
        n, start, count = len(tokens), piece.position, piece.count
        sees = np.tri(n, dtype=np.bool_)
        places = range(start, start + n), range(count, count + n), count, sees
        return self.pairs.evaluate(tokens, given, places, real=True)

    def ask(self, last: int, position: int, n_slots: int) -> None:
        """Raise: every conversation has cells of its own."""
        raise NotImplementedError

    def answer(self) -> BlockRows | None:
        """Return None: nothing was requested."""
        return None

    def close(self) -> None:
        """Free cells and graphs; again does nothing."""
        self.pairs.close()


class ParallelState(SlotState):
    """The pairs of a text; the last of them are evaluated together with those of the mask."""

    def __init__(self, cells: ParallelCells, window: int = 0) -> None:
        step = max(1, window // 4)  # as an EAGLE head's
        drop = cells.pairs.drop
        rows = cells.put, cells.n_cells
        super().__init__(*rows, ahead=1, window=window, drop=drop, step=step)
        self.cells = self._cells = cells

    def copy_cells(self, other: Self, base: int, count: int) -> bool:
        """Copy pairs."""
        self._cells.pairs.copy(other._cells.pairs, count)
        return True

    def block(self, tokens: Sequence[int], n_slots: int) -> BlockRows | None:
        """Evaluate waiting pairs and the mask's; return the rows, None if nothing is known."""
        piece = self.due(tokens, MOST_CHAIN_ROWS)
        if piece is None:
            return None
        rows = self._cells.block(piece, n_slots)
        self.settle(piece)
        return rows


def build_parallel(
    expression: Expression, env: DraftEnvironment, opened: Callable[[], Eagle3Head]
) -> DrafterWeights:
    """Build `eagle3(FILE, ...)` for P-EAGLE's heads, with the options of block drafters."""
    options = options_of(expression)
    if options.optional("accuracy") is not None:
        raise OptionError(f"{expression}: accuracy= is of heads that draft one token after another")
    file = HeadFile(model_file_of(expression, env), expression.atom)
    window = trained_window(file, seen_window(options, env), env.n_ctx)
    head, tree = opened(), TreeOptions.of(expression)
    asked = [size for size in (tree.n, tree.depth) if isinstance(size, int)]
    n_slots = max(head.n_drafted, *asked, 1)

    def started(slots: int) -> ParallelState:
        cells = head.cells((window or env.n_ctx) + slots + MOST_CHAIN_ROWS)
        return ParallelState(ParallelCells(head, cells, slots), window)

    try:
        sizes = head.n_params, head.depth_params
        blocks = Blocks(f"{head.name} (P-EAGLE)", n_slots, 0, head.taps, *sizes)
        return build_blocks(expression, env, head, blocks, started)
    except BaseException:
        head.close()
        raise
