"""The head of EAGLE-1 and EAGLE-2 (Li et al. 2024): it reads the target's final hidden states.

It predicts the target's next final hidden state from the one at position j, f_j, and the token after it, t_(j+1):
x = fc [embed(t_(j+1)); f_j] + b, then one Llama layer without an input norm (attention over the pairs before, x + attn;
then x + mlp(norm(x))). The target's own output matrix turns the predicted state into the draft law of t_(j+2).
Reference: SafeAILab/EAGLE, `eagle/model/cnets1.py` and `cnets.py`; HASS checkpoints are of the same form.

Tensors: `eagle.fc.weight` (2h, h), `eagle.fc.bias` (h, optional), `eagle.attn_{q,k,v,output}.weight`,
`eagle.attn_{q,k,v}.bias` (optional), `eagle.ffn_norm.weight`, `eagle.ffn_{gate,up,down}.weight`, `token_embd.weight`
(optional). Rotary pairs are the halves of a head, as in Hugging Face's checkpoints.
"""

from __future__ import annotations

import os

from specrun.bindings.errors import MalformedFileError
from specrun.bindings.ggml.graph import GraphBuilder, Rope, Tensor
from specrun.bindings.model import Model
from specrun.runtime.heads.cached_attention import AttentionSizes
from specrun.runtime.heads.head_file import HeadFile
from specrun.runtime.heads.pair_head import PairHead, PairSizes

__all__ = ["EagleHead"]


class EagleHead(PairHead):
    """The head of a file, for the target it was made for; the options are those of `PairHead`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        target: Model,
        *,
        n_cells: int,
        ranks: int,
        whole_rows: bool = False,
        n_threads: int = 0,
    ) -> None:
        file = HeadFile(path, "eagle")
        file.check_target(target)
        sizes = _sizes(file)
        super().__init__(
            file,
            _tensor_names(file, sizes),
            "eagle.",
            sizes,
            target,
            n_cells=n_cells,
            ranks=ranks,
            whole_rows=whole_rows,
            n_threads=n_threads,
        )

    def _predicted(self, builder: GraphBuilder, words: Tensor, states: Tensor, length: int) -> tuple[Tensor, Tensor]:
        x = builder.mul_mat(self._weight("fc.weight"), builder.concat(words, states))
        if "eagle.fc.bias" in self._weights:
            x = builder.add(x, self._weight("fc.bias"))
        x = self._layer(builder, x, x, length)
        return x, x


def _sizes(file: HeadFile) -> PairSizes:
    hidden, heads, kv = (
        file.size("embedding_length"),
        file.size("attention.head_count"),
        file.size("attention.head_count_kv"),
    )
    if hidden % heads or heads % kv or (hidden // heads) % 2:
        raise MalformedFileError(
            f"{file.path} has {heads} heads and {kv} key-value heads for hidden states of {hidden}: convert it again"
        )
    rope = Rope(hidden // heads, freq_base=file.number("rope.freq_base", 10000.0), neox=True)
    return PairSizes(
        hidden=hidden,
        features=hidden,
        words=file.size("vocab_size"),
        feed_forward=file.size("feed_forward_length"),
        norm_eps=file.number("attention.layer_norm_rms_epsilon", 1e-6),
        attention=AttentionSizes(heads, kv, hidden // heads, rope),
    )


def _tensor_names(file: HeadFile, sizes: PairSizes) -> list[str]:
    """Return all tensors of the file that are used, checked."""
    h, kv, wide = sizes.hidden, sizes.attention.kv_size, sizes.feed_forward
    names = [
        file.require("eagle.fc.weight", (2 * h, h)),
        file.require("eagle.attn_q.weight", (h, h)),
        file.require("eagle.attn_k.weight", (h, kv)),
        file.require("eagle.attn_v.weight", (h, kv)),
        file.require("eagle.attn_output.weight", (h, h)),
        file.require("eagle.ffn_norm.weight", (h,)),
        file.require("eagle.ffn_gate.weight", (h, wide)),
        file.require("eagle.ffn_up.weight", (h, wide)),
        file.require("eagle.ffn_down.weight", (wide, h)),
    ]
    optional = {
        "eagle.fc.bias": (h,),
        "eagle.attn_q.bias": (h,),
        "eagle.attn_k.bias": (kv,),
        "eagle.attn_v.bias": (kv,),
    }
    for name, shape in (*optional.items(), ("token_embd.weight", (h, sizes.words))):
        if name in file:
            names.append(file.require(name, shape))
    return names
