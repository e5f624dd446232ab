"""Options about sampling and the end of an answer, with llama.cpp's names and defaults.

`answer_options` are those of commands that answer, `grid_options` those of commands that measure at
several temperatures.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from specrun.bindings.errors import OptionError
from specrun.cli.options.group import SAMPLING, Decorator, option_group
from specrun.cli.options.types import LOGIT_BIAS, MAX_COUNT, NUMBERS, Parsed, each_once
from specrun.cli.terminal.terminal import MAX_TEXT_BYTES, decode_text, read_text
from specrun.runtime.grammar import Grammar
from specrun.runtime.laws import (
    DEFAULT_ORDER,
    RANDOM_SEED,
    SETTINGS,
    SamplingParams,
    Setting,
    read_sampler_letters,
    read_samplers,
)

if TYPE_CHECKING:
    from specrun.bindings.models.vocabulary import Vocabulary

# == Grammars: --json-schema, --grammar, --regex, --grammar-after ==================================


GRAMMAR_OPTIONS = (
    SAMPLING.option(
        "-j, --json-schema, -jf, --json-schema-file FILE|JSON",
        "Answer in JSON by this schema; -: read it from stdin.",
    ),
    SAMPLING.option(
        "--grammar, --grammar-file FILE|GBNF",
        "Answer by this grammar: GBNF as in llama.cpp, or Lark (.lark).",
    ),
    SAMPLING.option(
        "--regex PATTERN", "Answer with a text that matches this expression as a whole."
    ),
    SAMPLING.option(
        "--grammar-after TEXT",
        "Apply the grammar, schema or expression only after this text, such as </think>.",
    ),
)


def _chosen_grammar(
    json_schema: str | None, grammar: str | None, regex: str | None, grammar_after: str | None
) -> Grammar | None:
    """Return the grammar of `GRAMMAR_OPTIONS`; raises UsageError for several kinds."""
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
    if text.lstrip().startswith("{") or Path(text).suffix == ".json":
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
    if path.suffix == ".json":
        raise OptionError(f"{path} is JSON, no grammar: give it as --json-schema")
    build = Grammar.lark if path.suffix == ".lark" else Grammar.gbnf
    return build(read_text(path), after=after)


# == Settings of `SamplingParams` ==================================================================


_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", '\\"': '"', "\\'": "'", "\\\\": "\\"}

USUAL = (
    *("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n"),
    *("presence_penalty", "frequency_penalty", "logit_bias"),
)
"""The settings that help and `/show` list first, in their order."""

FURTHER = tuple(name for name in SETTINGS if name not in (*USUAL, "seed", "stop"))
"""All other settings that change the distribution."""


_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "seed": {"kind": click.IntRange(-1, 2**64 - 1), "default": RANDOM_SEED},
    "stop": {"multiple": True},
    "logit_bias": {"kind": LOGIT_BIAS, "multiple": True},
    "dry_sequence_breakers": {"multiple": True, "show_default": '\\n : " *'},
    "samplers": {
        "kind": Parsed("NAME;NAME", read_samplers),
        "show_default": ";".join(DEFAULT_ORDER),
    },
}
"""Attributes of click's options for settings that are no numbers."""


def _setting_option(name: str, *, metavar: bool = True) -> Decorator:
    """Return the option of a setting; without `metavar` its help names the type of the value."""
    setting = SETTINGS[name]
    usage = setting.flags if metavar else setting.flags.rpartition(" ")[0]
    attributes = _ATTRIBUTES.get(name) or {"kind": _range(setting), "default": setting.default}
    return SAMPLING.option(usage, setting.help, dest=setting.variable, **attributes)


def _range(setting: Setting) -> click.ParamType[Any]:
    least, most = setting.least, setting.most
    if setting.kind == "count":
        return click.IntRange(
            None if least is None else int(least), MAX_COUNT if most is None else int(most)
        )
    if least is None and most is None:
        return click.FLOAT
    return click.FloatRange(least, most, min_open=setting.above)


SAMPLER_OPTIONS = (
    _setting_option("samplers"),
    SAMPLING.option(
        "--sampler-seq, --sampling-seq",
        "The same as letters: e penalties, d dry, s top_n_sigma, k top_k, y typ_p, p top_p, "
        "m min_p, x xtc, t temperature.",
        Parsed("LETTERS", read_sampler_letters),
        dest="sampler_seq",
        show_default="edskypmxt",
    ),
    *(_setting_option(name) for name in FURTHER if name != "samplers"),
)
"""Samplers beyond top-k, top-p, min-p and penalties, and the order of all."""


def read_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by the names of `SamplingParams`, of the values of their options."""
    found = {
        name: values[setting.variable]
        for name, setting in SETTINGS.items()
        if setting.variable in values
    }
    order, letters = found.pop("samplers", None), values.get("sampler_seq")
    if order is not None and letters is not None:
        raise click.UsageError(
            "--samplers and --sampler-seq have the same meaning: give one of them"
        )
    if order is not None or letters is not None:
        found["samplers"] = letters if order is None else order
    breakers = found.pop("dry_sequence_breakers", ())
    if breakers:
        found["dry_sequence_breakers"] = read_breakers(breakers)
    if found.get("seed") == RANDOM_SEED:
        found["seed"] = None
    if "logit_bias" in found:
        found["logit_bias"] = dict(found["logit_bias"])
    return found


def read_breakers(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return DRY's sequence breakers as they were typed, escapes read; "none" drops those before.

    So it is in llama.cpp.
    """
    last = max((number for number, text in enumerate(texts) if text == "none"), default=-1)
    return tuple(
        re.sub(r"""\\[ntr"'\\]""", lambda found: _ESCAPES[found[0]], text)
        for text in texts[last + 1 :]
    )


# == Answers =======================================================================================


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How tokens are drawn, and how many; `max_tokens` None: until the model ends."""

    params: SamplingParams
    max_tokens: int | None
    ignore_eos: bool = False

    def of(self, vocabulary: Vocabulary) -> AnswerSettings:
        """Return the settings for a model: without its end tokens, if they are to be ignored."""
        if not self.ignore_eos:
            return self
        bias = {**self.params.logit_bias, **dict.fromkeys(vocabulary.end_of_generation, -inf)}
        return dataclasses.replace(self, params=self.params.replace(logit_bias=bias))


def _build(predict: int, ignore_eos: bool, **values: Any) -> AnswerSettings:  # noqa: ANN401
    grammar = _chosen_grammar(
        *(values.pop(name) for name in ("json_schema", "grammar", "regex", "grammar_after"))
    )
    params = SamplingParams(grammar=grammar, **read_settings(values))
    return AnswerSettings(params, None if predict < 0 else predict, ignore_eos)


LENGTH_FLAGS = "-n, --predict, --n-predict, --max-tokens N"

answer_options = option_group(
    "answer",
    _build,
    SAMPLING.option(
        LENGTH_FLAGS,
        "The most tokens in an answer; -1: until the model ends it.",
        click.IntRange(-1, MAX_COUNT),
        default=-1,
    ),
    SAMPLING.option(
        "--ignore-eos", "Ignore the model's end token and continue the answer.", is_flag=True
    ),
    *map(_setting_option, ("stop", "seed", *USUAL)),
    *GRAMMAR_OPTIONS,
    *SAMPLER_OPTIONS,
)


# == Measurements at several temperatures ==========================================================


def temperatures_option(default: str, purpose: str = "") -> Decorator:
    """Return --temp, which takes several temperatures: as a,b or repeated."""
    return SAMPLING.option(
        SETTINGS["temperature"].flags.rpartition(" ")[0],
        f"Temperatures{purpose}: a,b or repeated.",
        NUMBERS,
        multiple=True,
        default=(default,),
        callback=each_once,
    )


SamplingGrid: TypeAlias = tuple[SamplingParams, ...]
"""The settings at each of several temperatures."""


def _grid(temp: Sequence[float], **values: Any) -> SamplingGrid:  # noqa: ANN401 - of the settings
    settings = read_settings(values)
    return tuple(SamplingParams(temperature=each, **settings) for each in temp)


def grid_options(default: str, purpose: str = "", *more: Decorator) -> Decorator:
    """Return the options of a `SamplingGrid`, which the command gets as `sampling`.

    `default` is of --temp, `purpose` stands in its help.
    """
    cuts = (_setting_option(name, metavar=False) for name in ("top_k", "top_p", "min_p"))
    temperatures = temperatures_option(default, purpose)
    return option_group("sampling", _grid, temperatures, *cuts, *more)
