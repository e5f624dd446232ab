"""Jacobi trajectories of a target, collected by the runtime that decodes with them (`jacobi(n=N)`).

Each prompt is answered greedily. The draft of every round is an iterate: a guess of the next n
tokens, made by the target from the guess before. The answer itself is the fixed point that all of
them come to (Kou et al. 2024, section 3.2.1). Here the block slides with the text, as in decoding,
so that training meets the blocks of decoding. Kept as JSON Lines and written as they come: an
interrupted run collects only the rest.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.models.model import Model
from specrun.runtime.acceptance import build_rule
from specrun.runtime.drafters.lookahead import JacobiDrafter
from specrun.runtime.engine import Session
from specrun.runtime.laws import SamplingParams
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import DraftTree
from specrun.train.data.store import Progress, Record, kept_records

GREEDY = SamplingParams(temperature=0.0, seed=0)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """An answer and the iterates that came to it.

    `ids` [T] are the prompt's `n_prompt` tokens and the answer's. Iterate r, `iterates[r]` [n],
    guesses the tokens from position `starts[r]` on, when all before it stood.
    """

    ids: npt.NDArray[np.int32]
    n_prompt: int
    starts: npt.NDArray[np.int32]
    iterates: npt.NDArray[np.int32]

    @property
    def n_rounds(self) -> int:
        """How many evaluations of the target the answer took."""
        return len(self.starts)


def tokens_per_iteration(found: Sequence[Trajectory]) -> float:
    """Return tokens of answers over evaluations of the target."""
    rounds = sum(each.n_rounds for each in found)
    return sum(len(each.ids) - each.n_prompt for each in found) / max(1, rounds)


class _NotedJacobi(JacobiDrafter):
    """Jacobi decoding whose iterates are noted."""

    def begin(self, tokens: Sequence[int]) -> None:
        super().begin(tokens)
        self.noted: list[tuple[int, list[int]]] = []

    def propose(self, request: DraftRequest) -> DraftTree:
        tree = super().propose(request)
        self.noted.append((len(request.tokens), list(self._iterate)))
        return tree


def collect_trajectories(
    target: AbstractContextManager[Path],
    prompts: Sequence[Sequence[int]],
    store: Path,
    *,
    identity: Mapping[str, Any],
    block: int,
    longest: int,
    max_length: int,
    n_threads: int = 0,
    progress: Progress | None = None,
) -> list[Trajectory]:
    """Return the trajectory of every prompt, of answers of at most `longest` tokens.

    `target` yields the GGUF file that answers, and is entered only if one is missing in `store`.
    `identity` names its weights: others are answered again. Raises MalformedFileError for a damaged
    store.
    """
    keys = [json.dumps([identity, block, longest, list(p)], sort_keys=True) for p in prompts]

    def made(missing: list[int]) -> Generator[tuple[int, Record]]:
        options = ContextOptions(
            n_ctx=max_length + block + 1, n_threads=n_threads, n_threads_batch=n_threads
        )
        with (
            target as path,
            Model(path) as model,
            Session.open(model, _NotedJacobi(n=block), options, build_rule("exact")) as session,
        ):
            for number in missing:
                prompt = list(prompts[number])
                room = min(longest, max_length - len(prompt))
                yield number, _asked(session, prompt, room)

    def fields(record: Record) -> tuple[list[int], list[int], list[list[int]]]:
        return record["answer"], record["starts"], record["iterates"]

    records = kept_records(store, keys, made, fields, what="trajectory", progress=progress)
    return [
        Trajectory(
            np.array([*prompt, *answer], np.int32),
            len(prompt),
            np.array(starts, np.int32),
            np.array(iterates, np.int32).reshape(-1, block),
        )
        for prompt, (answer, starts, iterates) in zip(prompts, records, strict=True)
    ]


def _asked(session: Session, prompt: list[int], room: int) -> dict[str, Any]:
    """Return the answer to a prompt, and the iterates that came to it."""
    stream = session.stream(prompt, GREEDY, seed=0, max_tokens=room, logprobs=False)
    result = stream.drain()
    drafter = session.drafter
    assert isinstance(drafter, _NotedJacobi)
    return {
        "answer": result.token_ids,
        "starts": [start for start, _ in drafter.noted],
        "iterates": [tokens for _, tokens in drafter.noted],
    }
