"""Options about sampling and the end of an answer, with llama.cpp's names and defaults.

`answer_options` are those of commands that answer; `temperatures_option` and `TRUNCATION_OPTIONS`
those of commands that measure, at several temperatures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import click

from specrun.bindings.errors import OptionError
from specrun.cli.options.group import SAMPLING, Decorator, option_group
from specrun.cli.options.types import MAX_COUNT, SHARE, LogitBiasType, NumberListType
from specrun.cli.terminal.terminal import MAX_TEXT_BYTES, decode_text, read_text
from specrun.runtime.grammar import Grammar
from specrun.runtime.laws import (
    DEFAULT_ORDER,
    RANDOM_SEED,
    SamplingParams,
    read_sampler_letters,
    read_samplers,
)

# == Grammars: --json-schema, --grammar, --regex, --grammar-after ==================================


_LARK, _SCHEMA = (".lark",), (".json",)

GRAMMAR_OPTIONS = (
    SAMPLING.option(
        "-j, --json-schema, -jf, --json-schema-file FILE|JSON",
        "Answer in JSON by this schema; -: read it from stdin.",
    ),
    SAMPLING.option(
        "--grammar, --grammar-file FILE|GBNF",
        "Answer by this grammar: GBNF as in llama.cpp, or Lark (.lark).",
    ),
    SAMPLING.option("--regex PATTERN", "Answer with a text that this matches as a whole."),
    SAMPLING.option(
        "--grammar-after TEXT",
        "Let any of them begin behind this text, such as </think>.",
    ),
)
"""They hand on `json_schema`, `grammar`, `regex` and `grammar_after`: see `chosen_grammar`."""


def chosen_grammar(
    json_schema: str | None, grammar: str | None, regex: str | None, grammar_after: str | None
) -> Grammar | None:
    """Return the grammar that was asked for; of several kinds only one may be."""
    given = {"--json-schema": json_schema, "--grammar": grammar, "--regex": regex}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise click.UsageError(f"give one of {' and '.join(names)}")
    after = grammar_after or ""
    if json_schema is not None:
        return Grammar.json_schema(_schema_text(json_schema), after=after)
    if regex is not None:
        return Grammar.regex(regex, after=after)
    if grammar is not None:
        return _written(grammar, after)
    if after:
        raise click.UsageError("--grammar-after needs --json-schema, --grammar or --regex")
    return None


def read_grammar(text: str) -> Grammar | None:
    """Return the grammar of `/set grammar`: a file (.json, .lark, GBNF), a schema, or "none"."""
    if text == "none":
        return None
    if text.lstrip().startswith("{") or Path(text).suffix in _SCHEMA:
        return Grammar.json_schema(_schema_text(text))
    return _written(text, "")


def _schema_text(text: str) -> str:
    if text == "-":
        data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
        return decode_text(data, "the JSON schema on stdin")
    if text.strip() in ("true", "false") or text.lstrip().startswith("{"):
        return text
    return read_text(Path(text))


def _written(text: str, after: str) -> Grammar:
    path = Path(text)
    if "::=" in text:
        return Grammar.gbnf(text, after=after)
    if path.suffix in _SCHEMA:
        raise OptionError(f"{path} is JSON, no grammar: give it as --json-schema")
    source = read_text(path)
    if path.suffix in _LARK:
        return Grammar.lark(source, after=after)
    return Grammar.gbnf(source, after=after)


# == Samplers beyond top-k, top-p, min-p and penalties, and the order of all =======================
#
# `SAMPLER_OPTIONS` hand on their values by the names of `SamplingParams`, but for those that
# `sampler_settings` reads.


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


# == Sampling ======================================================================================
#
# `answer_options` are those of commands that answer; `temperatures_option` and `TRUNCATION_OPTIONS`
# those of commands that measure, at several temperatures.


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How tokens are drawn, and how many; `max_tokens` None: until the model ends."""

    params: SamplingParams
    max_tokens: int | None


def _build(
    temp: float,
    logit_bias: tuple[tuple[int, float], ...],
    seed: int,
    predict: int,
    reverse_prompt: tuple[str, ...],
    json_schema: str | None,
    grammar: str | None,
    regex: str | None,
    grammar_after: str | None,
    **others: Any,  # noqa: ANN401 - options with the names of SamplingParams
) -> AnswerSettings:
    params = SamplingParams(
        temperature=temp,
        logit_bias=dict(logit_bias),
        seed=None if seed == RANDOM_SEED else seed,
        stop=reverse_prompt,
        grammar=chosen_grammar(json_schema, grammar, regex, grammar_after),
        **sampler_settings(**others),
    )
    return AnswerSettings(params, None if predict < 0 else predict)


def _truncation_options(metavar: str = "") -> tuple[Decorator, ...]:
    """Return --top-k, --top-p and --min-p."""
    return (
        SAMPLING.option(
            f"--top-k{metavar}",
            "Keep the K most likely tokens; 0: all.",
            click.IntRange(0, MAX_COUNT),
            default=_DEFAULTS.top_k,
        ),
        SAMPLING.option(
            f"--top-p{metavar}",
            "Keep the most likely tokens with this much probability together; 1: all.",
            SHARE,
            default=_DEFAULTS.top_p,
        ),
        SAMPLING.option(
            f"--min-p{metavar}",
            "Keep tokens with this share of the most likely one's probability; 0: all.",
            SHARE,
            default=_DEFAULTS.min_p,
        ),
    )


TRUNCATION_OPTIONS = _truncation_options()

answer_options = option_group(
    "answer",
    _build,
    SAMPLING.option(
        "-n, --predict, --n-predict, --max-tokens N",
        "The most tokens of an answer; -1: until the model ends.",
        click.IntRange(-1, MAX_COUNT),
        default=-1,
    ),
    SAMPLING.option(
        "-r, --reverse-prompt, --stop TEXT",
        "A text that ends the answer and is left out; repeatable.",
        multiple=True,
    ),
    SAMPLING.option(
        "-s, --seed N",
        "Seed of the random numbers; -1: another one for every answer.",
        click.IntRange(-1, 2**64 - 1),
        default=RANDOM_SEED,
    ),
    SAMPLING.option(
        "--temp, --temperature N",
        "Temperature; 0: always the most likely token.",
        click.FloatRange(0),
        default=_DEFAULTS.temperature,
    ),
    *_truncation_options(" N"),
    SAMPLING.option(
        "--repeat-penalty N",
        "Divide the logits of recent tokens; 1: off.",
        click.FloatRange(0, min_open=True),
        default=_DEFAULTS.repeat_penalty,
    ),
    SAMPLING.option(
        "--repeat-last-n N",
        "How many recent tokens penalties look at; 0: none, -1: all.",
        click.IntRange(-1, MAX_COUNT),
        default=_DEFAULTS.repeat_last_n,
    ),
    SAMPLING.option(
        "--presence-penalty N",
        "Subtract from the logits of recent tokens.",
        click.FLOAT,
        default=_DEFAULTS.presence_penalty,
    ),
    SAMPLING.option(
        "--frequency-penalty N",
        "Subtract from the logits of recent tokens, once an occurrence.",
        click.FLOAT,
        default=_DEFAULTS.frequency_penalty,
    ),
    SAMPLING.option(
        "-l, --logit-bias",
        "Add to a token's logit, as in 15043+1 or 15043-inf; repeatable.",
        LogitBiasType(),
        multiple=True,
    ),
    *GRAMMAR_OPTIONS,
    *SAMPLER_OPTIONS,
)


def temperatures_option(default: str, purpose: str = "") -> Decorator:
    """Return --temp, which takes several temperatures: as a,b or repeated."""
    return SAMPLING.option(
        "--temp, --temperature",
        f"Temperatures{purpose}: a,b or repeated.",
        NumberListType(),
        multiple=True,
        default=(default,),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingGrid:
    """Sampling settings at one or several temperatures: the values of these options.

    `others` have the names of `SamplingParams`.
    """

    temp: Sequence[Sequence[float]]
    top_k: int
    top_p: float
    min_p: float
    seed: int | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def with_samplers(
        cls,
        *,
        temp: Sequence[Sequence[float]],
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        **others: Any,  # noqa: ANN401 - the values of SAMPLER_OPTIONS
    ) -> SamplingGrid:
        """Return the grid of a command that has all samplers' options."""
        settings = sampler_settings(**others)
        return cls(temp=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, others=settings)

    def params(self) -> tuple[SamplingParams, ...]:
        """Return the settings of each temperature, in order, none twice."""
        return tuple(
            SamplingParams(
                temperature=temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                seed=self.seed,
                **self.others,
            )
            for temperature in dict.fromkeys(temp for several in self.temp for temp in several)
        )
