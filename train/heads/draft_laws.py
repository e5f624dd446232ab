"""The target's distributions that a head learns, among the tokens that it drafts.

If targets are narrow, distributions of the whole vocabulary are most of the work of a step. A
distribution's restriction to any tokens, made to sum to one, is matched where the distribution
itself is, so that the optimum stays as it is. The rare tokens vary by step: a token that no step
looks at would be drafted where it should not be.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specrun.bindings.errors import OptionError
from specrun.train.data.corpus import TokenBatch, TokenCorpus, choosing
from specrun.train.target.hf_model import TargetMatrices

_FEWEST = 4


def check_law_tokens(count: int) -> None:
    """Raise OptionError for distributions of too few tokens; 0 stands for all."""
    if count and count < _FEWEST:
        few = f"distributions of {count} tokens"
        raise OptionError(f"{few}: give at least {_FEWEST}, or 0 for all")


def frequent_tokens(corpus: TokenCorpus, vocab_size: int, most: int) -> Tensor:
    """Return the ids of the `most` tokens most frequent in the training texts, in that order.

    Ties go to the lower id. If fewer occur, the lowest other ids fill up: they cost little
    and can be learnt later.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for number in corpus.training:
        sequence = corpus.sequences[number]
        said = torch.from_numpy(sequence.ids[sequence.learnt].astype("int64"))
        # Only tokens that are learnt: a drafter need not predict prompts.
        counts += torch.bincount(said, minlength=vocab_size)
    return torch.argsort(counts, descending=True, stable=True)[:most]


class LawTokens:
    """`count` of the tokens `drafted` (None: all), by their places, to compare distributions among.

    Three quarters are the most frequent ones, the others are drawn at each step.
    """

    def __init__(
        self, corpus: TokenCorpus, target: TargetMatrices, drafted: Tensor | None, count: int
    ) -> None:
        device, vocab_size = target.output.device, len(target.output)
        size = vocab_size if drafted is None else len(drafted)
        often = frequent_tokens(corpus, vocab_size, count - count // 4).sort().values
        if drafted is not None:
            often = torch.searchsorted(drafted, often)
        self._often = often.to(device)
        self._n_drawn = count - len(often)
        is_often = torch.zeros(size, dtype=torch.int8)
        is_often[often] = 1
        # Sorted, not selected: when memory is estimated, tensors have shapes only.
        others = torch.argsort(is_often, stable=True)[: size - len(often)]
        self._others = others.to(device)

    @classmethod
    def chosen(
        cls, corpus: TokenCorpus, target: TargetMatrices, drafted: Tensor | None, count: int
    ) -> LawTokens | None:
        """Return the tokens; None if all are compared."""
        size = len(target.output if drafted is None else drafted)
        return cls(corpus, target, drafted, count) if 0 < count < size else None

    def drawn(self, noise: torch.Generator) -> Tensor:
        """Return a step's tokens [count], drawn with `noise`."""
        order = torch.randperm(len(self._others), generator=noise, device=self._others.device)
        return torch.cat((self._often, self._others[order[: self._n_drawn]]))


@dataclass(frozen=True, slots=True)
class BatchLaws:
    """The target's distributions [N, compared] at N positions that choose a learnt token.

    `among` are the compared places in the draft vocabulary, None for all. `counted` [N] marks the
    distributions whose most likely token is compared: others teach a head tokens that it cannot
    draft.
    """

    rows: Tensor
    counted: Tensor
    among: Tensor | None


class DraftLaws:
    """The target's distributions among the tokens `drafted` (None: all), or among some of these."""

    def __init__(
        self, target: TargetMatrices, drafted: Tensor | None, law_tokens: LawTokens | None = None
    ) -> None:
        self._target, self._drafted, self._law_tokens = target, drafted, law_tokens
        self._choices: dict[int, Tensor] = {}

    def of(self, batch: TokenBatch, final: Tensor, noise: torch.Generator) -> BatchLaws:
        """Return the distributions of a batch, whose final states are [B, T, h]."""
        wanted = choosing(batch.learnt)
        states = final[wanted]
        among = None if self._law_tokens is None else self._law_tokens.drawn(noise)
        rows = self._drafts.among(among).law(states)
        if self._drafted is None and among is None:
            counted = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
            return BatchLaws(rows, counted, None)
        places = self._places(batch.numbers, states, wanted.sum(-1).tolist())
        counted = places >= 0
        if among is not None:
            is_compared = torch.zeros(self._size, dtype=torch.bool, device=rows.device)
            is_compared[among] = True
            counted = counted & is_compared[places.clamp(min=0)]
        return BatchLaws(rows, counted, among)

    @property
    def _size(self) -> int:
        return len(self._target.output if self._drafted is None else self._drafted)

    @functools.cached_property
    def _drafts(self) -> TargetMatrices:
        """The target with the rows of its output matrix whose tokens can be drafted."""
        return self._target.among(self._drafted)

    @functools.cached_property
    def _place_of(self) -> Tensor:
        """The place of each of the target's tokens in the draft vocabulary, -1: it has none."""
        device, size = self._target.output.device, self._target.output.shape[0]
        if self._drafted is None:
            return torch.arange(size, device=device)
        places = torch.full((size,), -1, dtype=torch.long, device=device)
        places[self._drafted] = torch.arange(len(self._drafted), device=device)
        return places

    def _places(self, numbers: Sequence[int], states: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the place of the target's first choice after states [n, h], [n], or -1.

        They are `counts` of each text, and found out once: where targets are narrow, logits of the
        whole vocabulary are a third of a step.
        """
        choices = self._choices
        if any(number not in choices for number in numbers):
            found = self._place_of[self._target.logits(states).argmax(-1)]
            start = 0
            for number, count in zip(numbers, counts, strict=True):
                choices[number] = found[start : start + count]
                start += count
        return torch.cat([choices[number] for number in numbers])
