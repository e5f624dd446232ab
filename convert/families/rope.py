"""Rotary embeddings: how far and how fast positions turn, in config.json's words and in
llama.cpp's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log, pi, sqrt

import numpy as np

from specrun.bindings.errors import MalformedFileError, UnsupportedModelError
from specrun.convert.checkpoint import JsonObject
from specrun.convert.families.family import Array, TensorRule
from specrun.convert.families.steps import head_width, require
from specrun.convert.gguf import Metadata

_BASE = 10000.0


def rope_settings(config: JsonObject, layer_type: str | None = None) -> tuple[JsonObject, str]:
    """Return the settings of the rotary embedding and the kind of its scaling.

    `layer_type` picks one kind of layer ("full_attention") where the config has settings for each.
    """
    # transformers 5 moved rope_theta and rope_scaling together into rope_parameters.
    rope = config.object("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    if layer_type is not None and layer_type in rope:
        rope = rope.object(layer_type)
    kind = rope.text("rope_type", rope.text("type", "default"))
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
) -> None:
    """Write the keys of a rotary embedding over whole heads.

    `scalings` are the kinds that llama.cpp has for the architecture; raises UnsupportedModelError
    for another.
    """
    rope, kind = rope_settings(config)
    require(rope, "partial_rotary_factor", 1.0)
    require(config, "partial_rotary_factor", 1.0)
    metadata.count(f"{prefix}.rope.dimension_count", head_width(config))
    metadata.number(f"{prefix}.rope.freq_base", rope_base(config, rope))
    if kind not in ("default", *scalings):
        known = ", ".join(("default", *scalings))
        raise UnsupportedModelError(
            f"{rope.shown} is {kind!r}: only {known} can be converted for {prefix}"
        )
    if kind == "linear":
        metadata.text(f"{prefix}.rope.scaling.type", "linear")
        metadata.number(f"{prefix}.rope.scaling.factor", rope.number("factor"))
    elif kind == "yarn":
        _describe_yarn(rope, metadata, prefix)


def _describe_yarn(rope: JsonObject, metadata: Metadata, prefix: str) -> None:
    """YaRN (Peng et al., arXiv 2309.00071): interpolates frequencies between two wave lengths."""
    # llama.cpp reads these for other architectures only.
    require(rope, "beta_fast", 32)
    require(rope, "beta_slow", 1)
    require(rope, "truncate", True)
    factor = rope.number("factor")
    metadata.text(f"{prefix}.rope.scaling.type", "yarn")
    metadata.number(f"{prefix}.rope.scaling.factor", factor)
    trained = rope.count("original_max_position_embeddings")
    metadata.count(f"{prefix}.rope.scaling.original_context_length", trained)
    # llama.cpp multiplies rotated vectors by 0.1 ln(factor) + 1 by itself; what the config wants
    # instead is stated as a ratio to that.
    usual = _yarn_magnitude(factor, 1.0)
    wanted = usual
    if "attention_factor" in rope:
        wanted = rope.number("attention_factor")
    elif "mscale" in rope and "mscale_all_dim" in rope:
        wanted = _yarn_magnitude(factor, rope.number("mscale")) / _yarn_magnitude(
            factor, rope.number("mscale_all_dim")
        )
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
    factor, low, high = (
        rope.number("factor"),
        rope.number("low_freq_factor"),
        rope.number("high_freq_factor"),
    )
    trained = rope.count("original_max_position_embeddings")
    if high <= low:
        raise MalformedFileError(
            f"{rope.shown} has high_freq_factor {high:g}, not above low_freq_factor {low:g}"
        )

    def compute() -> Array:
        wavelength = 2 * pi * base ** (np.arange(0, width, 2, dtype=np.float64) / width)
        # 1 where a wave fits the trained context `high` times, 0 where less than `low` times.
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
    if kind not in ("default", "longrope"):
        raise UnsupportedModelError(
            f"{rope.shown} is {kind!r}: only default and longrope can be converted for {prefix}"
        )
    longest = config.count("max_position_embeddings")
    trained = _trained_context(config, rope)
    metadata.count(f"{prefix}.rope.dimension_count", dimensions)
    metadata.number(f"{prefix}.rope.freq_base", rope_base(config, rope))
    metadata.count(f"{prefix}.rope.scaling.original_context_length", trained)
    if kind == "longrope":
        factor = rope.number("factor", longest / trained)
        usual = sqrt(1 + log(factor) / log(trained)) if factor > 1 and trained > 1 else 1.0
        metadata.number(
            f"{prefix}.rope.scaling.attn_factor", rope.number("attention_factor", usual)
        )


def longrope_factors(config: JsonObject, dimensions: int) -> Iterator[TensorRule]:
    """Yield the two tensors that divide the frequencies, where the config asks for LongRoPE."""
    rope, kind = rope_settings(config)
    if kind != "longrope":
        return
    for name in ("long", "short"):
        factors = rope.items(f"{name}_factor")
        if len(factors) != dimensions // 2 or not all(
            type(n) in (int, float) and 0 < n < 1e30 for n in factors
        ):
            raise MalformedFileError(
                f"{rope.shown} has a {name}_factor that is not {dimensions // 2} positive numbers"
            )
        numbers = np.array(factors, dtype=np.float32)
        yield TensorRule(f"rope_factors_{name}.weight", (), numbers.shape, numbers.copy)


def _trained_context(config: JsonObject, rope: JsonObject) -> int:
    key = "original_max_position_embeddings"
    return rope.count(key, config.count(key, config.count("max_position_embeddings")))
