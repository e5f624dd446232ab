"""Messages of chat requests, with the parts that OpenAI's contents may consist of, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrun.cli.serve.body import Fields, shown
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.settings import Bounds

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_messages(fields: Fields, bounds: Bounds) -> list[dict[str, Any]]:
    """Return the messages, each with its content as a text; raises `RequestError` by place."""
    given = fields.items("messages", bounds.messages)
    if not given:
        raise RequestError("messages is missing or empty: give at least one message", "messages")
    return [_message(value, f"messages[{place}]") for place, value in enumerate(given)]


def _message(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(
            f"{where} is {shown(value)}: give an object with role and content", where
        )
    role = value.get("role")
    if role not in _ROLES:
        field = f"{where}.role"
        raise RequestError(f"{field} is {shown(role)}: give one of {', '.join(_ROLES)}", field)
    content = _content(value.get("content"), f"{where}.content", required=role != "assistant")
    # "developer" is OpenAI's newer name, which templates do not know.
    own = "system" if role == "developer" else role
    return {**value, "role": own, "content": content}


def _content(content: object, field: str, *, required: bool) -> str:
    """Return a text, the texts of several parts joined; "" for null where that is allowed."""
    if isinstance(content, str):
        return content
    if content is None and not required:
        return ""
    wanted = 'a text, or parts as {"type": "text", "text": "..."}'
    if not isinstance(content, list):
        raise RequestError(f"{field} is {shown(content)}: give {wanted}", field)
    return "".join(_texts(content, field, wanted))


def _texts(parts: Sequence[object], field: str, wanted: str) -> list[str]:
    texts: list[str] = []
    for place, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            where = f"{field}[{place}]"
            raise RequestError(
                f"{where} is {shown(kind)}, this model reads text: give {wanted}", where
            )
        texts.append(text)
    return texts
