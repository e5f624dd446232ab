"""Responses as items of reasoning, text and calls, whole or as events that begin, grow and end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrun.cli.serve.body import Fields
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.openai.figures import speculation_of, timings_of, usage_of
from specrun.cli.serve.replies import Choice, event_bytes
from specrun.cli.serve.service import Answer, Delta, Finish
from specrun.runtime.chat import CallBegun, Content, MoreArguments, Part, Reasoning

Item = dict[str, Any]
_ECHOED = ("instructions", "max_output_tokens", "temperature", "top_p", "metadata", "user")
"""Fields of a request that a response repeats."""


class ResponseForm:
    """A response, whole or as numbered events."""

    def __init__(self, answer: Answer, fields: Fields) -> None:
        self._answer = answer
        self._fields = fields
        self._items: list[Item] = []
        self._is_open = False
        self._number = 0
        self._reasoning = ""
        self._finish: Finish | None = None

    # -- whole -------------------------------------------------------------------------------------

    def whole(self, choices: Sequence[Choice]) -> object:
        """Return the response object."""
        (choice,) = choices
        reply = choice.reply
        parts: list[Part] = [Reasoning(reply.reasoning)] if reply.reasoning else []
        if reply.content or not reply.calls:
            parts.append(Content(reply.content))
        for index, call in enumerate(reply.calls):
            parts += [CallBegun(index, call.name), MoreArguments(index, call.arguments)]
        for part in parts:
            self._part(part)
        self._finish = choice.finish
        self._close()
        return self._response(self._status())

    # -- as events ---------------------------------------------------------------------------------

    def begin(self) -> bytes:
        """Return the events that begin the response."""
        response = self._response("in_progress")
        return self._event("created", response=response) + self._event(
            "in_progress", response=response
        )

    def delta(self, delta: Delta) -> bytes:
        """Return the events of a round's parts."""
        if delta.finish is not None:
            self._finish = delta.finish
        return b"".join([self._part(part) for part in delta.parts])

    def end(self) -> bytes:
        """Return the events that end the last item and the response."""
        empty = b"" if self._items else self._part(Content(""))
        closed = self._close()
        status = self._status()
        return empty + closed + self._event(status, response=self._response(status))

    def failed(self, error: RequestError) -> bytes:
        """Return the event of a response that failed."""
        problem = {"code": error.code or "server_error", "message": str(error)}
        response = {**self._response("failed"), "error": problem}
        return self._event("failed", response=response)

    def _event(self, kind: str, **fields: object) -> bytes:
        kind = f"response.{kind}"
        payload = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event_bytes(payload, kind)

    # -- items -------------------------------------------------------------------------------------

    def _part(self, part: Part) -> bytes:
        if isinstance(part, CallBegun):
            return self._begin_item(self._call(part))
        kind = self._items[-1]["type"] if self._is_open else None
        begun = b""
        if isinstance(part, Reasoning):
            self._reasoning += part.text
            if kind != "reasoning":
                item = {"type": "reasoning", "id": self._id("rs"), "summary": [], "content": []}
                begun = self._begin_item(item) + self._begin_text("reasoning_text")
        elif isinstance(part, Content) and kind != "message":
            item = {"type": "message", "id": self._id("msg"), "role": "assistant", "content": []}
            begun = self._begin_item(item) + self._begin_text("output_text")
        return begun + self._grow(part.text)

    def _call(self, part: CallBegun) -> Item:
        return {
            "type": "function_call",
            "id": self._id("fc"),
            "call_id": self._answer.request.plan.new_id(),
            "name": part.name,
            "arguments": "",
        }

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._answer.id}{len(self._items)}"

    def _begin_item(self, item: Item) -> bytes:
        closed = self._close()
        self._items.append({**item, "status": "in_progress"})
        self._is_open = True
        return closed + self._event("output_item.added", **self._place(), item=self._items[-1])

    def _begin_text(self, kind: str) -> bytes:
        part: Item = {"type": kind, "text": ""}
        if kind == "output_text":
            part |= {"annotations": [], "logprobs": []}
        self._items[-1]["content"].append(part)
        return self._event("content_part.added", **self._place(), **self._of_item(), part=part)

    def _grow(self, text: str) -> bytes:
        item = self._items[-1]
        if item["type"] == "function_call":
            item["arguments"] += text
            where = {**self._place(), "item_id": item["id"]}
            return self._event("function_call_arguments.delta", **where, delta=text)
        part = item["content"][0]
        part["text"] += text
        where = {**self._place(), **self._of_item()}
        if part["type"] == "output_text":
            where["logprobs"] = []
        return self._event(f"{part['type']}.delta", **where, delta=text)

    def _close(self) -> bytes:
        """Return the events that end the item that is open."""
        if not self._is_open:
            return b""
        self._is_open = False
        item, place = self._items[-1], self._place()
        is_cut = self._finish in ("length", "abort")  # the last item's finish is known by then
        item["status"] = "incomplete" if is_cut else "completed"
        if item["type"] == "function_call":
            where = {**place, "item_id": item["id"], "name": item["name"]}
            done = self._event("function_call_arguments.done", **where, arguments=item["arguments"])
        else:
            part, where = item["content"][0], {**place, **self._of_item()}
            more: Item = {"logprobs": []} if part["type"] == "output_text" else {}
            done = self._event(f"{part['type']}.done", **where, **more, text=part["text"])
            done += self._event("content_part.done", **where, part=part)
        return done + self._event("output_item.done", **place, item=item)

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._items) - 1}

    def _of_item(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "content_index": 0}

    # -- the response ------------------------------------------------------------------------------

    def _status(self) -> str:
        return "incomplete" if self._finish in ("length", "abort") else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        answer, get = self._answer, self._fields.get
        is_over = status not in ("in_progress", "failed")
        results = answer.results.values()
        counts = {"timings": timings_of(results), "specrun": speculation_of(results)}
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": answer.created,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "model": answer.service.settings.model,
            "output": list(self._items) if is_over else [],
            **{name: get(name) for name in _ECHOED},
            "parallel_tool_calls": get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "text": get("text") or {"format": {"type": "text"}},
            "tool_choice": get("tool_choice") or "auto",
            "tools": get("tools") or [],
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            **(counts if is_over else {}),
        }

    def _usage(self) -> dict[str, Any]:
        usage = usage_of(self._answer)
        tokenize = self._answer.service.engine.vocabulary.tokenize
        n_thought = len(tokenize(self._reasoning, add_special=False))
        drafted = usage["completion_tokens_details"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": n_thought, **drafted},
            "total_tokens": usage["total_tokens"],
        }
