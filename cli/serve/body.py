"""Bodies of requests: JSON decoded into structs within bounds, with errors that name the field.

The form of a body is its struct: types and their bounds limit a field, and `wanted` is its form in
words, for errors. Objects that come in kinds (messages, parts, items, tools) are plain objects
in the body, and `checked` decodes one into the struct of its kind. Null is the same as a field
that is not there; unknown fields are ignored.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Meta, inspect
from starlette.requests import ClientDisconnect, Request

from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.lanes import REQUESTS
from specrun.cli.serve.settings import Bounds
from specrun.runtime.laws import unknown_name

if TYPE_CHECKING:
    from specrun.cli.serve.service import AnswerService

_Value = TypeVar("_Value")
_Body = TypeVar("_Body", bound="ModelBody")
_SHORT = 2_000  # bytes that are read faster than a thread is woken
_SHOWN = 60  # characters of a value in a message


class ModelBody(msgspec.Struct, kw_only=True):
    """The field of all bodies: the model's name, which has no effect if there is one alone."""

    model: Any = None


@dataclass(frozen=True, slots=True)
class GivenBody(Generic[_Body]):
    """The body of a request. Work on it takes time by its size: see `run`."""

    fields: _Body
    is_short: bool

    async def run(self, work: Callable[[], _Value]) -> _Value:
        """Return the result of work on it, beside the event loop unless the body is small."""
        return work() if self.is_short else await REQUESTS.run(work)

    @classmethod
    async def of(cls, request: Request, kind: type[_Body]) -> GivenBody[_Body]:
        """Read the body of a request; raises `RequestError` if it is no JSON of this kind."""
        bounds = request.app.state.models.settings.bounds
        data = await _read_bytes(request, bounds)
        packed_by = request.headers.get("content-encoding", "")

        def work() -> _Body:
            return decoded(unpacked(data, packed_by, bounds), kind, bounds.depth)

        is_short = len(data) <= _SHORT and not packed_by
        return cls(work() if is_short else await REQUESTS.run(work), is_short)


async def read_body(
    request: Request, kind: type[_Body], read: Callable[[_Body, AnswerService], _Value]
) -> tuple[_Body, AnswerService, _Value]:
    """Return the body of a request, its model's service, and the result of `read` for both.

    Raises `RequestError` if it is no JSON of this kind, the errors of loading the model, and all
    that `read` raises.
    """
    given = await GivenBody.of(request, kind)
    body = given.fields
    service: AnswerService = await request.app.state.models.used(request.scope, body.model)
    return body, service, await given.run(lambda: read(body, service))


async def _read_bytes(request: Request, bounds: Bounds) -> bytes:
    too_large = _too_large(bounds)
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > bounds.body_bytes:
        raise too_large
    parts: list[bytes] = []
    clock = asyncio.get_running_loop().time
    size, started = 0, clock()
    try:
        async with asyncio.timeout(bounds.pause_seconds) as limit:
            async for part in request.stream():
                size += len(part)
                if size > bounds.body_bytes:
                    raise too_large
                parts.append(part)
                whole = started + bounds.body_seconds + size / bounds.body_rate
                limit.reschedule(min(whole, clock() + bounds.pause_seconds))
    except TimeoutError:
        problem = f"of the body {size:,} bytes arrived within {clock() - started:.1f} seconds"
        raise RequestError(
            f"{problem}: send it without pauses", status=HTTPStatus.REQUEST_TIMEOUT
        ) from None
    except ClientDisconnect:
        raise RequestError("the client left before its request was whole") from None
    return b"".join(parts)


def _too_large(bounds: Bounds) -> RequestError:
    problem = f"the body is larger than {bounds.body_bytes:,} bytes: send a shorter request"
    return RequestError(problem, status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


# -- Compressed bodies -----------------------------------------------------------------------------


def unpacked(data: bytes, packed_by: str, bounds: Bounds) -> bytes:
    """Return a body without its compressions, which are named in the order that made it.

    Raises `RequestError` for compressions that are not read here, for data that are none of theirs
    and for a body that becomes too large.
    """
    names = [name.strip().lower() for name in packed_by.split(",")]
    for name in reversed([name for name in names if name not in ("", "identity")]):
        unpack = UNPACKERS.get(name.removeprefix("x-"))
        if unpack is None:
            problem = f"the body's Content-Encoding is {shown(name)}: send it plain, or by"
            status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
            raise RequestError(f"{problem} {', '.join(UNPACKERS)}", status=status)
        try:
            data = unpack(data, bounds.body_bytes)
        except OverflowError:
            raise _too_large(bounds) from None
        except Exception as error:  # each of them has its own
            raise RequestError(f"the body is not {name}, unlike its header: {error}") from None
    return data


def _inflated(data: bytes, most: int, wbits: int = zlib.MAX_WBITS) -> bytes:
    """Return the data of one or several streams; raises `OverflowError` for too much."""
    parts: list[bytes] = []
    size = 0
    while data or not parts:
        unpacker = zlib.decompressobj(wbits)
        parts.append(unpacker.decompress(data, most + 1 - size))
        size += len(parts[-1])
        if size > most:
            raise OverflowError
        if not unpacker.eof:
            raise ValueError("it is cut short")
        data = unpacker.unused_data
    return b"".join(parts)


def _deflated(data: bytes, most: int) -> bytes:
    """Return the data of a stream, which some clients send without its head."""
    try:
        return _inflated(data, most)
    except zlib.error:
        return _inflated(data, most, -zlib.MAX_WBITS)


def _ungzipped(data: bytes, most: int) -> bytes:
    return _inflated(data, most, zlib.MAX_WBITS | 16)


def _unpackers() -> dict[str, Callable[[bytes, int], bytes]]:
    found: dict[str, Callable[[bytes, int], bytes]] = {"gzip": _ungzipped, "deflate": _deflated}
    with suppress(ImportError):  # since Python 3.14
        zstd: Any = importlib.import_module("compression.zstd")

        def unpack(data: bytes, most: int) -> bytes:
            unpacker = zstd.ZstdDecompressor()
            made: bytes = unpacker.decompress(data, most + 1)
            if len(made) > most:
                raise OverflowError
            if not unpacker.eof:
                raise ValueError("it is cut short")
            return made

        found["zstd"] = unpack
    return found


UNPACKERS = _unpackers()
"""The compressions of bodies that are read, by their names."""


# -- Decoding --------------------------------------------------------------------------------------

_DOTTED = "speculative."
"""The prefix of llama-server's names, as "speculative.n_max", for fields of `speculative`."""


def decoded(data: bytes, kind: type[_Body], depth: int) -> _Body:
    """Return the struct of a JSON object that nests at most `depth` lists and objects.

    Raises `RequestError`, with the field in it if a value does not fit the struct.
    """
    try:
        try:
            values = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            data = _repaired(data)
            values = msgspec.json.decode(data)
        is_deep = data.count(b"[") + data.count(b"{") > depth and _depth_of(data) > depth
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RequestError(f"the body is no JSON: {error}") from None
    except RecursionError:
        is_deep = True
    if is_deep:
        problem = f"the body nests lists and objects deeper than {depth}"
        raise RequestError(f"{problem}: send a flatter one")
    if not isinstance(values, dict):
        raise RequestError('the body is no JSON object: give one, as in {"prompt": "..."}')
    own = values.get("speculative")
    dotted = {
        name.removeprefix(_DOTTED): value
        for name, value in values.items()
        if name.startswith(_DOTTED)
    }
    if dotted and isinstance(own, dict | None):
        values["speculative"] = {**(own or {}), **dotted}
    return checked(values, kind)


_ESCAPES = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>\\u[dD][89a-fA-F]..)|\\.")


def _repaired(data: bytes) -> bytes:
    """Return JSON in UTF-8, with halves of characters replaced: some clients cut texts anywhere."""
    text = data.decode(json.detect_encoding(data), "surrogatepass")
    halves = text.encode("utf-16-le", "surrogatepass")
    plain = halves.decode("utf-16-le", "replace").encode()
    return _ESCAPES.sub(lambda found: rb"\ufffd" if found["half"] else found[0], plain)


def checked(value: object, kind: type[_Value], where: str = "", asked: str | None = None) -> _Value:
    """Return the struct of a body, or of an object within it; `where` is its place there.

    Numbers may be texts, whole ones may have a point, and true may be 1: clients are loose. Errors
    name the field within it, or demand the whole object as `asked`.
    """
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        if asked is not None:
            raise wrong(where, value, asked) from None
        raise _field_error(error, kind, value, where) from None


_STEPS = np.zeros(256, np.int8)
_STEPS[[*b"[{"]], _STEPS[[*b"]}"]] = 1, -1
_OTHERS = bytes(set(range(256)) - set(b'[]{}"'))


def _depth_of(data: bytes) -> int:
    """Return how deep lists and objects are nested in JSON that is known to be valid."""
    marks = data.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHERS)
    codes = np.frombuffer(marks, np.uint8)
    in_text = (codes == ord('"')).cumsum(dtype=np.int32) & 1
    steps = _STEPS[codes] * (1 - in_text)
    return int(steps.cumsum(dtype=np.int32).max(initial=0))


# -- Errors that name the field and the value ------------------------------------------------------


def wanted(text: str, *, whole: bool = False) -> Meta:
    """Return the annotation of a type with the words for an error.

    `whole`: errors within the value are errors of the value.
    """
    return Meta(extra={"wanted": text, "whole": whole})


def one_of(literal: object) -> Meta:
    """Return the annotation of a `Literal` whose errors list its values in their order."""
    return wanted(f"one of {', '.join(get_args(literal))}")


def shown(value: object) -> str:
    """Return a value as messages show it: not more than its beginning."""
    text = repr(value[:_SHOWN] if isinstance(value, str | list) else value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def wrong(field: str, value: object, asked: str) -> RequestError:
    """Return the error for a field with a value that it cannot have."""
    return RequestError(f"{field} is {shown(value)}: give {asked}", field)


_PLACE = re.compile(r" - at `\$(.*)`$")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_NAMED = re.compile(r"Object (missing required|contains unknown) field `(.*?)`")
_MOST = re.compile(r"Expected `(?:array|object)` of length <= (\d+)")


def _field_error(
    error: msgspec.ValidationError,
    kind: object,
    value: Any,  # noqa: ANN401 - any JSON value
    field: str,
) -> RequestError:
    """Return msgspec's error about a place in a value in the words of this server."""
    place = _PLACE.search(str(error))
    steps: list[str | int] = [
        name or int(index) for name, index in _STEP.findall(place[1] if place else "")
    ]
    named = _NAMED.match(str(error))
    if named and named[1] == "missing required":
        steps.append(named[2])
    node: inspect.Type | None = inspect.type_info(kind)
    while steps and not _extra(node).get("whole"):
        step = steps.pop(0)
        if isinstance(step, int):
            lists = [form for form in _forms(node) if isinstance(form, inspect.ListType)]
            node = lists[0].item_type if lists else None
            value, field = value[step], f"{field}[{step}]"
        else:
            node = {each.encode_name: each.type for each in _fields_of(node)}.get(step)
            value, field = value.get(step), f"{field}.{step}" if field else step
    if named and named[1] == "contains unknown":
        known = [f"{field}.{each.encode_name}" for each in _fields_of(node)]
        unknown = f"{field}.{named[2]}"
        return RequestError(str(unknown_name(unknown, known, "field")), unknown)
    most = _MOST.match(str(error))
    if most and not steps:
        return RequestError(f"{field} has {len(value)} items: give at most {most[1]}", field)
    return wrong(field, value, _asked(node))


def _extra(node: inspect.Type | None) -> Mapping[str, Any]:
    return (node.extra or {}) if isinstance(node, inspect.Metadata) else {}


def _forms(node: inspect.Type | None) -> Sequence[inspect.Type]:
    """Return the forms of a type, null left out: a union has several."""
    if isinstance(node, inspect.Metadata):
        return _forms(node.type)
    if isinstance(node, inspect.UnionType):
        return [form for each in node.types for form in _forms(each)]
    return [] if node is None or isinstance(node, inspect.NoneType) else [node]


def _fields_of(node: inspect.Type | None) -> Sequence[inspect.Field]:
    return [
        field
        for form in _forms(node)
        if isinstance(form, inspect.StructType)
        for field in form.fields
    ]


_WORDS: dict[type[inspect.Type], str] = {
    inspect.StrType: "a text",
    inspect.BoolType: "true or false",
    inspect.FloatType: "a number",
    inspect.ListType: "a list",
    inspect.DictType: "an object",
    inspect.StructType: "an object",
}


def _asked(node: inspect.Type | None) -> str:
    """Return the expected form for an error: the words of the type, or those of its kind."""
    if "wanted" in _extra(node):
        return str(_extra(node)["wanted"])
    asked: list[str] = []
    for form in _forms(node):
        if isinstance(form, inspect.IntType):
            bounds = "" if form.ge is None else f" from {form.ge} to {form.le}"
            asked.append(f"a whole number{bounds}")
        else:
            asked.append(_WORDS.get(type(form), "another value"))
    return " or ".join(asked)
