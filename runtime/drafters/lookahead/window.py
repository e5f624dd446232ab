"""Lookahead decoding's lookahead branch: several Jacobi iterations at once, as nodes of one tree.

These nodes are evaluated and never accepted. Fu et al. (2024), section 3.1 and figure 2. With
window W and n-gram size N there are N - 1 rows of W columns. Column 0 of row 0 is the root, the
last committed token; the rest of row 0 is a chain below it; row r of a column hangs below its row r
- 1, so that it stands at position (column + row) after the root and sees row 0 up to its column,
then its own column. That is (N - 1) W - 1 nodes and W leaves. The target's greedy token after a
column's last row completes an n-gram; then every row moves up by one, and those tokens become the
last row. What moves up keeps its position, because the root has moved on by one.

Warm-up begins with one row of W + N - 3 random tokens and adds a row a pass for N - 2 passes. Each
pass drops column 0: the root has taken the place of column 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrun.bindings.errors import OptionError
from specrun.runtime.tree import ROOT, TreeBuilder


def window_nodes(width: int, n: int) -> int:
    """Return the most nodes of any pass: (N - 1) W - 1, or more while warming up."""
    # While warming up, a pass has fewer rows but more columns, which may be more nodes in all.
    return max(rows * _columns(width, n, rows) - 1 for rows in range(1, n)) if width else 0


def window_leaves(width: int, n: int) -> int:
    """Return the most leaves of any pass: W, or more while warming up (a single row is a chain)."""
    return max((_columns(width, n, rows) for rows in range(2, n)), default=1) if width else 0


def _columns(width: int, n: int, rows: int) -> int:
    return width + n - 1 - rows


class LookaheadWindow:
    """The rows of one window; `random_token` gives the tokens that warm-up begins with.

    `rows[0]` lacks column 0, which is the root.
    """

    def __init__(self, width: int, n: int, random_token: Callable[[], int]) -> None:
        if width < 1 or n < 2:
            raise OptionError(
                f"a window of {width} columns for n-grams of {n} tokens: give at least 1 and 2"
            )
        self.n = n
        self.rows: list[list[int]] = [[random_token() for _ in range(width + n - 3)]]

    @property
    def columns(self) -> int:
        """How many columns there are, W once it is warm."""
        return len(self.rows[0]) + 1

    @property
    def is_warm(self) -> bool:
        """Whether the next pass yields n-grams."""
        return len(self.rows) == self.n - 1

    @property
    def n_nodes(self) -> int:
        """How many nodes `add_to` adds."""
        return len(self.rows) * self.columns - 1

    def fit(self, max_depth: int, max_nodes: int) -> bool:
        """Cut columns off at the right until the window fits; return whether any is left."""
        rows = len(self.rows)
        # Row r of column c stands c + r deep: the deepest node is at columns + rows - 2.
        columns = min(self.columns, max_depth - rows + 2, (max_nodes + 1) // rows)
        if columns < self.n - rows:  # each pass of the warm-up that is left drops one more
            return False
        self.rows = [row[: columns - (not number)] for number, row in enumerate(self.rows)]
        return True

    def add_to(self, builder: TreeBuilder) -> list[int]:
        """Add the window's nodes; return the last row's, by column (ROOT for the root itself)."""
        above = [ROOT]
        for token in self.rows[0]:
            # Hidden nodes: evaluated in the same mask as the rest, and never accepted.
            above.append(builder.add_hidden(above[-1], token))
        for row in self.rows[1:]:
            places = zip(above, row, strict=True)
            above = [builder.add_hidden(parent, token) for parent, token in places]
        return above

    def advance(self, root: int, outputs: Sequence[int]) -> list[tuple[int, ...]]:
        """Move on by one token; return the n-grams that were completed, by column.

        `root` is the token that column 0 of row 0 was, `outputs` the target's greedy token after
        each column.
        """
        if not self.is_warm:
            # The last row's answers become the next row. All drop
            # column 0, whose place the root has taken.
            self.rows = [*(row[1:] for row in self.rows), list(outputs[1:])]
            return []
        # Column 0 of row 0 is the root, so its n-gram is that of the text's last token.
        ngrams = list(zip([root, *self.rows[0]], *self.rows[1:], outputs, strict=True))
        below = [*self.rows[1:], list(outputs)]
        # Only row 0 drops a column: its first place is the root's, which is not kept here.
        self.rows = [below[0][1:], *below[1:]]
        return ngrams
