"""Padded targets: more parameters that cost time and change no output, in a temporary file."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from specrun.bindings.errors import OptionError

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMBG]?)", re.IGNORECASE)


def parse_parameters(text: str) -> int:
    """Return the count that "400M", "1.5B" or "400000000" names."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"{text!r} is not a number of parameters, such as 400M or 1.5B")
    count = int(float(match[1]) * _FACTORS[match[2].upper()])
    if count < 1:
        raise OptionError(f"{text!r} parameters: give a positive number, such as 400M")
    return count


@contextmanager
def padded_target(
    source: Path,
    parameters: int | None,
    *,
    keep: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Path]:
    """Yield `source` widened to about `parameters` parameters, or `source` itself for None.

    The file goes into a temporary folder and away with it, or to `keep` (which must not exist).
    Free space is checked before anything is written.
    """
    if parameters is None:
        yield source
        return
    from specrun.convert.cut import pad_ffn

    progress(f"padding {source.name} to {parameters / 1e6:,.0f}M parameters")
    if keep is not None:
        yield pad_ffn(source, keep, parameters).output
        return
    with tempfile.TemporaryDirectory(prefix="specrun-bench-") as folder:
        yield pad_ffn(source, Path(folder) / source.name, parameters).output
