"""The head of EAGLE-1 and EAGLE-2 (Li et al. 2024): it reads the target's final hidden states.

It predicts the target's next final hidden state from the one at position j, f_j, and the token
after it, t_(j+1): x = fc [embed(t_(j+1)); f_j] + b, then one Llama layer without an input norm
(attention over the pairs before, x + attn; then x + mlp(norm(x))). The target's own output matrix
turns the predicted state into the draft law of t_(j+2). Reference: SafeAILab/EAGLE,
`eagle/model/cnets1.py` and `cnets.py`; HASS checkpoints are of the same form.

Tensors: `eagle.fc.weight` (2h, h), `eagle.fc.bias` (h, optional), those of `decoder_layer` after
`eagle.`, and where a file has them, `token_embd.weight` (h, vocab) and `draft_tokens`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Unpack

from specrun.bindings.ggml import GraphBuilder, Tensor
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.eagle.draft_vocabulary import draft_vocabulary
from specrun.runtime.drafters.eagle.pair_head import PairHead, PairOptions, PairSizes
from specrun.runtime.heads import HeadFile, Places, layer_attention, layer_tensor_names


class EagleHead(PairHead):
    """The head of a file, for the target it was made for; the options are those of `PairHead`.

    It drafts the tokens of `draft_vocabulary`, of which there are `draft_tokens` at most.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        target: Model,
        draft_tokens: int | None = None,
        **options: Unpack[PairOptions],
    ) -> None:
        file = HeadFile(path, "eagle")
        file.check_target(target)
        sizes, drafted = _sizes(file), draft_vocabulary(file, target, draft_tokens)
        names = _tensor_names(file, sizes)
        if drafted is not None:
            sizes = replace(sizes, vocab_size=len(drafted))
        super().__init__(file, names, "eagle.", sizes, target, drafted, **options)

    def predicted(
        self, builder: GraphBuilder, tokens: Tensor, states: Tensor, places: Places
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output for fc [embedding; state] + b, twice: it is read as it is."""
        # The embedding comes first, as in cnets.py: fc's columns are in that order.
        x = builder.mul_mat(self._weight("fc.weight"), builder.concat(tokens, states))
        if "eagle.fc.bias" in self._weights:
            x = builder.add(x, self._weight("fc.bias"))
        # x is its own residual, without an input norm: the layer of EAGLE-1 has none.
        x = self._layer(builder, x, x, places)
        return x, x


def _sizes(file: HeadFile) -> PairSizes:
    attention = layer_attention(file)
    return PairSizes(
        hidden=attention.size,
        features=attention.size,
        vocab_size=file.size("vocab_size"),
        feed_forward=file.size("feed_forward_length"),
        norm_eps=file.number("attention.layer_norm_rms_epsilon", 1e-6),
        attention=attention,
    )


def _tensor_names(file: HeadFile, sizes: PairSizes) -> list[str]:
    """Return all tensors of the file that are used, checked."""
    h = sizes.hidden
    names = [file.require("eagle.fc.weight", (2 * h, h))]
    names += layer_tensor_names(file, "eagle.", sizes.attention)
    for name, shape in (("eagle.fc.bias", (h,)), ("token_embd.weight", (h, sizes.vocab_size))):
        if name in file:
            names.append(file.require(name, shape))
    return names
