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

from specrun.bindings.errors import ModelError
from specrun.convert import convert_checkpoint
from specrun.runtime import Engine, SamplingParams
from specrun.runtime.engine import GenerationStream
from specrun.train.data.documents import Document
from specrun.train.data.store import Progress, Record, kept_records
from specrun.train.data.tokens import TargetTokens, TokenSequence

# == Texts of a target, several at once, in a store that an interrupted run goes on with ===========
#
# The store is JSON Lines, a text a line, written as they come.


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, with room for at most `room` more tokens; `key` is its key in the store."""

    prompt: list[int]
    room: int
    key: str


@dataclass(frozen=True, slots=True)
class Said:
    """The target's answer: tokens and text, and whether it ended by itself."""

    token_ids: list[int]
    text: str
    is_whole: bool


@dataclass(frozen=True, slots=True)
class AskingSettings:
    """Settings of answers: sampling, drafter, number at once, and the longest text."""

    params: SamplingParams
    drafter: str
    parallel: int
    max_length: int
    n_threads: int = 0


class Answerer(Protocol):
    """A runner of the target for answers: llama.cpp, or torch."""

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
    """Return the target's text after each question; chance differs by a question's number.

    `target` is entered only if something is missing in `store`. Raises MalformedFileError for a
    damaged one.
    """

    def made(missing: list[int]) -> Generator[tuple[int, Record]]:
        asked = [(number, questions[number]) for number in missing]
        with target as answerer, closing(answerer.answers(asked, settings)) as coming:
            for number, said in coming:
                found = {"answer": said.token_ids, "text": said.text, "whole": said.is_whole}
                yield number, found

    keys = [question.key for question in questions]
    return kept_records(store, keys, made, _said, what="answer", progress=progress)


def _said(record: Record) -> Said:
    token_ids = [int(token) for token in record["answer"]]
    return Said(token_ids, str(record.get("text", "")), bool(record.get("whole", True)))


class FileAnswerer:
    """A GGUF file, which our runtime runs: several conversations in one evaluation."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def answers(
        self, asked: Sequence[tuple[int, Question]], settings: AskingSettings
    ) -> Generator[tuple[int, Said]]:
        """Yield the answers in the order of the questions."""
        n_slots, n_threads, questions = settings.parallel, settings.n_threads, iter(asked)
        waiting: deque[tuple[int, GenerationStream]] = deque()
        with Engine(
            self._path,
            settings.drafter,
            slots=n_slots,
            n_ctx=settings.max_length * n_slots,
            n_threads=n_threads,
            n_threads_batch=n_threads,
        ) as engine:
            while True:
                # More than are answered at once, so that no slot waits for the reader.
                for number, each in islice(questions, 2 * n_slots - len(waiting)):
                    stream = engine.submit(
                        each.prompt, settings.params, max_tokens=each.room, index=number
                    )
                    waiting.append((number, stream))
                if not waiting:
                    return
                number, stream = waiting.popleft()
                found = stream.result
                yield number, Said(found.token_ids, found.text, found.finish_reason == "stop")


# == Answers to the data's prompts (Medusa, section 2.3) ===========================================
#
# Heads that learn the target's answers rather than a data set's predict the target more often
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
        """Plain sampling from the target's own distribution; answers differ by their index."""
        return SamplingParams(
            temperature=self.temperature, top_k=0, top_p=1.0, min_p=0.0, seed=self.seed
        )


def asked_prompts(
    documents: Sequence[Document], tokenizer: TargetTokens, max_length: int
) -> list[list[int]]:
    """Return the prompts that leave room for an answer; raises ModelError without any."""
    found = map(tokenizer.prompt, documents)
    prompts = [prompt for prompt in found if prompt and len(prompt) < max_length - 1]
    if not prompts:
        raise ModelError(
            f"the data has no prompts for {tokenizer.path.name}: give prompts or chats"
        )
    return prompts


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
    """Return each prompt of the documents with the target's answer, which is learnt.

    `target` is entered only if an answer is missing in `store`. `identity` names its weights:
    others answer again. Texts without a question, and prompts that leave no room for an answer
    within `max_length` tokens, are left out. Raises ModelError if none is left,
    MalformedFileError for a damaged `store`.
    """
    prompts = asked_prompts(documents, tokenizer, max_length)
    # The number: a prompt that occurs twice has two answers, each with its own noise.
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
