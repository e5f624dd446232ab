"""How `specrun tune` prints what it found: the cost curves, the acceptance by rank, and the plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specrun.cli.table import print_table
from specrun.cli.terminal import Terminal

if TYPE_CHECKING:
    from specrun.runtime.planning.tune_result import Candidate, TunedSetting, TuneResult

__all__ = ["print_tuning"]

_SCHEMES = {"argmax": "most likely words", "without": "drawn without replacement", "with": "drawn with replacement"}


def print_tuning(draft: Path, result: TuneResult, terminal: Terminal) -> None:
    """Print all tables, and the verdict for each temperature."""
    _print_curves(result, terminal)
    for one in result.settings:
        _print_acceptance(one, terminal)
        _print_plans(one, terminal)
    _print_theory(result, terminal)
    for one in result.settings:
        terminal.answer(_verdict(one, draft) + "\n")


def _print_curves(result: TuneResult, terminal: Terminal) -> None:
    rows = []
    for size in sorted({*result.target.sizes, *result.draft.sizes}):
        cells = [str(size)]
        for curve in (result.target, result.draft):
            if size not in curve.sizes:
                cells += ["", ""]
                continue
            seconds = curve.seconds(size)
            cells += [f"{1e3 * seconds:.2f}", f"{seconds / curve.seconds(1):.2f}"]
        rows.append(cells)
    head = ("tokens", "target ms", "times one", "draft ms", "times one")
    print_table(terminal, "What an evaluation costs", head, rows)


def _print_acceptance(one: TunedSetting, terminal: Terminal) -> None:
    ranks = max(map(len, one.acceptance.values()), default=0)
    rows = [(_SCHEMES[name], *_shares(shares)) for name, shares in one.acceptance.items()]
    head = ("drafts", *(f"{rank + 1}." for rank in range(ranks)))
    print_table(terminal, f"Accepted by rank, temperature {one.params.temperature:g}", head, rows)


def _shares(values: Sequence[float]) -> list[str]:
    return [f"{value:.3f}" for value in values]


def _print_plans(one: TunedSetting, terminal: Terminal) -> None:
    rows = [
        (
            candidate.options or "no drafting",
            str(candidate.n_nodes),
            f"{candidate.expected_tokens:.2f}",
            "" if candidate.mean_accepted_length is None else f"{candidate.mean_accepted_length:.2f}",
            f"{candidate.predicted:.1f}",
            "" if candidate.measured is None else f"{candidate.measured:.1f}",
            _gain(candidate, one),
        )
        for candidate in one.candidates
    ]
    head = ("plan", "nodes", "tokens/round", "measured", "tokens/s", "measured", "speed-up")
    print_table(terminal, f"Plans, temperature {one.params.temperature:g}", head, rows)


def _print_theory(result: TuneResult, terminal: Terminal) -> None:
    rows = []
    for one in result.settings:
        theory = one.theory
        chains = [candidate for candidate in one.candidates if candidate.kind == "chain" and candidate.measured]
        measured = max(((candidate.measured or 0.0) / one.plain.speed for candidate in chains), default=None)
        rows.append(
            (
                f"{one.params.temperature:g}",
                f"{theory.acceptance:.3f}",
                f"{theory.cost_ratio:.3f}",
                f"{theory.flat_improvement:.2f} (n={theory.flat_length})",
                f"{theory.improvement:.2f} (n={theory.length})",
                f"{theory.expected_tokens:.2f}",
                f"{theory.operations:.2f}",
                "" if measured is None else f"{measured:.2f}",
            )
        )
    head = ("temp", "alpha", "c", "free width", "measured T(n)", "tokens/round", "operations", "measured")
    print_table(terminal, "Theory of chains (Leviathan et al. 2023): times the speed of plain decoding", head, rows)


def _gain(candidate: Candidate, one: TunedSetting) -> str:
    if candidate.measured is None:
        return f"{candidate.predicted / one.plain.predicted:.2f} predicted"
    return f"{candidate.measured / one.plain.speed:.2f}"


def _verdict(one: TunedSetting, draft: Path) -> str:
    temperature = f"temperature {one.params.temperature:g}"
    best = one.best
    if not best.options:
        return f"{temperature}: plain decoding is fastest; --drafter none"
    gain = best.speed / one.plain.speed
    return f"{temperature}: draft({draft.name}, {best.options}) gives {gain:.2f} times the speed of plain decoding"
