"""Statistics of an engine and its slots: what they do now, and have done."""

from __future__ import annotations

from dataclasses import dataclass

from specrun.runtime.engine.schedule import Load


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """What an engine does now, and has done (`load`); `cells` of `n_ctx` are used."""

    slots: int
    busy: int
    queued: int
    n_ctx: int
    cells: int
    load: Load


@dataclass(frozen=True, slots=True)
class SlotState:
    """What a slot does: its drafter, and of how many tokens of its text keys are cached."""

    busy: bool
    drafter: str
    n_tokens: int
    n_cached: int
