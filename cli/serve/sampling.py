"""Fields that all requests for an answer share: sampling settings, grammars, lengths, speculation.

They have OpenAI's names and llama-server's, and change the server's own settings.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import inf
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from specrun.bindings.errors import OptionError
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.cli.serve.body import ModelBody, wanted, wrong
from specrun.cli.serve.errors import RequestError, field_named_in
from specrun.cli.serve.service import AnswerRequest, AnswerService, Prompt, Speculation
from specrun.cli.serve.settings import ServeSettings
from specrun.runtime.chat import ChatTurn
from specrun.runtime.grammar import Grammar, GrammarError, loosened
from specrun.runtime.laws import RANDOM_SEED, SETTINGS, SamplingParams

_Body = TypeVar("_Body", bound="AnswerBody")

MOST = 2**31 - 1
Number = Annotated[int | float | None, wanted("a number")]
Count = Annotated[int, Meta(ge=-1, le=MOST)]
Length = Annotated[int, Meta(ge=0, le=MOST)]
_Stop = Annotated[str, Meta(max_length=1024)]
Texts = Annotated[
    _Stop | Annotated[list[_Stop], Meta(max_length=32)] | None,
    wanted("a text or a list of texts, each of at most 1024 characters", whole=True),
]

_LEAST_SEED, _MOST_SEED = -(2**63), 2**64 - 1
_SEED = f"a whole number from {_LEAST_SEED} to {_MOST_SEED}"

_KINDS = {"count": Count | None, "number": Number}
FIELDS: dict[str, tuple[str, Any]] = {
    **{
        name: (own, _KINDS[setting.kind])
        for own, setting in SETTINGS.items()
        if setting.kind in _KINDS
        for name in setting.fields
    },
    "dry_sequence_breakers": ("dry_sequence_breakers", Texts),
    "samplers": ("samplers", Any),
    "seed": ("seed", Annotated[int | None, wanted(_SEED)]),
    "stop": ("stop", Texts),
}
"""Fields of sampling settings: the name in `SamplingParams`, and the type in a body."""

_log = logging.getLogger(__name__)
_NO_TURN = ChatTurn()
_MOST_WHOLE = 10**300
_MOST_BIASES = 4096
_FAR = 1e30  # a bias that decides alone, and that a logit of 32 bits can have added


class TextFormat(Struct):
    """OpenAI's `response_format`; the schema may stand beside the type, as in newer APIs."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"],
        wanted("one of text, json_object and json_schema"),
    ]
    json_schema: dict[str, Any] | None = None
    schema: Any = None
    strict: Any = None

    def grammar(self, field: str) -> Grammar | None:
        """Return the grammar of a text of this format; None for any text."""
        if self.type == "text":
            return None
        own = self.json_schema
        schema = self.schema if own is None else own.get("schema")
        if schema is not None:
            is_strict = self.strict is True or (own is not None and own.get("strict") is True)
            return _of_schema(schema, field, is_strict=is_strict)
        if self.type == "json_schema":
            raise RequestError(f"{field} has no schema: give one, or the type json_object", field)
        return Grammar.json_object()


class FormatHolder(Struct):
    """The object that has the format in newer APIs."""

    format: TextFormat | None = None


class AnswerBody(ModelBody, kw_only=True):
    """The fields of every API's requests for answers; `with_settings` adds those of sampling."""

    stream: bool | None = None
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    n_predict: Count | None = None
    ignore_eos: bool | None = None
    logit_bias: Any = None
    response_format: TextFormat | None = None
    json_schema: Any = None
    grammar: str | None = None
    # {"n_max": 4}, or llama-server's "speculative.n_max" beside it
    speculative: Annotated[Speculation | None, wanted('an object, as {"n_max": 4}')] = None
    accept: str | None = None


def with_settings(body: type[_Body]) -> type[_Body]:
    """Return a body with a field for each setting of sampling."""
    own = body.__struct_fields__  # an API may have its own name for a setting
    fields = [(name, kind, None) for name, (_, kind) in FIELDS.items() if name not in own]
    made = msgspec.defstruct(body.__name__, fields, bases=(body,), kw_only=True)
    return cast("type[_Body]", made)


def answer_request(
    body: AnswerBody,
    service: AnswerService,
    *,
    turn: ChatTurn = _NO_TURN,
    prompts: Sequence[Prompt] = (),
    n: int = 1,
    top_logprobs: int | None = None,
    max_tokens: int | None = None,
    form: TextFormat | None = None,
    form_field: str = "",
) -> AnswerRequest:
    """Return the request that a body makes; raises `RequestError` that names the field.

    `top_logprobs` None: no log-probabilities at all; `max_tokens` goes before the
    body's, and so does `form`, the format of newer APIs in the field `form_field`.
    """
    own = body.speculative or Speculation()
    if body.accept and not own.accept:
        own = msgspec.structs.replace(own, accept=body.accept)
    params = sampling_params(body, service.settings, service.engine.vocabulary)
    if form is not None:
        params = params.replace(grammar=form.grammar(form_field))
    return AnswerRequest(
        turn=turn,
        prompts=prompts,
        params=params,
        max_tokens=length_of(body, service.settings) if max_tokens is None else max_tokens,
        n=n,
        logprobs=top_logprobs is not None,
        top_logprobs=top_logprobs or 0,
        speculative=own,
    )


def length_of(body: AnswerBody, settings: ServeSettings) -> int | None:
    """Return the most tokens of an answer; None: until the model ends or the context is full."""
    for length in (body.max_completion_tokens, body.max_tokens, body.n_predict):
        if length is not None:
            return None if length < 0 else length
    return settings.max_tokens


def sampling_params(
    body: AnswerBody, settings: ServeSettings, vocabulary: Vocabulary
) -> SamplingParams:
    """Return how tokens are drawn: the server's settings with the changes of a request."""
    names: dict[str, str] = {}  # of fields, by those of SamplingParams
    found: dict[str, Any] = {}
    for name, (own, kind) in FIELDS.items():
        value = getattr(body, name)
        if value is not None:
            found[own], names[own] = _setting(name, kind, value), name
    if found.get("seed") == RANDOM_SEED:
        del found["seed"]
    if any(each is not None for each in (body.response_format, body.json_schema, body.grammar)):
        found["grammar"] = _grammar(body)
    bias = _bias(body.logit_bias, vocabulary)
    if body.ignore_eos:
        bias |= dict.fromkeys(vocabulary.end_of_generation, -inf)
    if bias:
        found["logit_bias"] = {**settings.params.logit_bias, **bias}
    try:
        return settings.params.replace(**found)
    except OptionError as error:
        refused = field_named_in(str(error))
        if refused is None:  # a sampler's name
            raise RequestError(f"samplers: {error}", "samplers") from None
        name = names.get(refused, refused)  # that the field has in the request
        raise RequestError(name + str(error).removeprefix(refused), name) from None


def _setting(name: str, kind: object, value: Any) -> Any:  # noqa: ANN401 - any setting's value
    """Return the value of a setting as `SamplingParams` has it."""
    if name == "dry_sequence_breakers" and value and isinstance(value, str):
        return value  # which may be a list in JSON
    if kind is Texts:
        texts = [value] if isinstance(value, str) else value
        return tuple(text for text in texts if text)
    if kind is Number:
        if abs(value) > _MOST_WHOLE:
            raise wrong(name, value, "a number of a size that floats have")
        return float(value)
    if name == "top_k":
        return max(0, value)
    if name == "seed" and not _LEAST_SEED <= value <= _MOST_SEED:
        raise wrong(name, value, _SEED)
    return value


# -- Biases ----------------------------------------------------------------------------------------

_BIASES = 'token ids with numbers, as {"15043": 1.5} or [[15043, 1.5], [" text", false]]'


def _bias(given: object, vocabulary: Vocabulary) -> dict[int, float]:
    """Read {"15043": 1} or [[15043, 1], ["text", false]]: false forbids a token."""
    if given is None:
        return {}
    pairs: object = given
    if isinstance(given, dict):
        pairs = [
            [int(key) if key.isdecimal() and len(key) < 12 else key, value]
            for key, value in given.items()
        ]
    if not isinstance(pairs, list):
        raise wrong("logit_bias", given, _BIASES)
    if len(pairs) > _MOST_BIASES:
        problem = f"logit_bias has {len(pairs)} entries: give at most {_MOST_BIASES}"
        raise RequestError(problem, "logit_bias")
    bias: dict[int, float] = {}
    for pair in pairs:
        try:
            tokens, amount = msgspec.convert(pair, tuple[int | str | list[int], int | float | bool])
        except msgspec.ValidationError:
            raise wrong("logit_bias", given, _BIASES) from None
        if amount is True:
            raise wrong("logit_bias", given, _BIASES)
        if isinstance(tokens, str):
            tokens = vocabulary.tokenize(tokens, add_special=False)
        for token in tokens if isinstance(tokens, list) else [tokens]:
            if not 0 <= token < vocabulary.size:
                _log.info("logit_bias names token %d, which the model does not have", token)
                continue
            bias[token] = -inf if amount is False else float(max(-_FAR, min(_FAR, amount)))
    return bias


# -- Grammars --------------------------------------------------------------------------------------


def _grammar(body: AnswerBody) -> Grammar | None:
    """Return the grammar of an answer's text, None for any text.

    Raises `RequestError` that names the field, also if two fields bind the text.
    """
    found: dict[str, Grammar] = {}
    if body.response_format is not None:
        grammar = body.response_format.grammar("response_format")
        if grammar is not None:
            found["response_format"] = grammar
    if body.json_schema not in (None, ""):
        found["json_schema"] = _of_schema(body.json_schema, "json_schema")
    if body.grammar:  # in GBNF, or in Lark if it begins as llama.cpp has it
        is_lark = body.grammar.lstrip().startswith("%llguidance")
        try:
            found["grammar"] = (Grammar.lark if is_lark else Grammar.gbnf)(body.grammar)
        except GrammarError as error:
            raise RequestError(f"grammar: {error}", "grammar") from None
    if len(found) > 1:
        first, second = list(found)[:2]
        raise RequestError(f"{first} and {second} both bind the text: give one of them", second)
    return next(iter(found.values()), None)


def _of_schema(schema: object, field: str, *, is_strict: bool = False) -> Grammar:
    """Return the grammar of a schema; a strict one is refused if it cannot be followed exactly."""
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{field}: the schema must be a JSON object, true or false", field)
    try:
        grammar = Grammar.json_schema(schema)
    except GrammarError as error:
        raise RequestError(f"{field}: {error}", field) from None
    if is_strict and (notes := loosened(schema)[1]):
        problem = f"{field} is strict, and {notes[0]}"
        raise RequestError(f"{problem}. Change the schema, or leave strict out", field)
    return grammar
