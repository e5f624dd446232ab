"""Messages as Anthropic writes them: blocks of text, thinking and tool use, whole or as events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from specrun.cli.serve.errors import RequestError, anthropic_error
from specrun.cli.serve.openai.figures import speculation_of, usage_of
from specrun.cli.serve.replies import Choice, event_bytes
from specrun.cli.serve.service import Answer, Delta, Finish
from specrun.runtime.chat import CallBegun, Content, MoreArguments, Part, Reasoning
from specrun.runtime.round import GenerationResult

Block = dict[str, Any]


class MessageForm:
    """A message, whole or as named events: each block begins, grows and ends before the next."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._blocks = 0
        self._open: type[Content] | type[Reasoning] | type[CallBegun] | None = None
        self._last: tuple[GenerationResult, Finish] | None = None

    def _message(self, content: Sequence[Block], reason: str | None, stop: str | None) -> Block:
        return {
            "id": f"msg_{self._answer.id}",
            "type": "message",
            "role": "assistant",
            "model": self._answer.service.settings.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": self._usage(),
        }

    # -- whole -------------------------------------------------------------------------------------

    def whole(self, choices: Sequence[Choice]) -> object:
        """Return the message."""
        (choice,) = choices
        reply = choice.reply
        content: list[Block] = []
        if reply.reasoning:
            content.append(_thinking(reply.reasoning))
        if reply.content or not reply.calls:
            content.append({"type": "text", "text": reply.content})
        content += [_tool_use(call.name, _as_object(call.arguments)) for call in reply.calls]
        reason, stop = self._ending(choice.result, choice.finish)
        message = self._message(content, reason, stop)
        return {**message, "specrun": speculation_of(self._answer.results.values())}

    # -- as events ---------------------------------------------------------------------------------

    def begin(self) -> bytes:
        """Return the event that begins the message."""
        return _event("message_start", message=self._message([], None, None))

    def delta(self, delta: Delta) -> bytes:
        """Return the events of a round's parts."""
        if delta.result is not None and delta.finish is not None:
            self._last = delta.result, delta.finish
        return b"".join([self._part(part) for part in delta.parts])

    def end(self) -> bytes:
        """Return the events that end the last block and the message."""
        empty = b"" if self._blocks else self._part(Content(""))
        assert self._last is not None  # the service tells how every choice ended
        reason, stop = self._ending(*self._last)
        return (
            empty
            + self._close()
            + _event(
                "message_delta",
                delta={"stop_reason": reason, "stop_sequence": stop},
                usage=self._usage(),
                specrun=speculation_of(self._answer.results.values()),
            )
            + _event("message_stop")
        )

    def failed(self, error: RequestError) -> bytes:
        """Return the error object as an event."""
        return event_bytes(anthropic_error(error), "error")

    def _part(self, part: Part) -> bytes:
        if isinstance(part, CallBegun):
            return self._begin_block(CallBegun, _tool_use(part.name, {}))
        if isinstance(part, MoreArguments):
            return self._grow({"type": "input_json_delta", "partial_json": part.text})
        if isinstance(part, Reasoning):
            begun = b"" if self._open is Reasoning else self._begin_block(Reasoning, _thinking(""))
            return begun + self._grow({"type": "thinking_delta", "thinking": part.text})
        empty = {"type": "text", "text": ""}
        begun = b"" if self._open is Content else self._begin_block(Content, empty)
        return begun + self._grow({"type": "text_delta", "text": part.text})

    def _begin_block(
        self, kind: type[Content] | type[Reasoning] | type[CallBegun], block: Block
    ) -> bytes:
        closed = self._close()
        self._open = kind
        self._blocks += 1
        return closed + _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _grow(self, delta: Block) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._blocks - 1)

    # -- what both have ----------------------------------------------------------------------------

    def _ending(self, result: GenerationResult, finish: Finish) -> tuple[str, str | None]:
        """Return Anthropic's reason of the end, and the stop sequence that came."""
        if finish == "tool_calls":
            return "tool_use", None
        if finish == "abort":  # it may be sent back, and goes on
            return "pause_turn", None
        if finish == "length":
            most = self._answer.request.max_tokens
            is_most = most is not None and result.usage.completion_tokens >= most
            return "max_tokens" if is_most else "model_context_window_exceeded", None
        stop = self._stop_sequence(result)
        return ("end_turn", None) if stop is None else ("stop_sequence", stop)

    def _stop_sequence(self, result: GenerationResult) -> str | None:
        """Return the stop sequence that ended the answer: its tokens have it, its text has not."""
        vocabulary = self._answer.service.engine.vocabulary
        said = result.token_ids
        if not said or said[-1] in vocabulary.end_of_generation:
            return None
        rest = vocabulary.detokenize(said)[len(result.text) :]
        return next((stop for stop in self._answer.request.params.stop if stop in rest), None)

    def _usage(self) -> dict[str, int]:
        usage = usage_of(self._answer)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _thinking(text: str) -> Block:
    # Signed are thoughts that only their server may read: these are anyone's.
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(name: str, given: object) -> Block:
    return {
        "type": "tool_use",
        "id": f"toolu_{secrets.token_hex(12)}",
        "name": name,
        "input": given,
    }


def _as_object(arguments: str) -> object:
    """Return the arguments of a call; {} for one that was cut short."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _event(kind: str, **fields: object) -> bytes:
    return event_bytes({"type": kind, **fields}, kind)
