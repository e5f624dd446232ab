"""Keys and values of answers that grow: with room for tokens to come, so that one more copies none.

transformers' own cache is as long as its tokens, and copied whole for each: of thousands of answers
at once that is more than attention reads, and memory in pieces of ever other sizes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

_PIECE = 64  # tokens of room at a time


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer's keys and values [B, heads, T, head size]: views of tensors that have more room."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._room: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Add tokens; return all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._room is None or end > self._room[0].shape[-2]:
            self._room = tuple(  # type: ignore[assignment]
                _grown(kept, added, start, end)
                for kept, added in ((self.keys, key_states), (self.values, value_states))
            )
        assert self._room is not None
        keys, values = self._room
        keys[..., start:end, :], values[..., start:end, :] = key_states, value_states
        self.keys, self.values = keys[..., :end, :], values[..., :end, :]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, copied out of the room that there was."""
        super().batch_select_indices(indices)
        self._room = None


def _grown(kept: Tensor | None, like: Tensor, start: int, end: int) -> Tensor:
    """Return a tensor as `like` with room for `end` tokens and some more; `start` are `kept`."""
    size = (end // _PIECE + 1) * _PIECE
    room = like.new_empty(*like.shape[:-2], size, like.shape[-1])
    if kept is not None and start:
        room[..., :start, :] = kept
    return room


def growing_cache(config: Any) -> DynamicCache:  # noqa: ANN401 - transformers is untyped
    """Return an empty cache for a model of a configuration; layers of other kinds stay theirs."""
    cache = DynamicCache(config=config)
    cache.layers = [
        GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache
