"""Builds `pass(embeddings.gguf, ...)` and `space(mask.gguf, ...)`."""

from __future__ import annotations

from typing import cast, get_args

from specrun.bindings.errors import OptionError
from specrun.runtime.drafter import DrafterWeights
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, file_of
from specrun.runtime.drafters.parallel.drafter import (
    Below,
    ParallelDrafter,
    ParallelSampling,
    lookahead_nodes,
)
from specrun.runtime.drafters.parallel.lookahead_file import LookaheadFile
from specrun.runtime.language import Expression
from specrun.runtime.methods import options_of

_MOST_SIBLINGS = 32


def build_pass(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `pass(FILE, n=all that were trained, below=every, sampling=argmax, topk=1)`."""
    return _build(expression, env, "pass")


def build_space(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `space(FILE, n=all that were trained, below=every, sampling=argmax, topk=1)`."""
    return _build(expression, env, "space")


def _build(expression: Expression, env: DraftEnvironment, kind: str) -> DrafterWeights:
    options = options_of(expression)
    n = options.integer("n", 0)
    below = cast("Below", options.choice("below", list(get_args(Below)), "every"))
    schemes = list(get_args(ParallelSampling))
    sampling = cast("ParallelSampling", options.choice("sampling", schemes, "argmax"))
    topk = options.integer("topk", 1)
    if not 1 <= topk <= _MOST_SIBLINGS:
        raise OptionError(f"{expression}: topk is {topk}: give 1 to {_MOST_SIBLINGS}")
    if topk > 1 and sampling == "with":
        problem = "topk= puts point masses beside the first draft, and sampling=with draws it"
        raise OptionError(f"{expression}: {problem}: leave one of them out")
    path = file_of(expression, env)
    file = LookaheadFile(path, kind, env.target, n_threads=env.context.n_threads)
    try:
        n = _checked_n(expression, n, options.optional("n") is not None, file, env)
        most = env.context.n_batch - 1
        if lookahead_nodes(n, topk, below) > most:
            problem = f"{expression}: look-ahead positions and candidates do not fit a batch of"
            raise OptionError(f"{problem} {most + 1}: give a smaller n, or raise -b")
    except BaseException:
        file.close()
        raise
    name = str(expression)

    def start() -> ParallelDrafter:
        return ParallelDrafter(file, n, below=below, sampling=sampling, topk=topk, name=name)

    return DrafterWeights(name, start, [file])


def _checked_n(
    expression: Expression, n: int, given: bool, file: LookaheadFile, env: DraftEnvironment
) -> int:
    """Return how many positions look ahead: all that were trained, unless a number is given."""
    if not given:
        return file.n_positions
    if not 1 <= n <= file.n_positions:
        trained = f"{file.path} was trained for {file.n_positions} look-ahead positions"
        raise OptionError(f"{expression}: n is {n}, and {trained}: give 1 to {file.n_positions}")
    return n
