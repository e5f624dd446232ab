"""Examples for cascades: prompts with reference answers, or real text to continue."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.errors import FileMissingError, ModelError, OptionError
from specrun.runtime.demo import demo_questions

_PIECE = 1200  # characters of a text, about 300 tokens
_PROMPT = 0.25  # the share of them that is given
_SHORTEST = 80


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, and what came after it. An `is_answer` is what a model should say; other texts only
    went on so, among many ways to go on, and tell by their probability alone."""

    prompt: str
    reference: str
    is_answer: bool


def demo_examples(count: int) -> tuple[Example, ...]:
    """Return `count` of the embedded demo's questions with the docstrings that answer them."""
    return _spread(_of_lines(demo_questions()), count)


def read_examples(path: Path, count: int) -> tuple[Example, ...]:
    """Return at most `count` examples of a file, spread evenly over it.

    .jsonl has a "question" (or "prompt") and an "answer" (or "reference") a line. Any other file is
    text, cut at line ends into pieces, whose first quarter is the prompt.
    """
    examples = _of_lines(path) if path.suffix == ".jsonl" else _of_text(path)
    if not examples:
        raise OptionError(f"{path} is too short: a piece of text needs {_SHORTEST} characters")
    return _spread(examples, count)


def _of_lines(path: Path) -> list[Example]:
    examples = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path}, line {number} is not JSON: {error}") from error
        found = [_text_of(record, names) for names in (("question", "prompt"), _ANSWERS)]
        if not all(found):
            wanted = '"question" and "answer"'
            raise ModelError(f"{path}, line {number} has no {wanted} that are texts")
        examples.append(Example(found[0], found[1], is_answer=True))
    return examples


_ANSWERS = ("answer", "reference")


def _text_of(record: object, names: tuple[str, ...]) -> str:
    values = [record.get(name) for name in names] if isinstance(record, dict) else []
    return next((value for value in values if isinstance(value, str)), "")


def _of_text(path: Path) -> list[Example]:
    pieces: list[str] = []
    for line in _read(path).splitlines(keepends=True):
        if not pieces or len(pieces[-1]) >= _PIECE:
            pieces.append("")
        pieces[-1] += line
    examples = []
    for piece in pieces:
        # At a blank, so that no token of the prompt would have gone on.
        cut = piece.find(" ", int(_PROMPT * len(piece)))
        if len(piece) >= _SHORTEST and cut > 0:
            examples.append(Example(piece[:cut], piece[cut:], is_answer=False))
    return examples


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        place = f"byte {error.start + 1}"
        raise ModelError(f"{path} is not UTF-8 text ({place}); convert it first") from error
    except OSError as error:
        raise FileMissingError(f"{path} cannot be read: {error.strerror}") from error


def _spread(examples: Sequence[Example], count: int) -> tuple[Example, ...]:
    n = min(count, len(examples))
    return tuple(examples[index * len(examples) // n] for index in range(n))
