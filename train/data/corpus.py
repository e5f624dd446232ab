"""A corpus of token sequences, its held-out part, and batches by seed and epoch alone.

`draft_marks` returns the positions of a text that count when a drafter is trained on it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specrun.bindings.errors import ModelError, OptionError
from specrun.train.data.documents import Document, PlainText
from specrun.train.data.tokens import TargetTokens, TokenSequence

_SHORTEST = 4  # tokens: below that there is nothing to draft
MOST_MEASURED = 256
"""The most sequences measured on: more would take longer than the training in between."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Sequences `numbers`, padded on the right: `ids`, `learnt` and `valid` are all [B, T]."""

    numbers: tuple[int, ...]
    ids: Tensor
    learnt: Tensor
    valid: Tensor

    @classmethod
    def of(cls, numbers: Sequence[int], texts: Sequence[TokenSequence]) -> TokenBatch:
        """Return texts, of which these are the numbers, on the CPU."""
        shape = (len(texts), max(map(len, texts)))
        ids = torch.zeros(shape, dtype=torch.long)
        learnt, valid = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.from_numpy(text.ids.astype(np.int64))
            learnt[row, : len(text)] = torch.from_numpy(text.learnt)
            valid[row, : len(text)] = True
        return cls(tuple(numbers), ids, learnt, valid)

    @property
    def n_tokens(self) -> int:
        """Tokens without padding."""
        return int(self.valid.sum())

    def to(self, device: torch.device) -> TokenBatch:
        """Return the batch on a device."""
        tensors = (each.to(device) for each in (self.ids, self.learnt, self.valid))
        return TokenBatch(self.numbers, *tensors)


class EpochTexts(Protocol):
    """The texts of a trainer: others in every epoch, if its number alone decides them."""

    def epoch(self, number: int) -> TokenCorpus:
        """Return the texts of an epoch, counted from 0."""


@dataclass(frozen=True, slots=True)
class TokenCorpus:
    """All sequences, and the numbers of those to train on and of those held out.

    With too few sequences to hold one out, `held_out` are some of the training sequences, and
    `measured_on_training` is True. `widths`, if any, are the lengths that sequences may reach in a
    step that writes their answers anew: batches are planned by them.
    """

    sequences: tuple[TokenSequence, ...]
    training: tuple[int, ...]
    held_out: tuple[int, ...]
    measured_on_training: bool
    widths: tuple[int, ...] = ()

    @property
    def n_tokens(self) -> int:
        """Tokens to train on, of one epoch."""
        return sum(len(self.sequences[number]) for number in self.training)

    @property
    def longest(self) -> int:
        """The length of the longest sequence."""
        return max(len(sequence) for sequence in self.sequences)

    def widest(self, tokens_per_batch: int) -> int:
        """Return the most tokens of a step: a text may be longer than `tokens_per_batch`."""
        return min(max(tokens_per_batch, self.longest), self.n_tokens)

    @property
    def digest(self) -> str:
        """A SHA-256 of all tokens and marks."""
        found = hashlib.sha256()
        for text in self.sequences:
            found.update(len(text).to_bytes(8, "little"))
            found.update(text.ids.tobytes() + text.learnt.tobytes())
        return found.hexdigest()

    def epoch(self, number: int) -> TokenCorpus:
        """Return this corpus: the texts of every epoch."""
        return self

    def batch(self, numbers: Sequence[int]) -> TokenBatch:
        """Return the sequences `numbers` as one batch on the CPU."""
        return TokenBatch.of(numbers, [self.sequences[number] for number in numbers])

    def training_batches(
        self, epoch: int, seed: int, tokens_per_batch: int
    ) -> list[tuple[int, ...]]:
        """Return the batches of one epoch as sequence numbers, in order."""
        widths = self.widths or tuple(len(sequence) for sequence in self.sequences)
        lengths = {number: widths[number] for number in self.training}
        return plan_batches(lengths, random.Random(f"{seed}/{epoch}"), tokens_per_batch)

    def held_out_batches(self, tokens_per_batch: int, device: torch.device) -> list[TokenBatch]:
        """Return the batches that measurements use, always the same."""
        lengths = {number: len(self.sequences[number]) for number in self.held_out}
        groups = plan_batches(lengths, random.Random(0), tokens_per_batch)
        return [self.batch(numbers).to(device) for numbers in groups]


def plan_batches(
    lengths: dict[int, int], rng: random.Random, tokens_per_batch: int
) -> list[tuple[int, ...]]:
    """Return `lengths`' keys in batches of at most `tokens_per_batch` tokens with padding.

    Sequences of nearly equal length share a batch; `rng` decides which, and the order of batches.
    """
    order = sorted(lengths, key=lambda number: (lengths[number] + rng.random() * 3, number))
    groups: list[list[int]] = [[]]
    for number in order:  # lengths rise, so the newest is the longest, nearly
        longest = max([lengths[number], *(lengths[group] for group in groups[-1])])
        if groups[-1] and (len(groups[-1]) + 1) * longest > tokens_per_batch:
            groups.append([])
        groups[-1].append(number)
    rng.shuffle(groups)
    return [tuple(group) for group in groups]


def encode_corpus(
    documents: Sequence[Document],
    tokenizer: TargetTokens,
    *,
    max_length: int,
    held_out: float = 0.05,
    seed: int = 0,
    need_answers: bool = True,
) -> TokenCorpus:
    """Return the documents as sequences of at most `max_length`, a share `held_out` set aside.

    Texts are cut into pieces; of chats and answers the rest is left out. `need_answers`
    False also takes prompts that have room for an answer, nothing of which is marked. Raises
    ModelError if nothing can be learnt.
    """
    if max_length < _SHORTEST:
        raise OptionError(f"sequences of {max_length} tokens: give at least {_SHORTEST}")
    sequences: list[TokenSequence] = []
    for document in documents:
        encoded = tokenizer.encode(document)
        last = len(encoded) if isinstance(document, PlainText) else 1
        for start in range(0, last, max_length):
            piece = slice(start, start + max_length)
            cut = TokenSequence(encoded.ids[piece], encoded.learnt[piece])
            if len(cut) >= _SHORTEST and cut.learnt.any():
                sequences.append(cut)
        prompt = None if need_answers or encoded.learnt.any() else tokenizer.prompt(document)
        if prompt and len(prompt) < max_length:
            sequences.append(TokenSequence.of(prompt, len(prompt)))
    if not sequences:
        raise ModelError(
            f"the data have no usable text: no document has {_SHORTEST} tokens, some of them to "
            f"learn, within the first {max_length}"
        )
    return corpus_of(sequences, held_out=held_out, seed=seed)


def corpus_of(
    sequences: Sequence[TokenSequence], *, held_out: float = 0.05, seed: int = 0
) -> TokenCorpus:
    """Return sequences as a corpus, a share `held_out` of them set aside, MOST_MEASURED at most."""
    order = list(range(len(sequences)))
    random.Random(seed).shuffle(order)
    share = min(MOST_MEASURED, max(1, round(held_out * len(order)))) if held_out > 0 else 0
    aside = min(len(order) - 1, share)
    kept = tuple(sorted(order[:aside]))
    rest = tuple(sorted(order[aside:]))
    measured = kept or tuple(sorted(order[:MOST_MEASURED]))
    return TokenCorpus(tuple(sequences), rest, measured, measured_on_training=not kept)


def draft_marks(learnt: Tensor, depth: int) -> Tensor:
    """Return [B, T - 2 - depth]: the positions p whose draft counts down to `depth` (from 0).

    `learnt` [B, T] marks the tokens that count. A draft made from the state at p and the token p +
    1 predicts the tokens p + 2 to p + 2 + depth: all of them must be the model's. The token p + 1
    need not be: the first draft of an answer is made after the prompt's last token.
    """
    length = learnt.shape[1] - 2 - depth
    marks = torch.ones(learnt.shape[0], max(0, length), dtype=torch.bool, device=learnt.device)
    for ahead in range(2, depth + 3):
        marks = marks & learnt[:, ahead : ahead + marks.shape[1]]
    return marks


def choosing(learnt: Tensor) -> Tensor:
    """Return [B, T]: the positions just before a token that `learnt` [B, T] marks."""
    return F.pad(learnt[:, 1:], (0, 1))


def choice_numbers(learnt: Tensor) -> Tensor:
    """Return [B, T]: the number of each position `choosing` a token, in reading order."""
    return (choosing(learnt).flatten().long().cumsum(0) - 1).view(learnt.shape)
