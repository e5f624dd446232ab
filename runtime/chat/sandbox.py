"""A Jinja sandbox for untrusted templates: bounded in access and in memory.

Jinja's immutable sandbox keeps a template from Python's internals and from changing its arguments.
It does not keep `"a".ljust(10**10)` or sixty doublings of a text from taking all memory. So every
value is counted here, before it is built, against one budget per rendering.

Nor does it keep a few lists that share their elements from being compared, hashed or written for
years, inside C code that nothing can interrupt. Comparisons, hashes, sorting and error messages
happen in too many places to be watched one by one. So their operands are watched: every value of a
literal, an operator, a slice, a filter or a call, and every argument, is weighed as if nothing in
it were shared. It may be that much heavier and deeper than the conversation, no more, and each of
those operations takes time in proportion to the weight of its operands (at most times a
logarithm). Weights are remembered: weighing takes as long as building. Operations that take longer
or make much of little (powers, widths, repetitions, texts sought from the end) have bounds of their
own beforehand.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.exceptions import SecurityError

from specrun.bindings.errors import TemplateError

_BUDGET = 128 * 1024 * 1024  # bytes, about, built in one rendering
_MAX_WEIGHT = 16 * 1024 * 1024  # characters, about, of a value beyond the conversation's
_MAX_DEPTH = 64  # of lists in lists beyond the conversation's: hashing one has no other limit
_MAX_SECONDS = 5.0
_POINTER = 8
_CONTAINER = 128  # bytes, about, of an empty one, and of its remembered weight
_PIECE = 64  # bytes, about, of a short text
_MAX_BITS = 4096  # of a number: multiplying larger ones takes time that nothing can interrupt
# Jinja's filters that neither draw at random nor take apart texts for web pages (urlize, xmlattr).
_FILTERS = """
    abs attr batch capitalize center count d default dictsort e escape filesizeformat first float
    forceescape format groupby indent int items join last length list lower map max min pprint
    reject rejectattr replace reverse round safe select selectattr slice sort string striptags sum
    title trim truncate unique upper urlencode wordcount wordwrap
"""
# Those that build text, and how many bytes at most of one; the others return parts of their
# argument.
_TEXT_FILTERS = {
    **dict.fromkeys(("capitalize", "lower", "safe", "string", "title", "tojson", "trim"), 1),
    **dict.fromkeys(("truncate", "upper"), 1),
    **dict.fromkeys(("e", "escape", "forceescape", "striptags"), 6),
    **{"urlencode": 12, "wordwrap": 128},
}
_LIST_FILTERS = frozenset(
    {"dictsort", "groupby", "items", "list", "max", "min", "reverse", "sort", "unique", "wordcount"}
)
_PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
# They make much of little, or (fromkeys) take for ever over numbers of one hash; the rest of this
# module does not handle bytes.
_REFUSED = frozenset({"encode", "expandtabs", "fromkeys", "to_bytes", "translate"})
# They compare every place of a text with every character of another.
_SEARCHES = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"})
_MAX_STEPS = 2**30
_ITEMS: Any = type({}.items())
_CONTAINERS: Any = (list, tuple, dict, type({}.keys()), type({}.values()), _ITEMS)


# Their bodies may run more than once: nested, for years.
_REPEATED: tuple[Any, ...] = (
    jinja2.nodes.Block,
    jinja2.nodes.CallBlock,
    jinja2.nodes.For,
    jinja2.nodes.Macro,
)
_WATCH = "watch"


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Sends operations that build values through the environment, as the intercepted operators."""

    def visit(self, node: jinja2.nodes.Node, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - Jinja's signature
        """Write a node; a list, dict, tuple or slice, which is a copy, is counted."""
        is_built = isinstance(node, jinja2.nodes.List | jinja2.nodes.Dict)
        is_built |= isinstance(node, jinja2.nodes.Tuple) and node.ctx == "load"
        is_built |= isinstance(node, jinja2.nodes.Getitem) and (
            isinstance(node.arg, jinja2.nodes.Slice)
        )
        if not is_built:
            super().visit(node, *args, **kwargs)
            return
        self.write("environment.built(")
        super().visit(node, *args, **kwargs)
        self.write(")")

    def visit_EnvironmentAttribute(
        self, node: jinja2.nodes.EnvironmentAttribute, frame: jinja2.compiler.Frame
    ) -> None:
        """Write a look at the clock, which templates themselves cannot express."""
        super().visit_EnvironmentAttribute(node, frame)
        if node.name == _WATCH:
            self.write("()")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        """Write a call instead of a join."""
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, by which trainers find answers: its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Return the enclosed statements, in a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _too_slow() -> TemplateError:
    return TemplateError(f"the chat template ran for over {_MAX_SECONDS:.0f} seconds")


class _Account(threading.local):
    """The bytes that the rendering in a thread may still build, and the weights of its values.

    `weights` has by id the container, which lives as long as this, its weight and its depth;
    `given` has those of the conversation.
    """

    left = 0
    deadline = 0.0
    heaviest = deepest = sys.maxsize

    def __init__(self) -> None:
        self.weights: dict[int, tuple[object, int, int]] = {}
        self.given: dict[int, tuple[object, int, int]] = {}


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of chat templates, with the whitespace rules that model makers expect."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})
    code_generator_class = _CodeGenerator

    def __init__(self) -> None:
        self._account = _Account()
        self.start({})
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do", _GenerationTag],
            undefined=jinja2.ChainableUndefined,
            finalize=self._shown,
        )
        self.globals.pop("lipsum", None)
        filters: dict[str, Callable[..., Any]] = {}
        filters.update((name, self.filters[name]) for name in _FILTERS.split())
        filters |= {"join": self._join, "replace": self._replace, "sum": self._sum}
        filters |= {"round": _round, "tojson": self._tojson, "format": self._format}
        filters |= {"batch": self._batch, "slice": self._slice, "center": self._center}
        filters |= {"indent": self._indent, "pprint": self._pprint}
        self.filters = {name: self._counted(name, function) for name, function in filters.items()}

    def start(self, values: dict[str, Any]) -> None:
        """Begin a rendering with these values, in this thread: the whole budget is there again."""
        account = self._account
        account.deadline = time.monotonic() + _MAX_SECONDS
        account.left, account.weights = _BUDGET, {}
        account.heaviest = account.deepest = sys.maxsize  # the values themselves have no bounds
        weight, depth = self._weigh(values)
        account.given = dict(account.weights)
        account.heaviest, account.deepest = weight + _MAX_WEIGHT, depth + _MAX_DEPTH

    def _generate(
        self,
        source: jinja2.nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        """Return the code of a template, in which every repeated body looks at the clock."""
        for kind in _REPEATED:
            for node in source.find_all(kind):
                look = jinja2.nodes.ExprStmt(jinja2.nodes.EnvironmentAttribute(_WATCH))
                node.body.insert(0, look.set_lineno(node.lineno))
        return super()._generate(source, name, filename, defer_init)

    @contextmanager
    def rendering(self, values: dict[str, Any]) -> Iterator[None]:
        """Bound a rendering with these values, in this thread, in memory and in time.

        The clock is looked at in every repeated body of the template, and at every call of a Python
        function: those of a filter or a comparison may take long, too.
        """
        self.start(values)
        clock, deadline = time.monotonic, self._account.deadline

        def trace(_frame: FrameType, _event: str, _argument: object) -> None:
            if clock() > deadline:
                raise _too_slow()

        is_watched = sys.gettrace() is not None  # by a debugger or coverage: leave it in place
        if not is_watched:
            sys.settrace(trace)
        try:
            yield
        finally:
            if not is_watched:
                sys.settrace(None)
            self.start({})  # it remembers the values that it was given

    def watch(self) -> None:
        """Raise `TemplateError` if the rendering in this thread has taken too long."""
        if time.monotonic() > self._account.deadline:
            raise _too_slow()

    def spend(self, size: int) -> None:
        """Count bytes that are about to be built; raises `SecurityError` if they are too many."""
        account = self._account
        account.left -= size
        if account.left < 0:
            raise SecurityError("it builds more text than any chat needs")

    def built(self, value: Any) -> Any:  # noqa: ANN401 - any value
        """Return a value that is new; raises `SecurityError` when it is too much."""
        if isinstance(value, str):  # most are, and a text's weight is the bytes that it spends
            self.spend(len(value))
            return value
        if isinstance(value, _CONTAINERS):
            self.spend(_CONTAINER + _size(value))
        self._weigh(value)
        return value

    def _weigh(self, value: object) -> tuple[int, int]:
        """Return about how long a value's text is, and how deep its lists are.

        Lists may share their elements: a small structure can have an endless text.
        """
        if not isinstance(value, _CONTAINERS):
            weight = _leaf(value)
            self._check(weight, 0)
            return weight, 0
        known, left = self._account.weights, [value]
        while left:
            item = left[-1]
            if id(item) in known:
                left.pop()
                continue
            weight, depth, unknown = 0, 0, []
            for part in _parts(item):
                if type(part) is str:  # calls are slow while a rendering is watched
                    weight += len(part)
                elif not isinstance(part, _CONTAINERS):
                    weight += _leaf(part)
                elif id(part) in known:
                    _, heavy, deep = known[id(part)]
                    weight, depth = weight + heavy, max(depth, deep)
                else:
                    unknown.append(part)
                weight += _POINTER
            if unknown:
                left.extend(unknown)
                continue
            left.pop()
            self._remember(item, weight, depth + 1)
        return known[id(value)][1:]

    def _remember(self, value: object, weight: int, depth: int) -> None:
        self._check(weight, depth)
        self._account.weights[id(value)] = value, weight, depth

    def _check(self, weight: int, depth: int) -> None:
        if weight > self._account.heaviest:
            raise SecurityError("it builds a larger value than any chat needs")
        if depth > self._account.deepest:
            raise SecurityError("it builds deeper lists than any chat needs")

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
        elif operator == "-" and isinstance(left, _CONTAINERS):
            raise SecurityError("sets are not for chat templates")  # as the keys of dicts are
        elif operator == "%" and isinstance(left, str):
            self.spend(_formatted_size(left, self._weigh(right)[0]))
        elif operator == "*":
            times = right if isinstance(right, int) else left
            text = left if times is right else right
            if isinstance(times, int) and isinstance(text, str | list | tuple):
                self.spend(_size(text) * max(times, 0))
        value = super().call_binop(context, operator, left, right)
        if operator == "+" and isinstance(value, list | tuple):
            # Templates collect messages so: the sum's weight is known without a walk.
            (weight, depth), (more, deeper) = self._weigh(left), self._weigh(right)
            self._remember(value, weight + more, max(depth, deeper))
        return self.built(value)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:  # noqa: ANN401 - Jinja's signature
        """Whether a template may use an attribute: it may change lists that it made."""
        is_change = attr in ("append", "pop") and type(obj) is list
        return (is_change and id(obj) not in self._account.given) or super().is_safe_attribute(
            obj, attr, value
        )

    def concatenate(self, parts: Iterable[object]) -> str:
        """Compute `a ~ b ~ c`."""
        shown = [str(self._shown(part)) for part in parts]
        text: str = self.built("".join(shown))
        return text

    def call(self, context: jinja2.runtime.Context, obj: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Call a function or method."""
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if name in _REFUSED and isinstance(owner, str | int | type):
            raise SecurityError(f"the method {name} is not for chat templates")
        for value in (*args, *options.values()):  # a macro's become a tuple
            if not isinstance(value, str):
                self._weigh(value)
        if name == "append" and type(owner) is list:
            for value in args:
                if isinstance(value, _CONTAINERS):
                    raise SecurityError("only texts and numbers are appended in chat templates")
                self.spend(_POINTER + self._weigh(value)[0])
            # The weights of all lists that have this one are wrong.
            self._account.weights = dict(self._account.given)
        if isinstance(owner, str):
            self.spend(len(owner))
            if name in _SEARCHES:
                _check_steps(owner, *args, *options.values())
            if name in _PADDING:
                self.spend(sum(arg for arg in args if isinstance(arg, int)))
            elif name == "replace" and len(args) > 1:
                self.spend(owner.count(str(args[0])) * len(str(args[1])))
            elif name in ("split", "rsplit", "splitlines"):
                named = args[:1] if name != "splitlines" else ()
                pieces = owner.count(str(named[0])) if named and named[0] else len(owner) // 8
                self.spend(_PIECE * pieces)
            elif name == "join" and args:
                args = ([str(item) for item in self._listed(args[0], len(owner))], *args[1:])
        return self.built(super().call(context, obj, *args, **options))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:  # noqa: ANN401 - Jinja's signature
        """Return the counted form of `text.format`, None if `value` is something else."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        safe, text = wrapped, str(value.__self__)

        def run(*args: Any, **options: Any) -> str:  # noqa: ANN401 - what a template formats
            self.spend(_formatted_size(text, self._weigh([args, options])[0]))
            return safe(*args, **options)

        return functools.update_wrapper(run, value)

    def _shown(self, value: object) -> object:
        """Count a value that becomes text."""
        self.spend(self._weigh(value)[0])
        return value

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        is_text, is_list = _TEXT_FILTERS.get(name, 0), name in _LIST_FILTERS

        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - any filter
            if is_list:
                # An iterator has not been weighed as a whole.
                args = tuple(
                    self.built(list(value)) if isinstance(value, Iterator) else value
                    for value in args
                )
            if name in _LONG_SEARCHES:
                _LONG_SEARCHES[name](*(arg for arg in args if arg is not self), **options)
            for value in args:
                if is_text:
                    self.spend(self._weigh(value)[0] * is_text)
                elif is_list:  # pieces of a text are larger than it
                    self.spend(_size(value) * (_POINTER if isinstance(value, str) else 1))
            return self.built(function(*args, **options))

        return run

    def _listed(self, values: Iterable[object], separator: int) -> list[object]:
        listed = list(values)
        self.spend(self._weigh(listed)[0] + separator * len(listed))
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

    # Filters that make much of little: counted before they begin.

    def _batch(self, value: Iterable[object], linecount: int, fill_with: object = None) -> object:
        listed = self._listed(value, _CONTAINER)
        self.spend(_POINTER * max(int(linecount), 0))
        return list(jinja2.filters.do_batch(listed, linecount, fill_with))

    def _slice(self, value: Iterable[object], slices: int, fill_with: object = None) -> object:
        listed = self._listed(value, 0)
        self.spend(_CONTAINER * max(int(slices), 0))
        return list(jinja2.filters.sync_do_slice(listed, slices, fill_with))

    def _center(self, value: object, width: int = 80) -> str:
        self.spend(self._weigh(value)[0] + max(int(width), 0))
        return str(value).center(width)

    def _indent(
        self, s: object, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        text = str(s)
        each = len(width) if isinstance(width, str) else max(int(width), 0)
        self.spend(len(text) + (text.count("\n") + 2) * (each + _PIECE))
        return jinja2.filters.do_indent(text, width, first, blank)

    def _format(self, value: object, *args: object, **options: object) -> str:
        text = str(value)
        self.spend(_formatted_size(text, self._weigh([args, options])[0]))
        return jinja2.filters.do_format(text, *args, **options)

    def _pprint(self, value: object) -> str:
        weight, depth = self._weigh(value)
        self.spend(weight * (depth + 2))
        return jinja2.filters.do_pprint(value)

    def _sum(
        self, iterable: Iterable[object], attribute: str | int | None = None, start: object = 0
    ) -> object:
        values: Iterable[object] = iterable
        if attribute is not None:
            values = map(jinja2.filters.make_attrgetter(self, attribute), values)
        listed = self._listed(values, 0)
        if isinstance(start, _CONTAINERS):  # each step copies all before it
            self.spend(self._weigh(listed)[0] * len(listed))
        return sum(listed, start)  # type: ignore[call-overload]

    def _jsonable(self, value: object) -> object:
        if isinstance(value, Iterator):  # of a filter as map
            return self._listed(value, 0)
        raise TypeError(f"{type(value).__name__} is no JSON")

    def _tojson(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # As Hugging Face has it: not escaped for web pages.
        indent = indent if indent is None else min(indent, 16)
        if separators is not None:  # every element comes with one
            self.spend(self._weigh(value)[0] * sum(map(len, separators)))
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
            default=self._jsonable,
        )
        pieces = []
        for piece in encoder.iterencode(value):  # indented, there is more space than text
            self.spend(len(piece))
            pieces.append(piece)
        return "".join(pieces)


def _size(value: object) -> int:
    """Return the bytes of a value itself, not of the values that it refers to."""
    if isinstance(value, str):
        return len(value)
    return _POINTER * len(value) if isinstance(value, _CONTAINERS) else 0


def _parts(container: Any) -> list[object]:  # noqa: ANN401 - one of _CONTAINERS
    if isinstance(container, dict):
        return [*container, *container.values()]
    if isinstance(container, _ITEMS):  # whose pairs are new ones every time
        return [part for pair in container for part in pair]
    return list(container)


def _check_steps(*values: object) -> None:
    lengths = [len(value) for value in values if isinstance(value, str)]
    if len(lengths) > 1 and math.prod(lengths) > _MAX_STEPS:
        raise SecurityError("it looks for longer texts than any chat needs")


def _check_tags(value: object) -> None:
    """Bound the time to strip tags: each is sought, and cut out, in the whole text."""
    text = str(value)
    if (text.count("<") + 1) * len(text) > _MAX_STEPS:
        raise SecurityError("it strips more tags than any chat needs")


def _check_wrapping(value: object, width: int = 79, *_: object, **__: object) -> None:
    """Bound the time to wrap a text: a long word is cut piece by piece."""
    if len(str(value)) ** 2 // max(1, min(int(width), 79)) > _MAX_STEPS:
        raise SecurityError("it wraps a longer text than any chat needs")


_LONG_SEARCHES: dict[str, Callable[..., None]] = {
    "trim": _check_steps,
    "striptags": _check_tags,
    "wordwrap": _check_wrapping,
}


def _leaf(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise SecurityError("a number too large for a chat template")
    return _POINTER


def _formatted_size(text: str, weight: int) -> int:
    """Return the most that `text % values` or `text.format(values)` may give."""
    if re.search(r"%[^%a-zA-Z]*\*|\{[^{}]*\{", text):
        raise SecurityError("a field whose width is a value")
    widths = sum(int(digits[:12]) for digits in re.findall(r"\d+", text))
    return len(text) + widths + (text.count("%") + text.count("{")) * weight


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    if not -20 <= precision <= 20:
        raise SecurityError(f"rounding to {precision} places")
    rounded: float = jinja2.filters.do_round(value, precision, method)  # type: ignore[arg-type]
    return rounded
