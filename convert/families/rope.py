"""Rotary position embeddings (RoPE): config.json's settings as llama.cpp's keys and tensors.

Dimension pair i of a head turns by position * base^(-2i / width). Scalings change these frequencies
for texts longer than those of training: linear, YaRN, llama3's, LongRoPE.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log, pi, sqrt

import numpy as np

from specrun.convert.checkpoint import JsonObject, is_positive
from specrun.convert.families.family import Array, TensorRule
from specrun.convert.families.steps import head_width, require
from specrun.convert.gguf import Metadata

_BASE = 10000.0


def rope_settings(config: JsonObject, layers: str | None = None) -> tuple[JsonObject, str]:
    """Return the settings of the rotary embedding and the kind of its scaling.

    `layers` picks one kind of layer ("full_attention") if the config has settings for each.
    """
    # transformers 5 moved rope_theta and rope_scaling together into rope_parameters.
    rope = config.object("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    if layers is not None and layers in rope:
        rope = rope.object(layers)
    kind = rope.text("rope_type", rope.text("type", "default"))
    # "su" is the name of LongRoPE in early configs of Phi-3.
    return rope, "longrope" if kind == "su" else kind


def rope_base(config: JsonObject, rope: JsonObject, default: float = _BASE) -> float:
    """Return the base of the frequencies."""
    return rope.number("rope_theta", config.number("rope_theta", default))


def describe_rope(
    config: JsonObject,
    metadata: Metadata,
    prefix: str,
    *,
    scalings: Sequence[str] = ("linear", "yarn"),
    layers: str | None = None,
    base: float = _BASE,
    rounded: bool = True,
) -> None:
    """Write the keys of a rotary embedding over whole heads; `base` if the config has none.

    llama.cpp rounds the bounds of YaRN's ramp: `rounded` refuses a config that does not.

    `scalings` are the kinds that llama.cpp has for the architecture; raises UnsupportedModelError
    for another. `layers` is as in `rope_settings`.
    """
    rope, kind = rope_settings(config, layers)
    require(rope, "partial_rotary_factor", 1.0)
    require(config, "partial_rotary_factor", 1.0)
    metadata.count(f"{prefix}.rope.dimension_count", head_width(config))
    metadata.number(f"{prefix}.rope.freq_base", rope_base(config, rope, base))
    _require_kind(rope, kind, ("default", *scalings), prefix)
    if kind == "linear":
        metadata.text(f"{prefix}.rope.scaling.type", "linear")
        metadata.number(f"{prefix}.rope.scaling.factor", rope.number("factor"))
    elif kind == "yarn":
        if rounded:
            require(rope, "truncate", True)
        _describe_yarn(rope, metadata, prefix)


def _require_kind(rope: JsonObject, kind: str, known: Sequence[str], prefix: str) -> None:
    if kind not in known:
        raise rope.unsupported(f"is {kind!r}: only {', '.join(known)} can be read for {prefix}")


def _describe_yarn(rope: JsonObject, metadata: Metadata, prefix: str) -> None:
    """YaRN (Peng et al., arXiv 2309.00071): interpolates frequencies between two wave lengths."""
    # llama.cpp reads these for other architectures only.
    require(rope, "beta_fast", 32)
    require(rope, "beta_slow", 1)
    factor = rope.number("factor")
    metadata.text(f"{prefix}.rope.scaling.type", "yarn")
    metadata.number(f"{prefix}.rope.scaling.factor", factor)
    trained = rope.count("original_max_position_embeddings")
    metadata.count(f"{prefix}.rope.scaling.original_context_length", trained)
    # llama.cpp multiplies rotated vectors by 0.1 ln(factor) + 1 by itself; the config's factor
    # is written as a ratio to that.
    usual = _yarn_magnitude(factor, 1.0)
    wanted = usual
    if "attention_factor" in rope:
        wanted = rope.number("attention_factor")
    elif "mscale" in rope and "mscale_all_dim" in rope:
        wanted = _yarn_magnitude(factor, rope.number("mscale"))
        wanted /= _yarn_magnitude(factor, rope.number("mscale_all_dim"))
    if abs(wanted / usual - 1.0) > 1e-7:
        metadata.number(f"{prefix}.rope.scaling.attn_factor", wanted / usual)


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * log(factor) + 1.0 if factor > 1 else 1.0


def llama3_factors(config: JsonObject) -> Iterator[TensorRule]:
    """Yield the tensor of divisors of the rope frequencies, for configs with llama3's scaling."""
    rope, kind = rope_settings(config)
    if kind != "llama3":
        return
    width = head_width(config)
    base = rope_base(config, rope)
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    trained = rope.count("original_max_position_embeddings")
    if high <= low:
        raise rope.malformed(f"has high_freq_factor {high:g}, not above low_freq_factor {low:g}")

    def compute() -> Array:
        wavelength = 2 * pi * base ** (np.arange(0, width, 2, dtype=np.float64) / width)
        # 1 if a wave fits the trained context `high` times, 0 if less than `low` times:
        # short waves keep their frequency, long ones are divided by `factor`.
        kept = np.clip((trained / wavelength - low) / (high - low), 0.0, 1.0)
        return (1.0 / ((1.0 - kept) / factor + kept)).astype(np.float32)

    yield TensorRule("rope_freqs.weight", (), (width // 2,), compute)


def describe_longrope(config: JsonObject, metadata: Metadata, prefix: str, dimensions: int) -> None:
    """Write the keys of a rotary embedding over `dimensions` of each head, plain or LongRoPE.

    LongRoPE (Ding et al., arXiv 2402.13753) divides each frequency by a searched factor, of one
    list for texts within the trained context and another beyond. llama.cpp chooses by the size of
    the context.
    """
    rope, kind = rope_settings(config)
    _require_kind(rope, kind, ("default", "longrope"), prefix)
    longest = config.count("max_position_embeddings")
    key = "original_max_position_embeddings"
    trained = rope.count(key, config.count(key, longest))
    metadata.count(f"{prefix}.rope.dimension_count", dimensions)
    metadata.number(f"{prefix}.rope.freq_base", rope_base(config, rope))
    metadata.count(f"{prefix}.rope.scaling.original_context_length", trained)
    if kind == "longrope":
        factor = rope.number("factor", longest / trained)
        # LongRoPE's magnitude: sqrt(1 + ln s / ln L), with L the trained length.
        usual = sqrt(1 + log(factor) / log(trained)) if factor > 1 and trained > 1 else 1.0
        scale = rope.number("attention_factor", usual)
        metadata.number(f"{prefix}.rope.scaling.attn_factor", scale)


def longrope_factors(config: JsonObject, dimensions: int) -> Iterator[TensorRule]:
    """Yield the two tensors that divide the frequencies, if the config has LongRoPE."""
    rope, kind = rope_settings(config)
    if kind != "longrope":
        return
    for name in ("long", "short"):
        factors = rope.items(f"{name}_factor")
        if len(factors) != dimensions // 2 or not all(map(is_positive, factors)):
            raise rope.malformed(
                f"has a {name}_factor that is not {dimensions // 2} positive numbers"
            )
        numbers = np.array(factors, dtype=np.float32)
        yield TensorRule(f"rope_factors_{name}.weight", (), numbers.shape, numbers.copy)
