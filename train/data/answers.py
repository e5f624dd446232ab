"""Self-distillation: before training, the target answers the data's prompts itself."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from specrun.bindings.errors import MalformedFileError, ModelError, UnsupportedModelError
from specrun.bindings.files import DAMAGE
from specrun.convert import convert_checkpoint
from specrun.runtime import Engine, SamplingParams
from specrun.runtime.engine import EngineStream
from specrun.runtime.round import GenerationResult
from specrun.train.data.documents import Document
from specrun.train.data.tokens import TargetTokens, TokenSequence

# == Texts of a target, several at once, in a store that an interrupted run goes on with ===========
#
# The store is JSON Lines, a text a line, written as they come: what it holds is not asked again.


Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Question:
    """Tokens that the target goes on from, by at most `room` more; `key` tells it from others."""

    prompt: list[int]
    room: int
    key: str


@dataclass(frozen=True, slots=True)
class Said:
    """What the target said: tokens and text, and whether it ended by itself."""

    token_ids: list[int]
    text: str
    is_whole: bool


@dataclass(frozen=True, slots=True)
class AskingSettings:
    """How a target is asked: sampling, drafter, how many at once, and their longest text."""

    params: SamplingParams
    drafter: str
    parallel: int
    max_length: int
    n_threads: int = 0


class Answerer(Protocol):
    """What a target answers by: llama.cpp, or torch where it has a GPU."""

    def answers(
        self, asked: Sequence[tuple[int, Question]], settings: AskingSettings
    ) -> Generator[tuple[int, Said]]:
        """Yield the answers to numbered questions as they come, in whatever order."""


def ask_target(
    target: AbstractContextManager[Answerer],
    questions: Sequence[Question],
    store: Path,
    settings: AskingSettings,
    progress: Progress | None = None,
) -> list[Said]:
    """Return what the target says to each question; chance differs by a question's number.

    `target` is entered only where something is missing in `store`. Raises MalformedFileError for a
    damaged one.
    """
    known = _read(store)
    missing = [number for number, asked in enumerate(questions) if asked.key not in known]
    if missing:
        asked = [(number, questions[number]) for number in missing]
        with (
            target as answerer,
            store.open("a", encoding="utf-8") as file,
            closing(answerer.answers(asked, settings)) as coming,
        ):
            n_known = len(questions) - len(missing)
            for done, (number, said) in enumerate(coming, n_known + 1):
                key = questions[number].key
                known[key] = said
                record = {"key": key, "answer": said.token_ids, "text": said.text}
                file.write(json.dumps({**record, "whole": said.is_whole}) + "\n")
                file.flush()
                if progress is not None:
                    progress(done, len(questions))
    return [known[question.key] for question in questions]


class FileAnswerer:
    """A GGUF file, which our runtime runs: several conversations in one evaluation."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def answers(
        self, asked: Sequence[tuple[int, Question]], settings: AskingSettings
    ) -> Generator[tuple[int, Said]]:
        """Yield the answers in the order of the questions."""
        with _engine(self._path, settings) as engine:
            for number, result in _answers(engine, iter(asked), settings):
                whole = result.finish_reason == "stop"
                yield number, Said(result.token_ids, result.text, whole)


def _engine(path: Path, settings: AskingSettings) -> Engine:
    """Return an engine whose conversations have `max_length` tokens each."""

    def opened(slots: int) -> Engine:
        return Engine(
            path,
            settings.drafter,
            slots=slots,
            n_ctx=settings.max_length * slots,
            n_threads=settings.n_threads,
            n_threads_batch=settings.n_threads,
        )

    try:
        return opened(settings.parallel)
    except UnsupportedModelError:  # recurrent models answer one conversation at a time
        return opened(1)


def _answers(
    engine: Engine, asked: Iterator[tuple[int, Question]], settings: AskingSettings
) -> Iterator[tuple[int, GenerationResult]]:
    """Yield the answers to numbered questions, in their order."""
    waiting: deque[tuple[int, EngineStream]] = deque()
    while True:
        # More than are answered at once, so that no slot waits for whoever reads this.
        for number, question in islice(asked, 2 * settings.parallel - len(waiting)):
            stream = engine.submit(
                question.prompt, settings.params, max_tokens=question.room, index=number
            )
            waiting.append((number, stream))
        if not waiting:
            return
        number, stream = waiting.popleft()
        yield number, stream.result


def _read(store: Path) -> dict[str, Said]:
    """Return what is known, by key; a last line that was cut off is cut away."""
    if not store.exists():
        return {}
    data = store.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        with store.open("r+b") as file:
            file.truncate(len(whole))
    found: dict[str, Said] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
            token_ids = [int(token) for token in record["answer"]]
            said = Said(token_ids, str(record.get("text", "")), bool(record.get("whole", True)))
            found[str(record["key"])] = said
        except DAMAGE as error:
            raise MalformedFileError(f"line {number} of {store} is no answer: remove it") from error
    return found


# == Answers to the data's prompts (Medusa, section 2.3) ===========================================
#
# Heads that learn what the target says, rather than what a data set says, guess it more often
# (Medusa, section 2.3).


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
    target: AbstractContextManager[Answerer],
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

    `target` is entered only where an answer is missing in `store`. `identity` names its weights:
    others are asked again. Texts that ask nothing, and prompts that leave no room for an answer
    within `max_length` tokens, are left out. Raises ModelError where none is left,
    MalformedFileError for a damaged `store`.
    """
    found = map(tokenizer.prompt, documents)
    prompts = [prompt for prompt in found if prompt and len(prompt) < max_length - 1]
    if not prompts:
        raise ModelError(
            f"the data ask nothing that {tokenizer.path.name} could answer: give prompts or chats"
        )
    # The number, for a prompt that is asked twice is answered twice, with noise of its own.
    how = (identity, settings.temperature, settings.seed)
    questions = []
    for number, prompt in enumerate(prompts):
        room = min(settings.longest, max_length - len(prompt))
        key = json.dumps([*how, number, room, prompt], sort_keys=True)
        questions.append(Question(prompt, room, key))
    asking = AskingSettings(
        settings.params, settings.drafter, settings.parallel, max_length, n_threads
    )
    answers = ask_target(target, questions, store, asking, progress)
    pairs = zip(prompts, answers, strict=True)
    return [TokenSequence.of([*prompt, *said.token_ids], len(prompt)) for prompt, said in pairs]


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


@contextmanager
def converted_answerer(
    folder: Path, place: Path, note: Callable[[str], None]
) -> Iterator[FileAnswerer]:
    """Yield what answers for a folder: its model as GGUF, as of `runnable_target`."""
    with runnable_target(folder, place, note) as path:
        yield FileAnswerer(path)
