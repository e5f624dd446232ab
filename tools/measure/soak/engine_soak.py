"""Soak of an engine: waves of requests, cancelled and dropped at random, each held to its own text.

One engine answers for as long as it is told. What it says of each request has to be what plain
decoding says alone, as far as the answer got; memory, handles and threads have to stay flat.
"""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from measure.soak.setups import (
    CONTEXT,
    Question,
    Setup,
    random_question,
    with_files,
    write_files,
)
from measure.soak.soak import SoakOptions, SoakResult, Tally, difference, hold
from specrun.bench.prove.faults import Fault
from specrun.runtime.engine import Engine, GenerationStream, Runtime
from specrun.runtime.round import GenerationResult

_DRAWN = ("draft(DRAFTER, n=4)", "draft(DRAFTER, tree=3x2)", "medusa(MEDUSA)")
_POINTS = ("none", "prompt-lookup(min_ngram=1)")
_WAVE = 12  # requests
_FAULTS: tuple[Fault, ...] = ("none", "none", "none", "cancelled", "dropped")


@dataclass(frozen=True, slots=True)
class _Request:
    """What is asked, how it is drafted, and what becomes of it at which token."""

    question: Question
    drafter: str
    n_max: int | None
    fault: Fault
    at: int


def soak_engine(
    options: SoakOptions,
    slots: int,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> SoakResult:
    """Ask an engine in waves until the time is over, so many waves were answered, or Ctrl-C.

    A session of `options` is a wave; each is the same in every run.
    """
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="specrun-soak-") as folder:
        files = write_files(Path(folder))
        with _open(files, slots) as engine, Runtime(files["TARGET"], "none", **CONTEXT) as plain:
            run = functools.partial(_wave, engine, plain, files, tally)
            return hold(options, tally, "waves", run, progress)


def _open(files: Mapping[str, Path], slots: int) -> Engine:
    own, *others = (with_files(each, files) for each in (*_DRAWN, *_POINTS))
    # Fewer cells than all texts need: slots wait, and leave theirs to older answers.
    context = {**CONTEXT, "n_ctx": 256 * max(1, slots // 2)}
    return Engine(files["TARGET"], own, slots=slots, others=others, **context)


def _wave(
    engine: Engine,
    plain: Runtime,
    files: Mapping[str, Path],
    tally: Tally,
    number: int,
    source: random.Random,
) -> None:
    """Ask for some answers at once, meet the faults, and compare what was said."""
    tally.sessions += 1
    requests: list[_Request] = []
    text: tuple[int, ...] = ()
    for _ in range(_WAVE):
        drawn = source.random() < 0.5
        drafter = source.choice(_DRAWN if drawn else _POINTS)
        # What is drawn as a draft is part of which text comes of a seed: at temperature 0 it is
        # not.
        question = random_question(source, Setup(drafter, "exact", drawn), text)
        text = question.prompt
        n_max = source.choice((None, None, 0, 1, 3))
        fault = source.choice(_FAULTS)
        requests.append(_Request(question, drafter, n_max, fault, source.randrange(20)))
    streams = [_submit(engine, request, files) for request in requests]
    for request in requests:
        about = f"wave {number} ({request.drafter}, n_max={request.n_max})"
        stream = streams.pop(0)
        try:
            result, ended = _taken(stream, request)
            if result is None:
                continue
            question = request.question
            wanted = plain.generate(
                question.prompt, question.params, max_tokens=question.max_tokens
            )
        # Whatever it is, it is what a soak is for; Ctrl-C alone ends it.
        except Exception as error:
            tally.failures.append(f"{about}, {request.fault}: {type(error).__name__}: {error}")
            continue
        tally.answers += 1
        tally.tokens += len(result.token_ids)
        tally.cut += not ended
        tally.faults[request.fault] += 1
        tally.drafters[request.drafter.partition("(")[0]] += 1
        tally.rules["exact"] += 1
        problem = difference(result, wanted, ended)
        if problem is not None:
            tally.failures.append(f"{about}, {request.fault}: {problem}")


def _submit(engine: Engine, request: _Request, files: Mapping[str, Path]) -> GenerationStream:
    question = request.question
    return engine.submit(
        question.prompt,
        question.params,
        max_tokens=question.max_tokens,
        drafter=with_files(request.drafter, files),
        n_max=request.n_max,
        logprobs=request.at % 2 == 0,
    )


def _taken(stream: GenerationStream, request: _Request) -> tuple[GenerationResult | None, bool]:
    """Read an answer as far as its fault lets it; return it, and whether it came to its end.

    None for one that was dropped: nobody can tell what it said.
    """
    for index, _ in enumerate(stream):
        if index == request.at and request.fault == "dropped":
            return None, False
        if index == request.at and request.fault == "cancelled":
            stream.cancel()
    result = stream.result
    return result, result.finish_reason != "cancelled"
