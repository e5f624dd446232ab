"""Trains EAGLE's head on a frozen target (Li et al. 2024, section 4.2).

From the final states f_1..f_i and the tokens t_2..t_(i+1) the head predicts f_(i+1). The loss is
SmoothL1(f_(i+1), f') + w CE(p, p'), where p and p' are the laws that the target's output matrix
makes of the two states and w = 0.1. Uniform noise of +-0.1 on the states it reads makes the head
bear its own errors. AdamW .9/.95, gradients clipped to 0.5. With `steps` above 1 the head is also
trained on its own predictions, chains of that depth below every position, as HASS (Zhang et al.
2024) does.

EAGLE's head (Li et al. 2024), named as SafeAILab/EAGLE's `cnets`: `fc`, and one layer without an
input norm.

The token embedding is the target's, and so is the output matrix: neither is part of the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specrun.bindings.errors import OptionError
from specrun.train.data.token_corpus import TokenBatch, TokenCorpus, choosing, draft_marks
from specrun.train.family.llama import RMSNorm
from specrun.train.heads.agreement import Agreement, best_tokens, shifted
from specrun.train.heads.attention import Attention, FeedForward, KeysValues, added_at
from specrun.train.heads.recipe import HeadFiles, HeadRecipe, law_cross_entropy
from specrun.train.heads.unrolled import chain_loss, chain_states
from specrun.train.target.features import FeatureSource, TargetMatrices
from specrun.train.target.target_shape import TargetShape
from specrun.train.trainer.learner import Learner, LossPart
from specrun.train.trainer.run import TrainingDefaults


class _Layer(nn.Module):
    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)

    def forward(
        self, states: Tensor, earlier: Sequence[KeysValues], wanted: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        mixed, own = self.self_attn(states, earlier)
        return added_at(
            wanted, states + mixed, lambda rows: self.mlp(self.post_attention_layernorm(rows))
        ), own


class EagleHead(nn.Module):
    """Predicts the next final hidden state from the one before and the token in between."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=True)
        self.layers = nn.ModuleList([_Layer(shape)])

    def forward(
        self,
        embeddings: Tensor,
        states: Tensor,
        earlier: Sequence[KeysValues] = (),
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Return the states [B, T, h] after the pairs (state, embedding of the token after it), and
        their keys.

        `earlier` are the keys of the steps before, where `states` are the head's own predictions.
        Only states at `wanted` [B, T] are whole, where it is given.
        """
        joined = self.fc(torch.cat((embeddings, states), -1))
        found: tuple[Tensor, KeysValues] = self.layers[0](joined, earlier, wanted)
        return found


MEASURED_DEPTH = 4
_PAPER_WIDTH, _PAPER_RATE = 4096, 3e-5


@dataclass(frozen=True, slots=True)
class EagleRecipe(HeadRecipe):
    """`token_weight` is w, `noise` the largest noise on a state, `steps` the depth of the chains
    that are trained.

    Each step's loss weighs `step_decay` times the one before it.
    """

    token_weight: float = 0.1
    noise: float = 0.1
    steps: int = 1
    step_decay: float = 1.0

    kind = "eagle"

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 16:
            raise OptionError(f"{self.steps} steps: give 1 (EAGLE) to 16")
        if self.token_weight < 0 or self.noise < 0:
            raise OptionError("a weight or noise below 0: give 0 or more")
        if not 0 < self.step_decay <= 1:
            raise OptionError(
                f"a step decay of {self.step_decay:g}: give a number above 0, at most 1"
            )

    def defaults(self, shape: TargetShape) -> TrainingDefaults:
        """Return the paper's settings; its rate is for states of 4096 numbers, narrower ones learn
        faster."""
        return TrainingDefaults(learning_rate=_PAPER_RATE * max(1.0, _PAPER_WIDTH / shape.hidden))

    def activation_bytes(
        self, shape: TargetShape, vocab_size: int, tokens: int, longest: int, *, recompute: bool
    ) -> int:
        """Return what chains keep, their attention to the text included, and the target's laws."""
        attention = 3 * shape.n_heads * longest if self.steps > 1 else 0
        step = 4 * vocab_size + 24 * shape.hidden + 6 * shape.feed_forward + attention
        whole = step + self.steps * 5 * shape.hidden if recompute else self.steps * step
        return 4 * tokens * (whole + vocab_size)

    def learner(
        self, shape: TargetShape, target: TargetMatrices, source: FeatureSource, corpus: TokenCorpus
    ) -> Learner:
        """Return a random head."""
        return EagleLearner(self, shape, target, source)

    def files(self, learner: Learner, shape: TargetShape, vocab_size: int) -> HeadFiles:
        """Return upstream's layout: the config of a Llama of one layer, and its tensors."""
        config = {
            **llama_config(shape, vocab_size),
            "bias": True,
            "architectures": ["EagleLlamaForCausalLM"],
        }
        return HeadFiles(config, dict(learner.module.state_dict()))


def llama_config(shape: TargetShape, vocab_size: int) -> dict[str, Any]:
    """Return what config.json says of a one-layer Llama of the target's width."""
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": vocab_size,
        "torch_dtype": "float32",
    }


class EagleLearner(Learner):
    """A head over given states; embedding and output matrix are the target's and stay as they
    are."""

    def __init__(
        self, recipe: EagleRecipe, shape: TargetShape, target: TargetMatrices, source: FeatureSource
    ) -> None:
        self.recipe = recipe
        self.device = target.output.device
        self.head = EagleHead(shape).to(self.device)
        self.module = self.head
        self._target, self._source = target, source

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield the loss of states and tokens together, and where chains are trained, the sum over
        their steps."""
        states = self._source.features(batch).final
        shaken = states + self.recipe.noise * (
            2 * torch.rand(states.shape, generator=noise, device=self.device) - 1
        )
        wanted = states[choosing(batch.learnt)]
        laws = self._target.law(wanted) if self.recipe.token_weight else None

        def loss(predicted: Tensor, numbers: Tensor) -> Tensor:
            """SmoothL1 + w CE over rows [n, h]."""
            distance = F.smooth_l1_loss(predicted.float(), wanted[numbers])
            if laws is None:
                return distance
            tokens = law_cross_entropy(self._target.logits(predicted), laws[numbers])
            return distance + self.recipe.token_weight * tokens

        chains = chain_states(
            self.head,
            self._target.embedding,
            batch.ids,
            shaken[:, :-1],
            self.recipe.steps,
            learnt=batch.learnt,
            recompute=self.recompute,
        )
        found = chain_loss(
            chains, batch.learnt, loss, self.recipe.step_decay, recompute=self.recompute
        )
        if found is not None:
            yield found

    def measure(self, batches: Sequence[TokenBatch]) -> dict[str, float]:
        """Return how often chains agree with the target, by depth (n-alpha: n states they read were
        predicted)."""
        agreement = Agreement(MEASURED_DEPTH, "depth")
        for batch in batches:
            states = self._source.features(batch).final
            if batch.ids.shape[1] < 2:
                continue
            start = draft_marks(batch.learnt, 0)
            drafted, chosen, counted = [], [], []
            chains = chain_states(
                self.head, self._target.embedding, batch.ids, states[:, :-1], MEASURED_DEPTH
            )
            for depth, predicted in enumerate(chains):
                drafted.append(
                    best_tokens(self._target.logits(predicted[:, : start.shape[1]][start]))
                )
                ahead = shifted(states, depth + 1, start.shape[1])
                chosen.append(self._target.logits(ahead[start]).argmax(-1))
                counted.append(shifted(draft_marks(batch.learnt, depth), 0, start.shape[1])[start])
            agreement.add(drafted, chosen, counted)
        return agreement.measures()
