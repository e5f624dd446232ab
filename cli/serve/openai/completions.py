"""Completions: /v1/completions, which continues texts or tokens, streamed or whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specrun.cli.serve.body import Fields, read_body
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.infill import Gap, fill_prompt
from specrun.cli.serve.openai.asking import MOST_TOP, read_request, wants_usage
from specrun.cli.serve.openai.figures import completion_logprobs
from specrun.cli.serve.openai.form import OpenAIForm
from specrun.cli.serve.replies import Choice, begin, event_bytes, reply
from specrun.cli.serve.request import AnswerRequest, Prompt
from specrun.cli.serve.sampling import read_length
from specrun.cli.serve.service import Answer, AnswerService, Delta
from specrun.cli.serve.settings import Bounds

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
