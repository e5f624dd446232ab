"""Self-distillation: before training, the target answers the data's prompts itself.

Heads that learn what the target says, rather than what a data set says, guess it more often
(Medusa, section 2.3). Answers are kept as JSON Lines, one prompt a line, and written as they come:
an interrupted run asks only what is left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specrun.bindings.errors import MalformedFileError, ModelError
from specrun.convert import convert_checkpoint
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.engine import Engine
from specrun.runtime.results import GenerationResult
from specrun.train.data.data_file import Document
from specrun.train.data.target_tokens import TargetTokenizer, TokenSequence

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How the target answers: temperature, most tokens, a drafter, how many prompts at once."""

    temperature: float = 0.0
    longest: int = 512
    drafter: str = "prompt-lookup"
    seed: int = 0
    parallel: int = 1

    @property
    def params(self) -> SamplingParams:
        """Plain sampling from the target's own law; answers differ by their index."""
        return SamplingParams(
            temperature=self.temperature, top_k=0, top_p=1.0, min_p=0.0, seed=self.seed
        )


def answer_prompts(
    target: AbstractContextManager[Path],
    tokenizer: TargetTokenizer,
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
            f"the data ask nothing that {tokenizer.folder.name} could answer: give prompts or chats"
        )
    known = _read(store)
    rooms = [min(settings.longest, max_length - len(prompt)) for prompt in prompts]
    # The number, for a prompt that is asked twice is answered twice, with noise of its own.
    asked = (identity, settings.temperature, settings.seed)
    keys = [
        json.dumps([*asked, number, room, prompt], sort_keys=True)
        for number, (room, prompt) in enumerate(zip(rooms, prompts, strict=True))
    ]
    missing = [number for number, key in enumerate(keys) if key not in known]
    if missing:
        asked_now = [_Asked(prompts[number], rooms[number], number) for number in missing]
        options = {"n_threads": n_threads, "n_threads_batch": n_threads}
        with target as path, store.open("a", encoding="utf-8") as file:
            answers = _answers(path, settings, asked_now, max_length, options)
            for done, (number, result) in enumerate(
                zip(missing, answers, strict=True), len(keys) - len(missing) + 1
            ):
                known[keys[number]] = result.token_ids
                record = {"key": keys[number], "answer": result.token_ids, "text": result.text}
                file.write(json.dumps(record) + "\n")
                file.flush()
                if progress is not None:
                    progress(done, len(keys))
    pairs = zip(prompts, keys, strict=True)
    return [TokenSequence.of([*prompt, *known[key]], len(prompt)) for prompt, key in pairs]


class _Asked(NamedTuple):
    """A prompt, the room for its answer, and the number that keys its noise."""

    prompt: Sequence[int]
    room: int
    number: int


def _answers(
    path: Path,
    settings: AnswerSettings,
    asked: Sequence[_Asked],
    max_length: int,
    options: Mapping[str, Any],
) -> Iterator[GenerationResult]:
    """Yield the target's answers in turn; several are made at once where that is asked for."""
    n, drafter, params = settings.parallel, settings.drafter, settings.params
    if n == 1:
        with Runtime(path, drafter=drafter, n_ctx=max_length, **options) as runtime:
            for each in asked:
                yield runtime.generate(each.prompt, params, max_tokens=each.room, index=each.number)
        return
    with Engine(path, drafter, slots=n, n_ctx=n * max_length, **options) as engine:
        prompts = [each.prompt for each in asked]
        rooms, numbers = [each.room for each in asked], [each.number for each in asked]
        yield from engine.each_of_many(prompts, params, max_tokens=rooms, indices=numbers)


@contextmanager
def runnable_target(
    folder: Path, teacher: Path | None, place: Path, note: Callable[[str], None]
) -> Iterator[Path]:
    """Yield the target as GGUF: the teacher, or for a while the folder in float16 in `place`."""
    if teacher is not None:
        yield teacher
        return
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
