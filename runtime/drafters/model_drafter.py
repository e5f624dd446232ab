"""What drafters with a model of their own share: its cache, its cost, its confidence."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.draft_model_state import DraftModelState
from specrun.runtime.drafters.drafter import Drafter
from specrun.runtime.prefix import common_prefix
from specrun.runtime.sampling import SamplingParams

__all__ = ["RANKED_WORDS", "ModelDrafter", "ranking_params"]

RANKED_WORDS = 40
"""Words among which point masses are chosen where the settings do not truncate."""


class ModelDrafter(Drafter):
    """Owns a context of a draft model through its state; `p_min` ends drafts where the model is less certain."""

    def __init__(self, state: DraftModelState, *, p_min: float, name: str) -> None:
        if not 0.0 <= p_min <= 1.0:
            raise OptionError(f"p_min is {p_min}: it is a probability, between 0 and 1")
        self.name = name
        self._p_min = p_min
        self._context = state.context
        self._model_state = state

    @property
    def native_seconds(self) -> float:
        """Time inside the draft model's evaluations."""
        return self._context.native_seconds

    @property
    def n_params(self) -> int:
        """The draft model's parameters."""
        return self._context.model.n_params

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache of what the prompt shares with the last one."""
        self._model_state.rewind(common_prefix(self._model_state.cached, tokens))

    def rewind(self, length: int) -> None:
        """Drop the cache of tokens that were only guesses."""
        self._model_state.rewind(min(length, len(self._model_state.cached)))

    def close(self) -> None:
        """Free the context."""
        self._model_state.close()


def ranking_params(params: SamplingParams, ranked: int) -> SamplingParams:
    """Return the settings that rank the `ranked` most likely words: at temperature 0, those of temperature 1.

    Greedy settings make a law of one word, which ranks nothing and is always certain. Otherwise the ranking
    keeps the target's truncation: words that it can never say are not worth a node.
    """
    if params.is_greedy:
        return params.replace(temperature=1.0, top_k=ranked, top_p=1.0, min_p=0.0)
    return params.replace(top_k=min(params.top_k or ranked, ranked))
