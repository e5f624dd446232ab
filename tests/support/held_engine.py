"""An engine that finds all requests of a test at once, however busy the machine is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from specrun.runtime import SamplingParams
from specrun.runtime.engine import Engine
from specrun.runtime.round import GenerationResult

__all__ = ["answered_together", "held"]


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Keep an engine from taking requests: its thread waits for the lock of its requests."""
    with engine._changed:
        yield


def answered_together(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, **options: Any
) -> list[GenerationResult]:
    """Return the answers to prompts that wait for the engine when it begins."""
    with held(engine):
        streams = [engine.submit(prompt, params, **options) for prompt in prompts]
    return [stream.result for stream in streams]
