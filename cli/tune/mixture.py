"""Mixtures of experts: how many of them verification reads, and what that takes here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specrun.cli.terminal.terminal import Terminal

if TYPE_CHECKING:
    from specrun.runtime.planning import CostCurve

SIZES = (2, 4, 8)
"""Tokens of evaluations that verify 1, 3 and 7 drafts."""


def experts_text(n_experts: int, n_used: int) -> str:
    """Say how many experts evaluations of several tokens read."""
    from specrun.runtime.planning import expected_experts

    read = ", ".join(f"{expected_experts(n_experts, n_used, n):.1f}" for n in SIZES)
    sizes = ", ".join(map(str, SIZES[:-1])) + f" and {SIZES[-1]}"
    return (
        f"{n_used} of {n_experts} for a token; {sizes} tokens read about {read} of a layer's "
        "(less where they choose alike), so verifying drafts costs more than with a dense model"
    )


def warn_of_experts(target: Path, curve: CostCurve, terminal: Terminal) -> None:
    """Warn, where the target is a mixture of experts, of what its evaluations read and take."""
    from specrun.bindings.gguf import read_header
    from specrun.runtime.planning import mixture

    n_experts, n_used = mixture(read_header(target))
    if not n_experts:
        return
    times = ", ".join(f"T({n}) = {curve.seconds(n) / curve.seconds(1):.2f} T(1)" for n in SIZES)
    terminal.note(
        f"{target.name} is a mixture of experts, {experts_text(n_experts, n_used)}; measured here: "
        f"{times}"
    )
