"""Hydra's heads (Ankner et al. 2024) and their training on a frozen target.

Head k = 1..K predicts the token at t + k + 1 from the state at t and the tokens t + 1 to t + k,
which Medusa's heads do not see. Hydra learns the text's tokens; Hydra++ learns the target's own
distribution (teacher loss), with more blocks and a decoder layer over the states in front.

Named as zankner/Hydra's `hydra_mlp`, `hydra_lm_head`, `prefix_embeding_layer`. A head reads the
state and the embeddings of the tokens that follow it, side by side. Its first block shrinks them:
res_connection(x) + SiLU(linear(x)); the later ones are Medusa's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specrun.bindings.errors import OptionError
from specrun.train.data.corpus import TokenBatch, TokenCorpus, draft_marks
from specrun.train.heads.layers import DecoderLayer, RMSNorm, output_layer
from specrun.train.heads.learner import (
    HeadLearner,
    best_tokens,
    law_cross_entropy,
    rows_at,
    shifted,
    token_cross_entropy,
)
from specrun.train.heads.medusa import ResidualBlock
from specrun.train.heads.run import HeadFiles, HeadRecipe
from specrun.train.target.hf_model import TargetMatrices
from specrun.train.target.shape import ModelShape
from specrun.train.target.states import Features, FeatureSource
from specrun.train.trainer.learner import Learner, LossPart
from specrun.train.trainer.settings import TrainingDefaults


class _GroundedBlock(nn.Module):
    """From [..., (followers + 1) h] to [..., h]; starts as the state alone."""

    def __init__(self, hidden: int, followers: int) -> None:
        super().__init__()
        width = hidden * (followers + 1)
        self.linear = nn.Linear(width, hidden)
        self.res_connection = nn.Linear(width, hidden)
        # The state passes unchanged and embeddings count 0: an untrained head gives the
        # distribution that the target's output matrix makes of the state.
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.res_connection.weight.data[:, :hidden] = torch.eye(hidden)

    def forward(self, states: Tensor) -> Tensor:
        found: Tensor = self.res_connection(states) + F.silu(self.linear(states))
        return found


class _Prefix(nn.Module):
    """A Llama of one layer over states instead of embeddings."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DecoderLayer(shape)])
        self.norm = RMSNorm(shape)

    def forward(self, states: Tensor) -> Tensor:
        found: Tensor = self.norm(self.layers[0](states))
        return found


class HydraHeads(nn.Module):
    """`count` heads of `layers` blocks; their output matrices start from `output` [vocab, h].

    With `prefix` the layout is Hydra++'s: every second place is upstream's dropout of that rate.
    """

    def __init__(
        self,
        shape: ModelShape,
        count: int,
        layers: int,
        output: Tensor,
        *,
        prefix: bool,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.prefix_embeding_layer = _Prefix(shape) if prefix else None  # spelt as upstream
        heads: list[nn.Module] = []
        outputs: list[nn.Module] = []
        for head in range(count):
            blocks: list[nn.Module] = [_GroundedBlock(shape.hidden, head + 1)]
            blocks += [ResidualBlock(shape.hidden) for _ in range(layers - 1)]
            linear = output_layer(output)
            if prefix:
                blocks = [part for block in blocks for part in (nn.Dropout(dropout), block)]
                outputs.append(nn.Sequential(nn.Dropout(dropout), linear))
            else:
                outputs.append(linear)
            heads.append(nn.Sequential(*blocks))
        self.hydra_mlp = nn.ModuleList(heads)
        self.hydra_lm_head = nn.ModuleList(outputs)

    def prefixed(self, states: Tensor) -> Tensor:
        """Return the heads' inputs of the states [B, T, h]."""
        if self.prefix_embeding_layer is None:
            return states
        found: Tensor = self.prefix_embeding_layer(states)
        return found

    def logits(self, head: int, states: Tensor, followers: Tensor) -> Tensor:
        """Return logits [n, vocab] after states [n, h] and the embeddings [n, (head + 1) h]."""
        mixed = self.hydra_mlp[head](torch.cat((states, followers), -1))
        found: Tensor = self.hydra_lm_head[head](mixed)
        return found


@dataclass(frozen=True, slots=True)
class HydraRecipe(HeadRecipe):
    """`heads` heads of `layers` blocks, with `prefix` behind a decoder layer (Hydra++).

    `teacher_weight` and `token_weight` are those of the two losses. `noise` is the alpha of the
    noise on states and embeddings that heads read while they learn (`shaken`).
    """

    heads: int = 4
    layers: int = 1
    prefix: bool = False
    teacher_weight: float = 0.0
    token_weight: float = 1.0
    dropout: float = 0.0
    noise: float = 0.0

    kind = "hydra"
    files_name = "hydra_lm_head.safetensors"
    smaller = "use fewer --heads or --layers"

    def __post_init__(self) -> None:
        if not 1 <= self.heads <= 32:
            raise OptionError(f"{self.heads} heads: give 1 to 32")
        if not 1 <= self.layers <= 16:
            raise OptionError(f"{self.layers} blocks a head: give 1 to 16")
        weights = (self.teacher_weight, self.token_weight)
        if min(weights) < 0 or sum(weights) <= 0:
            raise OptionError("the weights of the losses: give 0 or more, and one above 0")
        if not 0 <= self.dropout < 1:
            raise OptionError(f"a dropout of {self.dropout:g}: give 0 to below 1")
        if self.noise < 0:
            raise OptionError(f"noise of {self.noise:g}: give 0 or more")

    @classmethod
    def plus_plus(cls, heads: int = 4, dropout: float = 0.2, noise: float = 0.0) -> HydraRecipe:
        """Return Hydra++ as its authors train it: 4 blocks, the teacher's distribution only."""
        weights = {"teacher_weight": 1.0, "token_weight": 0.0}
        return cls(heads=heads, layers=4, prefix=True, dropout=dropout, noise=noise, **weights)

    def defaults(self, shape: ModelShape) -> TrainingDefaults:
        """Return the authors' rate, and for Hydra++ their weight decay."""
        decay = 0.1 if self.prefix else 0.0
        return TrainingDefaults(5e-4, betas=(0.9, 0.999), clip_norm=1.0, weight_decay=decay)

    def activation_bytes(
        self, shape: ModelShape, tokens: int, longest: int, *, recompute: bool
    ) -> int:
        """Return the bytes that one head keeps for its gradient; of Hydra++ all heads together.

        Of tokens: the target's distribution and the logarithm of the head's own for the one loss,
        the latter for the other. In passing the logits and two gradients.
        """
        together = self.heads if self.prefix else 1
        kept = 2 * (self.teacher_weight > 0) + (self.token_weight > 0)
        # A head's inputs are kept, and those and the outputs of a block; once more if dropout
        # chose of it.
        copies = 2 if self.dropout else 1
        read = sum(range(self.heads + 2 - together, self.heads + 2)) * copies
        inside = together * (2 + copies + (self.layers - 1) * (1 + copies) + copies)
        passing = 3 * (self.heads + 1)
        laws = (together * kept + 3) * shape.vocab_size
        layer = shape.layer_numbers if self.prefix else 0
        return 4 * tokens * (laws + (read + inside + passing) * shape.hidden + layer)

    def learner(
        self, shape: ModelShape, target: TargetMatrices, source: FeatureSource, corpus: TokenCorpus
    ) -> HeadLearner:
        """Return heads that start as the target's own output."""
        return HydraLearner(self, shape, target, source)

    def files(self, learner: Learner, shape: ModelShape) -> HeadFiles:
        """Return upstream's layout. The embeddings that upstream's files repeat are left out."""
        config: dict[str, Any] = {
            "hydra_num_heads": self.heads,
            "hydra_num_layers": self.layers,
            "hydra_head_arch": "prefix-mlp" if self.prefix else "mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
            "hidden_size": shape.hidden,
            "vocab_size": shape.vocab_size,
        }
        return HeadFiles(config, dict(learner.module.state_dict()))


class HydraLearner(HeadLearner):
    """Trains Hydra heads on given states and the target's embeddings."""

    has_dropout = True

    def __init__(
        self, recipe: HydraRecipe, shape: ModelShape, target: TargetMatrices, source: FeatureSource
    ) -> None:
        self.recipe = recipe
        sizes = (recipe.heads, recipe.layers)
        self.heads = HydraHeads(
            shape, *sizes, target.output, prefix=recipe.prefix, dropout=recipe.dropout
        )
        super().__init__(self.heads, target, source, recipe.heads)

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield each head's loss; of Hydra++ their sum: all gradients pass the prefix layer."""
        states = self._source.features(batch).final
        alpha, table = self.recipe.noise, self._target.embedding
        read = self.heads.prefixed(shaken(states, batch.valid, alpha, noise))
        embedded = None
        if alpha:
            embedded = shaken(table[batch.ids].to(read.dtype), batch.valid, alpha, noise)
        total: Tensor | None = None
        reported = 0.0
        for head in range(self.recipe.heads):
            marks = draft_marks(batch.learnt, head)
            if not marks.any():
                continue
            with _drawn_from(noise, head):
                logits = self._logits(head, read, batch.ids, marks, embedded)
            loss = self._loss(logits, batch, states, marks, head)
            if not self.recipe.prefix:
                yield LossPart(f"head {head + 1}", loss, float(loss.detach()))
                continue
            # Of Hydra++ one backward pass for all heads: each of its own would go through the
            # prefix again.
            total = loss if total is None else total + loss
            reported += float(loss.detach())
        if total is not None:
            yield LossPart("heads", total, reported)

    def _loss(
        self, logits: Tensor, batch: TokenBatch, states: Tensor, marks: Tensor, head: int
    ) -> Tensor:
        """The weighted sum of the two losses of a head."""
        loss = torch.zeros((), device=self.device)
        if self.recipe.teacher_weight:
            # The distribution of token t + head + 2 is made of the state before it; the target's
            # own, not the prefixed.
            law = self._target.law(rows_at(states, marks, head + 1))
            loss = loss + self.recipe.teacher_weight * law_cross_entropy(logits, law)
        if self.recipe.token_weight:
            tokens = rows_at(batch.ids, marks, head + 2)
            loss = loss + self.recipe.token_weight * token_cross_entropy(logits, tokens)
        return loss

    def _logits(
        self, head: int, read: Tensor, ids: Tensor, marks: Tensor, embedded: Tensor | None = None
    ) -> Tensor:
        """Return a head's logits at marks [B, length] given the tokens of the text.

        `embedded` [B, T, h] replaces the tokens' embeddings, if they are not the target's.
        """
        followers = []
        for ahead in range(1, head + 2):
            # Teacher forcing: the tokens of the text, whatever earlier heads would have guessed.
            if embedded is None:
                tokens = shifted(ids, ahead, marks.shape[1])[marks]
                followers.append(self._target.embedding[tokens].to(read.dtype))
            else:
                followers.append(shifted(embedded, ahead, marks.shape[1])[marks])
        return self.heads.logits(head, rows_at(read, marks), torch.cat(followers, -1))

    def drafts(self, batch: TokenBatch, found: Features, start: Tensor) -> Iterator[Tensor]:
        """Yield the best tokens of heads that read the text's tokens before theirs."""
        read = self.heads.prefixed(found.final)
        for head in range(self.recipe.heads):
            yield best_tokens(self._logits(head, read, batch.ids, start))


def shaken(states: Tensor, valid: Tensor, alpha: float, noise: torch.Generator) -> Tensor:
    """Return states [B, T, h] with uniform noise of +-alpha / sqrt(n h), n the tokens of a text.

    That is NEFTune's (Jain et al. 2023, algorithm 1): its length over a text is alpha / sqrt(3),
    however long the text and wide the model. `valid` [B, T] marks tokens.
    """
    if alpha == 0.0:
        return states
    uniform = 2 * torch.rand(states.shape, generator=noise, device=states.device) - 1
    size = (valid.sum(1).clamp(min=1) * states.shape[-1]).float().rsqrt()
    return states + alpha * size[:, None, None].to(states.device) * uniform


@contextmanager
def _drawn_from(noise: torch.Generator, head: int) -> Iterator[None]:
    """Seed torch's own source, from which dropout draws, by `noise`."""
    # Torch's own source is put back afterwards; devices are named, as all would be by default.
    with torch.random.fork_rng(devices=[noise.device] if noise.device.type == "cuda" else []):
        torch.manual_seed(noise.initial_seed() + head)
        yield
