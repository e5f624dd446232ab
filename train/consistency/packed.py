"""Texts packed with iterates of their trajectories: one evaluation for all of them.

A row holds a text and, behind it, blocks of guesses. A block attends to the text before the place
it guesses from, and to itself; nothing attends to it. So its rows are those of the text up to there
followed by the guesses alone, as `jacobi` evaluates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specrun.train.target.hf_model import HFModel


@dataclass(frozen=True, slots=True)
class Block:
    """`tokens` guessed from position `start` of the text on."""

    start: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Rows [B, L] of texts and blocks, their positions, and what each token attends to [B, L, L].

    `places[b][k]` is the column of the first token of block k of row b.
    """

    ids: Tensor
    positions: Tensor
    attends: Tensor
    places: list[list[int]]


def pack(texts: Sequence[Sequence[int]], blocks: Sequence[Sequence[Block]]) -> PackedTexts:
    """Return texts, each with its blocks behind it."""
    lengths = [
        len(text) + sum(len(block.tokens) for block in own)
        for text, own in zip(texts, blocks, strict=True)
    ]
    width = max(lengths)
    ids = np.zeros((len(texts), width), np.int64)
    positions = np.zeros((len(texts), width), np.int64)
    # Padding attends to itself, for a softmax over nothing is no number.
    attends = np.broadcast_to(np.eye(width, dtype=np.bool_), (len(texts), width, width)).copy()
    places: list[list[int]] = []
    for row, (text, own) in enumerate(zip(texts, blocks, strict=True)):
        n = len(text)
        ids[row, :n], positions[row, :n] = text, np.arange(n)
        attends[row, :n, :n] = np.tri(n, dtype=np.bool_)
        column, starts = n, []
        for block in own:
            size = len(block.tokens)
            rows = slice(column, column + size)
            ids[row, rows], positions[row, rows] = block.tokens, block.start + np.arange(size)
            attends[row, rows, : block.start] = True
            attends[row, rows, rows] = np.tri(size, dtype=np.bool_)
            starts.append(column)
            column += size
        places.append(starts)
    return PackedTexts(
        torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(attends), places
    )


def packed_states(model: HFModel, packed: PackedTexts) -> Tensor:
    """Return the final states [B, L, h] of packed texts."""
    device = model.device
    dtype = next(model.module.parameters()).dtype
    refused = torch.finfo(dtype).min
    mask = torch.zeros(packed.attends.shape, dtype=dtype, device=device)
    mask.masked_fill_(~packed.attends.to(device), refused)
    found = model.model.base_model(
        input_ids=packed.ids.to(device),
        attention_mask=mask[:, None],
        position_ids=packed.positions.to(device),
        use_cache=False,
    )
    states: Tensor = found.last_hidden_state
    return states
