"""Batch noise: how much a model's laws depend on the tokens of an evaluation, as tables and JSON.

The measurement is bench/batch_noise.py; `specrun inspect FILE --batch-noise` shows it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.cli.options.group import Section, option_group
from specrun.cli.options.model import attention_options
from specrun.cli.terminal.paths import read_text
from specrun.cli.terminal.table import print_table
from specrun.cli.terminal.terminal import Terminal
from specrun.runtime.memory import LayerCount

_NOISE = Section("Batch noise of one model")


@dataclass(frozen=True, slots=True)
class NoiseSettings:
    """Whether batch noise is measured, at how many positions, with what attention and cache."""

    batch_noise: bool
    positions: int
    flash_attn: Literal["auto", "on", "off"]
    cache_type_k: str
    cache_type_v: str


noise_options = option_group(
    "noise",
    NoiseSettings,
    _NOISE.flag(
        "--batch-noise",
        "Measure how much the laws depend on how many tokens are evaluated at a time (-f, -t and "
        "-ngl as above).",
    ),
    _NOISE.option(
        "-n, --positions N", "The most positions to compare.", click.IntRange(16), default=256
    ),
    *attention_options(_NOISE),
)


def noise_of_file(
    file: Path,
    text_file: Path | None,
    threads: int,
    gpu_layers: LayerCount,
    settings: NoiseSettings,
    terminal: Terminal,
) -> dict[str, Any]:
    """Return what is found, ready for JSON; raises as `measure_batch_noise` does."""
    from specrun.bench.batch_noise import NoiseOptions, measure_batch_noise
    from specrun.convert.conversion import FIXED_TEXT

    text = FIXED_TEXT if text_file is None else read_text(text_file)
    context = ContextOptions(
        n_threads=threads,
        flash_attention=settings.flash_attn,
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
    )
    options = NoiseOptions(settings.positions, context, gpu_layers)

    def show(done: int, total: int) -> None:
        terminal.passing(f"evaluated {done} of {total} times")

    try:
        found = measure_batch_noise(file, text, options, show)
    finally:
        terminal.passing("")
    return {
        "text": "fixed" if text_file is None else str(text_file),
        **dataclasses.asdict(found),
    }


def print_noise(terminal: Terminal, file: Path, found: dict[str, Any]) -> None:
    """Print the figures by width, what they mean, and what a fixed shape does."""
    figures = ("mean nats", "largest", "mean variation", "largest", "other first token")
    head = ("at a time", *figures, "greedy texts part")
    rows = [
        (
            str(noise["width"]),
            f"{noise['logprob_mean']:.2g}",
            f"{noise['logprob_largest']:.2g}",
            f"{noise['variation_mean']:.2g}",
            f"{noise['variation_largest']:.2g}",
            f"{100 * noise['other_top']:.2f} %",
            _parting(noise),
        )
        for noise in found["widths"]
    ]
    text = "the fixed text" if found["text"] == "fixed" else found["text"]
    where = f"{found['n_positions']:,} positions of {text} after {found['n_before']} tokens"
    print_table(
        terminal, f"{file}: laws against those of one token at a time ({where})", head, rows
    )
    terminal.answer(f"{_of_fixed_shape(found['fixed_shape'])}\n")
    terminal.answer(
        "Kernels round by how many tokens they are given, so drafts move the target's laws by this "
        "much on this machine: nats of all tokens' log-probabilities, total variation, and how "
        "often another token is the most likely. Greedy texts are expected to part after 1 / that "
        "share, in tokens.\n"
    )


def _parting(noise: dict[str, Any]) -> str:
    if noise["parts_after"] is None:
        return f"none in {noise['n_positions']:,}"
    return f"after {noise['parts_after']:,.0f}"


def _of_fixed_shape(bits: dict[str, Any]) -> str:
    shape, n_positions = f"fixed shape of {bits['width']}", bits["n_positions"]
    if bits["left_out"]:
        return f"{shape}: left out, since {bits['left_out']}"
    equal = f"{shape}: equal bits at {bits['n_equal']:,} of {n_positions:,} positions"
    if bits["n_equal"] == n_positions:
        return equal
    return f"{equal}; logits differ by up to {bits['largest']:.2g} nats"
