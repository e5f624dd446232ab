"""Time to the first token of a short prompt, alone and while another conversation's is being read.

Prompts are drawn anew each time, so that nothing of them is cached.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specrun.bench.timing import Ratio, Spread, interleaved, ratio_of, spread_of
from specrun.bindings.contexts.context_options import RopeScaling
from specrun.bindings.errors import OptionError
from specrun.bindings.gguf import read_header
from specrun.runtime.engine import Engine
from specrun.runtime.laws import SamplingParams

_SHORT = 32  # tokens
_ROOM = 256  # tokens beside the long prompt
_GREEDY = SamplingParams(temperature=0.0)
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Seconds from the request to the first token: `alone`, and `beside` a prompt being read.

    `was_read` says in how many repetitions the long prompt was still being read when the short one
    had its first token.
    """

    short_prompt: int
    long_prompt: int
    alone_s: Spread
    beside_s: Spread
    ratio: Ratio
    was_read: int


def measure_first_token(
    target: Path,
    drafter: str,
    long_prompt: int,
    repetitions: int,
    options: Mapping[str, Any],
) -> FirstToken:
    """Measure an engine of two conversations; raises as opening one does."""
    opened = {**options, **_long_enough(target, long_prompt, options)}
    alone: list[float] = []
    beside: list[float] = []
    was_read = 0
    with Engine(target, drafter, slots=2, **opened) as engine:
        source = np.random.default_rng(0)

        def drawn(n: int) -> list[int]:
            tokens: list[int] = source.integers(0, engine.vocabulary.size, n).tolist()
            return tokens

        _first_token_s(engine, drawn(_SHORT))  # the first time everything is cold
        for _, arm in interleaved(2, repetitions):
            if arm == 0:
                alone.append(_first_token_s(engine, drawn(_SHORT)))
                continue
            pieces = engine.statistics().load.pieces
            long = engine.submit(drawn(long_prompt), _GREEDY, max_tokens=1)
            until = time.monotonic() + _PATIENCE_S
            while engine.statistics().load.pieces == pieces and not long.done:
                if time.monotonic() > until:
                    raise OptionError(f"no piece of {long_prompt} tokens was read in time")
                time.sleep(0.0005)
            beside.append(_first_token_s(engine, drawn(_SHORT)))
            was_read += not long.done
            long.cancel()
            _ = long.result
    return FirstToken(
        _SHORT,
        long_prompt,
        spread_of(alone),
        spread_of(beside),
        ratio_of(beside, alone),
        was_read,
    )


def _first_token_s(engine: Engine, prompt: list[int]) -> float:
    started = time.perf_counter()
    stream = engine.submit(prompt, _GREEDY, max_tokens=1)
    next(stream)
    seconds = time.perf_counter() - started
    _ = stream.result
    return seconds


def _long_enough(target: Path, long_prompt: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a context for both prompts; positions are stretched if need be.

    What is said of a text beyond the trained length matters as little as what it says.
    """
    header = read_header(target)
    trained = header.metadata.get(f"{header.architecture}.context_length", 0)
    needed = long_prompt + _SHORT + _ROOM
    found: dict[str, Any] = {"n_ctx": 256 * -(-needed // 256)}
    context = options.get("context")
    stretched = context is not None and context.rope.stretches
    if isinstance(trained, int) and 0 < trained < needed and not stretched:
        found["rope"] = RopeScaling("linear", scale=float(-(-needed // trained)))
    return found
