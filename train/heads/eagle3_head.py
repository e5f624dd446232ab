"""EAGLE-3's head (Li et al. 2025), named as SafeAILab/EAGLE's main `cnets`: `fc`, `midlayer`, `norm`, `lm_head`.

`d2t` are offsets (target word = draft word + d2t), `t2d` marks the target's words that can be drafted. The token
embedding is the target's and no part of the head.

Layers' inputs may be of any size: a thousand in one model, a hundredth in another. Norms hide that from all but the
sums, where a layer whose weights start small would add next to nothing to states of a thousand, or drown small ones.
So what the layer adds is multiplied by `scale`, the size of the inputs, and everything learns as it would at size one;
`upstream_tensors` has the factor in the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specrun.train.heads.attention import Attention, FeedForward, KeysValues, RMSNorm, added_at
from specrun.train.target_shape import TargetShape

__all__ = ["Eagle3Head"]

N_TAPS = 3


class _MiddleLayer(nn.Module):
    scale: Tensor

    def __init__(self, shape: TargetShape, scale: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))
        self.hidden_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape, 2 * shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(
        self, embeddings: Tensor, states: Tensor, earlier: Sequence[KeysValues], wanted: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        pair = torch.cat((self.input_layernorm(embeddings), self.hidden_norm(states)), -1)
        mixed, own = self.self_attn(pair, earlier)
        whole = states + self.scale * mixed
        return added_at(wanted, whole, lambda rows: self.scale * self.mlp(self.post_attention_layernorm(rows))), own


class Eagle3Head(nn.Module):
    """Predicts words of a draft vocabulary from three layers' inputs, then from its own states.

    `draft_words` are the target's ids that can be drafted, rising; `output` [words, h] is the target's output matrix,
    whose rows the head's own starts from. `scale` is the usual root mean square of the layers' inputs.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: TargetShape, draft_words: Tensor, output: Tensor, scale: float = 1.0) -> None:
        super().__init__()
        self.fc = nn.Linear(N_TAPS * shape.hidden, shape.hidden, bias=False)
        self.midlayer = _MiddleLayer(shape, scale)
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, len(draft_words), bias=False)
        self.lm_head.weight.data.copy_(output.detach()[draft_words.to(output.device)].float())
        self.register_buffer("d2t", draft_words - torch.arange(len(draft_words)))
        marks = torch.zeros(output.shape[0], dtype=torch.bool)
        marks[draft_words] = True
        self.register_buffer("t2d", marks)

    def forward(
        self,
        embeddings: Tensor,
        states: Tensor,
        earlier: Sequence[KeysValues] = (),
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Return the states [B, T, h] after the pairs (state, embedding of the token after it), and their keys.

        Step 0 reads `fc` of the taps as its states, later ones what the step before returned. Only states at `wanted`
        [B, T] are whole, where it is given.
        """
        found: tuple[Tensor, KeysValues] = self.midlayer(embeddings, states, earlier, wanted)
        return found

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of the draft vocabulary after `states`."""
        found: Tensor = self.lm_head(self.norm(states))
        return found

    @property
    def draft_words(self) -> Tensor:
        """The target's ids of the draft vocabulary."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def upstream_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that upstream's head has; it computes the same states from them without a scale."""
        tensors = self.state_dict()
        scale = tensors.pop("midlayer.scale")
        for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
            tensors[name] = scale * tensors[name]
        return dict(tensors)
