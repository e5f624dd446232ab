"""Bodies of requests: JSON within bounds, read field by field with errors that name the field."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.lanes import beside_the_loop
from specrun.cli.serve.settings import Bounds

if TYPE_CHECKING:
    from specrun.cli.serve.service import AnswerService

_Value = TypeVar("_Value")
_MOST_WHOLE = 10**300
_SHORT = 2_000  # bytes that are read faster than a thread is woken
_SHOWN = 60  # characters of a value in a message


async def read_body(
    request: Request, read: Callable[[Fields, AnswerService], _Value]
) -> tuple[Fields, _Value]:
    """Return the JSON object that a request carries, and what `read` makes of it.

    Both take time by the size of the body: all but small ones are read beside the event loop.
    Raises `RequestError` for anything else, and what `read` raises.
    """
    service: AnswerService = request.app.state.service
    data = await _read_bytes(request, service.settings.bounds)

    def work() -> tuple[Fields, _Value]:
        fields = _fields_of(data, service.settings.bounds)
        return fields, read(fields, service)

    return work() if len(data) <= _SHORT else await beside_the_loop(work)


def _fields_of(data: bytes, bounds: Bounds) -> Fields:
    """Return the fields of the JSON object in a body."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is no JSON: {error}") from None
    except RecursionError:
        raise _too_deep(bounds) from None
    if not isinstance(body, dict):
        raise RequestError('the body is no JSON object: give one, as in {"prompt": "..."}')
    if _is_deeper(body, bounds.depth):
        raise _too_deep(bounds)
    return Fields(body)


async def _read_bytes(request: Request, bounds: Bounds) -> bytes:
    too_large = RequestError(
        f"the body is larger than {bounds.body_bytes:,} bytes: send a shorter request",
        status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    )
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > bounds.body_bytes:
        raise too_large
    parts: list[bytes] = []
    size, started = 0, asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(bounds.pause_seconds) as limit:
            async for part in request.stream():
                size += len(part)
                if size > bounds.body_bytes:
                    raise too_large
                parts.append(part)
                limit.reschedule(_deadline(started, size, bounds))
    except TimeoutError:
        seconds = asyncio.get_running_loop().time() - started
        problem = f"of the body {size:,} bytes arrived within {seconds:.1f} seconds"
        advice = "send it without pauses"
        raise RequestError(f"{problem}: {advice}", status=HTTPStatus.REQUEST_TIMEOUT) from None
    except ClientDisconnect:
        raise RequestError("the client left before its request was whole") from None
    return b"".join(parts)


def _deadline(started: float, size: int, bounds: Bounds) -> float:
    """Return when the next piece of a body has to be there: it may be slow, but not stop."""
    whole = started + bounds.body_seconds + size / bounds.body_rate
    return min(whole, asyncio.get_running_loop().time() + bounds.pause_seconds)


def _is_deeper(value: object, depth: int) -> bool:
    """Whether lists and objects are nested deeper than `depth`; looks level by level."""
    level: list[object] = [value]
    for _ in range(depth + 1):
        inner: list[object] = []
        for each in level:
            if isinstance(each, dict):
                inner.extend(each.values())
            elif isinstance(each, list):
                inner.extend(each)
        if not inner:
            return False
        level = inner
    return True


def _too_deep(bounds: Bounds) -> RequestError:
    problem = f"the body nests lists and objects deeper than {bounds.depth}"
    return RequestError(f"{problem}: send a flatter one")


def shown(value: object) -> str:
    """Return a value as messages show it: not more than its beginning."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


class Fields:
    """The fields of an object; null is the same as a field that is not there.

    `where` goes before the names in messages, as "speculative.".
    """

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self.values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:  # noqa: ANN401 - any JSON value
        """Return the field as it is, None where it is not there."""
        return self.values.get(name)

    def wrong(self, name: str, wanted: str) -> RequestError:
        """Return the error for a field with a value that it cannot have."""
        field = self.where + name
        return RequestError(f"{field} is {shown(self.values.get(name))}: give {wanted}", field)

    def _typed(
        self, name: str, kinds: type[_Value] | tuple[type[_Value], ...], wanted: str
    ) -> _Value | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise self.wrong(name, wanted)
        return value

    def text(self, name: str) -> str | None:
        """Return a text."""
        return self._typed(name, str, "a text")

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return true or false."""
        value = self._typed(name, bool, "true or false")
        return default if value is None else value

    def number(self, name: str) -> float | None:
        """Return a number, one that is not too large to be a float."""
        value = self._typed(name, (int, float), "a number")
        if isinstance(value, int) and abs(value) > _MOST_WHOLE:
            raise self.wrong(name, "a number of a size that floats have")
        return None if value is None else float(value)

    def integer(self, name: str, least: int, most: int) -> int | None:
        """Return a whole number within bounds."""
        wanted = f"a whole number from {least} to {most}"
        value = self._typed(name, int, wanted)
        if value is not None and not least <= value <= most:
            raise self.wrong(name, wanted)
        return value

    def items(self, name: str, most: int) -> Sequence[Any] | None:
        """Return a list of anything, of at most so many items."""
        value = self._typed(name, list, "a list")
        if value is not None and len(value) > most:
            field = self.where + name
            raise RequestError(f"{field} has {len(value)} items: give at most {most}", field)
        return value

    def fields(self, name: str) -> Fields | None:
        """Return the fields of an object."""
        value = self._typed(name, dict, "an object")
        return None if value is None else Fields(value, f"{self.where}{name}.")

    def texts(self, name: str, most: int, longest: int) -> tuple[str, ...] | None:
        """Return a text, or a list of them, as a tuple."""
        value = self.get(name)
        if value is None:
            return None
        found = (value,) if isinstance(value, str) else tuple(self.items(name, most) or ())
        if not all(isinstance(text, str) and len(text) <= longest for text in found):
            raise self.wrong(
                name, f"a text or a list of texts, each of at most {longest} characters"
            )
        return found
