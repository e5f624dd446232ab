"""Options of a context (llama_context_params), checked before llama.cpp reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from specrun.bindings.errors import OptionError

if TYPE_CHECKING:
    from specrun.bindings.models.model import Model


# == Rope scaling: stretched positions, for contexts longer than the trained length ================
#
# Rotary positions can be squeezed into the trained range evenly (position interpolation, Chen et
# al. 2023, "Extending Context Window of Large Language Models via Positional Interpolation") or by
# frequency (YaRN, Peng et al. 2023), or their base can be raised. llama.cpp does all three per
# context; the file does not change.


RopeScalingKind = Literal["model", "none", "linear", "yarn"]
# LLAMA_ROPE_SCALING_TYPE
_ROPE_SCALINGS: dict[RopeScalingKind, int] = {"model": -1, "none": 0, "linear": 1, "yarn": 2}
_MAX_CTX = 2**31


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The scaling of a context's rotary positions; the default is that of the model's file.

    `scale` is the factor of the context's length (0: the model's own), `freq_base` the base
    of the rotary frequencies (0: the model's). `yarn_orig_ctx` is the length that YaRN stretches
    (0: the trained length); `yarn_ext_factor` mixes interpolation with extrapolation,
    `yarn_attn_factor` scales attention, and between `yarn_beta_slow` and `yarn_beta_fast` rotations
    over the original context YaRN goes over from one to the other (-1 each: the model's own, or
    YaRN's).
    """

    kind: RopeScalingKind = "model"
    scale: float = 0.0
    freq_base: float = 0.0
    yarn_orig_ctx: int = 0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_slow: float = -1.0
    yarn_beta_fast: float = -1.0

    def __post_init__(self) -> None:
        if self.kind not in _ROPE_SCALINGS:
            raise OptionError(f"rope scaling is {self.kind!r}: use {', '.join(_ROPE_SCALINGS)}")
        for name, value in (("rope scale", self.scale), ("rope frequency base", self.freq_base)):
            if not 0.0 <= value < math.inf:
                advice = "give a positive number, or 0 for the model's own"
                raise OptionError(f"{name} is {value}: {advice}")
        if self.kind == "none" and self.scale not in (0.0, 1.0):
            problem = f"rope scale is {self.scale:g} and rope scaling is none"
            raise OptionError(f"{problem}: use linear or yarn")
        if not 0 <= self.yarn_orig_ctx < _MAX_CTX:
            advice = "give the trained length, or 0 for the model's"
            raise OptionError(f"yarn_orig_ctx is {self.yarn_orig_ctx}: {advice}")
        not_yarn = f"is about YaRN, and rope scaling is {self.kind}: use yarn"
        for name in ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_slow", "yarn_beta_fast"):
            value = getattr(self, name)
            if value != -1.0 and not 0.0 <= value < math.inf:
                raise OptionError(f"{name} is {value}: give 0 or more, or -1 for the usual value")
            if value != -1.0 and self.kind in ("none", "linear"):
                raise OptionError(f"{name} {not_yarn}")
        if self.yarn_orig_ctx and self.kind in ("none", "linear"):
            raise OptionError(f"yarn_orig_ctx {not_yarn}")

    @property
    def stretches(self) -> bool:
        """Whether it is meant for contexts longer than the model was trained for."""
        return self.scale > 1.0 or self.freq_base > 0.0

    def context_size(self, asked: int, trained: int, factor: float = 1.0) -> int:
        """Return the context to make: `asked` tokens (0: the most), cut if nothing is stretched.

        `trained` is the file's length, `factor` its own stretching: `scale` takes
        its place.
        """
        if self.stretches:
            return asked or max(trained, int(trained / factor * self.scale))
        return min(asked or trained, trained)

    def check(self, kind_of_file: str, factor: float) -> None:
        """Raise OptionError if a file's own scaling (a kind or "", `factor`) defeats this."""
        scale = f"rope scale is {self.scale:g}"
        if self.kind == "model" and kind_of_file == "none" and self.scale not in (0.0, 1.0):
            problem = f"{scale}, and by the model's file its positions are not scaled"
            raise OptionError(f"{problem}: add --rope-scaling linear or yarn")
        if self.kind in ("linear", "yarn") and not self.scale and factor == 1.0:
            problem = f"rope scaling is {self.kind}, by no factor"
            raise OptionError(f"{problem}: add --rope-scale, such as 2")
        if 0.0 < self.scale <= factor != 1.0:
            problem = (
                f"{scale}, and the model's file has {factor:g} already, which it would replace"
            )
            raise OptionError(f"{problem}: give more than {factor:g}")

    def apply(self, params: Any) -> None:  # noqa: ANN401 - a ctypes structure
        """Write the settings into llama.cpp's context parameters."""
        params.rope_scaling_type = _ROPE_SCALINGS[self.kind]
        params.rope_freq_base = self.freq_base
        params.rope_freq_scale = 1.0 / self.scale if self.scale else 0.0
        for name in ("orig_ctx", "ext_factor", "attn_factor", "beta_slow", "beta_fast"):
            setattr(params, f"yarn_{name}", getattr(self, f"yarn_{name}"))

    def __str__(self) -> str:
        """Return it as a short text, such as "yarn x2"."""
        factor = f" x{self.scale:g}" if self.scale else ""
        base = f" base {self.freq_base:g}" if self.freq_base else ""
        return f"{'rope' if self.kind == 'model' else self.kind}{factor}{base}"


AS_TRAINED = RopeScaling()
"""The file's own scaling."""


# == Options =======================================================================================


MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
CHECKPOINT_MEMORY = 2**30
MAX_THREADS = 512  # GGML_MAX_N_THREADS: ggml crashes beyond it
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
# ggml_type numbers of the types of keys and values.
CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3}
CACHE_TYPES |= {"q5_0": 6, "q5_1": 7, "iq4_nl": 20}

# Marks the fields that nobody chooses: they follow from the evaluations of a context.
_FROM_USE = {"from_use": True}


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """How a context is made. Zero means: the model's own context length; as many threads as cores.

    `n_outputs` is the most rows one evaluation may give, `n_sequences` the most sequence ids: both
    size native buffers, so they should be the widest tree's and no more. `hidden_states` makes the
    final normed state of every token available, at the price of evaluating the output head for it.
    `layer_inputs` are the layers whose inputs are available at every token, at no such price.
    `nextn_states` makes the inputs of NextN blocks available, for every token and without the
    output head. `n_rollback` is the number of the last evaluation's tokens that a recurrent state
    can take back, if `Model.can_roll_back`; other models ignore it. Sequences that lie `apart` have
    cells of their own, equally many, and share none. Without `offload_kv` keys and values stay in
    this machine's memory, whatever device computes. `rope` stretches positions beyond the trained
    context. `checkpoint_memory` are the bytes for copies of recurrent states (`Checkpoints`), 0 for
    none.
    """

    n_ctx: int = 0
    n_batch: int = 512
    n_ubatch: int = 512
    n_sequences: int = field(default=1, metadata=_FROM_USE)
    n_outputs: int = field(default=1, metadata=_FROM_USE)
    n_threads: int = 0
    n_threads_batch: int = 0
    hidden_states: bool = field(default=False, metadata=_FROM_USE)
    layer_inputs: tuple[int, ...] = field(default=(), metadata=_FROM_USE)
    nextn_states: bool = field(default=False, metadata=_FROM_USE)
    n_rollback: int = field(default=0, metadata=_FROM_USE)
    apart: bool = field(default=False, metadata=_FROM_USE)
    flash_attention: Literal["auto", "on", "off"] = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    offload_kv: bool = True
    rope: RopeScaling = AS_TRAINED
    checkpoint_memory: int = CHECKPOINT_MEMORY

    def __post_init__(self) -> None:
        if not 0 <= self.n_ctx < 2**31:
            raise OptionError(f"n_ctx is {self.n_ctx}: give 0 (automatic) or a positive number")
        for name in ("n_threads", "n_threads_batch"):
            value = getattr(self, name)
            if not 0 <= value <= MAX_THREADS:
                raise OptionError(f"{name} is {value}: give 0 (automatic) to {MAX_THREADS}")
        for name in ("n_batch", "n_ubatch", "n_outputs"):
            if not 1 <= getattr(self, name) < 2**31:
                raise OptionError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if not 0 <= self.n_rollback < 2**16:
            raise OptionError(f"n_rollback is {self.n_rollback}: give 0 or a few tokens")
        if not 1 <= self.n_sequences <= MAX_SEQUENCES:
            limits = f"llama.cpp allows 1 to {MAX_SEQUENCES}"
            raise OptionError(f"n_sequences is {self.n_sequences}: {limits}")
        if not 0 <= self.checkpoint_memory < 2**60:
            problem = f"checkpoint_memory is {self.checkpoint_memory}"
            raise OptionError(f"{problem}: give bytes, as 2**30, or 0 for no checkpoints")
        if self.flash_attention not in FLASH_ATTENTION:
            raise OptionError(f"flash attention is {self.flash_attention!r}: use auto, on or off")
        for name in ("cache_type_k", "cache_type_v"):
            if getattr(self, name) not in CACHE_TYPES:
                known = ", ".join(CACHE_TYPES)
                raise OptionError(f"{name} is {getattr(self, name)!r}: use one of {known}")

    @classmethod
    def chosen_names(cls) -> list[str]:
        """Return the names of the fields that users choose; the others follow from the drafter."""
        return [field_.name for field_ in fields(cls) if not field_.metadata]

    def size_for(self, model: Model) -> int:
        """Return the length for a model: as trained at most, unless `rope` stretches that."""
        return self.rope.context_size(self.n_ctx, model.n_ctx_train, model.rope_factor)
