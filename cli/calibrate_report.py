"""How `specrun calibrate` prints what it measured: both tables of shares, and the tree that follows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from specrun.cli.table import print_table
from specrun.cli.terminal import Terminal

if TYPE_CHECKING:
    from specrun.runtime.planning.head_calibration import HeadCalibration, HeadCalibrationOptions

__all__ = ["print_calibration"]

_FEW = 200  # places, after which a share is known to about three hundredths


def print_calibration(
    options: HeadCalibrationOptions, result: HeadCalibration, *, as_json: bool, terminal: Terminal
) -> None:
    """Print all that was measured: tables and a verdict, or one JSON object."""
    if as_json:
        terminal.answer(json.dumps(_facts(options, result), indent=2) + "\n")
        return
    ranks = max(map(len, result.alone), default=0)
    head = ("depth", "positions", *(f"{rank + 1}." for rank in range(ranks)))
    for title, rows in (
        ("Right, where the guesses before were right", result.accuracy),
        ("Right, at all positions", result.alone),
    ):
        counted = result.n_reached if rows is result.accuracy else result.n_asked
        cells = [
            (str(depth + 1), str(count), *(f"{share:.3f}" for share in row))
            for depth, (count, row) in enumerate(zip(counted, rows, strict=False))
        ]
        print_table(terminal, title, head, cells)
    terminal.answer(_verdict(result) + "\n")
    if result.n_positions < _FEW:
        terminal.note(f"{result.n_positions} places are few: more prompts, or a longer text (-f), give steadier shares")


def _verdict(result: HeadCalibration) -> str:
    if result.plan is None:
        return "no guess was ever right: these heads are of no use for this target"
    costs = "measured" if result.is_measured else "typical"
    plan = result.plan
    text = (
        f"tree of {len(plan.topology)} nodes for the {costs} costs: {plan.expected_tokens:.2f} tokens a round, "
        f"{plan.speed_up:.2f} times the speed of plain decoding expected\n{plan.topology}"
    )
    return text if plan.speed_up > 1.0 else f"plain decoding is faster here; the least slow is a {text}"


def _facts(options: HeadCalibrationOptions, result: HeadCalibration) -> dict[str, Any]:
    plan = result.plan
    return {
        "target": str(options.target),
        "heads": str(options.heads),
        "positions": result.n_positions,
        "positions_by_depth": result.n_reached,
        "accuracy": result.accuracy,
        "accuracy_alone": result.alone,
        "costs": "measured" if result.is_measured else "typical",
        "plan": None
        if plan is None
        else {
            "tree": str(plan.topology),
            "nodes": len(plan.topology),
            "expected_tokens": plan.expected_tokens,
            "speed_up": plan.speed_up,
        },
    }
