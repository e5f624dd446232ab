"""A plugin of pytest: which tests find no small fault of the product that others do not find.

    python -m pytest -p support.product_mutants --mutate runtime/trees --mutants trees.json \
        tests/runtime/trees
    python -m support.product_mutants trees.json

First every test runs once, with the lines that it covers recorded. Suspects are tests whose lines
others cover, too, and that are no proofs, controls or messages (`PROTECTED`). Each mutant is put
into forked copies of the process: one runs the suspects that cover its line, and if one fails,
another runs other tests up to the first that fails. The second command prints the suspects that no
mutant needs. `--suspects FILE` tries others, such as all that were deleted since a commit: none of
them may be needed with another `--mutant-seed`. Files that Cython compiles are mutated with
`-p support.interpreted` in front. It needs the package coverage.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import json
import os
import random
import re
import resource
import select
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NoReturn, TypeVar

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).parents[2]
PACKAGES = ("bindings", "runtime", "convert", "train", "bench", "cli")
PROTECTED = re.compile(
    r"enumerat|Branching|TOLERANCE|wrong|control|interrupt|ctrl_c|SIGINT|is_seen|caught|rejected"
    r"|raises|exit_code|stderr|refused|fresh|golden|p_value|ALPHA|REJECTED",
    re.IGNORECASE,
)
"""What the names or texts of tests contain that stay whatever mutants say."""

Key = tuple[str, str, int]  # of a function's code: its file, qualified name and first line
Node = TypeVar("Node", bound=ast.AST)
_OTHERS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class Changes(ast.NodeTransformer):
    """Finds every change in the functions of a file, and makes the `wanted`-th."""

    def __init__(self, wanted: int = -1) -> None:
        self.found: list[tuple[int, str]] = []  # the line of each, and what it is
        self._wanted, self._depth = wanted, 0

    def _site(self, node: Node, what: str, make: Callable[[], ast.AST]) -> ast.AST:
        if not self._depth:
            return node
        self.found.append((node.lineno, what))  # type: ignore[attr-defined]
        return ast.copy_location(make(), node) if len(self.found) - 1 == self._wanted else node

    def _function(self, node: Any) -> Any:
        self._depth += 1
        node.body = [self.visit(statement) for statement in node.body]
        self._depth -= 1
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = _function

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        node.value = node.value and self.visit(node.value)
        return node

    def _operator(self, node: Any) -> Any:
        self.generic_visit(node)
        other = _OTHERS.get(type(node.op))
        if other is None:
            return node
        swapped = functools.partial(type(node), **{**vars(node), "op": other()})
        return self._site(node, type(node.op).__name__, swapped)

    visit_BinOp = visit_BoolOp = visit_AugAssign = _operator

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        ops = [_OTHERS[type(node.ops[0])](), *node.ops[1:]]
        swapped = functools.partial(ast.Compare, node.left, ops, node.comparators)
        return self._site(node, type(node.ops[0]).__name__, swapped)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        return self._site(node, f"without {type(node.op).__name__}", lambda: node.operand)

    def _branch(self, node: Any) -> Any:
        self.generic_visit(node)
        # Not the opposite, which every test of the branch would see: a guard taken away, or closed.
        for value in (True, False):
            node.test = self._site(node.test, f"if {value}", functools.partial(ast.Constant, value))
        return node

    visit_If = visit_IfExp = _branch

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        return node

    def visit_Constant(self, node: ast.Constant) -> Any:
        value: Any = node.value
        if isinstance(value, bool):
            value = not value
        elif isinstance(value, int | float):
            value = value + 1
        elif isinstance(value, str):
            value = f"XX{value}"
        else:
            return node
        return self._site(node, f"constant {node.value!r:.30}", lambda: ast.Constant(value))

    def visit_Return(self, node: ast.Return) -> Any:
        self.generic_visit(node)
        if node.value is None or (isinstance(node.value, ast.Constant) and not node.value.value):
            return node
        return self._site(node, "return None", lambda: ast.Return(ast.Constant(None)))

    def visit_Expr(self, node: ast.Expr) -> Any:
        if isinstance(node.value, ast.Constant):
            return node
        self.generic_visit(node)
        return self._site(node, "without the call", ast.Pass)

    def _jump(self, node: Any) -> Any:
        self.generic_visit(node)
        return self._site(node, f"without {type(node).__name__}", ast.Pass)

    visit_Raise = visit_Continue = visit_Break = _jump


@dataclass(frozen=True)
class Change:
    """The `index`-th change of a file."""

    path: Path
    index: int
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}#{self.index} {self.what}"


def codes_of(path: Path, wanted: int = -1) -> dict[Key, list[CodeType]]:
    """Return the code of each function of a file with a change made."""
    tree = ast.fix_missing_locations(Changes(wanted).visit(ast.parse(path.read_text())))
    found: dict[Key, list[CodeType]] = defaultdict(list)
    left = [compile(tree, str(path), "exec", dont_inherit=True)]
    while left:
        code = left.pop(0)
        found[str(path), code.co_qualname, code.co_firstlineno].append(code)
        left += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return found


@functools.cache
def real_path(name: str) -> str:
    """Return a file's path in the checkout: a module may be imported by a link to it."""
    return os.path.realpath(name)


def function_of(name: str) -> str:
    """Return the function of a test: its name without parameters."""
    return name.partition("[")[0]


# -- a run of pytest -------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mutants")
    group.addoption("--mutate", action="append", default=[], metavar="PATH")
    group.addoption("--mutants", type=Path, default=Path("mutants.json"), metavar="FILE")
    group.addoption("--suspects", type=Path, metavar="FILE", help="functions, one a line")
    group.addoption("--mutant-seed", type=int, default=0)
    group.addoption("--mutant-minutes", type=float, default=15.0, metavar="MINUTES")
    group.addoption("--most-per-line", type=int, default=3)
    group.addoption("--most-seconds", type=float, default=4.0, help="of tests, for one mutant")


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests once, then under each mutant."""
    if not session.config.option.mutate:
        return None
    Mutation(session).run()
    return True


class Mutation:
    """The mutants of some files and the tests of a session."""

    def __init__(self, session: pytest.Session) -> None:
        self._option, self._session = session.config.option, session
        self._items = {item.nodeid: item for item in session.items}
        paths = [ROOT / path for path in self._option.mutate]
        self._files = sorted(f for p in paths for f in (p.rglob("*.py") if p.is_dir() else [p]))
        self._seconds: dict[str, float] = {}
        self._unfit: set[str] = set()
        self._covering: dict[tuple[str, int], set[str]] = defaultdict(set)
        self._functions: dict[Key, list[FunctionType]] = defaultdict(list)
        self._caches: list[Any] = []

    def run(self) -> None:
        """Fill the file of `--mutants`."""
        self._cover()
        self._find_functions()
        fit = [name for name in self._items if name not in self._unfit]
        self._unfit.update(self._fork(None, fit, len(fit)))  # not to be run in a copy
        suspects = self._suspects()
        chosen, every = self._choose(suspects)
        found: dict[str, tuple[list[str], list[str]]] = {}
        end = time.monotonic() + 60 * self._option.mutant_minutes
        for change, tests in chosen:
            if time.monotonic() > end:
                break
            own = self._within([name for name in tests if function_of(name) in suspects])
            others = self._within([name for name in tests if function_of(name) not in suspects])
            by_suspects = self._fork(change, own, len(own))
            by_others = self._fork(change, others, 1) if by_suspects else []
            found[str(change)] = by_suspects, by_others
        whole = {"mutants": found, "suspects": sorted(suspects), "seconds": self._seconds}
        self._option.mutants.write_text(json.dumps({**whole, "unfit": sorted(self._unfit)}))
        killed = [by_others for by_suspects, by_others in found.values() if by_suspects]
        lost = sum(not by_others for by_others in killed)
        said = f"{len(found)} of {every} mutants: suspects kill {len(killed)}, {lost} of them alone"
        self._session.config.get_terminal_writer().line(said)

    def _cover(self) -> None:
        """Run every test once: how long it takes, and the lines that it covers."""
        import coverage

        signal.signal(signal.SIGPROF, _too_long)
        everything = [f"{ROOT}/{name}/*" for name in PACKAGES]
        recorder = coverage.Coverage(data_file=None, include=everything, messages=False)
        recorder.start()
        items = list(self._items.values())
        for item, following in zip(items, [*items[1:], items[0]], strict=True):
            recorder.switch_context(item.nodeid)
            started = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, 5 * self._option.most_seconds)
            reports = runtestprotocol(item, log=True, nextitem=following)
            signal.setitimer(signal.ITIMER_PROF, 0)
            self._seconds[item.nodeid] = taken = time.process_time() - started
            if taken > self._option.most_seconds or not all(report.passed for report in reports):
                self._unfit.add(item.nodeid)
        recorder.stop()
        data = recorder.get_data()
        for path in data.measured_files():
            for line, names in data.contexts_by_lineno(path).items():
                known = (n for n in names if n in self._items)
                self._covering[real_path(path), line].update(known)

    def _find_functions(self) -> None:
        files = set(map(str, self._files))
        gc.unfreeze()  # those that were imported while tests were collected
        for found in gc.get_objects():
            kind = type(found)  # what `isinstance` looks at may answer by itself
            if kind is FunctionType and real_path(found.__code__.co_filename) in files:
                code = found.__code__
                key = (real_path(code.co_filename), code.co_qualname, code.co_firstlineno)
                self._functions[key].append(found)
            elif kind is functools._lru_cache_wrapper and str(found.__module__).startswith("specr"):
                self._caches.append(found)
        if not self._functions:
            raise pytest.UsageError("the tests import no function of the files to mutate")

    def _suspects(self) -> set[str]:
        """Return functions of tests without which every line of the product is covered still."""
        if self._option.suspects is not None:
            return set(self._option.suspects.read_text().split())
        covered: dict[str, set[tuple[str, int]]] = defaultdict(set)
        times: Counter[tuple[str, int]] = Counter()
        for place, names in self._covering.items():
            for function in set(map(function_of, names)):
                covered[function].add(place)
                times[place] += 1
        sizes: Counter[str] = Counter()
        for name, item in self._items.items():
            source = inspect.getsource(getattr(item, "function", _too_long))
            if not PROTECTED.search(name + source):
                sizes[function_of(name)] = len(source)
        for name in self._unfit:
            sizes.pop(function_of(name), None)
        suspects: set[str] = set()
        for function, _ in sizes.most_common():
            if all(times[place] > 1 for place in covered[function]):
                suspects.add(function)
                times.subtract(covered[function])
        return suspects

    def _choose(self, suspects: set[str]) -> tuple[list[tuple[Change, list[str]]], int]:
        """Return changes of lines that suspects cover in a random order, with the tests of each."""
        noise = random.Random(self._option.mutant_seed)
        chosen: list[tuple[float, Change, list[str]]] = []
        every = 0
        for path in self._files:
            changes = Changes()
            changes.visit(ast.parse(path.read_text()))
            lines: dict[int, list[Change]] = defaultdict(list)
            for index, (line, what) in enumerate(changes.found):
                lines[line].append(Change(path, index, line, what))
            for line, of_line in lines.items():
                names = self._covering.get((str(path), line), set()) - self._unfit
                if any(function_of(name) in suspects for name in names):
                    every += len(of_line)
                    tests = [name for name in self._items if name in names]
                    # What costs little comes first.
                    cost = 0.1 + sum(self._seconds[name] for name in tests[:300])
                    noise.shuffle(of_line)
                    for change in of_line[: self._option.most_per_line]:
                        chosen.append((noise.random() * cost, change, tests))
        chosen.sort(key=lambda one: one[0])
        return [(change, tests) for _, change, tests in chosen], every

    def _within(self, tests: list[str]) -> list[str]:
        """Return the cheapest tests that take no more than `--most-seconds`, in their order."""
        kept, left = set(), self._option.most_seconds
        for name in sorted(tests, key=lambda name: self._seconds[name]):
            left -= self._seconds[name]
            if left > 0:
                kept.add(name)
        return [name for name in tests if name in kept]

    def _fork(self, change: Change | None, tests: list[str], most: int) -> list[str]:
        """Return the tests that fail in a copy of the process, at most `most`."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            self._work(change, tests, writing, most)
        os.close(writing)
        end = time.monotonic() + 60.0 + 50 * sum(self._seconds[name] for name in tests)
        failed, running, rest = list[str](), "", b""
        while select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]:
            data = os.read(reading, 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in map(bytes.decode, lines):
                kind, _, name = line.partition(" ")
                running = name if kind == "start" else ""
                failed += [name] if kind == "failed" else []
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return [*failed, running] if running else failed  # it ended or stopped the process

    def _work(self, change: Change | None, tests: list[str], writing: int, most: int) -> NoReturn:
        """Run tests in the copy of the process."""
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30))
        signal.signal(signal.SIGALRM, _too_long)
        if change is not None:
            self._apply(change)
        items = [self._items[name] for name in tests]
        for item, following in zip(items, [*items[1:], *items[:1]], strict=True):
            os.write(writing, f"start {item.nodeid}\n".encode())
            # Of its own time, so that a busy machine does not matter; by the clock if it sleeps.
            signal.setitimer(signal.ITIMER_PROF, 2.0 + 6 * self._seconds[item.nodeid])
            signal.setitimer(signal.ITIMER_REAL, 20.0 + 60 * self._seconds[item.nodeid])
            try:
                failed = any(r.failed for r in runtestprotocol(item, log=False, nextitem=following))
            except BaseException:
                failed = True
            for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
                signal.setitimer(timer, 0)
            os.write(writing, f"{'failed' if failed else 'passed'} {item.nodeid}\n".encode())
            most -= failed
            if most == 0:
                break
        os.close(writing)
        os._exit(0)

    def _apply(self, change: Change) -> None:
        """Give the functions of a file the code of a change."""
        before = codes_of(change.path)
        for key, codes in codes_of(change.path, change.index).items():
            both = zip(before[key], codes, strict=False)
            pairs = [(old, new) for old, new in both if old.co_freevars == new.co_freevars]
            for function in self._functions.get(key, []):
                code = function.__code__
                function.__code__ = next((new for old, new in pairs if old == code != new), code)
        for cache in self._caches:
            cache.cache_clear()


def _too_long(*_: object) -> NoReturn:
    raise TimeoutError("a test takes too long")


# -- what no mutant needs --------------------------------------------------------------------------


def superfluous(files: Sequence[Path]) -> list[str]:
    """Return the suspects of all files without which as many mutants are killed."""
    runs = [json.loads(file.read_text()) for file in files]
    suspects = set[str].intersection(*(set(run["suspects"]) for run in runs))
    left = [
        set(map(function_of, by_suspects))
        for run in runs
        for by_suspects, by_others in run["mutants"].values()
        if by_suspects and not by_others
    ]
    left = [killers for killers in left if killers <= suspects]
    needed: set[str] = set()
    while left := [killers for killers in left if not killers & needed]:
        needed.add(Counter(name for killers in left for name in killers).most_common(1)[0][0])
    return sorted(suspects - needed)


if __name__ == "__main__":
    sys.stdout.write("\n".join(superfluous([Path(name) for name in sys.argv[1:]])) + "\n")
