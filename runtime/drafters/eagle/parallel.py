"""P-EAGLE (Hui et al. 2026): EAGLE-3's head drafts all tokens at once, from pairs of a mask.

The pair of the last token and the features before it predicts the first token. Behind it stand
pairs of a mask token and learnt features, each of which predicts one token further, whatever was
drafted before: so they are evaluated together, and their rows are a block's (`drafters/dflash`).
Their cells are written over by the next evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specrun.bindings.errors import OptionError
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


class ParallelState(SlotState):
    """The pairs of a text; the last of them are evaluated together with those of the mask.

    `pairs` are one conversation's cells of a head, whose blocks predict at most `n_slots` tokens.
    """

    def __init__(self, head: Eagle3Head, pairs: PairCells, n_slots: int, window: int = 0) -> None:
        step = max(1, window // 4)  # as an EAGLE head's
        n_cells, drop = pairs.n_cells - n_slots, pairs.drop
        super().__init__(self._evaluate_real, n_cells, ahead=1, window=window, drop=drop, step=step)
        self.cells = self._pairs = pairs
        self._head, self.n_slots = head, n_slots

    def block(self, tokens: Sequence[int], n_slots: int) -> BlockRows | None:
        """Evaluate waiting pairs and the mask's; return the rows, None if nothing is known."""
        piece = self.due(tokens, MOST_CHAIN_ROWS)
        if piece is None:
            return None
        rows = self._evaluated(piece, n_slots - 1).logits
        assert rows is not None
        self.settle(piece)
        return MarginalRows(list(rows[len(piece) - 1 :]))

    def _evaluate_real(self, piece: RowPiece) -> EagleRows:
        return self._evaluated(piece, 0)

    def _evaluated(self, piece: RowPiece, n_masks: int) -> EagleRows:
        """Evaluate real pairs and those of the mask, each of which sees all before it."""
        mask, features = self._head.mask, self._head.mask_features
        assert mask is not None
        assert features is not None
        tokens = [*piece.tokens, *[mask] * n_masks]
        given = np.concatenate([piece.rows, *[features] * n_masks]) if n_masks else piece.rows
        n, start, count = len(tokens), piece.position, piece.count
        sees = np.tri(n, dtype=np.bool_)
        places = range(start, start + n), range(count, count + n), count, sees
        return self._pairs.evaluate(tokens, given, places, real=True)


def build_parallel(
    expression: Expression, env: DraftEnvironment, opened: Callable[[], Eagle3Head]
) -> DrafterWeights:
    """Build `eagle3(FILE, ...)` for P-EAGLE's heads, with the options of block drafters."""
    options = options_of(expression)
    if options.optional("accuracy") is not None:
        raise OptionError(f"{expression}: accuracy= is of heads that draft one token after another")
    file = HeadFile(model_file_of(expression, env), expression.atom)
    window = seen_window(options, env, trained_window(file))
    head, tree = opened(), TreeOptions.of(expression)
    asked = [size for size in (tree.n, tree.depth) if isinstance(size, int)]
    n_slots = max(head.n_drafted, *asked, 1)

    def started(slots: int) -> ParallelState:
        cells = head.cells((window or env.n_ctx) + slots + MOST_CHAIN_ROWS)
        return ParallelState(head, cells, slots, window)

    try:
        sizes = head.n_params, head.depth_params
        blocks = Blocks(f"{head.name} (P-EAGLE)", n_slots, 0, head.taps, *sizes)
        return build_blocks(expression, env, head, blocks, started)
    except BaseException:
        head.close()
        raise
