"""/infill: the text of a gap, in llama-server's own form, streamed or whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specrun.cli.serve.body import Fields, read_body, shown
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.infill.prompt import Gap, OtherFile, fill_prompt
from specrun.cli.serve.openai.errors import error_object
from specrun.cli.serve.openai.usage import speculation_of, timings_of, usage_of
from specrun.cli.serve.replies import Choice, event_bytes, reply
from specrun.cli.serve.request import AnswerRequest
from specrun.cli.serve.sampling import read_length, read_sampling, read_speculative
from specrun.cli.serve.service import Answer, AnswerService, Delta, Finish
from specrun.runtime.results import GenerationResult

_MOST_FILES = 1024


async def infill(request: Request) -> Response:
    """Fill a gap."""
    service: AnswerService = request.app.state.service
    fields = await read_body(request, service.settings.bounds)
    answer = await service.begin(read_infill(fields, service))
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
        return event_bytes(error_object(error))

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
