"""When to stop looking ahead: a window may only borrow so much time before it has to pay.

The window's cost in a round is what the curve charges for its nodes beside the guesses; its gain is the accepted
tokens that no other source of n-grams knew. Both are counted in tokens of plain decoding. The window is closed where
the debt exceeds a credit that grows with the text, and opened again when the grown credit covers twice the debt; so
the whole loss is bounded by `_CREDIT` tokens and `_SHARE` of the text. Nothing is timed: the same text closes it
at the same place.
"""

from __future__ import annotations

from specrun.runtime.planning.cost_curves import CostCurve

__all__ = ["WindowGuard"]

_CREDIT = 8.0
_SHARE = 0.02


class WindowGuard:
    """Opens and closes a window by its debt."""

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve
        self.forget()

    def forget(self) -> None:
        """Return to the first credit."""
        self.debt = 0.0
        self.is_open = True
        self._n_tokens = 0

    def count(self, n_guessed: int, n_window: int, gained: int, n_tokens: int) -> None:
        """Count a round that evaluated so many nodes and produced `n_tokens`, `gained` of them thanks to the window."""
        curve, without = self._curve, 1 + n_guessed
        self._n_tokens += n_tokens
        cost = curve.seconds(without + n_window) - curve.seconds(without) if n_window else 0.0
        # What was earned long ago does not pay for a window that earns no more.
        self.debt = max(self.debt + cost / curve.seconds(1) - gained, -_CREDIT)
        credit = _CREDIT + _SHARE * self._n_tokens
        self.is_open = self.debt <= (credit if self.is_open else credit / 2.0)
