"""A Jinja sandbox for untrusted templates: bounded in what they reach and in what they build.

Jinja's immutable sandbox keeps a template from Python's internals and from changing its arguments.
It does not keep `"a".ljust(10**10)` or sixty doublings of a text from taking all memory, so
everything that builds values is counted here, before it is built, against one budget per rendering.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox
from jinja2.exceptions import SecurityError

_BUDGET = 128 * 1024 * 1024  # bytes, about, built in one rendering
_MAX_ELEMENTS = 200_000  # of a value that becomes text
_POINTER = 8
_MAX_BITS = 4096  # of a number: multiplying larger ones takes time that nothing can interrupt
# What chat templates use; others make much out of little (batch, slice), or are for web pages.
_FILTERS = """
    abs attr capitalize count d default dictsort e escape first float int items join last length
    list lower map max min reject rejectattr replace reverse round safe select selectattr sort
    string title trim unique upper wordcount
"""
# Those that build text; the others hand on what is there.
_TEXT_FILTERS = frozenset(
    {"capitalize", "e", "escape", "lower", "safe", "string", "title", "tojson", "trim", "upper"}
)
_LIST_FILTERS = frozenset({"dictsort", "items", "list", "reverse", "sort", "unique"})
_PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
_REFUSED = frozenset({"expandtabs", "to_bytes", "translate"})


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Sends `a ~ b` through the environment, like the operators that a sandbox may intercept."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        """Write a call instead of a join."""
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of chat templates, with the whitespace rules that model makers expect."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _CodeGenerator

    def __init__(self) -> None:
        self._left = _BUDGET
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            undefined=jinja2.ChainableUndefined,
            finalize=self._shown,
        )
        self.globals.pop("lipsum", None)
        filters: dict[str, Callable[..., Any]] = {}
        filters.update((name, self.filters[name]) for name in _FILTERS.split())
        filters |= {"join": self._join, "replace": self._replace}
        filters |= {"round": _round, "tojson": _tojson}
        self.filters = {name: self._counted(name, function) for name, function in filters.items()}

    def start(self) -> None:
        """Begin a rendering: the whole budget is there again."""
        self._left = _BUDGET

    def spend(self, size: int) -> None:
        """Count what is about to be built; raises `SecurityError` when it is too much."""
        self._left -= size
        if self._left < 0:
            raise SecurityError("it builds more text than any chat needs")

    def call_binop(
        self,
        context: jinja2.runtime.Context,
        operator: str,
        left: Any,  # noqa: ANN401
        right: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Compute one of the intercepted operators."""
        if isinstance(left, int) and isinstance(right, int):
            is_power, bits = operator == "**", left.bit_length()
            bits = bits * abs(right) if is_power else bits + right.bit_length()
            if bits > _MAX_BITS:
                raise SecurityError("a number too large for a chat template")
        elif operator == "%" and isinstance(left, str):
            self.spend(_formatted_size(left, right))
        elif operator == "*":
            times = right if isinstance(right, int) else left
            text = left if times is right else right
            if isinstance(times, int) and isinstance(text, str | list | tuple):
                self.spend(_size(text) * max(times, 0))
        elif operator == "+" and isinstance(left, str | list | tuple):
            self.spend(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def concatenate(self, parts: Iterable[object]) -> str:
        """Compute `a ~ b ~ c`."""
        shown = [str(self._shown(part)) for part in parts]
        return "".join(shown)

    def call(self, context: jinja2.runtime.Context, obj: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Call a function or method."""
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if name in _REFUSED and isinstance(owner, str | bytes | int):
            raise SecurityError(f"the method {name} is not for chat templates")
        if isinstance(owner, str):
            self.spend(len(owner))
            if name in _PADDING:
                self.spend(sum(arg for arg in args if isinstance(arg, int)))
            elif name == "replace" and len(args) > 1:
                self.spend(owner.count(str(args[0])) * len(str(args[1])))
            elif name == "join" and args:
                args = ([str(item) for item in self._listed(args[0], len(owner))], *args[1:])
        return super().call(context, obj, *args, **options)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:  # noqa: ANN401 - Jinja's signature
        """Return what stands for `text.format`, None if `value` is something else."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        safe, text = wrapped, str(value.__self__)

        def run(*args: Any, **options: Any) -> str:  # noqa: ANN401 - what a template formats
            self.spend(_formatted_size(text, [args, options]))
            return safe(*args, **options)

        return functools.update_wrapper(run, value)

    def _shown(self, value: object) -> object:
        """Count a value that becomes text."""
        self.spend(_weight(value))
        return value

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if name not in _TEXT_FILTERS | _LIST_FILTERS:
            return function
        measure = _weight if name in _TEXT_FILTERS else _size

        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - any filter
            for value in args:
                self.spend(measure(value))
            return function(*args, **options)

        return run

    def _listed(self, values: Iterable[object], separator: int) -> list[object]:
        listed = list(values)
        self.spend(_weight(listed) + separator * len(listed))
        return listed

    def _join(
        self, value: Iterable[object], d: str = "", attribute: str | int | None = None
    ) -> str:
        if attribute is not None:
            value = map(jinja2.filters.make_attrgetter(self, attribute), value)
        return str(d).join(str(item) for item in self._listed(value, len(str(d))))

    def _replace(self, s: object, old: str, new: str, count: int | None = None) -> str:
        text = str(s)
        self.spend(text.count(str(old)) * len(str(new)))
        return text.replace(str(old), str(new), -1 if count is None else count)


def _size(value: object) -> int:
    """Return the bytes of a value itself, not of what it refers to."""
    if isinstance(value, str | bytes):
        return len(value)
    return _POINTER * len(value) if isinstance(value, list | tuple | dict) else 0


def _weight(value: object) -> int:
    """Return about how long the value's text is; more than the budget if it has too many elements.

    Lists may share their elements: a small structure can have an endless text.
    """
    total, count, left = 0, 0, [value]
    while left:
        item = left.pop()
        count += 1
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, dict | list | tuple):
            if count + len(left) + len(item) > _MAX_ELEMENTS:
                return _BUDGET + 1
            left.extend(item)
            if isinstance(item, dict):
                left.extend(item.values())
        else:
            total += _POINTER
    return total


def _formatted_size(text: str, values: object) -> int:
    """Return the most that `text % values` or `text.format(values)` may give."""
    if re.search(r"%[^%a-zA-Z]*\*|\{[^{}]*\{", text):
        raise SecurityError("a field whose width is a value")
    widths = sum(int(digits[:12]) for digits in re.findall(r"\d+", text))
    return len(text) + widths + (text.count("%") + text.count("{")) * _weight(values)


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    if not -20 <= precision <= 20:
        raise SecurityError(f"rounding to {precision} places")
    rounded: float = jinja2.filters.do_round(value, precision, method)  # type: ignore[arg-type]
    return rounded


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # As Hugging Face has it: not escaped for web pages.
    indent = indent if indent is None else min(indent, 16)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
