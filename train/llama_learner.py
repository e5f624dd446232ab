"""Next-token cross entropy of a whole Llama, and its recall of what it learnt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specrun.train.learner import Learner, LossPart, ParameterGroup
from specrun.train.llama import Llama
from specrun.train.token_corpus import TokenBatch


class LlamaLearner(Learner):
    """Trains all of `model`, embeddings and norms at `other_rate` times the matrices' rate."""

    def __init__(self, model: Llama, *, other_rate: float = 0.5) -> None:
        self.module = self.model = model
        self.device = next(model.parameters()).device
        self._other_rate = other_rate

    def groups(self) -> list[ParameterGroup]:
        """Return the hidden matrices, which Muon may train, and the rest."""
        named = list(self.model.named_parameters())
        hidden = [weights for name, weights in named if weights.ndim == 2 and "embed" not in name]
        others = [weights for name, weights in named if weights.ndim != 2 or "embed" in name]
        return [ParameterGroup(hidden, hidden_matrices=True), ParameterGroup(others, rate=self._other_rate)]

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield the mean cross entropy of the tokens to be learnt, each given those before it."""
        loss = self.model.loss(batch.ids[:, :-1], next_labels(batch))
        yield LossPart("cross entropy", loss, float(loss.detach()))

    def measure(self, batches: Sequence[TokenBatch]) -> dict[str, float]:
        """Return greedy recall: shares of `exact` answers, right to the letter, and right `tokens`.

        One forward pass over the right answer is enough: greedy decoding gives it exactly when
        every token of it is the most probable given those before it.
        """
        exact = n_answers = right = n_tokens = 0
        for batch in batches:
            labels = next_labels(batch)
            wanted = labels >= 0
            hits = (self.model(batch.ids[:, :-1]).argmax(-1) == labels) & wanted
            exact += int((hits == wanted).all(dim=1).sum())
            n_answers += len(wanted)
            right += int(hits.sum())
            n_tokens += int(wanted.sum())
        return {"exact": exact / max(1, n_answers), "tokens": right / max(1, n_tokens)}


def next_labels(batch: TokenBatch) -> Tensor:
    """Return [B, T - 1]: the token after each position where that is to be learnt, -1 elsewhere."""
    return torch.where(batch.learnt[:, 1:], batch.ids[:, 1:], -1)
