"""The chains of a head as one graph, where its backends can compute them; where they cannot, that is found out once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from specrun.bindings.errors import UnsupportedModelError
from specrun.runtime.heads.chain_words import MOST_CHAIN_ROWS, MOST_CHAIN_WORDS, ChainWords

__all__ = ["PossibleChains"]


class _Chains(Protocol):
    def close(self) -> None: ...


Chains = TypeVar("Chains", bound=_Chains)


class PossibleChains(Generic[Chains]):
    """Prepares chains when they are first asked for. `prepare`, and drafting with what it returns, may raise
    UnsupportedModelError: then none is asked for again."""

    def __init__(self, prepare: Callable[[], Chains]) -> None:
        self.chains: Chains | None = None
        self._prepare = prepare
        self._impossible = False

    def draft(self, n_rows: int, n: int, run: Callable[[Chains], ChainWords]) -> ChainWords | None:
        """Return what `run` drafts: n words after `n_rows` rows; None where that is too much for one graph."""
        if self._impossible or n > MOST_CHAIN_WORDS or n_rows > MOST_CHAIN_ROWS:
            return None
        try:
            if self.chains is None:
                self.chains = self._prepare()
            return run(self.chains)
        except UnsupportedModelError:
            self._impossible = True
            return None

    def close(self) -> None:
        """Free the chains."""
        if self.chains is not None:
            self.chains.close()
            self.chains = None
