"""The head of EAGLE-3 (Li et al. 2025, arXiv 2503.01840) and 3.1 in llama.cpp's GGUF layout: it reads layer inputs.

The target's features at position j are the inputs of some of its layers there, one after the other (three, low, middle
and high). fc makes a state g_j of them. With the token after it, t_(j+1), one Llama layer computes
y = r + attn([norm_1(embed(t_(j+1))); norm_2(g_j)]), z = y + mlp(norm_3(y)), where r is g_j, or norm_2(g_j) if
`norm_before_residual`. output(norm(z)) is the draft law of t_(j+2), over a draft vocabulary of which `d2t` names the
target's words. Below the last real pair z stands in the place of g.

EAGLE-3.1 norms what goes in and comes back: `norm_before_fc`, all features together by `enc.output_norm` (the only one
that llama.cpp computes too); `fc_norm`, each layer's by a norm of its own; `norm_output`, norm(z) is fed back, not z.
References: SafeAILab/EAGLE, `eagle/model/cnets.py` at 148042c5; vLLM's `llama_eagle3.py`; llama.cpp's
`src/models/eagle3.cpp`. The file: `eagle3_layout`.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from specrun.bindings.ggml.graph import GraphBuilder, Tensor
from specrun.bindings.model import Model
from specrun.runtime.heads.cached_attention import Places
from specrun.runtime.heads.eagle3_layout import FEATURES_NORM, ROPE_FACTORS, WORD_MAP, checked_words, read_layout
from specrun.runtime.heads.head_file import HeadFile
from specrun.runtime.heads.pair_head import PairHead

__all__ = ["Eagle3Head"]

FloatRows = npt.NDArray[np.float32]


class Eagle3Head(PairHead):
    """The head of a file, for the target it was made for; the options are those of `PairHead`.

    Raises UnsupportedModelError for a target whose layer inputs llama.cpp does not hand out, PairError for one that the
    head was not made for, MalformedFileError for a file that contradicts itself.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        target: Model,
        *,
        ranks: int,
        whole_rows: bool = False,
        n_threads: int = 0,
    ) -> None:
        file = HeadFile(path, "eagle3")
        layout = read_layout(file, target)
        self.taps = layout.taps
        self._norm_before_residual = layout.norm_before_residual
        self._norm_output = layout.norm_output
        self._n_target_words = target.vocabulary.size
        super().__init__(
            file,
            layout.tensors,
            "blk.0.",
            layout.sizes,
            target,
            ranks=ranks,
            whole_rows=whole_rows,
            n_threads=n_threads,
        )
        try:
            if WORD_MAP in self._weights:
                ids = self._weights.read(WORD_MAP, np.int64)
                self._word_ids = checked_words(ids.astype(np.int64, copy=False), file, target)
        except BaseException:
            self.close()
            raise

    def fused(self, builder: GraphBuilder, features: Tensor) -> Tensor:
        """Return the taps joined into states: norms where the head has them, then `fc`."""
        eps = self.sizes.norm_eps
        if FEATURES_NORM in self._weights:
            features = builder.rms_norm(features, Tensor(self._weights[FEATURES_NORM]), eps)
        if "fc_norm.0.weight" in self._weights:
            width = self.sizes.features // len(self.taps)
            normed = [
                builder.rms_norm(
                    builder.contiguous(builder.columns(features, tap * width, width)),
                    Tensor(self._weights[f"fc_norm.{tap}.weight"]),
                    eps,
                )
                for tap in range(len(self.taps))
            ]
            features = normed[0]
            for layer in normed[1:]:
                features = builder.concat(features, layer)
        return builder.mul_mat(Tensor(self._weights["fc.weight"]), features)

    def predicted(self, builder: GraphBuilder, words: Tensor, states: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Return what the layer makes of [norm(embedding); norm(state)]; see the module."""
        eps = self.sizes.norm_eps
        words = builder.rms_norm(words, self._weight("attn_norm.weight"), eps)
        normed = builder.rms_norm(states, self._weight("attn_norm_2.weight"), eps)
        residual = normed if self._norm_before_residual else states
        factors = self._own(ROPE_FACTORS)
        z = self._layer(builder, builder.concat(words, normed), residual, places, factors)
        read = builder.rms_norm(z, Tensor(self._weights["output_norm.weight"]), eps)
        return (read if self._norm_output else z), read

    def target_rows(self, logits: FloatRows) -> FloatRows:
        """Return logits over the target's tokens; those that the head does not know get -inf."""
        if self._word_ids is None:
            return logits
        rows = np.full((len(logits), self._n_target_words), -np.inf, np.float32)
        rows[:, self._word_ids] = logits
        return rows
