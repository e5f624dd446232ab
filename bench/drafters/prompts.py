"""Prompts that drafters are compared on: files of questions, and workloads that repeat or edit.

Earlier answers of a workload are those of the question file, which the embedded demo gives almost
always; for other models they are another assistant's. Every conversation can be lengthened by
earlier questions and answers.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from specrun.bench.drafters.scores import Reference
from specrun.bindings.errors import FileMissingError, ModelError, OptionError
from specrun.runtime.demo import demo_questions

Conversation = tuple[Mapping[str, str], ...]
"""Messages with "role" and "content", the last one a user's."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question of a suite: the user's `turns`, each sent after the answer to the one before.

    `references` are the known facts of the answers, turn by turn. `continued` is the text that
    models without a chat template continue, if it is not the first turn. Questions `by_length` are
    told apart by their tokens, too.
    """

    category: str
    turns: tuple[str, ...]
    references: tuple[Reference | None, ...] = ()
    continued: str = ""
    by_length: bool = False


Prompt = str | Conversation | Question

Workload = Literal["questions", "repeated", "edited", "quoted"]
WORKLOADS: tuple[Workload, ...] = ("questions", "repeated", "edited", "quoted")
"""`questions` alone; `repeated`: answered before; `edited`: an answer nearly like an
earlier one; `quoted`: a text to be repeated exactly (of which the embedded demo is not capable)."""

GENERAL_PROMPTS = (
    "Explain how a hash table works, and when it is the wrong choice.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Write a Python function that merges two sorted lists, with comments.",
    "List the planets of the solar system with one sentence about each.",
)
"""The default prompts: an explanation, a story, code and facts, as people write them."""

_KEYS = ("prompt", "question", "text")
_ALIKE = 0.8  # difflib's ratio from which a sentence is an edit of another
_SHORTEST_EDIT = 60

T = TypeVar("T")


def as_text(conversation: Conversation) -> str:
    """Return a conversation for models without a chat template: its texts, one below the other."""
    return "".join(message["content"] + "\n" for message in conversation)


def demo_prompts(count: int) -> tuple[str, ...]:
    """Return `count` of the embedded demo's questions, spread evenly over the file."""
    return tuple(spread(read_prompts(demo_questions()), count))


def read_text(path: Path) -> str:
    """Return the text of a file; raises `FileMissingError`, or `ModelError` if it is no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        place = f"byte {error.start + 1}"
        raise ModelError(f"{path} is not UTF-8 text ({place}); convert it first") from error
    except OSError as error:
        raise FileMissingError(f"{path} cannot be read: {error.strerror}") from error


def read_prompts(path: Path) -> tuple[str, ...]:
    """Return a file's prompts, one a line; of .jsonl, a "prompt", "question" or "text" a line."""
    numbered = enumerate(read_text(path).splitlines(), 1)
    lines = [(number, line) for number, line in numbered if line.strip()]
    if path.suffix == ".jsonl":
        prompts = tuple(_of_object(line, f"{path}, line {number}") for number, line in lines)
    else:
        prompts = tuple(line for _, line in lines)
    if not prompts:
        raise OptionError(f"{path} holds no prompts: write one a line")
    return prompts


def _of_object(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is not JSON: {error}") from error
    for key in _KEYS:
        found = value.get(key) if isinstance(value, dict) else None
        if isinstance(found, str) and found:
            return found
    raise ModelError(f"{where} has no {', '.join(_KEYS[:-1])} or {_KEYS[-1]} that is a text")


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return at most `count` items, spread evenly."""
    n = min(count, len(items))
    return [items[index * len(items) // n] for index in range(n)]


@dataclass(frozen=True, slots=True)
class _Pair:
    question: str
    answer: str


_Start = tuple[list[_Pair], str]
"""Earlier questions with their answers, and the question."""


def demo_workload(
    workload: Workload, count: int, context: int, count_tokens: Callable[[Conversation], int]
) -> tuple[Conversation, ...]:
    """Return `count` conversations of a workload, each lengthened to about `context` tokens.

    `context` 0 leaves them as they are; `count_tokens` returns the tokens of a conversation as the
    chat template renders it.
    """
    lines = demo_questions().read_text(encoding="utf-8").splitlines()
    pairs = [_Pair(record["question"], record["answer"]) for record in map(json.loads, lines)]
    candidates = _edits() if workload == "edited" else [_start(workload, pair) for pair in pairs]
    return tuple(
        _lengthened(start, pairs, number, context, count_tokens)
        for number, start in enumerate(spread(candidates, count))
    )


def _start(workload: Workload, pair: _Pair) -> _Start:
    question = f"Repeat: {pair.answer}" if workload == "quoted" else pair.question
    return [pair] if workload == "repeated" else [], question


def _edits() -> list[_Start]:
    """Return questions whose answer is nearly one given before: equal names of other classes."""
    from specrun.bench.drafters.corpus import Entry, build_corpus, canonical_question

    by_name: dict[str, list[Entry]] = {}
    for entry in build_corpus():
        by_name.setdefault(entry.name.rpartition(".")[2], []).append(entry)
    found: list[_Start] = []
    for own in by_name.values():
        for before, now in itertools.pairwise(own):
            texts = difflib.SequenceMatcher(None, before.sentence, now.sentence, autojunk=False)
            if (
                before.sentence != now.sentence
                and len(now.sentence) >= _SHORTEST_EDIT
                and texts.ratio() >= _ALIKE
            ):
                pair = _Pair(canonical_question(before), before.sentence)
                found.append(([pair], canonical_question(now)))
    if not found:
        raise OptionError("this Python's documentation has no two sentences that are nearly alike")
    return found


def _lengthened(
    start: _Start,
    pairs: Sequence[_Pair],
    number: int,
    context: int,
    count_tokens: Callable[[Conversation], int],
) -> Conversation:
    """Return the conversation with other questions put before its last one."""
    before, question = start
    others = [pair for pair in pairs if pair not in before and pair.question != question]
    # Every conversation begins at another place, so that they are not lengthened by the same pairs.
    others = others[17 * number % len(others) :] + others[: 17 * number % len(others)]
    own, fillers = _messages(before), []
    last = {"role": "user", "content": question}
    bare = length = count_tokens((*own, last))
    for other in others * (1 + context // 1000):
        if length >= context:
            break
        more = _messages([other])
        fillers += more
        length += count_tokens((*own, *more, last)) - bare
    return (*own, *fillers, last)


def _messages(pairs: Sequence[_Pair]) -> list[Mapping[str, str]]:
    messages: list[Mapping[str, str]] = []
    for pair in pairs:
        messages.append({"role": "user", "content": pair.question})
        messages.append({"role": "assistant", "content": pair.answer})
    return messages
