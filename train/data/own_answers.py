"""Self-distillation: before training, the target answers the data's prompts itself.

Heads that learn what the target says, rather than what a data set says, guess it more often
(Medusa, section 2.3). Answers are kept as JSON Lines, one prompt a line, and written as they come:
an interrupted run asks only what is left.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from specrun.bindings.errors import MalformedFileError, ModelError, UnsupportedModelError
from specrun.convert import convert_checkpoint
from specrun.runtime import Engine, SamplingParams
from specrun.runtime.engine.streams import EngineStream
from specrun.runtime.results import GenerationResult
from specrun.train.data.data_file import Document
from specrun.train.data.target_tokens import TargetTokens, TokenSequence

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How the target answers: temperature, most tokens, a drafter, how many prompts at once."""

    temperature: float = 0.0
    longest: int = 512
    drafter: str = "prompt-lookup"
    seed: int = 0
    parallel: int = 4

    @property
    def params(self) -> SamplingParams:
        """Plain sampling from the target's own law; answers differ by their index."""
        return SamplingParams(
            temperature=self.temperature, top_k=0, top_p=1.0, min_p=0.0, seed=self.seed
        )


def answer_prompts(
    target: AbstractContextManager[Path],
    tokenizer: TargetTokens,
    documents: Sequence[Document],
    store: Path,
    settings: AnswerSettings,
    *,
    identity: Mapping[str, Any],
    max_length: int,
    n_threads: int = 0,
    progress: Progress | None = None,
) -> list[TokenSequence]:
    """Return each prompt of the documents with the target's answer; the answer is what is learnt.

    `target` yields the GGUF file that answers, and is entered only where an answer is missing in
    `store`. `identity` names its weights: others are asked again. Texts that ask nothing, and
    prompts that leave no room for an answer within `max_length` tokens, are left out. Raises
    ModelError where none is left, MalformedFileError for a damaged `store`.
    """
    found = map(tokenizer.prompt, documents)
    prompts = [prompt for prompt in found if prompt and len(prompt) < max_length - 1]
    if not prompts:
        raise ModelError(
            f"the data ask nothing that {tokenizer.path.name} could answer: give prompts or chats"
        )
    known = _read(store)
    rooms = [min(settings.longest, max_length - len(prompt)) for prompt in prompts]
    # The number, for a prompt that is asked twice is answered twice, with noise of its own.
    how = (identity, settings.temperature, settings.seed)
    keys = [
        json.dumps([*how, number, room, prompt], sort_keys=True)
        for number, (room, prompt) in enumerate(zip(rooms, prompts, strict=True))
    ]
    missing = [number for number, key in enumerate(keys) if key not in known]
    if missing:
        with (
            target as path,
            _engine(path, settings, max_length, n_threads) as engine,
            store.open("a", encoding="utf-8") as file,
        ):
            asked = ((number, prompts[number], rooms[number]) for number in missing)
            answers = _answers(engine, asked, settings)
            for done, (number, result) in enumerate(answers, len(keys) - len(missing) + 1):
                known[keys[number]] = result.token_ids
                record = {"key": keys[number], "answer": result.token_ids, "text": result.text}
                file.write(json.dumps(record) + "\n")
                file.flush()
                if progress is not None:
                    progress(done, len(keys))
    pairs = zip(prompts, keys, strict=True)
    return [TokenSequence.of([*prompt, *known[key]], len(prompt)) for prompt, key in pairs]


def _engine(path: Path, settings: AnswerSettings, max_length: int, n_threads: int) -> Engine:
    """Return an engine whose conversations have `max_length` tokens each."""

    def opened(slots: int) -> Engine:
        return Engine(
            path,
            settings.drafter,
            slots=slots,
            n_ctx=max_length * slots,
            n_threads=n_threads,
            n_threads_batch=n_threads,
        )

    try:
        return opened(settings.parallel)
    except UnsupportedModelError:  # recurrent models answer one conversation at a time
        return opened(1)


def _answers(
    engine: Engine, asked: Iterator[tuple[int, list[int], int]], settings: AnswerSettings
) -> Iterator[tuple[int, GenerationResult]]:
    """Yield the answers to numbered prompts of so many tokens at most, in their order."""
    waiting: deque[tuple[int, EngineStream]] = deque()
    while True:
        # More than are answered at once, so that no slot waits for whoever reads this.
        for number, prompt, room in islice(asked, 2 * settings.parallel - len(waiting)):
            stream = engine.submit(prompt, settings.params, max_tokens=room, index=number)
            waiting.append((number, stream))
        if not waiting:
            return
        number, stream = waiting.popleft()
        yield number, stream.result


@contextmanager
def runnable_target(folder: Path, place: Path, note: Callable[[str], None]) -> Iterator[Path]:
    """Yield a folder's model as GGUF: for a while in float16 in `place`."""
    path = place / "target.gguf"
    note(f"{folder.name} is converted to float16, to answer the prompts of the data")
    try:
        convert_checkpoint(folder, path, outtype="f16", verify=False, force=True)
        yield path
    finally:
        path.unlink(missing_ok=True)


def _read(store: Path) -> dict[str, list[int]]:
    """Return the answers that are known, by key; a last line that was cut off is cut away."""
    if not store.exists():
        return {}
    data = store.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        with store.open("r+b") as file:
            file.truncate(len(whole))
    found: dict[str, list[int]] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
            found[str(record["key"])] = [int(token) for token in record["answer"]]
        except (ValueError, KeyError, TypeError) as error:
            raise MalformedFileError(f"line {number} of {store} is no answer: remove it") from error
    return found
