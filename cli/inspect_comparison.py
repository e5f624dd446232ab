"""What `specrun inspect A B` finds and prints: sizes, perplexities, divergence, and the error of each tensor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from specrun.cli.byte_progress import byte_progress
from specrun.cli.comparison_options import ComparisonSettings
from specrun.cli.paths import read_text
from specrun.cli.quantities import bytes_text
from specrun.cli.table import print_facts, print_table
from specrun.cli.terminal import Terminal

__all__ = ["compare_files", "print_comparison"]

_SHOWN_TENSORS = 10


def compare_files(original: Path, other: Path, settings: ComparisonSettings, terminal: Terminal) -> dict[str, Any]:
    """Return what is found, ready for JSON. Raises PairError unless both files have one vocabulary."""
    from specrun.bench.model_comparison import ComparisonOptions, compare_models
    from specrun.bench.tensor_errors import tensor_errors
    from specrun.convert.fixed_text import FIXED_TEXT

    text = FIXED_TEXT if settings.text_file is None else read_text(settings.text_file)
    options = ComparisonOptions(
        n_ctx=settings.ctx_size,
        n_chunks=settings.chunks,
        n_threads=settings.threads,
        n_gpu_layers=settings.gpu_layers,
    )
    try:
        found = compare_models(
            original, other, text, options, lambda done, total: terminal.passing(f"chunk {done} of {total}")
        )
    finally:
        terminal.passing("")
    with byte_progress(terminal, "comparing tensors") as progress:
        errors = [dataclasses.asdict(one) for one in tensor_errors(original, other, progress)]
    return {
        "text": "fixed" if settings.text_file is None else str(settings.text_file),
        **dataclasses.asdict(found),
        "tensor_errors": errors,
    }


def print_comparison(terminal: Terminal, one: dict[str, Any], other: dict[str, Any], found: dict[str, Any]) -> None:
    """Print both files side by side, then the figures, then the tensors that are furthest off."""
    rows = [
        ("file", one["file"], other["file"]),
        ("size", bytes_text(one["file_bytes"]), bytes_text(other["file_bytes"])),
        ("file type", str(one["file_type"]), str(other["file_type"])),
        ("bits per weight", f"{one['bits_per_weight']:.2f}", f"{other['bits_per_weight']:.2f}"),
        ("perplexity", *(_perplexity(found["summary"][which]) for which in ("original", "other"))),
    ]
    print_table(terminal, "models", ("", "first", "second"), rows)
    print_facts(terminal, "the second against the first", _facts(found))
    _print_tensors(terminal, found["tensor_errors"])


def _facts(found: dict[str, Any]) -> dict[str, str]:
    summary = found["summary"]
    text = "the fixed text" if found["text"] == "fixed" else found["text"]
    return {
        "scored": f"{summary['n_tokens']:,} tokens of {text} ({found['n_chunks']:,} chunks of {found['n_ctx']:,})",
        "KL divergence, mean": f"{summary['kl_mean']:.3g} +- {summary['kl_error']:.2g} nats",
        "KL divergence, median": f"{summary['kl_median']:.3g}",
        "KL divergence, 99 %": f"{summary['kl_99']:.3g}",
        "KL divergence, largest": f"{summary['kl_largest']:.3g}",
        "same first word": f"{100 * summary['same_top']:.2f} +- {100 * summary['top_error']:.2f} %",
    }


def _perplexity(one: dict[str, float]) -> str:
    return f"{one['value']:.4f} +- {one['error']:.2g}"


def _print_tensors(terminal: Terminal, errors: list[dict[str, Any]]) -> None:
    compared = [one for one in errors if one["relative_rms"] is not None]
    changed = sorted((one for one in compared if one["relative_rms"] > 0), key=lambda one: -one["relative_rms"])
    rows = [
        (one["name"], one["original_type"], one["other_type"], f"{one['relative_rms']:.3g}")
        for one in changed[:_SHOWN_TENSORS]
    ]
    if rows:
        title = f"tensors furthest off ({len(changed):,} of {len(compared):,} differ; --json has all)"
        print_table(terminal, title, ("tensor", "first", "second", "relative RMS error"), rows)
    else:
        terminal.answer(f"All {len(compared):,} tensors have the same numbers.\n")
    for one in errors:
        if one["relative_rms"] is None:
            terminal.warn(f"{one['name']} was not compared: {one['note']}")
