"""The prompts that drafters are compared on.

Conversations that drafters are compared on: plain questions, and answers that repeat or edit
earlier text.

Earlier answers are those of the question file, which the embedded demo gives almost always; for
other models they are what somebody said before. Every conversation can be lengthened by earlier
questions and answers.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specrun.bindings.errors import FileMissingError, ModelError, OptionError
from specrun.runtime.demo import demo_questions

Prompt = str | tuple[Mapping[str, str], ...]
"""A text, or a conversation: messages with "role" and "content"."""


_KEYS = ("prompt", "question", "text")


def as_text(conversation: Sequence[Mapping[str, str]]) -> str:
    """Return a conversation for models without a chat template: its texts, one below the other."""
    return "".join(message["content"] + "\n" for message in conversation)


def demo_prompts(count: int) -> tuple[str, ...]:
    """Return `count` of the embedded demo's questions, spread evenly over the file."""
    return _spread(read_prompts(demo_questions()), count)


def read_prompts(path: Path) -> tuple[str, ...]:
    """Return a file's prompts: one a line, or for .jsonl the "prompt", "question" or "text" of each
    object."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{path} is not UTF-8 text (byte {error.start + 1}); convert it first"
        ) from error
    except OSError as error:
        raise FileMissingError(f"{path} cannot be read: {error.strerror}") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if path.suffix == ".jsonl":
        prompts = tuple(_of_object(line, f"{path}, line {number}") for number, line in lines)
    else:
        prompts = tuple(line for _, line in lines)
    if not prompts:
        raise OptionError(f"{path} holds no prompts: write one a line")
    return prompts


def _spread(prompts: Sequence[str], count: int) -> tuple[str, ...]:
    n = min(count, len(prompts))
    return tuple(prompts[index * len(prompts) // n] for index in range(n))


def _of_object(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ModelError(f"{where} is not JSON: {error}") from error
    for key in _KEYS:
        found = value.get(key) if isinstance(value, dict) else None
        if isinstance(found, str) and found:
            return found
    raise ModelError(f"{where} has no {', '.join(_KEYS[:-1])} or {_KEYS[-1]} that is a text")


Workload = Literal["questions", "repeated", "edited", "quoted"]
WORKLOADS: tuple[Workload, ...] = ("questions", "repeated", "edited", "quoted")
"""`questions` alone; `repeated`: asked and answered before; `edited`: an answer nearly like an
earlier one; `quoted`: a text to be repeated word for word (of which the embedded demo is not
capable)."""

Conversation = tuple[Mapping[str, str], ...]
"""Messages with "role" and "content", the last one a user's."""

_ALIKE = 0.8  # difflib's ratio from which a sentence is an edit of another
_SHORTEST_EDIT = 60


@dataclass(frozen=True, slots=True)
class _Pair:
    question: str
    answer: str


def demo_workload(
    workload: Workload, count: int, context: int, count_tokens: Callable[[Conversation], int]
) -> tuple[Conversation, ...]:
    """Return `count` conversations of a workload, each lengthened to about `context` tokens (0: as
    it is).

    `count_tokens` returns the tokens of a rendered conversation.
    """
    pairs = _pairs(demo_questions())
    if workload == "edited":
        starts = _edits(count)
    else:
        chosen = [
            pairs[index * len(pairs) // min(count, len(pairs))]
            for index in range(min(count, len(pairs)))
        ]
        starts = [_start(workload, entry) for entry in chosen]
    return tuple(
        _lengthened(start, pairs, number, context, count_tokens)
        for number, start in enumerate(starts)
    )


def _start(workload: Workload, pair: _Pair) -> tuple[list[_Pair], str]:
    """Return what was asked and answered before, and the question."""
    if workload == "repeated":
        return [pair], pair.question
    if workload == "quoted":
        return [], f"Repeat: {pair.answer}"
    return [], pair.question


def _edits(count: int) -> list[tuple[list[_Pair], str]]:
    """Return questions whose answer differs by a few words from one given before: names of
    different classes."""
    from specrun.train.family.conversations import canonical_question
    from specrun.train.family.corpus import Entry, build_corpus

    by_name: dict[str, list[Entry]] = {}
    for entry in build_corpus():
        by_name.setdefault(entry.name.rpartition(".")[2], []).append(entry)
    found: list[tuple[list[_Pair], str]] = []
    for own in by_name.values():
        for before, now in itertools.pairwise(own):
            alike = difflib.SequenceMatcher(
                None, before.sentence, now.sentence, autojunk=False
            ).ratio()
            if (
                before.sentence != now.sentence
                and len(now.sentence) >= _SHORTEST_EDIT
                and alike >= _ALIKE
            ):
                found.append(
                    ([_Pair(canonical_question(before), before.sentence)], canonical_question(now))
                )
    if not found:
        raise OptionError("this Python's documentation has no two sentences that are nearly alike")
    n = min(count, len(found))
    return [found[index * len(found) // n] for index in range(n)]


def _lengthened(
    start: tuple[list[_Pair], str],
    pairs: Sequence[_Pair],
    number: int,
    context: int,
    count_tokens: Callable[[Conversation], int],
) -> Conversation:
    """Return the conversation with other questions between what belongs to it and its last
    question."""
    before, question = start
    others = [pair for pair in pairs if pair not in before and pair.question != question]
    others = others[17 * number % len(others) :] + others[: 17 * number % len(others)]
    own, fillers = _messages(before), []
    last = {"role": "user", "content": question}
    length = count_tokens((*own, last))
    for other in others * (1 + context // 1000):
        if length >= context:
            break
        more = _messages([other])
        fillers += more
        length += count_tokens((*own, *more, last)) - count_tokens((*own, last))
    return (*own, *fillers, last)


def _messages(pairs: Sequence[_Pair]) -> list[Mapping[str, str]]:
    return [
        message
        for pair in pairs
        for message in (
            {"role": "user", "content": pair.question},
            {"role": "assistant", "content": pair.answer},
        )
    ]


def _pairs(path: Path) -> list[_Pair]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_Pair(record["question"], record["answer"]) for record in map(json.loads, lines)]
