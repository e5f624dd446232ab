"""Grammars that take too much stack, time or memory of whoever compiles or follows them."""

from __future__ import annotations

from typing import Any


def reference_chain(n: int) -> dict[str, Any]:
    """A schema whose `$ref`s lead from one to the next, n times."""
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n)}
    return {"$defs": {**chain, f"d{n}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def deep_objects(n: int) -> dict[str, Any]:
    """A schema of objects in objects, n deep by references."""
    chain: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(n)
    }
    return {"$defs": {**chain, f"d{n}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def lark_chain(n: int) -> str:
    """Lark rules that name one another, n deep."""
    rules = "".join(f'r{i}: "a" r{i + 1}\n' for i in range(n))
    return f'start: r0\n{rules}r{n}: "b"\n'


def gbnf_chain(n: int) -> str:
    """GBNF rules that name one another, n deep."""
    rules = "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(n))
    return f'root ::= r0\n{rules}r{n} ::= "b"\n'


def overflowing_lark() -> str:
    """Rules of nested groups that name one another: they need 600 MiB of stack, or more."""
    groups, n = 20, 15_000
    rules = "".join(f'r{i}: {"(" * groups}r{i + 1} "a"{")*" * groups}\n' for i in range(n))
    return f'start: r0\n{rules}r{n}: "b"\n'


def endless_schema() -> dict[str, Any]:
    """A schema of 5 kB that takes minutes and many GiB to compile."""
    patterns = [{"type": "string", "pattern": f"a{i}.*b{i}"} for i in range(100)]
    return {"allOf": patterns}
