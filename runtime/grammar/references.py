"""The schemas that the references of a JSON schema name, its properties, and types of values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

Schema = Any
_Node = dict[str, Any]


class References:
    """The references within one schema: by path, by anchor, and by the ids of its parts."""

    def __init__(self, root: _Node) -> None:
        self._root, self._base = root, str(root.get("$id") or "")
        self._anchors: dict[str, Schema] | None = None
        self._recursive: dict[int, bool] = {}

    def target(self, reference: object) -> tuple[Schema, str] | None:
        """Return the schema that a reference names, and its path; None if there is none."""
        if not isinstance(reference, str):
            return None
        node: Any = self._root
        try:
            address, fragment = urldefrag(reference)
            whole = urljoin(self._base, address)
        except ValueError:  # no address
            return None
        if address and whole != urldefrag(self._base)[0]:
            node = self._anchor(address) or self._anchor(whole)
        if fragment and not fragment.startswith("/"):
            node, parts = self._anchor(fragment), []
        else:
            parts = fragment.split("/")[1:] if fragment != "/" else []  # it is often meant as "#"
        for part in parts:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            else:
                node = node.get(key) if isinstance(node, dict) else None
        return (node, f"#{fragment}") if isinstance(node, dict | bool) else None

    def _anchor(self, name: str) -> Schema | None:
        """Return the schema with an anchor or an id."""
        if self._anchors is None:
            self._anchors = {}
            for node in _nodes(self._root):
                for keyword in ("$anchor", "$dynamicAnchor", "$id", "id"):
                    given = node.get(keyword)
                    if isinstance(given, str):
                        self._anchors.setdefault(given.removeprefix("#"), node)
        return self._anchors.get(name)

    def resolved(self, node: Schema) -> Schema:
        """Return a schema, or the one that it refers to."""
        for _ in range(8):
            if not (isinstance(node, dict) and "$ref" in node):
                break
            target = self.target(node["$ref"])
            node = True if target is None else target[0]
        return node

    def is_recursive(self, target: Schema) -> bool:
        """Whether references in a schema lead back to it."""
        known = self._recursive.get(id(target))
        if known is None:
            known = self._recursive[id(target)] = self._leads_back(target)
        return known

    def _leads_back(self, target: Schema) -> bool:
        seen: set[int] = set()
        ahead = [target]
        while ahead:
            for node in _nodes(ahead.pop()):
                for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
                    found = self.target(node.get(keyword))
                    if found is None or id(found[0]) in seen:
                        continue
                    if found[0] is target:
                        return True
                    seen.add(id(found[0]))
                    ahead.append(found[0])
        return False


def properties_of(schema: Schema) -> _Node:
    """Return the properties that a schema lists, with their schemas."""
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def type_of(value: object) -> str:
    """Return JSON's type of a value."""
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "null")


def _nodes(schema: Schema) -> Iterator[_Node]:
    """Yield all objects in a schema, also those that are no schemas."""
    ahead = [schema]
    while ahead:
        node = ahead.pop()
        if isinstance(node, dict):
            yield node
            ahead.extend(node.values())
        elif isinstance(node, list):
            ahead.extend(node)
