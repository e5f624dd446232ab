"""Options that stretch positions beyond the context that a model was trained for, named as in
llama.cpp."""

from __future__ import annotations

from typing import Any

import click

from specrun.bindings.errors import OptionError
from specrun.bindings.rope_scaling import RopeScaling
from specrun.cli.options.group import Decorator, option

_SECTION = "Context and devices"
_FIELDS = (
    "yarn_orig_ctx",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_slow",
    "yarn_beta_fast",
)


def _yarn_number(name: str, what: str) -> Decorator:
    return option(
        name,
        section=_SECTION,
        type=float,
        metavar="X",
        default=-1.0,
        show_default="the model's",
        help=what,
    )


ROPE_OPTIONS: tuple[Decorator, ...] = (
    option(
        "--rope-scaling",
        section=_SECTION,
        type=click.Choice(["none", "linear", "yarn"]),
        show_default="the model's",
        help=(
            "How rotary positions are stretched for contexts longer than the model was trained for."
        ),
    ),
    option(
        "--rope-scale",
        section=_SECTION,
        type=float,
        metavar="X",
        show_default="the model's",
        help=(
            "How many times longer the context becomes; -c may then exceed what the model was "
            "trained for."
        ),
    ),
    option(
        "--rope-freq-base",
        section=_SECTION,
        type=float,
        metavar="X",
        default=0.0,
        show_default="the model's",
        help="Base of the rotary frequencies; a larger one stretches positions too.",
    ),
    option(
        "--rope-freq-scale",
        section=_SECTION,
        type=float,
        metavar="X",
        help="Short for --rope-scale of 1/X, as 0.5.",
    ),
    option(
        "--yarn-orig-ctx",
        section=_SECTION,
        type=int,
        metavar="N",
        default=0,
        show_default="the model's",
        help="The context that YaRN stretches.",
    ),
    _yarn_number("--yarn-ext-factor", "YaRN's mix of interpolation (0) and extrapolation (1)."),
    _yarn_number("--yarn-attn-factor", "YaRN's scale of attention."),
    _yarn_number("--yarn-beta-slow", "YaRN: rotations up to which frequencies are interpolated."),
    _yarn_number("--yarn-beta-fast", "YaRN: rotations from which frequencies are kept."),
)


def rope_scaling(values: dict[str, Any]) -> RopeScaling:
    """Take the options' values out of `values`, and return what they ask for."""
    kind, scale = values.pop("rope_scaling"), values.pop("rope_scale")
    base, freq_scale = values.pop("rope_freq_base"), values.pop("rope_freq_scale")
    others = {name: values.pop(name) for name in _FIELDS}
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
