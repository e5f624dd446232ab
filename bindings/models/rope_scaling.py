"""Rope scaling: stretching positions, for contexts longer than a model was trained for.

Rotary positions can be squeezed into the trained range evenly (position interpolation, Chen et al.
2023, "Extending Context Window of Large Language Models via Positional Interpolation") or by
frequency (YaRN, Peng et al. 2023), or their base can be raised. llama.cpp does all three per
context; the file does not change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from specrun.bindings.errors import OptionError

RopeScalingKind = Literal["model", "none", "linear", "yarn"]
# LLAMA_ROPE_SCALING_TYPE
ROPE_SCALINGS: dict[RopeScalingKind, int] = {"model": -1, "none": 0, "linear": 1, "yarn": 2}
_MAX_CTX = 2**31


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How a context scales rotary positions; the default is what the model's file says.

    `scale` is how many times longer the context becomes (0: the model's own), `freq_base` the base
    of the rotary frequencies (0: the model's). `yarn_orig_ctx` is the length that YaRN stretches
    (0: what the model was trained for); `yarn_ext_factor` mixes interpolation with extrapolation,
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
        if self.kind not in ROPE_SCALINGS:
            raise OptionError(f"rope scaling is {self.kind!r}: use {', '.join(ROPE_SCALINGS)}")
        for name, value in (("rope scale", self.scale), ("rope frequency base", self.freq_base)):
            if not 0.0 <= value < math.inf:
                advice = "give a positive number, or 0 for the model's own"
                raise OptionError(f"{name} is {value}: {advice}")
        if self.kind == "none" and self.scale not in (0.0, 1.0):
            problem = f"rope scale is {self.scale:g} where rope scaling is none"
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
        """Return the context to make: `asked` tokens (0: the most), cut where nothing is stretched.

        `trained` is what the file says, `factor` how far that is stretched already: `scale` takes
        its place.
        """
        if self.stretches:
            return asked or max(trained, int(trained / factor * self.scale))
        return min(asked or trained, trained)

    def check(self, kind_of_file: str, factor: float) -> None:
        """Raise OptionError where a file's own scaling (a kind or "", `factor`) defeats this."""
        scale = f"rope scale is {self.scale:g}"
        if self.kind == "model" and kind_of_file == "none" and self.scale not in (0.0, 1.0):
            problem = f"{scale}, and the model's file says that its positions are not scaled"
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
        params.rope_scaling_type = ROPE_SCALINGS[self.kind]
        params.rope_freq_base = self.freq_base
        params.rope_freq_scale = 1.0 / self.scale if self.scale else 0.0
        for name in ("orig_ctx", "ext_factor", "attn_factor", "beta_slow", "beta_fast"):
            setattr(params, f"yarn_{name}", getattr(self, f"yarn_{name}"))

    def __str__(self) -> str:
        """Return it as people say it, such as "yarn x2"."""
        factor = f" x{self.scale:g}" if self.scale else ""
        base = f" base {self.freq_base:g}" if self.freq_base else ""
        return f"{'rope' if self.kind == 'model' else self.kind}{factor}{base}"


AS_TRAINED = RopeScaling()
"""What the model's file says."""
