"""Options that bind an answer to a grammar: --json-schema, --grammar, --regex, --grammar-after."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from specrun.bindings.errors import OptionError
from specrun.cli.options.group import SAMPLING
from specrun.cli.terminal.paths import MAX_TEXT_BYTES, decode_text, read_text
from specrun.runtime.grammar import Grammar

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
