"""JSON schemas as generators write them: what they allow is possible, and what is lost is said."""

from __future__ import annotations

import copy
import json
import logging
import random
from typing import Any

import pytest
from support.schemas import SCHEMAS

from specrun.bindings.models.model import Model
from specrun.runtime import Grammar
from specrun.runtime.grammar import GrammarState, loosened
from specrun.runtime.grammar.compiled import compiled


def is_possible(model: Model, place: GrammarState, value: object) -> bool:
    """Whether an answer may be this value, at the beginning of its grammar."""
    text = json.dumps(value, ensure_ascii=False)
    end = min(model.vocabulary.end_of_generation)
    return place.after(model.vocabulary.tokenize_within(text.encode())).allows(end)


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_of_generators_are_masks(model: Model, name: str) -> None:
    written = SCHEMAS[name]
    place = compiled(Grammar.json_schema(written.schema), model.vocabulary).start(0)
    for value in written.good:
        assert is_possible(model, place, value), value
    for value in written.bad:
        assert not is_possible(model, place, value), value


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_not_followed_is_said(name: str) -> None:
    written = SCHEMAS[name]
    notes = loosened(written.schema)[1]
    assert {note.split(" at ")[0] for note in notes} == set(written.unfollowed)
    assert all(note.split(" at ")[1].startswith("#") for note in notes)


@pytest.mark.parametrize("name", SCHEMAS)
def test_loosening_never_narrows(model: Model, name: str) -> None:
    """Whatever the whole schema accepts of values near to good ones is possible."""
    jsonschema = pytest.importorskip("jsonschema")
    written, chance = SCHEMAS[name], random.Random(name)
    validator = jsonschema.validators.validator_for(
        written.schema, default=jsonschema.Draft202012Validator
    )(written.schema)
    place = compiled(Grammar.json_schema(written.schema), model.vocabulary).start(0)
    for value in written.good:
        for _ in range(20):
            other = _changed(value, chance)
            try:
                is_valid = validator.is_valid(other)
            except Exception:
                return
            if is_valid and not _has_format(written.schema, other):
                assert is_possible(model, place, other), other


_LEAVES = ("", "a", "abc", 0, 3, -2, 0.5, True, None, [], {}, ["a"], [1, 2], {"a": 1})


def _changed(value: Any, chance: random.Random) -> Any:
    """Return a value with one of its parts left out, replaced or added."""
    value = copy.deepcopy(value)
    places = [(None, None)]
    ahead = [value]
    while ahead:
        part = ahead.pop()
        keys = (
            list(part)
            if isinstance(part, dict)
            else range(len(part))
            if isinstance(part, list)
            else ()
        )
        places += [(part, key) for key in keys]
        ahead += [part[key] for key in keys]
    part, key = chance.choice(places)
    if part is None and not isinstance(value, dict | list):
        return chance.choice(_LEAVES)
    if part is None and isinstance(value, dict):
        value[chance.choice(("zz", "x-zz", "n_2"))] = chance.choice(_LEAVES)
    elif part is None:
        value.append(chance.choice(_LEAVES))
    elif chance.random() < 0.3:
        del part[key]
    else:
        part[key] = chance.choice(_LEAVES)
    return value


def _has_format(schema: object, value: object) -> bool:
    """Whether a value has a property whose format is followed: for the validator it is a note."""
    properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
    keys = value if isinstance(value, dict) else ()
    return any("format" in properties.get(key, {}) for key in keys)


def test_a_warning_comes_once(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    schema = {"type": "object", "properties": {"only here": {"type": "array", "uniqueItems": True}}}
    with caplog.at_level(logging.WARNING, logger="specrun.grammar"):
        for minimum in range(2):
            compiled(Grammar.json_schema({**schema, "minProperties": minimum}), model.vocabulary)
    said = [each.getMessage() for each in caplog.records if "only here" in each.getMessage()]
    assert len(said) == 1
    assert "uniqueItems at #/properties/only here" in said[0]


def test_many_warnings_are_counted(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    listed = {f"many {k}": {"type": "array", "uniqueItems": True} for k in range(50)}
    with caplog.at_level(logging.WARNING, logger="specrun.grammar"):
        compiled(Grammar.json_schema({"type": "object", "properties": listed}), model.vocabulary)
    said = [each.getMessage() for each in caplog.records]
    assert sum("many" in each for each in said) == 20
    assert "30 more keywords are not followed" in said[-1]


def test_deep_schemas_take_no_stack() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(20_000):
        schema = {"type": "array", "items": schema}
    found, notes = loosened(schema)
    assert found["items"]["items"]["type"] == "array"
    assert notes == []
