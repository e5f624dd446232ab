"""/infill: the text of a gap, in llama-server's own form, streamed or whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specrun.bindings.models.vocabulary import FillTokens, Vocabulary
from specrun.cli.serve.body import Fields, read_body, shown
from specrun.cli.serve.errors import RequestError, openai_error
from specrun.cli.serve.openai.figures import speculation_of, timings_of, usage_of
from specrun.cli.serve.replies import Choice, begin, event_bytes, reply
from specrun.cli.serve.request import AnswerRequest
from specrun.cli.serve.sampling import read_length, read_sampling, read_speculative
from specrun.cli.serve.service import Answer, AnswerService, Delta, Finish
from specrun.runtime.engine import Engine
from specrun.runtime.round import GenerationResult

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


_MOST_FILES = 1024


async def infill(request: Request) -> Response:
    """Fill a gap."""
    fields, asked = await read_body(request, read_infill)
    answer = await begin(request, asked)
    return await reply(request, answer, InfillForm(answer), streamed=fields.flag("stream"))


def read_infill(fields: Fields, service: AnswerService) -> AnswerRequest:
    """Return what is to be filled; raises `RequestError` that names the field."""
    settings = service.settings
    for name in ("input_prefix", "input_suffix"):
        if name not in fields:
            raise RequestError(f"{name} is missing: give the text there, or an empty one", name)
    gap = Gap(
        before=fields.text("input_prefix") or "",
        behind=fields.text("input_suffix") or "",
        begun=fields.text("prompt") or "",
        others=_others(fields),
    )
    max_tokens = read_length(fields, settings)
    return AnswerRequest(
        prompts=[fill_prompt(gap, service.engine, max_tokens, "input_prefix")],
        params=read_sampling(fields, settings, service.engine.vocabulary),
        max_tokens=max_tokens,
        speculative=read_speculative(fields),
    )


def _others(fields: Fields) -> list[OtherFile]:
    others: list[OtherFile] = []
    for place, value in enumerate(fields.items("input_extra", _MOST_FILES) or ()):
        text = value.get("text") if isinstance(value, dict) else None
        name = value.get("filename", "file") if isinstance(value, dict) else None
        if not isinstance(text, str) or not isinstance(name, str):
            where = f"input_extra[{place}]"
            form = '{"filename": "a.py", "text": "..."}'
            raise RequestError(f"{where} is {shown(value)}: give {form}", where)
        others.append(OtherFile(name, text))
    return others


class InfillForm:
    """Completions as llama-server writes them itself: `content`, and whether it stops here."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def begin(self) -> bytes:
        """Return nothing."""
        return b""

    def delta(self, delta: Delta) -> bytes:
        """Return an event with a round's text; the last one says why it ended."""
        if delta.result is not None and delta.finish is not None:
            return event_bytes(self._ended(delta.text, delta.result, delta.finish))
        tokens = [event.token_id for event in delta.events]
        piece = {"index": 0, "content": delta.text, "tokens": tokens, "stop": False}
        return event_bytes(piece) if delta.text else b""

    def end(self) -> bytes:
        """Return nothing: the last event said it."""
        return b""

    def failed(self, error: RequestError) -> bytes:
        """Return the error object as an event."""
        return event_bytes(openai_error(error))

    def whole(self, choices: Sequence[Choice]) -> object:
        """Return the completion."""
        (choice,) = choices
        return self._ended(choice.result.text, choice.result, choice.finish)

    def _ended(self, content: str, result: GenerationResult, finish: Finish) -> dict[str, Any]:
        vocabulary = self._answer.service.engine.vocabulary
        said = result.token_ids
        is_end = bool(said) and said[-1] in vocabulary.end_of_generation
        usage = usage_of(self._answer)
        return {
            "index": 0,
            "content": content,
            "tokens": [],
            "stop": True,
            "stop_type": "limit" if finish != "stop" else "eos" if is_end else "word",
            "model": self._answer.service.settings.model,
            "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"],
            "tokens_cached": usage["prompt_tokens_details"]["cached_tokens"],
            "truncated": False,
            "timings": timings_of([result]),
            "specrun": speculation_of([result]),
        }
