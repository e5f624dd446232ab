"""Completions of texts and tokens: /v1/completions, and /infill, which fills a gap in a text."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

from msgspec import Meta, Struct

from specrun.bench.text_scores import TokenScore
from specrun.bindings.models.vocabulary import FillTokens, Vocabulary
from specrun.cli.serve.apis.chat import Likely, OpenAIBody, OpenAIForm
from specrun.cli.serve.body import wanted, wrong
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.figures import speculation_of, timings_of, usage_of
from specrun.cli.serve.replies import ReplyForm, answering, event_bytes
from specrun.cli.serve.sampling import AnswerBody, answer_request, length_of, with_settings
from specrun.cli.serve.service import (
    AnswerRequest,
    AnswerService,
    Delta,
    Ending,
    Prompt,
    ServedAnswer,
)
from specrun.runtime.engine import Engine
from specrun.runtime.round import TokenEvent

_PROMPTS = "a text, token ids, or a list of either"
GivenPrompts = Annotated[str | list[int | str | list[int]] | None, wanted(_PROMPTS, whole=True)]
"""Prompts of a body: a text, a list of texts, tokens, or a list of lists of tokens."""
_MOST_PROMPTS = 128
_LEAST_ROOM = 16  # tokens of the answer if no length was requested
_BEHIND_SHARE = 4  # one part in so many of a full context is for the text behind the gap

# -- Requests --------------------------------------------------------------------------------------


@with_settings
class CompletionBody(OpenAIBody, kw_only=True):
    """The body of a completion."""

    prompt: GivenPrompts = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Likely | None = None
    parse_special: bool | None = None
    add_special_tokens: bool | None = None


class OtherFile(Struct):
    """A file, or a piece of one, that the model should read."""

    text: str
    filename: str = "file"


_Other = Annotated[OtherFile, wanted('{"filename": "a.py", "text": "..."}', whole=True)]
_Others = Annotated[list[_Other], Meta(max_length=1024)]


@with_settings
class InfillBody(AnswerBody, kw_only=True):
    """The body of /infill; `prompt` is the begin of the text in the gap."""

    input_prefix: str | None = None
    input_suffix: str | None = None
    prompt: str | None = None
    input_extra: _Others | None = None


def completion_request(body: CompletionBody, service: AnswerService) -> AnswerRequest:
    """Return the request of a body; raises `RequestError` that names the field."""
    prompts = prompts_of(body.prompt, "prompt")
    if body.suffix:
        max_tokens = length_of(body, service.settings)
        for place, prompt in enumerate(prompts):
            if not isinstance(prompt, str):
                raise RequestError("suffix needs a prompt that is a text, not tokens", "suffix")
            gap = Gap(prompt, body.suffix)
            prompts[place] = fill_prompt(gap, service.engine, max_tokens, "suffix")
    request = answer_request(
        body, service, prompts=prompts, n=body.choices(), top_logprobs=body.logprobs
    )
    return dataclasses.replace(
        request,
        parse_special=body.parse_special is not False,
        adds_bos=body.add_special_tokens is not False,
        scores_prompts=bool(body.echo) and request.logprobs,
    )


def prompts_of(given: str | list[int | str | list[int]] | None, field: str) -> list[Prompt]:
    """Return the prompts in a field; raises `RequestError` that names it."""
    if given is None:
        raise RequestError(f"{field} is missing: give {_PROMPTS}", field)
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if kinds == {int}:
        return [tuple(given)]  # type: ignore[arg-type]
    if int in kinds or [] in given:
        raise wrong(field, given, _PROMPTS)
    if not 0 < len(given) <= _MOST_PROMPTS:
        problem = f"{field} has {len(given)} items: give 1 to {_MOST_PROMPTS}"
        raise RequestError(problem, field)
    return [each if isinstance(each, str) else tuple(each) for each in given]  # type: ignore[arg-type]


def infill_request(body: InfillBody, service: AnswerService) -> AnswerRequest:
    """Return the completion that fills a gap; raises `RequestError` that names the field."""
    before, behind = body.input_prefix, body.input_suffix
    for name, text in (("input_prefix", before), ("input_suffix", behind)):
        if text is None:
            raise RequestError(f"{name} is missing: give the text there, or an empty one", name)
    gap = Gap(before or "", behind or "", body.prompt or "", body.input_extra or ())
    max_tokens = length_of(body, service.settings)
    prompt = fill_prompt(gap, service.engine, max_tokens, "input_prefix")
    return answer_request(body, service, prompts=[prompt])


# -- Prompts of gaps -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gap:
    """The texts around a gap, and `begun`, the begin of the text in it."""

    before: str
    behind: str
    begun: str = ""
    others: Sequence[OtherFile] = ()


def fill_prompt(gap: Gap, engine: Engine, max_tokens: int | None, field: str) -> tuple[int, ...]:
    """Return the prompt's tokens, shortened far from the gap if they do not fit.

    Raises `RequestError`, which names `field`, if the vocabulary has no tokens for that.
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

    def add(text: str) -> None:
        tokens.extend(vocabulary.tokenize(text, add_special=False))

    if others and marks.repository is not None:
        tokens.append(marks.repository)
        add("repository\n")
    for other in others:
        if marks.file is not None:
            tokens.append(marks.file)
            add(f"{other.filename}\n{other.text}\n")
        else:
            add(f"{other.text}\n\n")
    if others and marks.file is not None:
        tokens.append(marks.file)
        add("this file\n")
    return tokens


# -- Replies ---------------------------------------------------------------------------------------


class CompletionForm(OpenAIForm):
    """Completions and their chunks, as OpenAI writes them; echoed prompts may have scores, too."""

    id_prefix, kind = "cmpl", "text_completion"

    def __init__(self, answer: ServedAnswer, body: CompletionBody) -> None:
        super().__init__(answer, body)
        request, vocabulary = answer.request, self._vocabulary
        self._lengths = [0] * len(answer.streams)  # in characters, which logprobs count
        self._echoed = [""] * len(answer.streams)  # the prompt's text of each choice
        self._scored: list[Logprobs] = [Logprobs() for _ in answer.streams]
        if body.echo:
            prompts = [prompt for prompt in request.prompts for _ in range(request.n)]
            for choice, prompt in enumerate(prompts):
                names = isinstance(prompt, str)
                text = prompt if isinstance(prompt, str) else vocabulary.detokenize([*prompt])
                self._echoed[choice] = text
                if answer.scores:
                    scores = answer.scores[choice // request.n]
                    self._scored[choice] = prompt_logprobs(scores, text, vocabulary, names=names)

    def delta(self, delta: Delta) -> bytes:
        """Return a chunk with a round's text; at the end of a choice one with the reason."""
        text, events, logprobs = delta.text, b"", None
        is_first = delta.index not in self._begun
        if self._answer.request.logprobs:
            start = self._lengths[delta.index]
            logprobs = self._logprobs(delta.index, delta.events, start, with_prompt=is_first)
        if is_first:
            self._begun.add(delta.index)
            text = self._echoed[delta.index] + text
        if text or (logprobs is not None and logprobs.tokens):
            events = self._chunk(delta.index, text, logprobs=logprobs)
        if delta.ending is not None:
            events += self._chunk(delta.index, "", finish=delta.ending.finish)
        return events

    def _logprobs(
        self, index: int, events: Sequence[TokenEvent], start: int, *, with_prompt: bool
    ) -> Logprobs:
        if not self._answer.scores:  # else clients count: the prompt's tokens, and all others
            ends = self._vocabulary.end_of_generation
            events = [event for event in events if event.token_id not in ends]
        if not with_prompt:
            return completion_logprobs(events, self._vocabulary, start)
        start += len(self._echoed[index])
        return self._scored[index] + completion_logprobs(events, self._vocabulary, start)

    def _chunk(
        self, index: int, text: str, *, logprobs: Logprobs | None = None, finish: str | None = None
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "text": text, "finish_reason": finish}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        self._lengths[index] += len(text)
        return event_bytes({**self._common, "choices": [choice]})

    def whole(self, choices: Sequence[Delta]) -> object:
        """Return a completion."""
        listed: list[dict[str, Any]] = []
        for choice in choices:
            assert choice.ending is not None
            index, logprobs = choice.index, None
            if self._answer.request.logprobs:
                logprobs = self._logprobs(index, choice.events, 0, with_prompt=True)
            text = self._echoed[index] + choice.text
            entry = {"index": index, "text": text, "logprobs": logprobs}
            listed.append({**entry, "finish_reason": choice.ending.finish})
        return {**self._common, "choices": listed, **self._summary()}


class Logprobs(Struct):
    """The `logprobs` of a completion: a list each, with an entry for each token."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def __add__(self, other: Logprobs) -> Logprobs:
        return Logprobs(
            self.tokens + other.tokens,
            self.token_logprobs + other.token_logprobs,
            self.top_logprobs + other.top_logprobs,
            self.text_offset + other.text_offset,
        )


def prompt_logprobs(
    scores: Sequence[TokenScore], text: str, vocabulary: Vocabulary, *, names: bool
) -> Logprobs:
    """Return the `logprobs` of a prompt's tokens; nothing predicts the first one.

    `names`: control tokens stand in the text by their names.
    """
    tokens = [score.token for score in scores]
    pieces = [*map(vocabulary.named, tokens)] if names else vocabulary.pieces(tokens)
    if names and not text.startswith(pieces[0].decode("utf-8", "replace")):
        pieces[0] = vocabulary.piece(tokens[0])  # a bos that was added
    return Logprobs(
        [vocabulary.label(token) for token in tokens],
        [score.logprob for score in scores],
        [
            None if place == 0 else {vocabulary.label(token): value for token, value in score.top}
            for place, score in enumerate(scores)
        ],
        [*_offsets(text.encode("utf-8", "replace"), pieces)],
    )


def _offsets(data: bytes, pieces: Sequence[bytes]) -> Iterator[int]:
    """Yield the character of a text at which each of its tokens begins.

    A tokenizer may have put a space before the text, which is no part of it.
    """
    joined = b"".join(pieces)
    place = len(data) - len(joined) if joined.endswith(data) else 0
    count = at = 0
    for piece in pieces:
        begin = min(max(place, 0), len(data))
        # All bytes but those that go on with a character.
        count += sum(byte & 0xC0 != 0x80 for byte in data[at:begin])
        at = begin
        yield count
        place += len(piece)


def completion_logprobs(
    events: Sequence[TokenEvent], vocabulary: Vocabulary, start: int
) -> Logprobs:
    """Return the `logprobs` of a completion's tokens, whose text begins at character `start`."""
    offsets = itertools.accumulate((len(event.text) for event in events), initial=start)
    return Logprobs(
        [vocabulary.label(event.token_id) for event in events],
        [event.logprob for event in events],
        [
            {vocabulary.label(token): value for token, value in event.top_logprobs()}
            for event in events
        ],
        [*offsets][: len(events)],
    )


class InfillForm(ReplyForm):
    """Completions as llama-server writes them itself: `content`, and whether it stops here."""

    def delta(self, delta: Delta) -> bytes:
        """Return an event with a round's text; the last one has the reason of the end."""
        if delta.ending is not None:
            return event_bytes(self._ended(delta.text, delta.ending))
        tokens = [event.token_id for event in delta.events]
        piece = {"index": 0, "content": delta.text, "tokens": tokens, "stop": False}
        return event_bytes(piece) if delta.text else b""

    def whole(self, choices: Sequence[Delta]) -> object:
        """Return the completion."""
        (choice,) = choices
        assert choice.ending is not None
        return self._ended(choice.text, choice.ending)

    def _ended(self, content: str, ending: Ending) -> dict[str, Any]:
        result, finish = ending
        ends = self._answer.service.engine.vocabulary.end_of_generation
        is_end = bool(result.token_ids) and result.token_ids[-1] in ends
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
            "timings": timings_of(self._answer),
            "specrun": speculation_of(self._answer),
        }


completions = answering(CompletionBody, completion_request, CompletionForm)
infill = answering(InfillBody, infill_request, InfillForm)
