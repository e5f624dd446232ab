"""Prompts that drafters are compared on: files of questions, and workloads that repeat or edit.

Earlier answers of a workload are those of the question file, which the embedded demo gives almost
always; for other models they are another assistant's. Every conversation can be lengthened by
earlier questions and answers.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

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
    if path.suffix == ".jsonl":
        prompts = tuple(_prompt(value, where) for value, where in read_json_lines(path))
    else:
        prompts = tuple(filter(str.strip, read_text(path).splitlines()))
    if not prompts:
        raise OptionError(f"{path} holds no prompts: write one a line")
    return prompts


def read_json_lines(path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the values of JSON lines, each with its place; raises `ModelError` that names it."""
    return json_lines(read_text(path), path)


def json_lines(text: str, path: Path) -> Iterator[tuple[Any, str]]:
    """Yield the values of a file's JSON lines, given its text; see `read_json_lines`."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield read_json(line, f"{path}, line {number}"), f"{path}, line {number}"


def read_json(text: str, where: str) -> Any:  # noqa: ANN401 - any JSON
    """Return the value of a JSON text; raises `ModelError` that names its place."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is not JSON: {error}") from error


def first_text(value: object, names: Sequence[str]) -> str:
    """Return the first of the fields that is a text; "" if none is."""
    found = [value.get(name) for name in names] if isinstance(value, dict) else []
    return next((text for text in found if isinstance(text, str) and text), "")


def _prompt(value: object, where: str) -> str:
    found = first_text(value, _KEYS)
    if not found:
        raise ModelError(f"{where} has no {', '.join(_KEYS[:-1])} or {_KEYS[-1]} that is a text")
    return found


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return at most `count` items, spread evenly."""
    n = min(count, len(items))
    return [items[index * len(items) // n] for index in range(n)]


class Pair(NamedTuple):
    """A question with its answer."""

    question: str
    answer: str


_Start = tuple[list[Pair], str]
"""Earlier questions with their answers, and the question."""


def demo_pairs() -> list[Pair]:
    """Return all of the embedded demo's questions with their answers."""
    return [
        Pair(record["question"], record["answer"])
        for record, _ in read_json_lines(demo_questions())
    ]


def demo_workload(
    workload: Workload, count: int, context: int, count_tokens: Callable[[Conversation], int]
) -> tuple[Conversation, ...]:
    """Return `count` conversations of a workload, each lengthened to about `context` tokens.

    `context` 0 leaves them as they are; `count_tokens` returns the tokens of a conversation as the
    chat template renders it.
    """
    pairs = demo_pairs()
    candidates = _edits() if workload == "edited" else [_start(workload, pair) for pair in pairs]
    return tuple(
        _lengthened(start, pairs, number, context, count_tokens)
        for number, start in enumerate(spread(candidates, count))
    )


def _start(workload: Workload, pair: Pair) -> _Start:
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
                pair = Pair(canonical_question(before), before.sentence)
                found.append(([pair], canonical_question(now)))
    if not found:
        raise OptionError("this Python's documentation has no two sentences that are nearly alike")
    return found


def _lengthened(
    start: _Start,
    pairs: Sequence[Pair],
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


def _messages(pairs: Sequence[Pair]) -> list[Mapping[str, str]]:
    messages: list[Mapping[str, str]] = []
    for pair in pairs:
        messages.append({"role": "user", "content": pair.question})
        messages.append({"role": "assistant", "content": pair.answer})
    return messages
