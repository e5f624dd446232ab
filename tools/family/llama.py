"""The demo family's Llama in plain torch, and its training: next-token cross entropy and recall.

Named like Hugging Face's, so that the saved folder is an ordinary checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specrun.train.data.corpus import TokenBatch
from specrun.train.heads.layers import DecoderLayer, RMSNorm
from specrun.train.target.shape import ModelShape
from specrun.train.trainer.learner import Learner, LossPart, ParameterGroup


class Backbone(nn.Module):
    """Everything below the output head; called `model` in the checkpoint."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.n_layers))
        self.norm = RMSNorm(shape)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [B, T] to normed hidden states [B, T, width]."""
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        out: Tensor = self.norm(hidden)
        return out


class Llama(nn.Module):
    """A Llama with tied embeddings."""

    def __init__(self, shape: ModelShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * shape.n_layers) ** 0.5 if small else 0.02
                with torch.no_grad():
                    parameter.normal_(0.0, std, generator=generator)

    def head(self, hidden: Tensor) -> Tensor:
        """Normed states [..., width] to logits [..., vocab]."""
        return hidden @ self.model.embed_tokens.weight.T

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [B, T] to logits [B, T, vocab]."""
        return self.head(self.model(ids))

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy where the label is not -1; logits are made only there."""
        wanted = labels >= 0
        logits = self.head(self.model(ids)[wanted])
        return F.cross_entropy(logits.float(), labels[wanted])


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
        rest = ParameterGroup(others, rate=self._other_rate)
        return [ParameterGroup(hidden, hidden_matrices=True), rest]

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
