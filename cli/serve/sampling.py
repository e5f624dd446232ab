"""Sampling settings of a request: OpenAI's fields and llama.cpp's, over the server's own."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from specrun.bindings.errors import OptionError
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.cli.serve.body import Fields
from specrun.cli.serve.errors import RequestError, field_named_in
from specrun.cli.serve.service import SpeculativeChoice
from specrun.cli.serve.settings import Bounds, ServeSettings
from specrun.runtime.grammar import Grammar, GrammarError
from specrun.runtime.laws import RANDOM_SEED, SETTINGS, SamplingParams, unknown_name

# -- Grammars of requests: OpenAI's response_format, llama-server's grammar and json_schema -------


_FIELDS = ("response_format", "grammar", "json_schema")
_FORMATS = "one of text, json_object and json_schema"


def asks_for_text(fields: Fields) -> bool:
    """Whether a request says itself how its text is bound: then the server's grammar is not."""
    return any(name in fields for name in _FIELDS)


def read_grammar(fields: Fields) -> Grammar | None:
    """Return what the text of an answer is bound to, None for any text.

    Raises `RequestError` that names the field, also where two fields ask for something.
    """
    found: dict[str, Grammar] = {}
    form = fields.fields("response_format")
    if form is not None:
        grammar = read_format(form)
        if grammar is not None:
            found["response_format"] = grammar
    schema = fields.get("json_schema")
    if schema not in (None, ""):
        found["json_schema"] = _of_schema(schema, "json_schema")
    text = fields.text("grammar")
    if text:
        found["grammar"] = _written(text)
    if len(found) > 1:
        first, second = list(found)[:2]
        raise RequestError(f"{first} and {second} both bind the text: give one of them", second)
    return next(iter(found.values()), None)


def read_format(form: Fields) -> Grammar | None:
    """Return what {"type": "json_schema", "json_schema": {"schema": {...}}} asks for.

    The schema may also stand beside the type, as in the Responses API and llama-server's
    {"type": "json_object", "schema": {...}}. `form.where` is the field and a dot.
    """
    kind, field = form.text("type"), form.where.removesuffix(".")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise form.wrong("type", _FORMATS)
    within = form.fields("json_schema")
    schema = form.get("schema") if within is None else within.get("schema")
    if schema is None and kind == "json_schema":
        raise RequestError(f"{field} has no schema: give one, or the type json_object", field)
    return Grammar.json_object() if schema is None else _of_schema(schema, field)


def _of_schema(schema: object, field: str) -> Grammar:
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{field}: the schema must be a JSON object, true or false", field)
    try:
        return Grammar.json_schema(schema)
    except GrammarError as error:
        raise RequestError(f"{field}: {error}", field) from None


def _written(text: str) -> Grammar:
    """Return a grammar in GBNF, or in Lark where it begins as llama.cpp has it."""
    try:
        is_lark = text.lstrip().startswith("%llguidance")
        return Grammar.lark(text) if is_lark else Grammar.gbnf(text)
    except GrammarError as error:
        raise RequestError(f"grammar: {error}", "grammar") from None


_MOST = 2**31 - 1
_MOST_SEED = 2**64 - 1
_LENGTHS = ("max_completion_tokens", "max_tokens", "n_predict")
_SPECULATIVE = ("drafter", "n_max", "accept", "trace")
_PREFIX = "speculative."
_FAR = 1e30  # a bias that decides alone, and that a logit of 32 bits can have added


def read_sampling(
    fields: Fields, settings: ServeSettings, vocabulary: Vocabulary
) -> SamplingParams:
    """Return how tokens are drawn; raises `RequestError` that names the field."""
    changes: dict[str, Any] = {}
    names: dict[str, str] = {}  # of fields, by those of SamplingParams
    for own, setting in SETTINGS.items():
        for name in setting.fields if setting.kind != "other" else ():
            is_count = setting.kind == "count"
            value = fields.integer(name, -1, _MOST) if is_count else fields.number(name)
            if value is not None:
                changes[own], names[own] = value, name
    if changes.get("top_k") == -1:
        changes["top_k"] = 0
    seed = fields.integer("seed", -(2**63), _MOST_SEED)
    if seed is not None and seed != RANDOM_SEED:
        changes["seed"] = seed
    bounds = settings.bounds
    for name in ("stop", "dry_sequence_breakers"):
        texts = fields.texts(name, bounds.stop_texts, bounds.stop_length)
        if texts is not None:
            changes[name] = tuple(text for text in texts if text)
    samplers = fields.get("samplers")
    if samplers is not None:
        changes["samplers"] = samplers
    if asks_for_text(fields):
        changes["grammar"] = read_grammar(fields)
    bias = _read_bias(fields, vocabulary, bounds)
    if fields.flag("ignore_eos"):
        bias |= dict.fromkeys(vocabulary.end_of_generation, -inf)
    if bias:
        changes["logit_bias"] = {**settings.params.logit_bias, **bias}
    try:
        return settings.params.replace(**changes)
    except OptionError as error:
        raise _named(error, names) from None


def _named(error: OptionError, names: Mapping[str, str]) -> RequestError:
    """Return the error with the name that the field has in the request."""
    own = field_named_in(str(error))
    if own is None:  # a sampler's name
        return RequestError(f"samplers: {error}", "samplers")
    name = names.get(own, own)
    return RequestError(name + str(error).removeprefix(own), name)


def _read_bias(fields: Fields, vocabulary: Vocabulary, bounds: Bounds) -> dict[int, float]:
    """Read {"15043": 1} or [[15043, 1], ["text", false]]: false forbids a token."""
    given = fields.get("logit_bias")
    wanted = 'token ids with numbers, as {"15043": 1.5} or [[15043, 1.5], [" text", false]]'
    if given is None:
        return {}
    if isinstance(given, dict):
        pairs: list[Any] = [[_as_id(key), value] for key, value in given.items()]
    elif isinstance(given, list):
        pairs = given
    else:
        raise fields.wrong("logit_bias", wanted)
    if len(pairs) > bounds.biases:
        problem = f"logit_bias has {len(pairs)} entries: give at most {bounds.biases}"
        raise RequestError(problem, "logit_bias")
    bias: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise fields.wrong("logit_bias", wanted)
        tokens, amount = pair
        if isinstance(tokens, str):
            tokens = vocabulary.tokenize(tokens, add_special=False)
        is_number = isinstance(amount, int | float) and amount is not True
        if not is_number:
            raise fields.wrong("logit_bias", wanted)
        for token in tokens if isinstance(tokens, list) else [tokens]:
            if isinstance(token, bool) or not isinstance(token, int):
                raise fields.wrong("logit_bias", wanted)
            if not 0 <= token < vocabulary.size:
                problem = f"logit_bias names token {token}: the model has {vocabulary.size} tokens"
                raise RequestError(problem, "logit_bias")
            bias[token] = -inf if amount is False else float(max(-_FAR, min(_FAR, amount)))
    return bias


def _as_id(key: str) -> int | str:
    return int(key) if key.isdecimal() and len(key) < 12 else key


def read_length(fields: Fields, settings: ServeSettings) -> int | None:
    """Return the most tokens of an answer; None: until the model ends or the context is full."""
    for name in _LENGTHS:
        length = fields.integer(name, -1, _MOST)
        if length is not None:
            return None if length < 0 else length
    return settings.max_tokens


def read_speculative(fields: Fields) -> SpeculativeChoice:
    """Return how the answer is to be drafted; raises `RequestError` for names that are unknown.

    Read are {"speculative": {"n_max": 4}}, llama-server's "speculative.n_max", and "accept".
    """
    given = fields.get("speculative")
    if given is not None and not isinstance(given, dict):
        raise fields.wrong("speculative", 'an object, as {"n_max": 4}')
    dotted = {
        name[len(_PREFIX) :]: value
        for name, value in fields.values.items()
        if name.startswith(_PREFIX)
    }
    own = Fields({**(given or {}), **dotted}, _PREFIX)
    for name in own.values:
        if name not in _SPECULATIVE:
            error = unknown_name(_PREFIX + name, [_PREFIX + each for each in _SPECULATIVE], "field")
            raise RequestError(str(error), _PREFIX + name)
    return SpeculativeChoice(
        drafter=own.text("drafter"),
        n_max=own.integer("n_max", 0, 1024),
        accept=own.text("accept") or fields.text("accept"),
        trace=own.flag("trace"),
    )
