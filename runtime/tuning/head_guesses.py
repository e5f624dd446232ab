"""Heads asked along a text by teacher forcing: their guesses at each place below the text's tokens.

A guess of depth k is then measured where a tree would make it: below the right tokens of the
depths above. With the hidden state f_t of position t, depth k guesses the token at t + 2 + k (the
target itself says the one at t + 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import UnsupportedModelError
from specrun.bindings.gguf import read_header
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.eagle import Eagle3Head, EagleHead, EagleState, PairHead
from specrun.runtime.drafters.hydra import HydraHead
from specrun.runtime.drafters.medusa import MedusaHead
from specrun.runtime.heads import HeadFile
from specrun.runtime.tree import ROOT

FloatRows = npt.NDArray[np.float32]
Guesses = list[list[int]]
"""Tokens by depth, the most likely first."""

_OUTPUT = "output.weight"
_EAGLE_DEPTHS = 5  # features that were predicted, as EAGLE counts its n-alpha
_POSITIONS, _PREFIX_ROWS = 16, 64  # of one evaluation of Hydra's heads, of its prefix layer


class HeadGuesses(Protocol):
    """A kind of heads as calibration sees them.

    `evaluated_params` are the weights that a depth of guesses reads; `taps` the layers of the
    target whose inputs the heads read, none where they read its final hidden state.
    """

    n_depths: int
    evaluated_params: float
    taps: tuple[int, ...]

    def along(self, tokens: Sequence[int], features: FloatRows, begin: int) -> Iterator[Guesses]:
        """Yield the guesses at positions `begin` to len(features) - 1, [depth][rank].

        `features` [n, ...] are what the heads read of the target at the first n positions of the
        text `tokens`, which is longer. Where the text ends, so do the depths.
        """

    def close(self) -> None:
        """Free native memory."""


class MedusaGuesses:
    """Medusa's heads, which see the hidden state alone and not the tokens on the way."""

    taps: tuple[int, ...] = ()

    def __init__(self, head: MedusaHead, ranks: int) -> None:
        self.n_depths = head.n_heads
        # A depth is one head: its share of them all.
        self.evaluated_params = head.evaluated_params / head.n_heads
        self._head = head
        self._ranks = ranks

    def along(self, tokens: Sequence[int], features: FloatRows, begin: int) -> Iterator[Guesses]:
        """Yield all heads' tokens; see `HeadGuesses`."""
        for offset, named in enumerate(self._head.tokens_along(features[begin:], self._ranks)):
            # Depth k is cut where token t + 2 + k lies beyond the text: nothing tells whether it is
            # right.
            yield named[: max(0, len(tokens) - (begin + offset) - 2)]

    def close(self) -> None:
        """Free the heads."""
        self._head.close()


class EagleGuesses:
    """An EAGLE head that goes on from its own predicted states along the text's tokens."""

    def __init__(self, head: PairHead, n_cells: int, evaluated_params: float) -> None:
        self.n_depths = _EAGLE_DEPTHS
        self.evaluated_params = evaluated_params
        self.taps = tuple(head.taps)
        self._head = head
        try:
            self._cells = head.cells(n_cells)
        except BaseException:
            head.close()
            raise

    def along(self, tokens: Sequence[int], features: FloatRows, begin: int) -> Iterator[Guesses]:
        """Yield the head's tokens after 0, 1, ... predicted states; see `HeadGuesses`."""
        # The cells hold the target's own states up to the position, as after an accepted round;
        # only below the root are states predicted.
        state = EagleState(self._cells)
        if begin:
            state.learn(0, features[:begin], tokens)
        for position in range(begin, min(len(features), len(tokens) - 2)):
            state.learn(position, features[position : position + 1], tokens)
            row = state.root(tokens[: position + 2])
            if row is None:  # more pairs than the head has cells
                return
            guesses = [row.tokens[0].tolist()]
            for depth in range(1, min(self.n_depths, len(tokens) - position - 2)):
                # Below the root the chain's nodes count from 0: the parent of depth d is node d -
                # 2.
                above = ROOT if depth == 1 else depth - 2
                # The text's token whatever the head guessed, so that each depth is asked below
                # right tokens.
                row = state.below([above], [tokens[position + 1 + depth]])
                guesses.append(row.tokens[0].tolist())
            yield guesses

    def close(self) -> None:
        """Free the head."""
        self._cells.close()
        self._head.close()


class HydraGuesses:
    """Hydra's heads, each given the text's own tokens up to its own."""

    taps: tuple[int, ...] = ()

    def __init__(self, head: HydraHead, n_cells: int) -> None:
        self.n_depths = head.n_heads
        self.evaluated_params = head.evaluated_params / head.n_heads
        self._head = head
        try:
            self._cells = head.cells(n_cells)
        except BaseException:
            head.close()
            raise

    def along(self, tokens: Sequence[int], features: FloatRows, begin: int) -> Iterator[Guesses]:
        """Yield all heads' tokens, several positions an evaluation; see `HeadGuesses`."""
        states = self._states(features)
        for first in range(begin, min(len(states), len(tokens) - 2), _POSITIONS):
            positions = range(first, min(first + _POSITIONS, len(states), len(tokens) - 2))
            guesses: list[Guesses] = [[] for _ in positions]
            for depth in range(self.n_depths):
                # At the end of the text the last positions drop out first: the others stay aligned
                # with `guesses`.
                known = [position for position in positions if position + 2 + depth < len(tokens)]
                if not known:
                    break
                # Head k reads the k + 1 tokens before its guess.
                paths = [tokens[position + 1 : position + 2 + depth] for position in known]
                named = self._head.best_tokens(states[known[0] : known[-1] + 1], paths).tolist()
                for own, best in zip(guesses, named, strict=False):
                    own.append(best)
            yield from guesses

    def close(self) -> None:
        """Free the heads."""
        self._cells.close()
        self._head.close()

    def _states(self, features: FloatRows) -> FloatRows:
        layer = self._cells.prefix
        if layer is None:
            return features
        features = features[: layer.n_cells]
        # In order: the prefix layer is causal, each piece attends to the cells of those before it.
        starts = range(0, len(features), _PREFIX_ROWS)
        pieces = [layer.evaluate(features[i : i + _PREFIX_ROWS], i, i) for i in starts]
        return np.concatenate(pieces)


def guess_kinds() -> list[str]:
    """Return the architectures of heads that can be asked."""
    return list(_OPENERS)


def open_guesses(
    path: Path, target: Model, *, ranks: int, n_tokens: int, n_threads: int = 0
) -> HeadGuesses:
    """Open the heads of a file for texts of up to `n_tokens`, each depth naming `ranks` tokens.

    Raises UnsupportedModelError for a file that holds no such heads, PairError for heads of another
    target.
    """
    kind = read_header(path).architecture
    opener = _OPENERS.get(kind)
    if opener is None:
        known = ", ".join(guess_kinds())
        problem = f"{path} is a file of architecture {kind}"
        raise UnsupportedModelError(f"{problem}: accuracies are measured for {known}")
    return opener(path, target, ranks, n_tokens, n_threads)


def _open_medusa(path: Path, target: Model, ranks: int, _n: int, n_threads: int) -> HeadGuesses:
    ranks = min(ranks, target.vocabulary.size)
    return MedusaGuesses(MedusaHead(path, target, n_threads=n_threads), ranks)


def _open_hydra(path: Path, target: Model, ranks: int, n: int, n_threads: int) -> HeadGuesses:
    head = HydraHead(path, target, n_threads=n_threads)
    head.prepare([ranks] * head.n_heads)
    return HydraGuesses(head, n)


def _open_eagle(path: Path, target: Model, ranks: int, n: int, n_threads: int) -> HeadGuesses:
    file = HeadFile(path, read_header(path).architecture)
    head_class = EagleHead if file.kind == "eagle" else Eagle3Head
    head: PairHead = head_class(path, target, ranks=ranks, n_threads=n_threads)
    # Beside the text's cells those of the predicted states below its last position.
    # A depth reads the head's weights, and of the target's output matrix the tokens it may draft.
    borrowed = 0 if _OUTPUT in file else target.n_embd * head.sizes.vocab_size
    return EagleGuesses(head, n + _EAGLE_DEPTHS, file.header.n_parameters + borrowed)


_OPENERS: Mapping[str, Callable[[Path, Model, int, int, int], HeadGuesses]] = {
    "medusa": _open_medusa,
    "hydra": _open_hydra,
    "eagle": _open_eagle,
    "eagle3": _open_eagle,
}
