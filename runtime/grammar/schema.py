"""JSON schemas as people and generators write them, in the part of them that can be a mask.

Annotations are passed over. Parts that a mask cannot follow are left out, with a line in the log:
then the grammar allows all that the schema does, and more. Nothing here makes a schema narrower.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrun.runtime.grammar.conditions import (
    CONDITIONS,
    ConditionReader,
    Conditions,
    as_list,
    listed_texts,
    listed_values,
)
from specrun.runtime.grammar.patterns import literal_prefix, written
from specrun.runtime.grammar.references import References, properties_of, type_of

logger = logging.getLogger("specrun.grammar")

Schema = Any  # an object or a bool; whatever else stands there is for the compiler to refuse
_Node = dict[str, Any]

_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"}
_FORMATS |= {"uuid", "uri"}
_UNCHECKED_FORMATS = {"idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference"}
_UNCHECKED_FORMATS |= {"uri-template", "json-pointer", "relative-json-pointer", "regex"}
_OLD_DRAFT = re.compile(r"draft-0?[3-7]\b")
SPACES = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}"}
"""Where spaces may stand in JSON, as in llama.cpp: small models would fill answers with them."""
_SURE = 2**53  # the compiler reads numbers as doubles, and would round larger ones
_TINY = 1e-10
_LONG = 2**31 - 1  # no text, array or object comes near it
_MOST_SAID, _MOST_NOTES = 1000, 20
_MOST_COPIES = 200
_COMBINED = ("allOf", "anyOf", "oneOf")
_PLAIN_OBJECT = {"type", "properties", "required", "allOf", "$ref"}
_TYPES = ("null", "boolean", "number", "string", "array", "object")


def loosened(schema: Schema) -> tuple[Schema, list[str]]:
    """Return a schema that can be a mask and allows all that this one does.

    In addition the parts that it does not follow, each as "KEYWORD at PATH: reason". Raises
    `RecursionError` for values that are nested too deep.
    """
    if not isinstance(schema, dict):
        return schema, []
    loosening = _Loosening(schema)
    return loosening.whole(), list(loosening.notes)


_said: dict[str, None] = {}


def warn_once(text: str) -> None:
    """Write a warning to the log, unless it was written before."""
    if text not in _said:
        _said[text] = None
        logger.warning("%s", text)
    if len(_said) > _MOST_SAID:
        del _said[next(iter(_said))]


def any_of(schemas: Sequence[Schema]) -> _Node:
    """Return the schema of the values of any of these, which may name their own definitions."""
    definitions: _Node = {}
    options: list[Schema] = []
    for number, schema in enumerate(schemas):
        found = _Loosening(schema, f"s{number}_").whole() if isinstance(schema, dict) else schema
        if isinstance(found, dict):
            definitions |= found.pop("$defs", {})
            found.pop("x-guidance", None)
        options.append(found)
    return {"anyOf": options, "$defs": definitions}


def followed(schema: Schema, whose: str, options: Mapping[str, Any]) -> _Node:
    """Return a loosened schema with the places of spaces; warn once of the lost parts.

    The schema's own options (`x-guidance`) go before those given here.
    """
    found, notes = loosened(schema)
    for note in notes[:_MOST_NOTES]:
        warn_once(f"the {whose}: {note}; answers may differ from the schema there")
    if len(notes) > _MOST_NOTES:
        warn_once(f"the {whose}: {len(notes) - _MOST_NOTES} more keywords are not followed")
    if not isinstance(found, dict):
        found = {} if found else {"enum": []}
    own = found.get("x-guidance")
    own = own if isinstance(own, dict) else {}
    if any(name.startswith("whitespace") for name in own):
        options = {name: value for name, value in options.items() if "whitespace" not in name}
    return {**found, "x-guidance": {**options, **own}}


@dataclass(slots=True)
class _Task:
    """A schema to be read, and the object that it is written to.

    `is_joined`: a value has to fit another schema, too.
    """

    node: _Node
    path: str
    out: _Node
    is_joined: bool = False

    def with_others(self, *names: str) -> bool:
        """Whether there is more to fit than keywords of these names."""
        return self.is_joined or bool(_keywords(self.node) - set(names))


class _Loosening:
    """The loosening of one schema. Nested ones wait in a list, so depth costs no stack."""

    def __init__(self, root: _Node, prefix: str = "r") -> None:
        self._prefix = prefix  # of the names of definitions
        self._root, self._root_out = root, _Node()
        self.notes: dict[str, None] = {}
        self._tasks = [_Task(root, "#", self._root_out)]
        self._targets: dict[int, str] = {}  # of references: their names, by the schemas' identity
        self._definitions: _Node = {}
        self._is_old = bool(_OLD_DRAFT.search(str(root.get("$schema", ""))))
        self._references = References(root)
        self._kept_alive: list[_Node] = []
        self._n_copies = 0

    def whole(self) -> Schema:
        """Return the loosened schema."""
        if _is_nothing(self._root):
            return False
        if self._joins_itself(self._root, is_joined=False):
            self._tasks.clear()
            self._root_out["$ref"] = self._defined(self._root, "#", is_joined=False)
        while self._tasks:
            self._fill(self._tasks.pop())
        if "x-guidance" in self._root:
            self._root_out["x-guidance"] = self._root["x-guidance"]
        if self._definitions:
            self._root_out["$defs"] = self._definitions
        return self._root_out

    def _say(self, keyword: str, path: str, why: str) -> None:
        self.notes[f"{keyword} at {path} is not followed: {why}"] = None

    def _below(self, node: Schema, path: str, *, is_joined: bool = False) -> Schema:
        """Return the object of a nested schema, which is filled later."""
        if not isinstance(node, dict):
            return node
        if _is_nothing(node):
            return False
        if self._joins_itself(node, is_joined=is_joined):
            return {"$ref": self._defined(node, path, is_joined=is_joined)}
        return self._copy(node, path, is_joined=is_joined)

    def _copy(self, node: _Node, path: str, *, is_joined: bool) -> _Node:
        out: _Node = {}
        self._tasks.append(_Task(node, path, out, is_joined))
        return out

    def _defined(self, target: Schema, path: str, *, is_joined: bool) -> str:
        """Return the reference to a schema that is a definition of its own here."""
        name = self._targets.get(id(target))
        if name is None:
            name = self._targets[id(target)] = f"{self._prefix}{len(self._targets)}"
            is_schema = isinstance(target, dict) and not _is_nothing(target)
            self._definitions[name] = (
                self._copy(target, path, is_joined=is_joined)
                if is_schema
                else not _is_nothing(target)
            )
        return f"#/$defs/{name}"

    def _joins_itself(self, node: _Node, *, is_joined: bool) -> bool:
        """Whether a value has to fit a schema that leads back to itself, and others, too.

        The compiler cannot join a reference to such a schema: a copy stands there instead. The
        joined schema is a definition, so that the copy leads back to it.
        """
        for name in ("$ref", "$dynamicRef", "$recursiveRef", *_COMBINED):
            if name not in node or not (is_joined or _keywords(node) - {name} or name == "allOf"):
                continue
            options = node[name] if name in _COMBINED else [{"$ref": node[name]}]
            if name == "allOf" and len(options) < 2 and not (_keywords(node) - {name}):
                continue
            for option in options if isinstance(options, list) else ():
                reference = option.get("$ref") if isinstance(option, dict) else None
                target = self._references.target(reference)
                if target is not None and self._references.is_recursive(target[0]):
                    return True
        return False

    def _fill(self, task: _Task) -> None:
        """Write a schema, its keywords in their order, which is that of the answer's keys."""
        node, path, out = task.node, task.path, task.out
        if self._is_old and "$ref" in node:  # its neighbours are not read there
            node = {name: node[name] for name in ("$ref", "nullable") if name in node}
        if node.get("nullable") is True and "null" not in as_list(node.get("type")):
            inner = {name: value for name, value in node.items() if name != "nullable"}
            if not _is_anything(inner):
                self._kept_alive.append(inner)  # known by its identity
                below = self._below(inner, path, is_joined=task.is_joined)
                out["anyOf"] = [below, {"type": "null"}]
            return
        task = _Task(node, path, out, task.is_joined)
        found = self._conditions(task)
        for name, value in (node if found is None else found.rest).items():
            if (write := _WRITERS.get(name)) is not None:
                write(self, task, name, value)
        if found is not None and found.options is not None:  # last: keys keep their order
            self._choose(task, found.options)

    # -- keywords that stay ------------------------------------------------------------------------

    def _required(self, task: _Task, name: str, value: object) -> None:
        if isinstance(value, list):  # a bool is of draft 3, about the property itself
            task.out[name] = value

    def _values(self, task: _Task, name: str, value: object) -> None:
        values = value if name == "enum" else [value]
        if not isinstance(values, list):
            task.out[name] = value
        elif any(isinstance(each, int) and abs(each) > _SURE for each in _numbers(values)):
            self._say(name, task.path, "it has whole numbers above 2^53")
            if {*map(type_of, values)} <= {"integer", "number"}:
                task.out.setdefault("type", "number")
        else:
            plain = [_plain(each) for each in values]
            task.out[name] = plain if name == "enum" else plain[0]

    def _bound(self, task: _Task, name: str, value: object) -> None:
        """Write a bound of a number; in draft 4 the exclusive one is a bool beside it."""
        node = task.node
        exclusive = f"exclusive{name.capitalize()}"
        if isinstance(value, bool):
            return
        if not isinstance(value, int | float):
            task.out[name] = value
            return
        if abs(value) > _SURE or 0 < abs(value) < _TINY:
            if not (abs(value) == float("inf") or _is_implied(name, value)):
                self._say(name, task.path, "the number is too large or too small for a mask")
            return
        task.out[exclusive if node.get(exclusive) is True else name] = value

    def _multiple(self, task: _Task, name: str, value: object) -> None:
        if isinstance(value, int | float) and not _TINY <= abs(value) <= _SURE:
            self._say(name, task.path, "the number is too large or too small for a mask")
        else:
            task.out[name] = _plain(value)

    def _count(self, task: _Task, name: str, value: object) -> None:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 0 or (name.startswith("max") and value > _LONG):
                return
            if name.endswith("Properties") and not self._can_count(task, name):
                self._say(name, task.path, "some of the properties are optional")
                return
        task.out[name] = value

    def _can_count(self, task: _Task, name: str) -> bool:
        """Whether the compiler counts the properties of an object."""
        node = task.node
        combined = (*_COMBINED, "$ref", "$dynamicRef", "$recursiveRef")
        if task.is_joined or any(key in node for key in combined):
            return False
        if set(properties_of(node)) <= set(_names_in(node.get("required"))):
            return True
        least, most = node.get("minProperties", 0), node.get("maxProperties", 1)
        is_single = node.get(name) == 1 or (name == "minProperties" and least == 0)
        closed = _is_nothing(node.get("additionalProperties", True))
        return (
            is_single
            and least in (0, 1)
            and most == 1
            and closed
            and "patternProperties" not in node
        )

    def _pattern(self, task: _Task, name: str, value: object) -> None:
        if not isinstance(value, str):
            task.out[name] = value
            return
        found, is_exact = written(value)
        if not is_exact:
            why = "it cannot be read" if found is None else "assertions and references are left out"
            self._say(name, task.path, why)
        if found is not None:
            task.out[name] = found

    def _format(self, task: _Task, name: str, value: object) -> None:
        """Write a format; a pattern beside it has the same meaning, in the generator's own form."""
        types = as_list(task.node.get("type", "string"))
        if "string" not in types or "pattern" in task.node or not isinstance(value, str):
            return
        if value in _FORMATS:
            task.out[name] = value
        elif value in _UNCHECKED_FORMATS:
            self._say(name, task.path, f"{value} has no mask")

    # -- keywords with schemas ---------------------------------------------------------------------

    def _nested(self, task: _Task, name: str, value: object) -> None:
        task.out[name] = self._below(value, f"{task.path}/{name}")

    def _named(self, task: _Task, name: str, value: object) -> None:
        path = f"{task.path}/{name}"
        if isinstance(value, dict):
            value = {key: self._below(each, f"{path}/{key}") for key, each in value.items()}
            others = task.out.get(name, {})  # that other schemas evaluate
            value |= {key: each for key, each in others.items() if key not in value}
        task.out[name] = value

    def _all_of(self, task: _Task, name: str, value: object) -> None:
        if isinstance(value, list):
            path, joined = f"{task.path}/{name}", len(value) > 1 or task.with_others(name)
            made = [
                self._below(each, f"{path}/{n}", is_joined=joined) for n, each in enumerate(value)
            ]
            task.out["allOf"] = [*task.out.get("allOf", ()), *made]
        else:
            task.out[name] = value

    def _any_of(self, task: _Task, name: str, value: object) -> None:
        """Write `anyOf`, and `oneOf` as the same: if one may match, several may."""
        if not isinstance(value, list):
            task.out[name] = value
            return
        path = f"{task.path}/{name}"
        if name == "oneOf" and "discriminator" not in task.node:
            read = [self._references.resolved(option) for option in value]
            if not all(_differ(left, right) for left, right in itertools.combinations(read, 2)):
                self._say(name, task.path, "more than one of the schemas may match")
        joined = task.with_others(name)
        made = [self._below(each, f"{path}/{n}", is_joined=joined) for n, each in enumerate(value)]
        if "anyOf" in task.out:
            task.out["allOf"] = [*task.out.get("allOf", ()), {"anyOf": made}]
        else:
            task.out["anyOf"] = made

    def _items(self, task: _Task, name: str, value: object) -> None:
        """Write `items`, which in older drafts may be a list, with `additionalItems` behind it."""
        path = f"{task.path}/{name}"
        if name == "prefixItems" or isinstance(value, list):
            if isinstance(value, list):
                value = [self._below(each, f"{path}/{n}") for n, each in enumerate(value)]
            task.out["prefixItems"] = value
        elif name == "items" or isinstance(task.node.get("items"), list):
            task.out["items"] = self._below(value, path)

    def _additional(self, task: _Task, name: str, value: object) -> None:
        """Write `additionalProperties`, with the names that `propertyNames` allows."""
        node, path = task.node, f"{task.path}/{name}"
        patterns, names = node.get("patternProperties"), node.get("propertyNames")
        if isinstance(patterns, dict) and not self._can_split(patterns):
            return  # see `_patterned`
        pattern = None if patterns else self._names_pattern(names, node)
        if pattern is None:
            task.out[name] = self._below(value, path)
        elif pattern:
            task.out["patternProperties"] = {pattern: self._below(value, path)}
            task.out["additionalProperties"] = False

    def _property_names(self, task: _Task, name: str, value: object) -> None:
        """Write the names of properties as a pattern of them; see `_additional`."""
        node = task.node
        pattern = None if node.get("patternProperties") else self._names_pattern(value, node)
        if pattern is None:
            if not (_is_anything(value) or _keywords(value) == {"type"}):
                self._say(name, task.path, "names are masked by one pattern or list alone")
        elif not {"additionalProperties", "unevaluatedProperties"} & node.keys():
            self._additional(task, "additionalProperties", True)

    def _names_pattern(self, names: Schema, node: _Node) -> str | None:
        """Return a pattern of the names that are allowed beside the listed ones."""
        names = self._references.resolved(names)
        if node.get("properties") or not isinstance(names, dict):  # those may have other schemas
            return None
        if _keywords(names) - {"type", "enum", "const", "pattern"}:
            return None
        known = names["enum"] if "enum" in names else [names["const"]] if "const" in names else None
        if known is None:
            pattern = names.get("pattern")
            return written(pattern)[0] if isinstance(pattern, str) else None
        if not isinstance(known, list) or not known:
            return None
        return f"^(?:{'|'.join(_escaped(each) for each in known if isinstance(each, str))})$"

    def _patterned(self, task: _Task, name: str, value: object) -> None:
        """Write `patternProperties`, as other properties if their patterns may meet."""
        path = f"{task.path}/{name}"
        if not isinstance(value, dict):
            task.out[name] = value
        elif self._can_split(value):
            task.out[name] = {
                written(pattern)[0]: self._below(each, f"{path}/{pattern}")
                for pattern, each in value.items()
            }
        else:
            self._say(name, task.path, "the patterns may meet, or cannot be read exactly")
            others = task.node.get("additionalProperties", True)
            if not _is_anything(others):
                made = [self._below(each, f"{path}/{key}") for key, each in value.items()]
                made.append(self._below(others, f"{task.path}/additionalProperties"))
                task.out["additionalProperties"] = {"anyOf": made}

    def _can_split(self, patterns: _Node) -> bool:
        """Whether no name fits two of the patterns, and each is read as it is written."""
        if not all(written(pattern)[1] for pattern in patterns):
            return False
        prefixes = [literal_prefix(pattern) for pattern in patterns]
        pairs = itertools.combinations(prefixes, 2)
        return not any(left.startswith(right) or right.startswith(left) for left, right in pairs)

    def _unevaluated(self, task: _Task, name: str, value: object) -> None:
        """Write it as `additionalProperties` or `items` if nothing else evaluates any."""
        node = task.node
        plain = "additionalProperties" if name.endswith("Properties") else "items"
        others = {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas", "not"}
        others |= {"contains"} if plain == "items" else set()
        if plain in node or _is_anything(value):
            return
        if others & node.keys():
            known = self._evaluated(node) if value is False and plain != "items" else None
            if known is None:
                self._say(name, task.path, "other schemas beside it evaluate some, too")
                return
            listed = task.out.setdefault("properties", {})
            listed |= {each: True for each in known if each not in listed}
            task.out[plain] = False
        elif plain == "items":
            self._items(task, plain, value)
        else:
            self._additional(task, plain, value)

    def _evaluated(self, node: _Node) -> list[str] | None:
        """Return the names of properties that schemas joined by `allOf` or a reference evaluate.

        None if that depends on the value.
        """
        names: list[str] = []
        ahead: list[Schema] = [node]
        for _ in range(_MOST_COPIES):
            if not ahead:
                return names
            own = ahead.pop()
            if not isinstance(own, dict):
                continue
            if own is not node and _keywords(own) - _PLAIN_OBJECT:
                return None
            if own is node and _keywords(own) - _PLAIN_OBJECT - {"unevaluatedProperties"}:
                return None
            names += properties_of(own)
            parts = own.get("allOf")
            ahead += parts if isinstance(parts, list) else []
            if "$ref" in own:
                target = self._references.target(own["$ref"])
                ahead += [] if target is None else [target[0]]
        return None

    def _type(self, task: _Task, name: str, value: object) -> None:
        task.out[name] = value

    def _left_out(self, task: _Task, name: str, value: object) -> None:
        node = task.node
        if name == "contains" and node.get("minContains") == 0 and "maxContains" not in node:
            return
        if value not in (False, {}):
            self._say(name, task.path, "a mask has no such condition")

    # -- conditions --------------------------------------------------------------------------------

    def _conditions(self, task: _Task) -> Conditions | None:
        """Return the conditions of a schema, None if it has none; log the lost ones."""
        node = task.node
        parts = node.get("allOf")
        nested = any(_keywords(each) & {*CONDITIONS} for each in as_list(parts))
        if not (node.keys() & {*CONDITIONS} or nested):
            return None
        found = ConditionReader(self._references.resolved, _keywords).read(node)
        for name in found.lost:
            self._say(name, task.path, "it cannot be written as alternatives")
        return found

    def _choose(self, task: _Task, options: Sequence[Schema]) -> None:
        """Write alternatives, of which a value has to fit one."""
        self._kept_alive += [option for option in options if isinstance(option, dict)]
        made = [self._below(each, task.path, is_joined=True) for each in options]
        chosen = {"anyOf": made} if made else False
        task.out["allOf"] = [*task.out.get("allOf", ()), chosen]

    # -- references --------------------------------------------------------------------------------

    def _reference(self, task: _Task, name: str, value: object) -> None:
        target = self._references.target(value)
        if target is None:
            self._say(name, task.path, f"{str(value)[:80]!r} is not in the schema")
            return
        if task.with_others(name) and self._references.is_recursive(target[0]):
            self._n_copies += 1
            if self._n_copies > _MOST_COPIES:
                self._say(name, task.path, "it leads back to itself, with others beside it")
                return
            found: Schema = self._copy(*target, is_joined=True)
        else:
            found = {"$ref": self._defined(*target, is_joined=task.with_others(name))}
        if "$ref" in task.out or "$ref" not in found:
            task.out["allOf"] = [*task.out.get("allOf", ()), found]
        else:
            task.out["$ref"] = found["$ref"]


_Writer = Callable[[_Loosening, _Task, str, Any], None]
_L = _Loosening
_WRITERS: Mapping[str, _Writer] = {
    "type": _L._type,
    "required": _L._required,
    **dict.fromkeys(("const", "enum"), _L._values),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _L._bound),
    "multipleOf": _L._multiple,
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        _L._count,
    ),
    "pattern": _L._pattern,
    "format": _L._format,
    "properties": _L._named,
    "allOf": _L._all_of,
    **dict.fromkeys(("anyOf", "oneOf"), _L._any_of),
    **dict.fromkeys(("items", "prefixItems", "additionalItems"), _L._items),
    "additionalProperties": _L._additional,
    "patternProperties": _L._patterned,
    "propertyNames": _L._property_names,
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), _L._unevaluated),
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), _L._reference),
    **dict.fromkeys(
        ("uniqueItems", "contains", *CONDITIONS),
        _L._left_out,
    ),
}


# -- kinds of schemas and values -------------------------------------------------------------------


def _keywords(node: Schema) -> set[str]:
    """Return the keywords of a schema that restrict a value."""
    return set(node.keys() & _WRITERS.keys()) if isinstance(node, dict) else set()


def _is_anything(node: Schema) -> bool:
    return node is True or (isinstance(node, dict) and not _keywords(node))


def _is_nothing(node: Schema) -> bool:
    """Whether no value fits: false, or as some write it, the negation of anything."""
    return node is False or (isinstance(node, dict) and _is_anything(node.get("not", False)))


def _names_in(names: object) -> list[str]:
    return [each for each in names if isinstance(each, str)] if isinstance(names, list) else []


def _numbers(values: list[Any]) -> Iterator[int | float]:
    ahead = list(values)
    while ahead:
        value = ahead.pop()
        if isinstance(value, dict | list):
            ahead.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield value


def _plain(value: Any) -> Any:  # noqa: ANN401 - a value of JSON
    """Return a value whose whole numbers have no fraction: the compiler spells them so."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= _SURE:
        return int(value)
    return value


def _is_implied(name: str, value: float) -> bool:
    """Whether a bound is that of all doubles, which generators write for "none"."""
    return abs(value) >= 1e300 and (value < 0) is name.lower().endswith("minimum")


def _escaped(name: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in name)


def _types_of(node: _Node) -> set[str]:
    """Return the types that a schema allows, by its keywords alone."""
    values = listed_values(node)
    types = as_list(node.get("type", [*_TYPES])) if values is None else map(type_of, values)
    return {"number" if each == "integer" else str(each) for each in types}


def _differ(left: Schema, right: Schema) -> bool:
    """Whether no value fits both schemas, as far as is easily seen."""
    if not (isinstance(left, dict) and isinstance(right, dict)):
        return left is False or right is False
    if not _types_of(left) & _types_of(right):
        return True
    first, second = listed_texts(left), listed_texts(right)
    if first is not None and second is not None:
        return not first & second
    if _types_of(left) & _types_of(right) != {"object"}:
        return False
    names = {*_names_in(left.get("required")), *_names_in(right.get("required"))}
    own, other = properties_of(left), properties_of(right)
    for name in names:
        first, second = (listed_texts(each.get(name, True)) for each in (own, other))
        if first is not None and second is not None and not first & second:
            return True
    return False
