"""Drafters with a model of their own: what they share, whether they draft chains or trees.

A `ContextDrafter` owns a context, a `ModelDrafter` has the target's tokens read in it, and a
`SteppedDrafter` drafts step by step, so that the steps of several conversations are one evaluation.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

from specrun.runtime.costs.memory_traffic import multiplications
from specrun.runtime.drafter import Drafter, DraftRequest
from specrun.runtime.drafters.draft_model.state import DraftModelState
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.transform import Logits
from specrun.runtime.tree import DraftTree
from specrun.runtime.trees import check_p_min

_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found")


class ContextDrafter(Drafter):
    """Owns a context of a draft model."""

    def __init__(self, state: DraftModelState, *, name: str) -> None:
        self.name = name
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

    @property
    def depth_params(self) -> float:
        """The draft model's."""
        return multiplications(self._context.model)

    def close(self) -> None:
        """Free the context."""
        self._model_state.close()


class ModelDrafter(ContextDrafter):
    """Reads the target's tokens; `p_min` ends drafts where the model is less certain."""

    def __init__(self, state: DraftModelState, *, p_min: float, name: str) -> None:
        check_p_min(p_min)
        super().__init__(state, name=name)
        self._p_min = p_min

    def has_room(self, tokens: Sequence[int]) -> bool:
        """Whether the model can read a text of which it has cached a beginning."""
        return self._model_state.room(tokens) >= 0

    def row_after(self, tokens: Sequence[int]) -> Logits:
        """Return the model's own logits after all tokens of the text, a view [shared vocab]."""
        state = self._model_state
        state.rewind(min(len(state.cached), len(tokens) - 1))  # the last token's row is needed
        return state.feed(tokens[len(state.cached) :])

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache of what the prompt shares with the last one."""
        self._model_state.begin(tokens)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Pass on: a cache may be chosen by the target's states."""
        self._model_state.learn_prompt(start, rows, count)

    def read_along(self, tokens: Sequence[int], end: int) -> None:
        """Read the prompt piece by piece."""
        self._model_state.read_along(tokens, end)

    def rewind(self, length: int) -> None:
        """Drop the cache of tokens that were only guesses."""
        self._model_state.rewind(min(length, len(self._model_state.cached)))


class SteppedDrafter(ModelDrafter, Generic[_Asked, _Found]):
    """Makes a draft step by step: alone, or each step beside those of other conversations.

    A step is the evaluation that is `_Asked` for; the draft goes on with what was `_Found`.
    """

    def __init__(self, state: DraftModelState, *, p_min: float, name: str) -> None:
        super().__init__(state, p_min=p_min, name=name)
        self.waits = state.shares_context
        # A draft in the making, for which request, and the tree that came of it.
        self._steps: Generator[_Asked, _Found, DraftTree] | None = None
        self._request: DraftRequest | None = None
        self._prepared: DraftTree | None = None

    @abstractmethod
    def _drafting(self, request: DraftRequest) -> Generator[_Asked, _Found, DraftTree]:
        """Draft: yields what to evaluate, and takes what was found."""

    @abstractmethod
    def _ask(self, asked: _Asked) -> None:
        """Ask for an evaluation that is made with those of other conversations."""

    @abstractmethod
    def _answer(self) -> _Found | None:
        """Return what the evaluation found; None before it was made."""

    def prepare(self, request: DraftRequest) -> bool:
        """Draft a step further, its evaluation made with those of other conversations."""
        if self._steps is None or self._request is not request:
            if not self._model_state.waits:
                return True
            self._request, self._steps = request, self._drafting(request)
            return self._go_on(next, self._steps)
        found = self._answer()
        return found is not None and self._go_on(self._steps.send, found)

    def _go_on(self, step: Callable[[Any], _Asked], given: object) -> bool:
        """Take a step, and ask for what it needs; return whether the draft is complete."""
        try:
            self._ask(step(given))
        except StopIteration as drafted:
            self._steps, self._prepared = None, drafted.value
            return True
        except BaseException:
            self._steps = None
            raise
        return False

    def _take_prepared(self, request: DraftRequest) -> DraftTree | None:
        """Return the draft that was prepared for this request, if one was, and forget it."""
        prepared, self._prepared, self._steps = self._prepared, None, None
        return prepared if self._request is request else None

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache of what the prompt shares with the last one, and no draft."""
        super().begin(tokens)
        self._steps = self._prepared = None
