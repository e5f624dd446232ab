"""Files that specrun keeps for itself: cost curves, plans, profiles, what drafters learn from.

No user named them, so none of them may end a command: one that is damaged, or made for something
else, is as if it were not there, and a warning names it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from specrun.bindings.errors import FileMissingError, MalformedFileError, SpecrunError
from specrun.bindings.regular_file import open_regular

logger = logging.getLogger("specrun.kept")
"""Where warnings go that no caller takes; the command line shows them."""

Warn = Callable[[str], None]
_Content = TypeVar("_Content")
_MOST_BYTES = 1 << 20
DAMAGE = (
    *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
    *(RecursionError, SpecrunError),
)
"""What the parsing of damaged content raises, nested deeper than a parser can follow included."""

_warned: set[str] = set()


class NotForThisError(Exception):
    """A kept file is whole, and was made for something else; the message says for what."""


def read_kept(
    path: Path,
    parse: Callable[[bytes], _Content],
    *,
    what: str,
    advice: str,
    warn: Warn | None = None,
    most: int = _MOST_BYTES,
) -> _Content | None:
    """Return what `parse` makes of a file's bytes; None without the file, or where it is damaged.

    `parse` may raise whatever damaged content makes it raise, or NotForThisError. Then `warn`
    (None: the log, once for each sentence) gets a sentence: that `what` was ignored, why, and the
    `advice`. So it is for a path that is no file, cannot be read, or has more than `most` bytes.
    """
    try:
        return parse(_bytes_of(path, most))
    except FileNotFoundError:
        return None
    except (NotForThisError, FileMissingError, MalformedFileError) as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or path} cannot be read ({error.strerror or error})"
    except DAMAGE:
        problem = f"{path} is damaged"
    sentence = f"{what} was ignored: {problem}; {advice}"
    # Damaged content may hold half a character, which no terminal can show.
    (warn or _log_once)(sentence.encode("utf-8", "backslashreplace").decode())
    return None


def _bytes_of(path: Path, most: int) -> bytes:
    with open_regular(path) as file:
        # One byte more than allowed tells a file that is too large without reading it all.
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} has more than {most} bytes")
    return data


def _log_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        logger.warning("%s", text)


def json_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`; raises ValueError, TypeError or RecursionError for others.

    NaN and infinities, which Python would take, are no JSON.
    """
    value = json.loads(data.decode("utf-8"), parse_constant=_refuse)
    if not isinstance(value, dict):
        raise TypeError(f"the outermost value is {type(value).__name__}, not an object")
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def number_in(value: object, least: float = 0.0, most: float = math.inf) -> float:
    """Return a finite number of a kept file as a float; raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r:.40} is no number")
    if not (math.isfinite(value) and least <= value <= most):
        raise ValueError(f"{value} is not between {least} and {most}")
    return float(value)


def count_in(value: object, least: int = 0, most: int = 2**31 - 1) -> int:
    """Return a whole number of a kept file; raises TypeError or ValueError."""
    if type(value) is not int:
        raise TypeError(f"{value!r:.40} is no whole number")
    if not least <= value <= most:
        raise ValueError(f"{value} is not between {least} and {most}")
    return value


def text_in(value: object) -> str:
    """Return a text of a kept file; raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


def list_in(value: object) -> list[Any]:
    """Return a list of a kept file; raises TypeError: a text or a mapping has elements, too."""
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.40} is no list")
    return value
