"""Jacobi trajectories of a target, collected by the runtime that decodes with them (`jacobi(n=N)`).

Each prompt is answered greedily. What every round drafted is an iterate: a guess of the next n
tokens, made by the target from the guess before. The answer itself is the fixed point that all of
them come to (Kou et al. 2024, section 3.2.1). Here the block slides with the text, as in decoding,
so that what is learnt is what will be met. Kept as JSON Lines and written as they come: an
interrupted run asks only what is left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import MalformedFileError, ModelError
from specrun.bindings.files import DAMAGE
from specrun.bindings.models.model import Model
from specrun.runtime.acceptance import build_rule
from specrun.runtime.drafters.lookahead import JacobiDrafter
from specrun.runtime.engine import Session
from specrun.runtime.laws import SamplingParams
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import DraftTree
from specrun.train.data.documents import Document
from specrun.train.data.tokens import TargetTokenizer

Progress = Callable[[int, int], None]
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


def prompts_of(
    documents: Sequence[Document], tokenizer: TargetTokenizer, max_length: int
) -> list[list[int]]:
    """Return the prompts that leave room for an answer; raises ModelError where there is none."""
    found = map(tokenizer.prompt, documents)
    prompts = [prompt for prompt in found if prompt and len(prompt) < max_length - 1]
    if not prompts:
        raise ModelError(
            f"the data ask nothing that {tokenizer.path.name} could answer: give prompts or chats"
        )
    return prompts


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

    `target` yields the GGUF file that answers, and is entered only where one is missing in `store`.
    `identity` names its weights: others are asked again. Raises MalformedFileError for a damaged
    store.
    """
    known = _read(store)
    keys = [json.dumps([identity, block, longest, list(p)], sort_keys=True) for p in prompts]
    missing = [number for number, key in enumerate(keys) if key not in known]
    if missing:
        with target as path, store.open("a", encoding="utf-8") as file:
            options = ContextOptions(
                n_ctx=max_length + block + 1, n_threads=n_threads, n_threads_batch=n_threads
            )
            with Model(path) as model, _jacobi_session(model, block, options) as session:
                for done, number in enumerate(missing, len(keys) - len(missing) + 1):
                    prompt = list(prompts[number])
                    room = min(longest, max_length - len(prompt))
                    record = _asked(session, prompt, room)
                    known[keys[number]] = record
                    file.write(json.dumps({"key": keys[number], **record}) + "\n")
                    file.flush()
                    if progress is not None:
                        progress(done, len(keys))
    pairs = zip(prompts, keys, strict=True)
    return [_trajectory(prompt, known[key], block) for prompt, key in pairs]


def _jacobi_session(model: Model, block: int, options: ContextOptions) -> Session:
    return Session.open(model, _NotedJacobi(n=block), options, build_rule("exact"))


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


def _trajectory(prompt: Sequence[int], record: Mapping[str, Any], block: int) -> Trajectory:
    ids = np.array([*prompt, *record["answer"]], np.int32)
    iterates = np.array(record["iterates"], np.int32).reshape(-1, block)
    return Trajectory(ids, len(prompt), np.array(record["starts"], np.int32), iterates)


def _read(store: Path) -> dict[str, dict[str, Any]]:
    """Return what is known, by key; a last line that was cut off is cut away."""
    if not store.exists():
        return {}
    data = store.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        with store.open("r+b") as file:
            file.truncate(len(whole))
    found: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
            found[str(record.pop("key"))] = {name: record[name] for name in _FIELDS}
        except DAMAGE as error:
            problem = f"line {number} of {store} is no trajectory: remove it"
            raise MalformedFileError(problem) from error
    return found


_FIELDS = ("answer", "starts", "iterates")
