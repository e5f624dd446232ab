"""Replies of OpenAI's APIs: what chat completions and completions share, streamed or whole."""

from __future__ import annotations

from typing import Any

from specrun.cli.serve.errors import RequestError, openai_error
from specrun.cli.serve.openai.figures import speculation_of, timings_of, usage_of
from specrun.cli.serve.replies import event_bytes
from specrun.cli.serve.service import Answer

_DONE = b"data: [DONE]\n\n"
"""The end of OpenAI's streams."""


class OpenAIForm:
    """The reply to an answer: how it begins and ends, and what it says of the whole.

    `prefix` begins its id, `kind` is the object that OpenAI calls it. With `with_usage` a stream
    ends with a chunk about usage.
    """

    def __init__(self, answer: Answer, prefix: str, kind: str, *, with_usage: bool) -> None:
        self._answer = answer
        self._with_usage = with_usage
        self._begun: set[int] = set()
        self._common = {
            "id": f"{prefix}-{answer.id}",
            "object": kind,
            "created": answer.created,
            "model": answer.service.settings.model,
        }

    def begin(self) -> bytes:
        """Return nothing: roles, and prompts that are echoed, come with the first deltas."""
        return b""

    def end(self) -> bytes:
        """Return the last chunk, about the whole answer, if it was asked for."""
        if not self._with_usage:
            return _DONE
        return event_bytes({**self._common, "choices": [], **self._summary()}) + _DONE

    def failed(self, error: RequestError) -> bytes:
        """Return the error object as an event."""
        return event_bytes(openai_error(error))

    def _summary(self) -> dict[str, Any]:
        results = self._answer.results.values()
        return {
            "usage": usage_of(self._answer),
            "timings": timings_of(results),
            "specrun": speculation_of(results),
        }
