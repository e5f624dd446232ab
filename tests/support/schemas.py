"""JSON schemas as pydantic, zod and OpenAPI generators write them, with values that they allow.

Each has texts that must be possible, and texts that must not be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_SQUARE = {"type": "object", "properties": {"side": {"type": "number"}}, "required": ["side"]}


@dataclass(frozen=True)
class Written:
    """A schema, values that it allows, and values that its grammar must not allow.

    `unfollowed` are the keywords that the log has to name.
    """

    schema: dict[str, Any] | bool
    good: tuple[Any, ...]
    bad: tuple[Any, ...] = ()
    unfollowed: tuple[str, ...] = ()


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split()}


def _closed(required: str, **properties: Any) -> dict[str, Any]:
    return {**_object(required, **properties), "additionalProperties": False}


_ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@"
    r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_DRAFT_7 = "http://json-schema.org/draft-07/schema#"
_DRAFT_4 = "http://json-schema.org/draft-04/schema#"

SCHEMAS: dict[str, Written] = {
    # -- pydantic
    "pydantic model": Written(
        {
            "title": "User",
            "description": "A user.",
            **_object(
                "name",
                name={"title": "Name", "type": "string", "maxLength": 8, "examples": ["ann"]},
                age={
                    "anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}],
                    "default": None,
                },
            ),
        },
        ({"name": "ann"}, {"name": "ann", "age": None}, {"name": "b", "age": 7}),
        ({"age": 7}, {"name": "far too long"}, {"name": "a", "age": -1}),
    ),
    "pydantic tagged union": Written(
        {
            "$defs": {
                "Cat": _object("kind lives", kind={"const": "cat"}, lives={"type": "integer"}),
                "Dog": _object("kind", kind={"const": "dog"}, name={"type": "string"}),
            },
            **_object(
                "pet",
                pet={
                    "discriminator": {
                        "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
                        "propertyName": "kind",
                    },
                    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
                },
            ),
        },
        ({"pet": {"kind": "cat", "lives": 9}}, {"pet": {"kind": "dog", "name": "rex"}}),
        ({"pet": {"kind": "cow"}}, {"pet": {"kind": "cat"}}),
    ),
    "pydantic set": Written(
        _object("tags", tags={"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}),
        ({"tags": ["a", "b"]}, {"tags": []}),
        ({"tags": ["c"]},),
        ("uniqueItems",),
    ),
    "pydantic decimal": Written(
        _object(
            "price",
            price={
                "anyOf": [
                    {"type": "number", "exclusiveMinimum": 0},
                    {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
                ]
            },
        ),
        ({"price": 1.5}, {"price": "-12.5"}),
        ({"price": -1}, {"price": "1,5"}),
        ("pattern",),
    ),
    "pydantic formats": Written(
        _object(
            "secret",
            secret={"type": "string", "format": "password", "writeOnly": True},
            folder={"type": "string", "format": "path"},
            picture={"type": "string", "format": "binary"},
            site={"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083},
            at={"type": "string", "format": "date-time"},
            key={"type": "string", "format": "uuid4"},
        ),
        (
            {"secret": "x"},
            {"secret": "x", "folder": "/tmp", "picture": "??", "site": "https://example.org/a"},
            {"secret": "x", "at": "2026-11-28T23:00:00Z", "key": "any text"},
        ),
        ({"secret": "x", "at": "yesterday"}, {"secret": "x", "site": "no address"}),
    ),
    "pydantic tree": Written(
        {
            "$defs": {
                "Node": _object(
                    "value",
                    value={"type": "integer"},
                    children={"type": "array", "items": {"$ref": "#/$defs/Node"}, "default": []},
                )
            },
            "$ref": "#/$defs/Node",
        },
        ({"value": 1}, {"value": 1, "children": [{"value": 2, "children": [{"value": 3}]}]}),
        ({"value": 1, "children": [{"value": "2"}]},),
    ),
    "pydantic dict": Written(
        _object(
            "counts",
            counts={
                "type": "object",
                "additionalProperties": {"type": "integer"},
                "propertyNames": {"pattern": "^[a-z]+$"},
                "minProperties": 1,
            },
        ),
        ({"counts": {"a": 1}}, {"counts": {"ab": 1, "c": 2}}),
        ({"counts": {}}, {"counts": {"A": 1}}, {"counts": {"a": "1"}}),
    ),
    "pydantic tuple": Written(
        _object(
            "point",
            point={
                "type": "array",
                "prefixItems": [{"type": "number"}, {"type": "number"}],
                "minItems": 2,
                "maxItems": 2,
            },
        ),
        ({"point": [1, 2.5]},),
        ({"point": [1]}, {"point": [1, 2, 3]}, {"point": ["1", 2]}),
    ),
    "pydantic bytes and json": Written(
        _object(
            "",
            data={"type": "string", "format": "base64url", "contentEncoding": "base64"},
            raw={
                "type": "string",
                "contentMediaType": "application/json",
                "contentSchema": {"type": "object"},
            },
        ),
        ({"data": "aGk="}, {"raw": "{}"}, {}),
        ({"data": 1},),
    ),
    # -- zod 3 and 4
    "zod 4 email": Written(
        {
            "$schema": _DRAFT,
            **_closed("email", email={"type": "string", "format": "email", "pattern": _ZOD_EMAIL}),
        },
        ({"email": "ann.b@example.org"},),
        ({"email": "ann"}, {"email": "ann@b@c.de"}),
        ("pattern",),
    ),
    "zod 4 record": Written(
        {
            "$schema": _DRAFT,
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["red", "sky blue"]},
            "additionalProperties": {"type": "number"},
        },
        ({"red": 1}, {"sky blue": 0.5}, {}),
        ({"green": 1}, {"red": "1"}),
    ),
    "zod 4 plain record": Written(
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        ({"any": [1]}, {}),
        ([],),
    ),
    "zod 4 never": Written(
        _closed("a", a={"type": "string"}, b={"not": {}}),
        ({"a": "x"},),
        ({"a": "x", "b": 1},),
    ),
    "zod 4 integer": Written(
        _closed(
            "n big",
            n={"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
            big={
                "type": "integer",
                "format": "int64",
                "minimum": -9223372036854775808,
                "maximum": 9223372036854775807,
            },
        ),
        ({"n": -5, "big": 9223372036854775807}, {"n": 0, "big": -9223372036854775808}),
        ({"n": 1.5, "big": 1}, {"n": 1, "big": "1"}),
        ("minimum", "maximum"),
    ),
    "zod 4 formats": Written(
        _closed(
            "",
            time={"type": "string", "format": "time", "pattern": r"^(?:[01]\d|2[0-3]):[0-5]\d$"},
            phone={"type": "string", "format": "e164", "pattern": r"^\+(?:[0-9]){6,14}[0-9]$"},
            emoji={
                "type": "string",
                "format": "emoji",
                "pattern": r"^(\p{Extended_Pictographic}|\p{Emoji_Component})+$",
            },
            jwt={"type": "string", "format": "jwt"},
        ),
        ({"time": "23:59", "phone": "+491701234567"}, {"emoji": "😀"}, {"jwt": "a.b.c"}),
        ({"time": "25:00"}, {"phone": "0170"}),
        ("pattern",),
    ),
    "zod 3 union with strictness": Written(
        {
            "$schema": _DRAFT_7,
            "type": "object",
            "properties": {
                "shape": {
                    "anyOf": [
                        _closed(
                            "type r",
                            type={"type": "string", "const": "circle"},
                            r={"type": "number"},
                        ),
                        _closed(
                            "type a",
                            type={"type": "string", "const": "square"},
                            a={"type": "number"},
                        ),
                    ]
                }
            },
            "required": ["shape"],
            "additionalProperties": False,
        },
        ({"shape": {"type": "circle", "r": 1}}, {"shape": {"type": "square", "a": 2.5}}),
        ({"shape": {"type": "circle", "a": 1}},),
    ),
    "zod 3 nullable and tuple": Written(
        {
            "$schema": _DRAFT_7,
            **_closed(
                "name pair",
                name={"type": ["string", "null"]},
                pair={
                    "type": "array",
                    "items": [{"type": "string"}, {"type": "integer"}],
                    "additionalItems": False,
                    "minItems": 2,
                },
            ),
        },
        ({"name": None, "pair": ["a", 1]}, {"name": "x", "pair": ["b", 2]}),
        ({"name": 1, "pair": ["a", 1]}, {"name": "x", "pair": ["a", 1, 2]}),
    ),
    "zod 3 recursive": Written(
        {
            "$schema": _DRAFT_7,
            "$ref": "#/definitions/category",
            "definitions": {
                "category": _closed(
                    "name subs",
                    name={"type": "string"},
                    subs={"type": "array", "items": {"$ref": "#/definitions/category"}},
                )
            },
        },
        ({"name": "a", "subs": [{"name": "b", "subs": []}]},),
        ({"name": "a", "subs": [{"name": "b"}]},),
    ),
    "zod 3 intersection": Written(
        {
            "allOf": [_object("a", a={"type": "string"}), _object("b", b={"type": "number"})],
            "unevaluatedProperties": False,
        },
        ({"a": "x", "b": 1},),
        ({"a": "x"}, {"a": 1, "b": 1}, {"a": "x", "b": 1, "c": 1}),
    ),
    # -- OpenAPI
    "OpenAPI nullable": Written(
        _object(
            "note",
            note={"type": "string", "nullable": True, "maxLength": 3, "example": "abc"},
            owner={"nullable": True, "allOf": [{"$ref": "#/components/schemas/Owner"}]},
            mood={"type": "string", "enum": ["good", "bad"], "nullable": True},
        )
        | {
            "components": {
                "schemas": {"Owner": _object("id", id={"type": "integer", "format": "int32"})}
            }
        },
        (
            {"note": None},
            {"note": "abc", "owner": {"id": 3}},
            {"note": "", "owner": None, "mood": None},
        ),
        ({"note": "abcd"}, {"note": "a", "owner": {}}, {"note": "a", "mood": "so so"}),
    ),
    "OpenAPI inheritance": Written(
        {
            "components": {
                "schemas": {
                    "Base": {
                        **_object("kind", kind={"type": "string"}),
                        "discriminator": {"propertyName": "kind"},
                    }
                }
            },
            "allOf": [
                {"$ref": "#/components/schemas/Base"},
                _object("side", side={"type": "number"}),
            ],
            "xml": {"name": "square"},
            "externalDocs": {"url": "https://example.org"},
        },
        ({"kind": "square", "side": 2},),
        ({"side": 2}, {"kind": "square"}),
    ),
    "OpenAPI untagged oneOf": Written(
        {"oneOf": [_SQUARE, _object("radius", radius={"type": "number"})]},
        ({"side": 1}, {"radius": 1}),
        ({"corner": 1}, 5),
        ("oneOf",),
    ),
    "OpenAPI exclusive bounds of draft 4": Written(
        {
            "$schema": _DRAFT_4,
            "id": "http://example.org/price#",
            **_object(
                "price",
                price={"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 10},
                share={"type": "number", "maximum": 1, "exclusiveMaximum": False},
            ),
        },
        ({"price": 0.5}, {"price": 10, "share": 1}),
        ({"price": 0}, {"price": 11}),
    ),
    "OpenAPI doubles": Written(
        _object(
            "x",
            x={
                "type": "number",
                "format": "double",
                "minimum": -1.7976931348623157e308,
                "maximum": 1.7976931348623157e308,
            },
            count={"type": "integer", "format": "uint64", "minimum": 0, "maximum": 2**64 - 1},
        ),
        ({"x": 2.5}, {"x": -1, "count": 2**64 - 1}),
        ({"x": "2"}, {"x": 1, "count": -1}),
        ("maximum",),
    ),
    "OpenAPI map": Written(
        {
            "type": "object",
            "additionalProperties": {"type": "array", "items": {"type": "string"}},
            "maxProperties": 2,
            "x-internal": True,
            "deprecated": True,
        },
        ({}, {"a": ["b"]}, {"a": [], "b": ["c", "d"]}),
        ({"a": 1}, {"a": [], "b": [], "c": []}),
    ),
    "OpenAPI long lengths": Written(
        _object(
            "text",
            text={"type": "string", "maxLength": 9007199254740991, "minLength": 0},
            list={"type": "array", "items": {"type": "integer"}, "maxItems": 2147483647},
        ),
        ({"text": "a"}, {"text": "", "list": [1, 2]}),
        ({"text": 1},),
    ),
    # -- conditions and rest of the keywords
    "conditions": Written(
        {
            **_object("kind", kind={"enum": ["a", "b"]}, size={"type": "integer"}),
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["size"]},
            "else": {"not": {"required": ["size"]}},
        },
        ({"kind": "a", "size": 1}, {"kind": "b"}),
        ({"kind": "c"}, {"kind": "a"}, {"kind": "b", "size": 1}),
    ),
    "conditions that a mask cannot follow": Written(
        {
            **_object("", name={"type": "string"}, size={"type": "integer"}),
            "if": {"properties": {"name": {"pattern": "^a"}}, "required": ["name"]},
            "then": {"required": ["size"]},
            "not": {"properties": {"name": {"const": "b"}}, "required": ["name"]},
        },
        ({"name": "a", "size": 1}, {"name": "c"}, {}),
        ({"name": 1},),
        ("if", "not"),
    ),
    "a chain of conditions on one tag": Written(
        {
            **_closed(
                "kind",
                kind={"enum": [f"k{n}" for n in range(9)]},
                **{f"p{n}": {"type": "integer"} for n in range(9)},
            ),
            "allOf": [
                {
                    "if": {"properties": {"kind": {"const": f"k{n}"}}},
                    "then": {"required": [f"p{n}"]},
                }
                for n in range(9)
            ],
        },
        ({"kind": "k0", "p0": 1}, {"kind": "k8", "p0": 2, "p8": 1}),
        ({"kind": "k0"}, {"kind": "k8", "p0": 2}, {"kind": "k9"}),
    ),
    "a condition on an optional flag": Written(
        {
            **_object("", on={"type": "boolean"}, level={"type": "integer"}),
            "if": {"properties": {"on": {"const": True}}, "required": ["on"]},
            "then": {"required": ["level"], "properties": {"level": {"minimum": 1}}},
            "else": {"properties": {"level": False}},
        },
        ({"on": True, "level": 2}, {"on": False}, {}),
        ({"on": True}, {"on": True, "level": 0}, {"on": False, "level": 2}, {"level": 2}),
    ),
    "a condition on a number": Written(
        {
            **_object("age", age={"type": "integer"}, guardian={"type": "string"}),
            "if": {"properties": {"age": {"maximum": 17}}},
            "then": {"required": ["guardian"]},
        },
        ({"age": 17, "guardian": "a"}, {"age": 18}),
        ({"age": 17}, {"age": -1}),
    ),
    "names that exclude each other": Written(
        {
            **_closed("", a={"type": "integer"}, b={"type": "integer"}, c={"type": "integer"}),
            "not": {"anyOf": [{"required": ["a", "b"]}, {"required": ["c"]}]},
        },
        ({"a": 1}, {"b": 1}, {}),
        ({"a": 1, "b": 1}, {"c": 1}),
    ),
    "many names that depend on each other": Written(
        {
            **_object("", **{f"p{n}": {"type": "integer"} for n in range(24)}),
            "dependentRequired": {f"p{n}": [f"p{n + 1}"] for n in range(0, 24, 2)},
        },
        ({}, {"p0": 1, "p1": 1}, {"p22": 1, "p23": 1}),
        ({"p0": "a"}, {"p0": 1}),
        ("dependentRequired",),  # the last of them: the others have many alternatives already
    ),
    "dependent keywords": Written(
        {
            **_object("", card={"type": "string"}, street={"type": "string"}),
            "dependentRequired": {"card": ["street"]},
            "dependentSchemas": {"card": {"properties": {"street": {"minLength": 1}}}},
        },
        ({"card": "1", "street": "a"}, {"street": "a"}, {}),
        ({"card": 1}, {"card": "1"}, {"card": "1", "street": ""}),
    ),
    "dependencies of older drafts": Written(
        {
            "$schema": _DRAFT_7,
            **_object("", card={"type": "string"}, street={"type": "string"}),
            "dependencies": {
                "card": ["street"],
                "street": {"properties": {"street": {"minLength": 2}}},
            },
        },
        ({"card": "1", "street": "ab"}, {"street": "ab"}, {}),
        ({"card": "1"}, {"street": "a"}, {"card": "1", "street": "a"}),
    ),
    "contains": Written(
        {
            "type": "array",
            "items": {"type": ["integer", "string"]},
            "contains": {"type": "integer"},
            "minContains": 1,
            "maxContains": 2,
        },
        ([1], ["a", 1, 2]),
        ([None],),
        ("contains",),
    ),
    "anchors and dynamic references": Written(
        {
            "$id": "https://example.org/tree",
            "$dynamicAnchor": "node",
            **_closed(
                "data",
                data={"$ref": "#payload"},
                next={"$dynamicRef": "#node"},
                other={"$ref": "https://example.org/tree#/$defs/a~1b"},
                last={"$ref": "other.json"},
            ),
            "$defs": {
                "p": {"$anchor": "payload", "type": "string"},
                "a/b": {"type": "boolean"},
                "q": {"$id": "https://example.org/other.json", "type": "null"},
            },
        },
        ({"data": "x"}, {"data": "x", "next": {"data": "y"}, "other": True, "last": None}),
        (
            {"data": 1},
            {"data": "x", "next": {}},
            {"data": "x", "other": 1},
            {"data": "x", "last": 1},
        ),
    ),
    "remote reference": Written(
        _object("a", a={"$ref": "https://example.org/elsewhere.json"}, b={"type": "integer"}),
        ({"a": [1]}, {"a": None, "b": 1}),
        ({"a": 1, "b": "x"},),
        ("$ref",),
    ),
    "reference with siblings": Written(
        {
            "$defs": {"text": {"type": "string", "maxLength": 9}},
            **_object(
                "short",
                short={"$ref": "#/$defs/text", "maxLength": 2, "description": "a short one"},
            ),
        },
        ({"short": "ab"},),
        ({"short": "abc"}, {"short": 1}),
    ),
    "siblings in an old draft": Written(
        {
            "$schema": _DRAFT_7,
            "definitions": {"text": {"type": "string"}},
            **_object("short", short={"$ref": "#/definitions/text", "maxLength": 2}),
        },
        ({"short": "abcdef"},),
        ({"short": 1},),
    ),
    "recursion with siblings": Written(
        {"type": "object", "properties": {"n": {"$ref": "#", "minProperties": 1}, "v": True}},
        ({"n": {"v": 1}}, {"n": {"n": {"v": 1}}}, {}),
        (5, {"n": 1}, {"n": {"n": 1}}),
        ("minProperties",),
    ),
    "recursion with inheritance": Written(
        {
            "$defs": {
                "Base": _object("id", id={"type": "integer"}, parent={"$ref": "#/$defs/Node"}),
                "Node": {
                    "allOf": [{"$ref": "#/$defs/Base"}, _object("key", key={"type": "string"})]
                },
            },
            "$ref": "#/$defs/Base",
        },
        ({"id": 1}, {"id": 1, "parent": {"id": 2, "parent": {"id": 3, "key": "y"}, "key": "x"}}),
        ({"id": 1, "parent": {"id": 2}}, {"id": 1, "parent": {"key": "x"}}),
    ),
    "a tree of tagged nodes": Written(
        {
            "$defs": {
                "Sum": _object(
                    "op parts",
                    op={"const": "sum", "default": "sum"},
                    parts={"type": "array", "items": {"$ref": "#/$defs/Any"}, "minItems": 1},
                ),
                "Leaf": _object("op", op={"const": "leaf"}, value={"type": "number"}),
                "Any": {
                    "discriminator": {"propertyName": "op"},
                    "oneOf": [{"$ref": "#/$defs/Sum"}, {"$ref": "#/$defs/Leaf"}],
                },
            },
            "$ref": "#/$defs/Any",
            "properties": {"op": {"type": "string"}},
        },
        (
            {"op": "leaf", "value": 1},
            {"op": "sum", "parts": [{"op": "sum", "parts": [{"op": "leaf"}]}]},
        ),
        ({"op": "sum", "parts": []}, {"op": "sum", "parts": [{"op": "x"}]}),
    ),
    "constants of all kinds": Written(
        {"enum": ["a", 1, 1.5, True, None, {"x": [1, "b"]}, []]},
        ("a", 1, 1.5, True, None, {"x": [1, "b"]}, []),
        ("b", 2, False, {"x": []}),
    ),
    "a constant object": Written(
        _object("v", v={"const": {"version": 2.0, "tags": ["x"]}}),
        ({"v": {"version": 2, "tags": ["x"]}},),
        ({"v": {"version": 3, "tags": ["x"]}},),
    ),
    "a constant beyond doubles": Written(
        _object("id", id={"enum": [9007199254740993, 5]}),
        ({"id": 9007199254740993}, {"id": 5}),
        ({"id": "5"},),
        ("enum",),
    ),
    "patterns of names": Written(
        {
            **_object("", size={"type": "integer"}),
            "patternProperties": {"^x-": {"type": "string"}, "^n_": {"type": "number"}},
            "additionalProperties": False,
        },
        ({"size": 1, "x-a": "b", "n_1": 2}, {}),
        ({"size": 1, "y": 1}, {"x-a": 1}),
    ),
    "patterns of names that meet": Written(
        {
            "type": "object",
            "patternProperties": {"a": {"type": "string"}, "b": {"type": "string", "minLength": 2}},
            "additionalProperties": {"type": "integer"},
        },
        ({"ab": "xy", "c": 1}, {"a": "x"}),
        ({"a": True},),
        ("patternProperties",),
    ),
    "names with look-aheads": Written(
        {
            "type": "object",
            "patternProperties": {"^(?!secret)": {"type": "string"}},
            "additionalProperties": {"type": "integer"},
        },
        ({"a": "x"}, {"secret": 1}),
        ({"a": True},),
        ("patternProperties",),
    ),
    "optional properties that are counted": Written(
        {**_object("", a={"type": "integer"}, b={"type": "integer"}), "minProperties": 1},
        ({"a": 1}, {"b": 2}, {"c": "x"}),
        ({"a": "1"},),
        ("minProperties",),
    ),
    "exactly one of closed properties": Written(
        {
            **_closed("", a={"type": "integer"}, b={"type": "integer"}),
            "minProperties": 1,
            "maxProperties": 1,
        },
        ({"a": 1}, {"b": 2}),
        ({}, {"a": 1, "b": 2}),
    ),
    "types that are excluded": Written(
        _object(
            "a",
            a={"type": ["string", "null", "integer"], "not": {"type": "null"}},
            b={"not": {"const": 1}},
        ),
        ({"a": "x"}, {"a": 1, "b": 2}),
        ({"a": None},),
        ("not",),
    ),
    "unevaluated properties beside joined schemas": Written(
        {
            "$defs": {"base": _object("a", a={"type": "integer"})},
            "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {"type": "string"}}}],
            "properties": {"c": {"type": "boolean"}},
            "unevaluatedProperties": False,
        },
        ({"a": 1}, {"a": 1, "b": "x"}, {"a": 1, "b": "x", "c": True}),
        ({"a": 1, "d": 2}, {"a": 1, "b": 2}, {"b": "x"}),
    ),
    "unevaluated properties alone": Written(
        {**_object("a", a={"type": "integer"}), "unevaluatedProperties": False},
        ({"a": 1},),
        ({"a": 1, "b": 2},),
    ),
    "unevaluated items": Written(
        {"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
        ([1], []),
        ([1, 2],),
    ),
    "passwords": Written(
        _object(
            "word", word={"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{8,12}$"}
        ),
        ({"word": "Abcdefg1"},),
        ({"word": "short"}, {"word": "with space 1A"}),
        ("pattern",),
    ),
    "patterns of other languages": Written(
        _object(
            "",
            a={"type": "string", "pattern": r"^\_\@\/\<[\w-.]+\>$"},
            b={"type": "string", "pattern": r"\bfoo\b"},
            c={"type": "string", "pattern": r"^(?<year>\d{4})-(?P<month>\d\d)\Z"},
            d={"type": "string", "pattern": r"^(a|b)\1$"},
            e={"type": "string", "pattern": r"^[^]$"},
            f={"type": "string", "pattern": "^[\\u4e00-\\u9fa5]+$"},
        ),
        (
            {"a": "_@/<a-b.c>"},
            {"b": "a foo b"},
            {"c": "2026-11"},
            {"d": "aa"},
            {"e": "x"},
            {"f": "中"},
        ),
        ({"a": "x"}, {"b": "bar"}, {"c": "2026"}, {"d": "c"}, {"f": "x"}),
        ("pattern",),
    ),
    "a flag of draft 3 and odd numbers": Written(
        _object(
            "",
            a={"type": "string", "required": True, "minLength": 1.0},
            b={"type": "number", "multipleOf": 0.5},
            c={"type": "number", "multipleOf": 1e-12},
        ),
        ({"a": "x"}, {"b": 1.5}, {"c": 0.25}),
        ({"a": ""}, {"b": 0.3}),
        ("multipleOf",),
    ),
    "anything": Written(True, (1, {"a": [None]}, "x")),
}
