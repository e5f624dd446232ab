"""Consistency training of a target along its Jacobi trajectories (Kou et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from specrun.bindings.errors import OptionError
from specrun.train.consistency.trajectories import Trajectory
from specrun.train.data.corpus import TokenBatch
from specrun.train.distillation.learner import DIVERGENCES
from specrun.train.heads.learner import token_cross_entropy
from specrun.train.target.hf_model import HFModel
from specrun.train.trainer.learner import Learner, LossPart

# == Texts packed with iterates of their trajectories: one evaluation for all of them ==============
#
# A row holds a text and, behind it, blocks of guesses. A block attends to the text before the place
# it guesses from, and to itself; nothing attends to it. So its rows are those of the text up to
# there followed by the guesses alone, as `jacobi` evaluates them.


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


# == The learner ===================================================================================
#
# A row behind guesses shall say what the row behind the right tokens says. With y* the fixed point
# (the text) and y a state of the trajectory, the global form is E sum_i D(Q(. | x, y*_<i) || Q(. |
# x, y_<i)), equation 5; the local form has the next state of the trajectory in the place of y*,
# equation 6. No gradient flows into what is learnt from. To it is added L_AR, the cross-entropy of
# the text's own tokens, without which the text would be lost: the loss is L_AR + w L_consistency.


ConsistencyForm = Literal["global", "local"]


@dataclass(frozen=True, slots=True)
class ConsistencyRecipe:
    """What is learnt: `form`, its `weight` w beside L_AR, and from how many `states` of a text.

    Blocks have `block` guesses; decode with jacobi(n=block).
    """

    block: int = 16
    form: ConsistencyForm = "global"
    weight: float = 1.0
    divergence: str = "forward-kl"
    states: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.block <= 128:
            raise OptionError(f"blocks of {self.block} tokens: give 1 to 128")
        if self.form not in get_args(ConsistencyForm):
            raise OptionError(f"the form is {self.form!r}: use global or local")
        if self.weight < 0 or self.states < 1:
            raise OptionError("a weight below 0, or no state of a text: give 0 or more, and 1")
        if self.divergence not in DIVERGENCES:
            known = ", ".join(DIVERGENCES)
            raise OptionError(f"the divergence is {self.divergence!r}: use one of {known}")


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Rows that learn and rows that they learn from: (row of the batch, column) each, [P, 2]."""

    learn: Tensor
    teach: Tensor


class ConsistencyLearner(Learner):
    """`model` learns from trajectories, known by the numbers of the corpus that batches are of."""

    def __init__(
        self, recipe: ConsistencyRecipe, model: HFModel, trajectories: Sequence[Trajectory]
    ) -> None:
        self.recipe = recipe
        self.model, self._trajectories = model, trajectories
        self.device = model.device
        self.module = model.module.requires_grad_()

    def learning(self, on: bool) -> None:
        """Leave the model in evaluation mode: its own dropout would not resume exactly."""
        self.module.eval()

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield L_AR + w times the divergence along trajectories: they share the model's states."""
        chosen = [
            _drawn(len(self._trajectories[number].starts), self.recipe.states, noise)
            for number in batch.numbers
        ]
        states, pairs = self._evaluated(batch, chosen)
        own = self._text_loss(batch, states)
        total = own
        if len(pairs.learn):
            drift = self._divergence(states, pairs)
            total = own + self.recipe.weight * drift
            yield LossPart("consistency", total, float(drift.detach()))
        else:
            yield LossPart("text", total, float(own.detach()))

    def _evaluated(
        self, batch: TokenBatch, chosen: Sequence[Sequence[int]]
    ) -> tuple[Tensor, _Pairs]:
        """Return the states of texts with the chosen iterates, and which rows learn from which."""
        local = self.recipe.form == "local"
        found = [self._trajectories[number] for number in batch.numbers]
        blocks = [
            [
                Block(int(each.starts[state]), each.iterates[state].tolist())
                for first in rounds
                for state in ((first, first + 1) if local else (first,))
                if state < len(each.starts)
            ]
            for each, rounds in zip(found, chosen, strict=True)
        ]
        packed = pack([each.ids.tolist() for each in found], blocks)
        learn: list[tuple[int, int]] = []
        teach: list[tuple[int, int]] = []
        for row, (each, own) in enumerate(zip(found, blocks, strict=True)):
            step = 0
            while step < len(own):
                block, place = own[step], packed.places[row][step]
                later, step = None, step + 1
                if local and step < len(own) and own[step].start > block.start:
                    later, step = (own[step], packed.places[row][step]), step + 1
                for guess in range(len(block.tokens)):
                    source = _teacher(block.start + guess, len(each.ids), later)
                    if source is not None:
                        learn.append((row, place + guess))
                        teach.append((row, source))
        pairs = _Pairs(*(torch.tensor(each).view(-1, 2) for each in (learn, teach)))
        return packed_states(self.model, packed), pairs

    def _divergence(self, states: Tensor, pairs: _Pairs) -> Tensor:
        def log_law(places: Tensor) -> Tensor:
            rows = states[places[:, 0].to(self.device), places[:, 1].to(self.device)]
            return torch.log_softmax(self.model.logits(rows), -1)

        with torch.no_grad():
            wanted = log_law(pairs.teach)
        return DIVERGENCES[self.recipe.divergence](wanted, log_law(pairs.learn)).mean()

    def _text_loss(self, batch: TokenBatch, states: Tensor) -> Tensor:
        marks = batch.learnt[:, 1:]
        width = batch.ids.shape[1]
        # Rows of texts stand first in packed rows; position t chooses the token at t + 1.
        logits = self.model.logits(states[:, : width - 1][marks])
        return token_cross_entropy(logits, batch.ids[:, 1:][marks])

    def measure(self, batches: Sequence[TokenBatch]) -> dict[str, float]:
        """Return the share of guessed places whose row says the text's token, and the text's loss.

        Guesses are the trajectories' of the model as it was.
        """
        right = places = 0
        losses, count = 0.0, 0
        for batch in batches:
            chosen = [
                list(range(len(self._trajectories[number].starts))) for number in batch.numbers
            ]
            states, pairs = self._evaluated(
                batch, [every[:: max(1, len(every) // 8)] for every in chosen]
            )
            n = int(batch.learnt[:, 1:].sum())
            losses, count = losses + n * float(self._text_loss(batch, states)), count + n
            if len(pairs.learn):
                rows = states[pairs.learn[:, 0].to(self.device), pairs.learn[:, 1].to(self.device)]
                said = states[pairs.teach[:, 0].to(self.device), pairs.teach[:, 1].to(self.device)]
                same = self.model.logits(rows).argmax(-1) == self.model.logits(said).argmax(-1)
                right, places = right + int(same.sum()), places + len(same)
        return {"consistent rows": right / max(1, places), "text loss": losses / max(1, count)}


def _drawn(n: int, most: int, noise: torch.Generator) -> list[int]:
    """Return at most so many of n states, drawn without replacement, ascending."""
    order = torch.randperm(n, generator=noise, device=noise.device)[:most]
    return sorted(order.tolist())


def _teacher(position: int, length: int, later: tuple[Block, int] | None) -> int | None:
    """Return the column whose row says what the row after `position` is to say; None: nothing does.

    It is the text's own, or with a `later` block (and its column) that one's where it reaches.
    """
    if later is not None:
        block, place = later
        offset = position - block.start
        if 0 <= offset < len(block.tokens):
            return place + offset
    # The row after a text's last token would say what nobody asked for.
    return position if position < length - 1 else None
