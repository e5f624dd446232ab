"""Completions: /v1/completions, which continues texts or tokens, streamed or whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specrun.bindings.models.vocabulary import FillTokens, Vocabulary
from specrun.cli.serve.body import Fields, read_body, shown
from specrun.cli.serve.chat import MOST_TOP, read_request, wants_usage
from specrun.cli.serve.errors import RequestError, openai_error
from specrun.cli.serve.replies import (
    Choice,
    OpenAIForm,
    begin,
    completion_logprobs,
    event_bytes,
    reply,
    speculation_of,
    timings_of,
    usage_of,
)
from specrun.cli.serve.sampling import read_length, read_sampling, read_speculative
from specrun.cli.serve.service import Answer, AnswerRequest, AnswerService, Delta, Finish, Prompt
from specrun.cli.serve.settings import Bounds
from specrun.runtime.engine import Engine
from specrun.runtime.round import GenerationResult

# -- /infill: the text of a gap, in llama-server's own form, streamed or whole --------------------


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


_WANTED = "a text, token ids, or a list of either"


async def completions(request: Request) -> Response:
    """Continue prompts."""
    fields, asked = await read_body(request, read_completion)
    echo = fields.flag("echo")
    if echo and asked.logprobs:
        raise RequestError("echo has no logprobs here: those of a prompt are not computed", "echo")
    answer = await begin(request, asked)
    form = CompletionForm(answer, echo=echo, with_usage=wants_usage(fields))
    return await reply(request, answer, form, streamed=fields.flag("stream"))


def read_completion(fields: Fields, service: AnswerService) -> AnswerRequest:
    """Return what a completion request asks for; raises `RequestError` that names the field."""
    prompts = read_prompts(fields, service.settings.bounds)
    if fields.get("suffix"):
        prompts = [_with_gap(prompt, fields, service) for prompt in prompts]
    return read_request(
        fields,
        service,
        prompts=prompts,
        top_logprobs=fields.integer("logprobs", 0, MOST_TOP),
    )


def _with_gap(prompt: Prompt, fields: Fields, service: AnswerService) -> Prompt:
    """Return the prompt of a text that is to be filled between itself and the suffix."""
    if not isinstance(prompt, str):
        raise RequestError("suffix needs a prompt that is a text, not tokens", "suffix")
    gap = Gap(prompt, fields.text("suffix") or "")
    return fill_prompt(gap, service.engine, read_length(fields, service.settings), "suffix")


def read_prompts(fields: Fields, bounds: Bounds, name: str = "prompt") -> list[Prompt]:
    """Return the prompts: of a text, a list of them, tokens, or a list of lists of tokens."""
    given = fields.get(name)
    if given is None:
        raise RequestError(f"{name} is missing: give {_WANTED}", name)
    if isinstance(given, str) or _are_tokens(given):
        return [_prompt(given)]
    if not isinstance(given, list) or not all(
        isinstance(each, str) or _are_tokens(each) for each in given
    ):
        raise fields.wrong(name, _WANTED)
    if not 0 < len(given) <= bounds.prompts:
        problem = f"{name} has {len(given)} items: give 1 to {bounds.prompts}"
        raise RequestError(problem, name)
    return [_prompt(each) for each in given]


def _are_tokens(value: object) -> bool:
    """Whether this is a list of token ids."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, int) and not isinstance(each, bool) for each in value)
    )


def _prompt(value: str | list[int]) -> Prompt:
    return value if isinstance(value, str) else tuple(value)


class CompletionForm(OpenAIForm):
    """Completions and their chunks, as OpenAI writes them."""

    def __init__(self, answer: Answer, *, echo: bool = False, with_usage: bool = False) -> None:
        super().__init__(answer, "cmpl", "text_completion", with_usage=with_usage)
        self._vocabulary = answer.service.engine.vocabulary
        self._echoed = self._echoes() if echo else [""] * len(answer.streams)
        self._said = [0] * len(answer.streams)  # characters, which logprobs count

    def _echoes(self) -> list[str]:
        """Return the prompt's text of each choice."""
        answer, n = self._answer, self._answer.request.n
        given = answer.request.prompts
        texts = [
            prompt if isinstance(prompt, str) else self._vocabulary.detokenize(list(prompt))
            for prompt in given
        ]
        return [text for text in texts for _ in range(n)]

    def delta(self, delta: Delta) -> bytes:
        """Return a chunk with a round's text; at the end of a choice one that says why."""
        index, text, events = delta.index, delta.text, b""
        if index not in self._begun:
            self._begun.add(index)
            text = self._echoed[index] + text
        if text or (delta.events and self._answer.request.logprobs):
            events = self._chunk(delta, text)
        if delta.finish is not None:
            events += self._chunk(delta, "", finish=delta.finish)
        return events

    def _chunk(self, delta: Delta, text: str, *, finish: str | None = None) -> bytes:
        choice: dict[str, Any] = {"index": delta.index, "text": text, "finish_reason": finish}
        if self._answer.request.logprobs and finish is None:
            start = self._said[delta.index]
            choice["logprobs"] = completion_logprobs(delta.events, self._vocabulary, start)
        self._said[delta.index] += len(text)
        return event_bytes({**self._common, "choices": [choice]})

    def whole(self, choices: Sequence[Choice]) -> object:
        """Return a completion."""
        listed = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return {**self._common, "choices": listed, **self._summary()}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if self._answer.request.logprobs:
            logprobs = completion_logprobs(choice.events, self._vocabulary, 0)
        return {
            "index": index,
            "text": self._echoed[index] + choice.result.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish,
        }
