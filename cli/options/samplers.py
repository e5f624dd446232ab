"""Options of samplers beyond top-k, top-p, min-p and penalties, and of the order of all of them.

`SAMPLER_OPTIONS` hand on their values by the names of `SamplingParams`, but for those that
`sampler_settings` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import click

from specrun.bindings.errors import OptionError
from specrun.cli.options.group import SAMPLING, Decorator
from specrun.cli.options.types import MAX_COUNT, SHARE
from specrun.runtime.laws import DEFAULT_ORDER, SamplingParams, read_sampler_letters, read_samplers

_DEFAULTS = SamplingParams()
_Order: TypeAlias = tuple[str, ...]
_Parameter: TypeAlias = click.Parameter | None
_Context: TypeAlias = click.Context | None
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", '\\"': '"', "\\'": "'", "\\\\": "\\"}


class OrderType(click.ParamType[_Order]):
    """The value of --samplers or --sampler-seq: an order of samplers, as `read` reads it."""

    def __init__(self, name: str, read: Callable[[str], _Order]) -> None:
        self.name, self._read = name, read

    def convert(self, value: Any, param: _Parameter, ctx: _Context) -> _Order:  # noqa: ANN401
        """Return llama.cpp's names."""
        try:
            return value if isinstance(value, tuple) else self._read(str(value))
        except OptionError as error:
            self.fail(str(error), param, ctx)


def _number(usage: str, help: str, name: str, kind: click.ParamType[Any]) -> Decorator:
    """Declare an option of a number that `SamplingParams` has as `name`."""
    return SAMPLING.option(usage, help, kind, dest=name, default=getattr(_DEFAULTS, name))


SAMPLER_OPTIONS = (
    SAMPLING.option(
        "--samplers",
        "The samplers to apply, in order; logit biases always come first.",
        OrderType("NAME;NAME", read_samplers),
        show_default=";".join(DEFAULT_ORDER),
    ),
    SAMPLING.option(
        "--sampler-seq, --sampling-seq",
        "The same, a letter each: e penalties, d dry, s top_n_sigma, k top_k, y typ_p, p top_p, "
        "m min_p, x xtc, t temperature.",
        OrderType("LETTERS", read_sampler_letters),
        dest="sampler_seq",
        show_default="edskypmxt",
    ),
    _number(
        "--typical, --typical-p N",
        "Keep the tokens of the most typical surprise with this much probability; 1: all.",
        "typical_p",
        SHARE,
    ),
    _number(
        "--top-nsigma, --top-n-sigma N",
        "Keep logits within N standard deviations of the highest; 0 or less: all.",
        "top_n_sigma",
        click.FLOAT,
    ),
    _number(
        "--xtc-probability N",
        "Chance to leave out all likely tokens but the least likely of them; 0: off.",
        "xtc_probability",
        SHARE,
    ),
    _number(
        "--xtc-threshold N",
        "The probability from which a token is likely, for XTC; over 0.5: off.",
        "xtc_threshold",
        SHARE,
    ),
    _number(
        "--dry-multiplier N",
        "Penalise tokens that go on with a repetition, by N * base^(its length - the allowed one); "
        "0: off.",
        "dry_multiplier",
        click.FLOAT,
    ),
    _number("--dry-base N", "The base of DRY's penalty.", "dry_base", click.FloatRange(1)),
    _number(
        "--dry-allowed-length N",
        "How long a repetition costs nothing.",
        "dry_allowed_length",
        click.IntRange(0, MAX_COUNT),
    ),
    _number(
        "--dry-penalty-last-n N",
        "How many recent tokens DRY looks at; 0: none, -1: all.",
        "dry_penalty_last_n",
        click.IntRange(-1, MAX_COUNT),
    ),
    SAMPLING.option(
        "--dry-sequence-breaker TEXT",
        "A text that ends a repetition, in place of the usual ones; repeatable; none: no text.",
        multiple=True,
        show_default='\\n : " *',
    ),
    _number(
        "--mirostat N",
        "Steer the surprise of the text, in place of all samplers but temperature: version 1 or 2; "
        "0: off.",
        "mirostat",
        click.IntRange(0, 2),
    ),
    _number("--mirostat-lr N", "Mirostat's learning rate.", "mirostat_lr", click.FLOAT),
    _number(
        "--mirostat-ent N",
        "The surprise that mirostat aims at, in bits a token.",
        "mirostat_ent",
        click.FLOAT,
    ),
    _number(
        "--dynatemp-range N",
        "Let the temperature move by so much with the entropy of the law; 0: off.",
        "dynatemp_range",
        click.FloatRange(0),
    ),
    _number(
        "--dynatemp-exp N",
        "The power of the normalised entropy by which it moves.",
        "dynatemp_exp",
        click.FloatRange(0),
    ),
)


def sampler_settings(
    samplers: _Order | None,
    sampler_seq: _Order | None,
    dry_sequence_breaker: tuple[str, ...],
    **others: Any,  # noqa: ANN401 - options with the names of SamplingParams
) -> dict[str, Any]:
    """Return the settings by the names of `SamplingParams`."""
    if samplers is not None and sampler_seq is not None:
        raise click.UsageError("--samplers and --sampler-seq say the same: give one of them")
    order = samplers if samplers is not None else sampler_seq
    if order is not None:
        others["samplers"] = order
    if dry_sequence_breaker:
        others["dry_sequence_breakers"] = read_breakers(dry_sequence_breaker)
    return others


def read_breakers(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return DRY's sequence breakers as they were typed, escapes read; "none" drops those before.

    So it is in llama.cpp.
    """
    last = max((number for number, text in enumerate(texts) if text == "none"), default=-1)
    return tuple(_unescaped(text) for text in texts[last + 1 :])


def _unescaped(text: str) -> str:
    parts, place = [], 0
    while place < len(text):
        escaped = _ESCAPES.get(text[place : place + 2])
        parts.append(text[place] if escaped is None else escaped)
        place += 1 if escaped is None else 2
    return "".join(parts)
