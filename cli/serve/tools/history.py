"""Messages with tool calls in the form that chat templates read, whichever API they came by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from specrun.cli.serve.body import shown
from specrun.cli.serve.errors import RequestError

Message = dict[str, Any]
_MOST_CALLS = 128


def for_template(messages: Sequence[Message], id_length: int | None = None) -> list[Message]:
    """Return the messages with their calls' arguments as objects and results with their names.

    Templates write arguments as JSON themselves; a text would be quoted twice. Ids that a template
    takes in one length only, as Mistral's do, are replaced by digests of theirs.
    """
    names: dict[str, str] = {}
    made: list[Message] = []
    for place, message in enumerate(messages):
        given = message.get("tool_calls")
        if not given:  # templates ask whether there are some
            made.append(_result(message, names, id_length))
            continue
        field = f"messages[{place}].tool_calls"
        if not isinstance(given, list) or len(given) > _MOST_CALLS:
            raise RequestError(f"{field} is {shown(given)}: give a list of calls", field)
        calls = [_call(each, f"{field}[{k}]") for k, each in enumerate(given)]
        for call in calls:
            names[call["id"]] = call["function"]["name"]
            call["id"] = _fitting(call["id"], id_length)
        made.append({**message, "tool_calls": calls})
    return made


def _result(message: Message, names: Mapping[str, str], id_length: int | None) -> Message:
    own = {key: value for key, value in message.items() if key != "tool_calls"}
    call_id = own.get("tool_call_id")
    if own.get("role") != "tool" or not isinstance(call_id, str):
        return own
    if call_id in names:
        own.setdefault("name", names[call_id])
    return {**own, "tool_call_id": _fitting(call_id, id_length)}


def _call(value: object, field: str) -> Message:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict) or not isinstance(name, str):
        form = '{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{}"}}'
        raise RequestError(f"{field} is {shown(value)}: give {form}", field)
    arguments = _object(function.get("arguments"), f"{field}.function.arguments")
    call_id = value.get("id")
    return {
        "id": call_id if isinstance(call_id, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _object(arguments: object, field: str) -> Message:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}  # of a call that was cut short, say
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise RequestError(f"{field} is {shown(arguments)}: give a JSON object as a text", field)
    return arguments


def _fitting(call_id: str, length: int | None) -> str:
    """Return an id of that many letters and digits: the same for the same one."""
    if length is None or (len(call_id) == length and call_id.isalnum() and call_id.isascii()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:length]
