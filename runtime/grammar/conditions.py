"""Conditions of a JSON schema (`if`, `not`, `dependentRequired`, ...) as alternatives.

A mask has no conditions, but it has alternatives: a value fits "if A then B" if it fits A and B, or
does not fit A. So a condition is exact if "does not fit" is a schema itself: for lists of values
whose others are known, types, bounds, and names of properties.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrun.runtime.grammar.references import properties_of

Schema = Any
_Node = dict[str, Any]
_TYPES = ("null", "boolean", "number", "string", "array", "object")
CONDITIONS = ("if", "not", "dependentRequired", "dependentSchemas", "dependencies")
_ABSENT = "absent"
_MOST_WORK = 2000  # alternatives times properties, above which the compiler refuses a schema

# The keyword that holds where a bound does not, and the number added to it.
_BEYOND = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions of a schema taken out of it.

    `rest` is the schema without them. `options` are schemas of which a value has to fit one; None
    if there is nothing to choose. `lost` are keywords that are no alternatives.
    """

    rest: _Node
    options: list[Schema] | None
    lost: Sequence[str]


class ConditionReader:
    """Reads conditions; `resolved` returns the schema that a reference names."""

    def __init__(
        self, resolved: Callable[[Schema], Schema], keywords: Callable[[Schema], set[str]]
    ) -> None:
        self._resolved, self._keywords = resolved, keywords

    def read(self, node: _Node) -> Conditions:
        """Take the conditions out of a schema, also those that stand in its `allOf` alone."""
        own = {*CONDITIONS, "then", "else"}
        rest = {name: value for name, value in node.items() if name not in own}
        held = [node]
        if isinstance(node.get("allOf"), list):
            others = [each for each in node["allOf"] if not self._is_nothing_else(each)]
            held += [each for each in node["allOf"] if self._is_nothing_else(each)]
            rest = {name: value for name, value in rest.items() if name != "allOf" or others}
            if others:
                rest["allOf"] = others
        known, lost = self._with_properties(rest), list[str]()
        options: list[Sequence[Schema]] = [()]
        is_chosen = False
        most = max(2, _MOST_WORK // (1 + len(known["properties"])))
        for name, alternatives in (pair for each in held for pair in self._each(each, known)):
            made: list[Sequence[Schema]] | None = None
            if alternatives is not None:
                pairs = ((*option, more) for option in options for more in alternatives)
                made = [option for option in pairs if _may_be([known, *option])]
            if made is None or len(made) > most:
                lost.append(name)
            else:
                options, is_chosen = made, True
        joined = [_joined(option) for option in options]
        return Conditions(rest, joined if is_chosen else None, lost)

    def _is_nothing_else(self, node: Schema) -> bool:
        """Whether a schema has conditions and no other keywords."""
        known = self._keywords(node)
        return bool(known & {*CONDITIONS}) and not known - {*CONDITIONS}

    def _with_properties(self, node: _Node) -> _Node:
        """Return a schema with the properties of those that it joins."""
        properties, required = dict[str, Schema](), list[str]()
        ahead, n_read = [node], 0
        while ahead and n_read < 100:
            own = self._resolved(ahead.pop(0))
            n_read += 1
            if not isinstance(own, dict):
                continue
            properties, names = {**properties_of(own), **properties}, own.get("required")
            required += names if isinstance(names, list) else []
            parts = own.get("allOf")
            ahead += parts if isinstance(parts, list) else []
            ahead += [{"$ref": own["$ref"]}] if "$ref" in own and own is node else []
        return {**node, "properties": properties, "required": required}

    # -- conditions as alternatives ----------------------------------------------------------------

    def _each(self, node: _Node, known: _Node) -> Iterator[tuple[str, Sequence[Schema] | None]]:
        """Yield the keyword of each condition, and its alternatives; None if it has none."""
        if "if" in node and {"then", "else"} & node.keys():
            yield "if", self._branches(node, known)
        if node.get("not", False) is not False:
            yield "not", self.negated(node["not"], known)
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            entries = node.get(keyword)
            for name, needed in entries.items() if isinstance(entries, dict) else ():
                needs: Schema = needed
                if isinstance(needed, list):
                    needs = {"required": [name, *needed]}
                elif isinstance(needed, str):
                    needs = {"required": [name, needed]}
                else:
                    needs = {"allOf": [{"required": [name]}, needed]}
                yield keyword, [{"properties": {name: False}}, needs]

    def _branches(self, node: _Node, known: _Node) -> Sequence[Schema] | None:
        condition, then, other = node["if"], node.get("then", True), node.get("else", True)
        if then is True:
            return [condition, other]
        not_so = self.negated(condition, known)
        if not_so is None:
            return None
        fails = [each if other is True else {"allOf": [each, other]} for each in not_so]
        return [{"allOf": [condition, then]}, *fails]

    # -- negations ---------------------------------------------------------------------------------

    def negated(self, schema: Schema, known: Schema) -> Sequence[Schema] | None:
        """Return schemas one of which a value fits if it does not fit `schema`, and only then.

        None if there are no such schemas. `known` is one that the value fits in any case.
        """
        schema, known = self._resolved(schema), self._resolved(known)
        known = known if isinstance(known, dict) else {}
        if not isinstance(schema, dict):
            return [] if schema is True else [True]
        alternatives: list[Schema] = []
        for name in schema.keys() & self._keywords(schema):
            found = self._negated_keyword(name, schema, known)
            if found is None:
                return None
            alternatives += found
        return alternatives

    def _negated_keyword(self, name: str, schema: _Node, known: _Node) -> Sequence[Schema] | None:
        value = schema[name]
        if name in ("const", "enum"):
            return _other_values([value] if name == "const" else value, self._values(known))
        if name == "type":
            return _other_types(value, known)
        if name == "required" and isinstance(value, list):
            certain = as_list(known.get("required"))
            gone = (each for each in value if each not in certain)
            return [{"type": "object", "properties": {each: False}} for each in gone]
        if name == "properties" and isinstance(value, dict):
            return self._other_properties(value, known)
        if name == "not":
            return [value]
        if name in ("anyOf", "allOf") and isinstance(value, list):
            each = [self.negated(inner, known) for inner in value]
            if None in each:
                return None
            found = [alternatives for alternatives in each if alternatives is not None]
            if name == "allOf":
                return [inner for alternatives in found for inner in alternatives]
            return [{"allOf": [{"anyOf": [*inner]} for inner in found]}] if all(found) else []
        kind, keyword, more = _BEYOND.get(name, ("", "", 0))
        is_count = isinstance(value, int | float) and not isinstance(value, bool)
        if not kind or not is_count or (more and value != int(value)):
            return None
        beyond = value + more
        return [] if more and beyond < 0 else [{"type": kind, keyword: beyond}]

    def _other_properties(self, properties: _Node, known: _Node) -> Sequence[Schema] | None:
        alternatives: list[Schema] = []
        own = properties_of(known)
        for key, inner in properties.items():
            found = self.negated(inner, own.get(key, True))
            if found is None:
                return None
            alternatives += [
                {"type": "object", "properties": {key: each}, "required": [key]} for each in found
            ]
        return alternatives

    def _values(self, known: Schema) -> list[Any] | None:
        """Return all values that fit a schema, None if they are not listed."""
        node = self._resolved(known)
        listed = listed_values(node)
        if listed is not None or not isinstance(node, dict):
            return listed
        for name in ("anyOf", "oneOf"):
            if isinstance(node.get(name), list):
                each = [self._values(inner) for inner in node[name]]
                found = [values for values in each if values is not None]
                if len(found) < len(each):
                    return None
                return [value for values in found for value in values]
        known_types: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
        types = as_list(node.get("type"))
        if not types or any(each not in known_types for each in types):
            return None
        return [value for each in types for value in known_types[each]]


def as_list(value: object) -> list[Any]:
    """Return a list, or the one of a single value; none of null."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _text(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _other_values(values: object, known: list[Any] | None) -> Sequence[Schema] | None:
    if known is None or not isinstance(values, list):
        return None
    listed = set(map(_text, values))
    others = [value for value in known if _text(value) not in listed]
    return [{"enum": others}] if others else []


def _other_types(types: object, known: Mapping[str, Any]) -> Sequence[Schema] | None:
    forbidden = set(map(str, as_list(types)))
    own = set(map(str, as_list(known.get("type")))) or {*_TYPES}
    if "integer" in forbidden and "number" not in forbidden and "number" in own:
        return None
    if "number" in forbidden:
        forbidden.add("integer")
    others = [each for each in (*_TYPES, "integer") if each in own and each not in forbidden]
    return [{"type": others}] if others else []


# -- alternatives that exclude each other ----------------------------------------------------------


def _may_be(schemas: Sequence[Schema]) -> bool:
    """Whether schemas do not exclude each other, as far as listed properties show."""
    values: dict[str, set[str]] = {}
    present: set[str] = set()
    ahead = list(schemas)
    while ahead:
        part = ahead.pop()
        if part is False:
            return False
        if not isinstance(part, dict):
            continue
        required = as_list(part.get("required"))
        present.update(each for each in required if isinstance(each, str))
        parts = part.get("allOf")
        ahead += parts if isinstance(parts, list) else []
        for key, schema in properties_of(part).items():
            listed = listed_texts(schema)
            if listed is not None:
                listed |= {_ABSENT}
                values[key] = values.get(key, listed) & listed
    return all(found - {_ABSENT} if key in present else found for key, found in values.items())


def _joined(option: Sequence[Schema]) -> Schema:
    """Return a schema of the values that fit all of these, listed properties as one."""
    listed: dict[str, Schema] = {}
    required: list[str] = []
    others: list[Schema] = []
    ahead = [*reversed(option)]
    while ahead:
        part = ahead.pop()
        if isinstance(part, dict) and part.keys() == {"allOf"}:
            ahead += reversed(part["allOf"])
            continue
        own = properties_of(part)
        is_list = isinstance(part, dict) and part.keys() <= {"type", "properties", "required"}
        values = {key: listed_texts(each) for key, each in own.items()}
        if not is_list or part.get("type", "object") != "object" or None in values.values():
            others.append(part)
            continue
        required += [each for each in as_list(part.get("required")) if each not in required]
        for key, found in values.items():
            kept = listed.get(key, own[key])
            before = listed_texts(kept)
            if before is not None and found is not None and before != found:
                both = [each for each in listed_values(own[key]) or () if _text(each) in before]
                kept = {"enum": both} if both else False
            listed[key] = kept
        if "type" in part and {"type": "object"} not in others:
            others.append({"type": "object"})
    if listed or required:
        own = {"properties": listed, "required": required}
        others.insert(0, {name: value for name, value in own.items() if value})
    return {"allOf": others} if len(others) != 1 else others[0]


def listed_values(schema: Schema) -> list[Any] | None:
    """Return the values that a schema lists; None if it lists none."""
    if not isinstance(schema, dict):
        return [] if schema is False else None
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if isinstance(schema.get("enum"), list) else None


def listed_texts(schema: Schema) -> set[str] | None:
    """Return the same as texts of JSON, of which equal values have one."""
    values = listed_values(schema)
    return None if values is None else set(map(_text, values))
