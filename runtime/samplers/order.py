"""The order of samplers: llama.cpp's names, letters and aliases, as `--samplers` takes them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from specrun.bindings.errors import OptionError

DEFAULT_ORDER = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)
"""Every sampler that there is, in llama.cpp's order."""

_LETTERS = dict(zip("edskypmxt", DEFAULT_ORDER, strict=True))
_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}
_LACKING = {"infill": "i", "adaptive_p": "a"}


def sampler_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return llama.cpp's own names for these, which may be its aliases (top-k, topk, nucleus).

    Raises `OptionError` for a name that does not exist, with the nearest that does.
    """
    return tuple(map(_canonical, names))


def read_samplers(text: str) -> tuple[str, ...]:
    """Return the samplers of "penalties;top_k;temperature", in order."""
    return sampler_names(text.split(";"))


def read_sampler_letters(text: str) -> tuple[str, ...]:
    """Return the samplers of "ekt", a letter each; raises `OptionError` for others."""
    for letter in text:
        lacking = next((name for name, own in _LACKING.items() if own == letter), None)
        if lacking is not None:
            raise _is_lacking(lacking)
        if letter not in _LETTERS:
            known = ", ".join(f"{own} {name}" for own, name in _LETTERS.items())
            raise OptionError(f"{letter!r} is no sampler's letter: known are {known}")
    if not text:
        raise OptionError("the sequence of samplers is empty: give letters, such as ekpmt")
    return tuple(_LETTERS[letter] for letter in text)


def _canonical(name: str) -> str:
    plain = _ALIASES.get(name.strip().lower(), name.strip().lower()).replace("-", "_")
    bare = {known.replace("_", ""): known for known in (*DEFAULT_ORDER, *_LACKING)}
    if plain in DEFAULT_ORDER:
        return plain
    found = bare.get(plain) or (plain if plain in _LACKING else None)
    if found in _LACKING:
        raise _is_lacking(found)
    if found is not None:
        return found
    near = difflib.get_close_matches(plain, [*DEFAULT_ORDER, *_ALIASES], 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(DEFAULT_ORDER)}"
    raise OptionError(f"there is no sampler {name.strip()!r}: {hint}")


def _is_lacking(name: str) -> OptionError:
    known = ", ".join(DEFAULT_ORDER)
    return OptionError(f"llama.cpp's sampler {name!r} is not in specrun: there are {known}")
