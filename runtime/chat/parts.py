"""Parts of contents as texts: parts that a text model cannot read are described in words.

Clients send pictures, files, search results and blocks of tools that some server ran. The text for
the model names them; the texts within them are kept.
"""

from __future__ import annotations

import base64
import binascii
import json
import mimetypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specrun.bindings.errors import OptionError

_PLAIN = ("text", "input_text", "output_text", "summary_text", "reasoning_text")  # a type may be []
_HIDDEN = frozenset({"thinking", "redacted_thinking"})  # of an answer; they are no content
_MEDIA = {
    "image": "image",
    "audio": "audio",
    "video": "video",
    "file": "file",
    "document": "document",
    "pdf": "document",
    "container_upload": "file",
    "computer_screenshot": "screenshot",
}
_NAMES = ("title", "filename", "name", "tool_name", "server_name", "server_label", "label")
_KINDS = ("media_type", "mime_type", "mimeType", "format")
_PLACES = ("url", "file_url", "uri", "source", "file_id", "image_url", "video_url")
_HOLDERS = ("source", "file", "image_url", "input_audio", "audio", "video_url", "resource")
_ASKED = ("query", "queries", "action", "input", "arguments", "command", "code", "operation")
_WITHIN = (
    *("text", "content", "context", "output", "outputs", "results", "stdout", "stderr", "logs"),
    *("transcript", "refusal", "summary", "snippet", "error", "error_code", "tools"),
)
_MOST_SHOWN = 300  # characters of a name or an address


def content_text(content: object) -> str:
    """Return a content as one text: a text, or parts; raises `OptionError` for anything else."""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content):
        return joined(content)
    raise OptionError(f"the content of a message must be text, not {content!r}")


def joined(parts: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of parts: texts follow each other, words about others have own lines."""
    told, before = "", False
    for part in parts:
        text, plain = part_text(part), _plain_text(part) is not None
        if told and text and not (plain and before) and not told.endswith("\n"):
            told += "\n"
        told += text
        before = plain
    return told


def part_text(part: Mapping[str, Any]) -> str:
    """Return the text of a part, or a description of it, with the texts within it."""
    text = _plain_text(part)
    if text is not None:
        return text
    kind = str(part.get("type", ""))
    if kind in _HIDDEN:
        return ""
    if kind in ("refusal", "compaction") and isinstance(_first(part, ("refusal", "content")), str):
        return str(_first(part, ("refusal", "content")))
    within = [text for text in _texts_within(part) if text]
    return "\n".join([f"[{_label(part)}]", *within])


def is_malformed(part: Mapping[str, Any]) -> bool:
    """Whether a part is a text by its type, and has none."""
    return part.get("type", "text") in _PLAIN and not isinstance(part.get("text"), str)


def is_unreadable(part: Mapping[str, Any]) -> bool:
    """Whether a part has nothing that a text model can read."""
    if _plain_text(part) is not None:
        return False
    return not any(text.strip() for text in _texts_within(part)) and "refusal" not in part


def _plain_text(part: Mapping[str, Any]) -> str | None:
    text = part.get("text")
    is_plain = part.get("type", "text") in _PLAIN
    return text if is_plain and isinstance(text, str) else None


def _first(part: Mapping[str, Any], names: tuple[str, ...]) -> Any:  # noqa: ANN401 - any JSON value
    return next((part[name] for name in names if part.get(name) not in (None, "")), None)


def _media(part: Mapping[str, Any]) -> str | None:
    """Return the noun for a picture, a recording or a file; None for any other part."""
    kind = str(part.get("type", "")).removeprefix("input_").removesuffix("_url")
    return _MEDIA.get(kind)


# -- The kind of a part ----------------------------------------------------------------------------


def _label(part: Mapping[str, Any]) -> str:
    """Return a part's kind, name, type and place, as far as they are known."""
    facts: list[str] = []
    for holder in _holders(part):
        for names in (_NAMES, _KINDS, _PLACES):
            facts += [_shown(holder[name]) for name in names if isinstance(holder.get(name), str)]
        data = holder.get("file_data")
        facts += [_shown(data)] if isinstance(data, str) and data.startswith("data:") else []
    if part.get("type") == "item_reference":
        facts.append(str(part.get("id")))
    asked = _first(part, _ASKED) if _media(part) is None else None
    if asked is not None:
        text = asked if isinstance(asked, str) else json.dumps(asked, ensure_ascii=False)
        facts.append(text)
    noun = _media(part) or str(part.get("type") or "a part of another kind").replace("_", " ")
    known = ", ".join(dict.fromkeys(fact for fact in facts if fact))
    return f"{noun}: {known}" if known else noun


def _holders(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a part, and the objects in it that describe it."""
    yield part
    for name in _HOLDERS:
        if isinstance(part.get(name), Mapping):
            yield part[name]


def _shown(fact: str) -> str:
    """Return a name or an address; of data that are in the address only their kind."""
    if fact.startswith("data:"):
        return fact[5:].partition(",")[0].partition(";")[0]
    text = " ".join(fact.split())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


# -- The texts within ------------------------------------------------------------------------------


def _texts_within(value: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts in a part: of documents, results, logs."""
    text = _document_text(value)
    if text is not None:
        yield text
    for name in _WITHIN:
        found = value.get(name)
        if isinstance(found, str):
            yield found
        elif isinstance(found, Mapping):
            yield part_text(found) if "type" in found else "\n".join(_texts_within(found))
        elif isinstance(found, list):
            own = [each if isinstance(each, Mapping) else {"text": str(each)} for each in found]
            yield joined([{"type": name.removesuffix("s"), **each} for each in own if each])
    for holder in (*_holders(value),)[1:]:
        if "type" not in holder or holder.get("type") == "content":
            yield from _texts_within(holder)


def _document_text(part: Mapping[str, Any]) -> str | None:
    """Return the text of a file that is sent as data, None if it has none."""
    for holder in _holders(part):
        data = _first(holder, ("data", "file_data", "blob"))
        if not isinstance(data, str):
            continue
        kind = str(_first(holder, _KINDS) or "")
        if data.startswith("data:"):
            head, _, data = data.partition(",")
            kind = head[5:].partition(";")[0]
        kind = kind or mimetypes.guess_type(str(_first(holder, ("filename", "uri")) or ""))[0] or ""
        if holder.get("type") == "text":
            return data
        if kind.startswith("text/") or kind in ("application/json", "application/xml"):
            try:
                return base64.b64decode(data, validate=True).decode("utf-8", "replace")
            except (binascii.Error, ValueError):
                return data
    return None
