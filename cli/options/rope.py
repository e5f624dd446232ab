"""RoPE scaling options: stretch positions beyond the trained context, named as in llama.cpp."""

from __future__ import annotations

from typing import Any

import click

from specrun.bindings.contexts.context_options import RopeScaling
from specrun.bindings.errors import OptionError
from specrun.cli.options.group import EVALUATION, Decorator


def _option(usage: str, help: str, kind: click.ParamType[Any], **attributes: Any) -> Decorator:  # noqa: ANN401 - click's
    return EVALUATION.option(usage, help, kind, show_default="the model's", **attributes)


ROPE_OPTIONS: tuple[Decorator, ...] = (
    _option(
        "--rope-scaling",
        "How rotary positions are stretched for contexts longer than the model was trained for.",
        click.Choice(["none", "linear", "yarn"]),
    ),
    _option(
        "--rope-scale X",
        "How many times longer the context becomes; -c may then exceed what the model was trained "
        "for.",
        click.FLOAT,
    ),
    _option(
        "--rope-freq-base X",
        "Base of the rotary frequencies; a larger one stretches positions too.",
        click.FLOAT,
        default=0.0,
    ),
    EVALUATION.option("--rope-freq-scale X", "Short for --rope-scale of 1/X, as 0.5.", click.FLOAT),
    _option("--yarn-orig-ctx N", "The context that YaRN stretches.", click.INT, default=0),
    *(
        _option(f"--yarn-{name} X", help, click.FLOAT, default=-1.0)
        for name, help in (
            ("ext-factor", "YaRN's mix of interpolation (0) and extrapolation (1)."),
            ("attn-factor", "YaRN's scale of attention."),
            ("beta-slow", "YaRN: rotations up to which frequencies are interpolated."),
            ("beta-fast", "YaRN: rotations from which frequencies are kept."),
        )
    ),
)


def rope_scaling(values: dict[str, Any]) -> RopeScaling:
    """Take the options' values out of `values`, and return what they ask for."""
    kind, scale = values.pop("rope_scaling"), values.pop("rope_scale")
    base, freq_scale = values.pop("rope_freq_base"), values.pop("rope_freq_scale")
    others = {name: values.pop(name) for name in list(values) if name.startswith("yarn_")}
    if scale is not None and freq_scale is not None:
        raise click.UsageError(
            "--rope-scale and --rope-freq-scale say the same thing: give one of them"
        )
    if freq_scale is not None:
        if not 0.0 < freq_scale <= 1.0:
            raise OptionError(
                f"--rope-freq-scale is {freq_scale:g}: give a number above 0 and up to 1, such "
                "as 0.5"
            )
        scale = 1.0 / freq_scale
    if scale is not None and not scale >= 1.0:
        raise OptionError(f"--rope-scale is {scale:g}: give 1 (not stretched) or more, such as 2")
    return RopeScaling(kind=kind or "model", scale=scale or 0.0, freq_base=base, **others)
