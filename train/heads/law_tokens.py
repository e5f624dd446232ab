"""Among which tokens laws of head and target are compared: the most frequent and a sample.

Where targets are narrow, laws of the whole vocabulary are most of the work of a step. A law's
restriction to any tokens, made to sum to one, is matched where the law itself is, so that the
optimum stays as it is. What varies by step is which of the rare tokens a step sees: a token that no
step looks at would be drafted where it should not be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specrun.bindings.errors import OptionError
from specrun.train.data.token_corpus import TokenCorpus

_FEWEST = 4


def check_law_tokens(count: int) -> None:
    """Raise OptionError for laws of too few tokens; 0 stands for all."""
    if count and count < _FEWEST:
        few = f"laws of {count} tokens"
        raise OptionError(f"{few}: give at least {_FEWEST}, or 0 for all")


def always_compared(count: int) -> int:
    """Return how many of the `count` tokens that are compared are the most frequent ones."""
    return count - count // 4


def frequent_tokens(corpus: TokenCorpus, vocab_size: int, most: int) -> Tensor:
    """Return the ids of the `most` tokens said most often in the training texts, in that order.

    Ties go to the lower id. Where fewer were said, the lowest other ids fill up: they cost little
    and can be learnt later.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for number in corpus.training:
        sequence = corpus.sequences[number]
        said = torch.from_numpy(sequence.ids[sequence.learnt].astype("int64"))
        # Only tokens that are learnt: a drafter need not say what prompts say.
        counts += torch.bincount(said, minlength=vocab_size)
    return torch.argsort(counts, descending=True, stable=True)[:most]


class LawTokens:
    """Some `count` of `size` tokens: those of `often` always, the others drawn at each step."""

    def __init__(self, often: Tensor, size: int, count: int, device: torch.device) -> None:
        self._often = often.to(device)
        self._n_drawn = count - len(often)
        is_often = torch.zeros(size, dtype=torch.int8)
        is_often[often] = 1
        # Sorted, not selected: where memory is estimated, tensors have shapes only.
        others = torch.argsort(is_often, stable=True)[: size - len(often)]
        self._others = others.to(device)

    def drawn(self, noise: torch.Generator) -> Tensor:
        """Return a step's tokens [count], drawn with `noise`."""
        order = torch.randperm(len(self._others), generator=noise, device=self._others.device)
        return torch.cat((self._often, self._others[order[: self._n_drawn]]))
