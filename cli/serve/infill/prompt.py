"""Prompts for filling a gap: what stands before it, behind it and in other files.

Other files come first, as in the repository pattern of Qwen2.5-Coder's report (arXiv 2409.12186),
or as plain text where the vocabulary has no tokens for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

from specrun.bindings.vocabulary import FillTokens, Vocabulary
from specrun.cli.serve.errors import RequestError
from specrun.runtime.engine import Engine

_LEAST_ROOM = 16  # tokens to be said where no length was asked for
_BEHIND_SHARE = 4  # one part in so many of a full context is for what stands behind the gap


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file, or a piece of one, that the model should know."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Gap:
    """The texts around what is to be written, and `begun`, what of it stands there already."""

    before: str
    behind: str
    begun: str = ""
    others: Sequence[OtherFile] = ()


def fill_prompt(gap: Gap, engine: Engine, max_tokens: int | None, field: str) -> tuple[int, ...]:
    """Return the prompt's tokens, shortened far from the gap where they do not fit.

    Raises `RequestError`, which names `field`, where the vocabulary has no tokens for that.
    """
    vocabulary = engine.vocabulary
    marks = vocabulary.fill_tokens
    if marks is None:
        problem = "this model's vocabulary has no tokens for filling in the middle"
        status = HTTPStatus.NOT_IMPLEMENTED
        raise RequestError(f"{field}: {problem}, take a code model", field, status=status)
    before, behind, begun = (
        vocabulary.tokenize(text, add_special=False) for text in (gap.before, gap.behind, gap.begun)
    )
    others = _other_tokens(gap.others, vocabulary, marks)
    first = [vocabulary.bos] if vocabulary.adds_bos and vocabulary.bos is not None else []
    longest = min(engine.n_ctx, engine.model.n_ctx_train)
    room = longest - (max_tokens or _LEAST_ROOM) - len(begun) - len(first) - 3
    if room < 0:
        problem = f"{longest} tokens of context have no room for so long an answer"
        raise RequestError(f"{problem}: lower n_predict", code="context_length_exceeded")
    n_behind = min(len(behind), max(room // _BEHIND_SHARE, room - len(before)))
    n_before = min(len(before), room - n_behind)
    n_others = min(len(others), room - n_behind - n_before)
    return (
        *first,
        *others[len(others) - n_others :],
        marks.before,
        *before[len(before) - n_before :],
        marks.behind,
        *behind[:n_behind],
        marks.gap,
        *begun,
    )


def _other_tokens(
    others: Sequence[OtherFile], vocabulary: Vocabulary, marks: FillTokens
) -> list[int]:
    tokens: list[int] = []

    def say(text: str) -> None:
        tokens.extend(vocabulary.tokenize(text, add_special=False))

    if others and marks.repository is not None:
        tokens.append(marks.repository)
        say("repository\n")
    for other in others:
        if marks.file is not None:
            tokens.append(marks.file)
            say(f"{other.name}\n{other.text}\n")
        else:
            say(f"{other.text}\n\n")
    if others and marks.file is not None:
        tokens.append(marks.file)
        say("this file\n")
    return tokens
