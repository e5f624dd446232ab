"""Checks of imports and of how sources look: each takes source files and returns its offenders.

`test_layout.py` holds the repository to them; `test_layout_checks.py` shows that each finds a
made-up offender.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Floor",
    "Source",
    "folders_without_init",
    "forbidden_imports",
    "import_circles",
    "imports_back_up",
    "imports_upwards",
    "long_lines",
    "mixed_names",
    "printing",
    "read_sources",
    "undocumented",
    "unplaced",
    "variables_called_one",
]


@dataclass(frozen=True, slots=True)
class Source:
    """A file of Python: its `path` below the root, with slashes, and its text."""

    path: str
    text: str

    @property
    def parts(self) -> tuple[str, ...]:
        """Folders and name, without the ending."""
        return tuple(self.path.removesuffix(".py").split("/"))

    @property
    def folder(self) -> str:
        """The folder that it lies in."""
        return self.path.rpartition("/")[0]

    @property
    def module(self) -> str:
        """What it is imported as."""
        return ".".join(("specrun", *self.parts)).removesuffix(".__init__")

    @property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return _parsed(self.text)


@functools.cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


@dataclass(frozen=True, slots=True)
class Floor:
    """Modules and folders of a package, as "tree" or "drafters/eagle", that may import each other.

    A folder stands for all in it that is not named more closely elsewhere; "drafters/__init__" is
    that file alone.
    """

    name: str
    members: tuple[str, ...]


def read_sources(root: Path, folders: Collection[str]) -> list[Source]:
    """Return all Python files in `folders` of `root`, in the order of their paths."""
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    return [
        Source(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
        for path in paths
    ]


# -- imports between packages --------------------------------------------------------------------


def imports(source: Source, *, top_level_only: bool = False) -> Iterator[str]:
    """Yield all that a file imports, names with their module.

    With `top_level_only` that is what importing the file would run.
    """
    left: list[ast.AST] = [source.tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (
                f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names
            )
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            left.extend(node.orelse if top_level_only else [*node.body, *node.orelse])
        elif not (top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            left.extend(ast.iter_child_nodes(node))


def imports_upwards(sources: Sequence[Source], order: Sequence[str]) -> list[str]:
    """Return imports of packages later in `order`, relative ones, and any without "specrun.".

    One file loaded under two names breaks isinstance.
    """
    found = []
    for source in sources:
        allowed = order[: order.index(source.parts[0]) + 1]
        for name in imports(source):
            root, _, rest = name.partition(".")
            upwards = root == "specrun" and rest.split(".")[0] not in allowed
            if upwards or root in ("", "tests", *order):
                found.append(f"{source.path}: {name}")
    return found


def forbidden_imports(
    sources: Sequence[Source], names: Collection[str], *, top_level_only: bool = False
) -> list[str]:
    """Return imports of the libraries `names`; `top_level_only` as of `imports`."""
    return [
        f"{source.path}: {name}"
        for source in sources
        for name in imports(source, top_level_only=top_level_only)
        if name.split(".")[0] in names
    ]


# -- the floors of a package ---------------------------------------------------------------------


def unplaced(sources: Sequence[Source], package: str, floors: Sequence[Floor]) -> list[str]:
    """Return files of `package` on no floor, and members of floors that are no file or folder."""
    inside = _inside(sources, package)
    lost = [source.path for source in inside if _place(source, package, floors) is None]
    known = {"/".join(source.parts[1:]) for source in inside} | {
        source.folder.partition("/")[2] for source in inside
    }
    members = [member for floor in floors for member in floor.members]
    stale = [f"{member} is nothing in {package}" for member in members if member not in known]
    return (
        lost
        + stale
        + [f"{member} is on two floors" for member in members if members.count(member) > 1]
    )


def imports_back_up(sources: Sequence[Source], package: str, floors: Sequence[Floor]) -> list[str]:
    """Return imports from a floor of `package`, lowest first, of something on a higher one."""
    return [
        f"{here.path} ({floors[low].name}) imports {there.path} ({floors[high].name})"
        for here, there, (low, _), (high, _) in _edges(sources, package, floors)
        if high > low
    ]


def import_circles(sources: Sequence[Source], package: str, floors: Sequence[Floor]) -> list[str]:
    """Return circles of imports between folders of `package`; a floor's modules are one folder.

    Each is a list of folders that all reach each other, with the imports between them.
    """
    reached: dict[str, set[str]] = {}
    reasons: dict[tuple[str, str], list[str]] = {}
    for here, there, (_, above), (_, below) in _edges(sources, package, floors):
        if above != below:
            reached.setdefault(above, set()).add(below)
            reasons.setdefault((above, below), []).append(f"{here.path} imports {there.path}")
    while True:  # to the transitive closure
        more = {
            start: ends.union(*(reached.get(end, set()) for end in ends))
            for start, ends in reached.items()
        }
        if more == reached:
            break
        reached = more
    circles = {
        tuple(sorted(node for node in ends if start in reached.get(node, set())))
        for start, ends in reached.items()
        if start in ends
    }
    found = []
    for circle in sorted(circles):
        whys = [
            why for pair, all_of_it in reasons.items() if {*pair} <= {*circle} for why in all_of_it
        ]
        found.append(f"{', '.join(circle)}: {'; '.join(whys)}")
    return found


def _inside(sources: Sequence[Source], package: str) -> list[Source]:
    return [source for source in sources if source.parts[0] == package]


def _place(source: Source, package: str, floors: Sequence[Floor]) -> tuple[int, str] | None:
    """Return a file's floor, and its folder there: the floor itself for its own modules."""
    below = source.parts[1:]
    found: tuple[int, int, str] | None = None
    for number, floor in enumerate(floors):
        for member in floor.members:
            parts = tuple(member.split("/"))
            if below[: len(parts)] == parts and (found is None or len(parts) > found[0]):
                found = (
                    len(parts),
                    number,
                    floor.name if parts == below else f"{package}/{member}",
                )
    return None if found is None else found[1:]


_Edge = tuple[Source, Source, tuple[int, str], tuple[int, str]]


def _edges(sources: Sequence[Source], package: str, floors: Sequence[Floor]) -> Iterator[_Edge]:
    """Yield imports within `package`, each with the two files and their places.

    A name that an `__init__` only hands on counts as imported from where it was made, and handing
    on is no import.
    """
    inside = {source.module: source for source in _inside(sources, package)}
    handed_on = {
        f"{source.module}.{alias.asname or alias.name}": f"{node.module}.{alias.name}"
        for source in inside.values()
        if source.parts[-1] == "__init__"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for here in inside.values():
        place = _place(here, package, floors)
        hands_on = f"{here.module}." if here.parts[-1] == "__init__" else None
        names = sorted(
            name for name in imports(here) if hands_on is None or not name.startswith(hands_on)
        )
        for there in dict.fromkeys(_made_in(name, inside, handed_on) for name in names):
            other = None if there is None else _place(there, package, floors)
            if there is not None and place is not None and other is not None:
                yield here, there, place, other


def _made_in(
    name: str, modules: Mapping[str, Source], handed_on: Mapping[str, str]
) -> Source | None:
    """Return the file that an imported name is, or is defined in; None for what lies elsewhere."""
    while name not in modules and name in handed_on:
        name = handed_on[name]
    return modules.get(name) or modules.get(name.rpartition(".")[0])


def folders_without_init(sources: Sequence[Source]) -> list[str]:
    """Return folders with code that are no package."""
    packages = {source.folder for source in sources if source.parts[-1] == "__init__"}
    return sorted({source.folder for source in sources} - packages)


# -- how it is written ---------------------------------------------------------------------------


def printing(sources: Sequence[Source]) -> list[str]:
    """Return uses of print, input, sys.stdout and sys.stderr."""
    return _nodes(
        sources,
        lambda node: (
            (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("print", "input")
            )
            or (
                isinstance(node, ast.Attribute)
                and ast.unparse(node) in ("sys.stdout", "sys.stderr")
            )
        ),
    )


def undocumented(sources: Sequence[Source]) -> list[str]:
    """Return modules without docstring, and public classes and functions of them without one.

    Public is what has no underscore. Overloads have no docstring: what implements them has.
    """
    found = []
    for source in sources:
        if ast.get_docstring(source.tree) is None:
            found.append(source.path)
        for node in _defined(source.tree):
            overload = any(
                ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list
            )
            if not node.name.startswith("_") and not overload and ast.get_docstring(node) is None:
                found.append(f"{source.path}:{node.lineno} {node.name}")
    return found


def mixed_names(sources: Sequence[Source]) -> list[str]:
    """Return names that a file lists twice in `__all__`, or lists without having them."""
    found = []
    for source in sources:
        names = [str(name) for name in _assigned(source.tree, "__all__")]
        bound = {node.name for node in _defined(source.tree)}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                bound |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
        lazy = "__getattr__" in bound
        found += [
            f"{source.path}: {name}"
            for name in names
            if names.count(name) > 1 or not (lazy or name in bound)
        ]
    return found


_PRAGMA = re.compile(r"\s*# (noqa|type: ignore)\b.*")


def long_lines(sources: Sequence[Source], most: int) -> list[str]:
    """Return lines of more than `most` characters, as ruff's E501 counts them.

    Trailing pragmas do not count, nor do texts that are shown as they are: string literals whose
    last line says `noqa: E501`.
    """
    return [
        f"{source.path}:{number}"
        for source in sources
        for shown in [_shown_as_they_are(source)]
        for number, line in enumerate(source.text.split("\n"), 1)
        if len(_PRAGMA.sub("", line)) > most and number not in shown
    ]


def _shown_as_they_are(source: Source) -> set[int]:
    """Return the lines of string literals that end with `noqa: E501`."""
    lines = source.text.split("\n")
    return {
        number
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant | ast.JoinedStr)
        and "noqa: E501" in lines[(node.end_lineno or 1) - 1]
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def variables_called_one(sources: Sequence[Source]) -> list[str]:
    """Return variables and parameters called `one`."""
    return _nodes(
        sources,
        lambda node: (
            (isinstance(node, ast.Name) and node.id == "one" and isinstance(node.ctx, ast.Store))
            or (isinstance(node, ast.arg) and node.arg == "one")
            or (
                isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar)
                and node.name == "one"
            )
        ),
    )


def _nodes(sources: Sequence[Source], wanted: Callable[[ast.AST], bool]) -> list[str]:
    found = [
        (source.path, node) for source in sources for node in ast.walk(source.tree) if wanted(node)
    ]
    return [f"{path}:{getattr(node, 'lineno', 0)}" for path, node in found]


def _defined(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yield the functions and classes of a module, those behind conditions included."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
        else:
            left.extend(ast.iter_child_nodes(node))


def _assigned(tree: ast.Module, name: str) -> Sequence[object]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name:
            return tuple(ast.literal_eval(node.value))
    return ()
