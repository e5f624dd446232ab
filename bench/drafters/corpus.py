"""The corpus of the demo family: the standard library's docstrings, as facts and as a text."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Final, Literal

from specrun.bench.drafters.prompts import demo_pairs
from specrun.bindings.models import Model
from specrun.runtime.drafters.retrieval import build_store

# == Facts: the public names that have a docstring =================================================
#
# An entry is a name and the first sentence of its docstring, the one fact that the demo family
# learns by heart. Python sources are read with `ast`; builtins and extension modules, which are
# written in C, are read from the running interpreter. A name is called by the package that
# re-exports it: json.JSONDecoder is defined in json.decoder.


MAX_SENTENCE = 200
"""Longest sentence kept, in characters: long ones cost tokens and rarely answer well."""
_MAX_SIGNATURE = 120

_SIGNATURE_LINE = re.compile(r"^[\w.]+\([^()]*(\([^()]*\)[^()]*)*\)\s*(-+>.*|[-=:].*)?$")
_OPEN_SIGNATURE = re.compile(r"^[\w.]+\([^)]*$")
_ARROW = re.compile(r"^[\w.]+\(.*?\)\s*-+>\s*(?:None\b[.\s-]*)?(.*)$")
_SENTENCE_END = re.compile(r"[.!?][\"')\]`]*(?=\s+[^a-z\s]|(?:\s\s+|\n)\S|\s*$)")
_ABBREVIATION = re.compile(
    r"(?:\b(?:e\.g|i\.e|etc|vs|cf|E\.g|I\.e|No|Mr|Dr|St|resp|approx|incl|[A-Z])|\.\.)\.$"
)
_CODE = re.compile(
    r" = .*\(|^\S+( \S+)? = |^(\S+ ){0,3}-+> |^.{0,30}\[.*\]|^\w+\(\w+\) |^\w=|^\w, "
)
_WORD = re.compile(r"[A-Za-z]{2,}")


def first_sentence(doc: str | None) -> str | None:
    """Return the first sentence of `doc`, its white space collapsed; None if there is no prose.

    Signature lines, which older C docstrings begin with, are skipped; so are sentences that are
    longer than MAX_SENTENCE characters, announce a list, or are not prose at all.
    """
    text = inspect.cleandoc(doc or "")
    paragraph = _first_prose_paragraph(text)
    if paragraph is None:  # "dict() -> new empty dictionary" is all that some C docstrings have
        arrow = _ARROW.match(text.partition("\n")[0])
        paragraph = arrow.group(1) if arrow else ""
    sentence = " ".join(_cut(paragraph).split())
    return sentence if _is_prose(sentence) else None


def _first_prose_paragraph(text: str) -> str | None:
    """The first paragraph that is left after signatures are taken off, its lines joined."""
    for paragraph in re.split(r"\n\s*\n", text):
        given = paragraph.strip().splitlines()
        lines = _without_signatures([line for line in given if set(line.strip()) - set("=-~*#")])
        for index, line in enumerate(lines):
            if line.lstrip().startswith((">>>", "* ", "- ", ":param", "@")):
                lines = lines[:index]
                break
        if lines:
            return "\n".join(line.strip() for line in lines)
    return None


def _without_signatures(lines: list[str]) -> list[str]:
    """Drop leading signature lines ("f(x) -> y"), continued ones too; keep a described result."""
    if not lines:
        return []
    arrow = _ARROW.match(lines[0])
    if arrow and len(_WORD.findall(arrow.group(1))) >= 5 and arrow.group(1)[0].isalpha():
        return [arrow.group(1), *lines[1:]]
    if _OPEN_SIGNATURE.match(lines[0]) and "->" in " ".join(lines):
        return []  # a signature that runs over several lines
    n_dropped = 0
    for line in lines:
        if not (_SIGNATURE_LINE.match(line.strip()) or (n_dropped and line[0].isspace())):
            break
        n_dropped += 1
    return lines[n_dropped:]


def _cut(paragraph: str) -> str:
    """The paragraph up to its first real end of sentence."""
    for match in _SENTENCE_END.finditer(paragraph):
        head = paragraph[: match.end()]
        if not _ABBREVIATION.search(head.rstrip("\"')]`")) or match.end() == len(paragraph):
            return head
    return paragraph


def _is_prose(sentence: str) -> bool:
    """Whether a sentence can stand alone as an answer."""
    if not 8 <= len(sentence) <= MAX_SENTENCE or len(sentence.split()) < 2:
        return False
    if _CODE.search(sentence):
        return False
    if sentence.endswith((":", ",", "...")) or not sentence.isprintable():
        return False
    return sentence[0].isalpha() or sentence[0] in "\"'`*(_"


NATIVE_MODULES: Final = (
    "array", "asyncio", "atexit", "audioop", "binascii", "builtins", "bz2", "cmath", "codecs",
    "collections", "contextlib", "contextvars", "copyreg", "crypt", "csv", "ctypes", "datetime",
    "decimal", "errno", "faulthandler", "fcntl", "functools", "gc", "grp", "hashlib", "hmac", "imp",
    "io", "itertools", "json", "locale", "lzma", "marshal", "math", "mmap", "operator", "os",
    "pickle", "pwd", "pyexpat", "queue", "random", "re", "readline", "resource", "select", "signal",
    "socket", "sqlite3", "ssl", "statistics", "string", "struct", "sys", "syslog", "termios",
    "threading", "time", "tracemalloc", "types", "unicodedata", "uuid", "warnings", "weakref",
    "xml.etree.ElementTree", "zlib", "zoneinfo",
)  # fmt: skip
"""Modules whose C parts are read; importing them has no side effect worth naming."""

NativeName = tuple[str, str, str | None, str | None]
_METHOD_TYPES = (type(str.join), type(dict.__dict__["fromkeys"]), staticmethod, classmethod)


def native_entries() -> Iterator[NativeName]:
    """Yield (name, kind, signature, docstring) of public C names, in a fixed order."""
    for module_name in NATIVE_MODULES:
        try:
            with warnings.catch_warnings():  # some are deprecated, but documented
                warnings.simplefilter("ignore", DeprecationWarning)
                module = importlib.import_module(module_name)
        except ImportError:  # an interpreter built without this extension
            continue
        prefix = "" if module_name == "builtins" else f"{module_name}."
        if prefix:
            yield module_name, "module", None, module.__doc__
        for name in sorted(vars(module)):
            value = vars(module)[name]
            if not name.startswith("_") and _is_native(value, module):
                # socket.SocketType is socket.socket.
                own_name = value.__name__ if isinstance(value, type) else name
                yield from _object_names(prefix + own_name, value)


def _is_native(value: object, module: ModuleType) -> bool:
    """Whether a C function or class of a module belongs to it, and was not imported."""
    if not isinstance(value, BuiltinFunctionType | type):
        return False
    if isinstance(value, type) and any(map(inspect.isfunction, vars(value).values())):
        return False  # written in Python: the .py files have it
    if module.__name__ == "builtins":
        return True
    bound_to = getattr(value, "__self__", None)  # random.random is a method of a hidden instance
    owner = getattr(value, "__module__", None) or type(bound_to).__module__
    names = ("os", "posix") if module.__name__ == "os" else (module.__name__,)
    return owner.lstrip("_") in names


def _object_names(name: str, value: object) -> Iterator[NativeName]:
    if not isinstance(value, type):
        yield name, "function", _native_signature(name, value), getattr(value, "__doc__", None)
        return
    yield name, "class", None, value.__doc__
    for member_name in sorted(vars(value)):
        member = vars(value)[member_name]
        if not member_name.startswith("_") and isinstance(member, _METHOD_TYPES):
            full = f"{name}.{member_name}"
            yield full, "method", _native_signature(full, member), getattr(member, "__doc__", None)


def _native_signature(name: str, value: object) -> str | None:
    try:
        text = name.rsplit(".", 1)[-1] + str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return text if len(text) <= _MAX_SIGNATURE and " at 0x" not in text else None


def public_prefixes(module: str, path: Path, tree: ast.Module) -> dict[str, str]:
    """Map the names of `module` that its package's __init__ re-exports to the package's name."""
    package, _, leaf = module.rpartition(".")
    init = path.parent / "__init__.py"
    if not package or path.name == "__init__.py" or not init.exists():
        return {}
    prefixes: dict[str, str] = {}
    for node in _parse(init).body:
        if isinstance(node, ast.ImportFrom) and _imports_from(node, package, leaf):
            for alias in node.names:
                names = _exported_names(tree) if alias.name == "*" else [alias.asname or alias.name]
                prefixes.update(dict.fromkeys(names, package))
    return prefixes


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def _imports_from(node: ast.ImportFrom, package: str, leaf: str) -> bool:
    relative = node.level == 1 and node.module == leaf
    return relative or (node.level == 0 and node.module == f"{package}.{leaf}")


def _exported_names(tree: ast.Module) -> list[str]:
    """The strings of a module's `__all__`; nothing when it has none or computes it."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            try:
                return list(ast.literal_eval(node.value))
            except ValueError:
                return []
    return []


SKIPPED_PACKAGES = frozenset((
    "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "distutils", "lib-dynload",
    "pydoc_data", "site-packages", "config", "__phello__", "this", "antigravity", "ntpath",
    "nturl2path", "genericpath", "encodings", "tix", "pydoc", "expatbuilder", "ast",
))  # fmt: skip
"""Left out: tests, retired packages, generated tables, jokes, the other os.path."""

QUESTION = "What does {} do?"
"""The question about a name that the embedded family was taught most often."""

_RENAMED = {"posixpath": "os.path"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A public "module", "class", "function" or "method"; its `sentence` is the fact to learn."""

    name: str
    kind: str
    signature: str | None
    sentence: str


def canonical_question(entry: Entry) -> str:
    """The question about an entry that the embedded family was taught most often."""
    return QUESTION.format(entry.name)


def build_corpus() -> list[Entry]:
    """All entries, sorted by name, no name twice; the same for the same Python and platform."""
    found: dict[str, Entry] = {}
    for entry in _python_entries():
        found.setdefault(entry.name, entry)
    for name, kind, signature, doc in native_entries():
        sentence = first_sentence(doc)
        if sentence is not None:
            found.setdefault(name, Entry(name, kind, signature, sentence))
    return [found[name] for name in sorted(found)]


def _python_entries() -> Iterator[Entry]:
    """Entries of the library's .py files, read with `ast`: nothing is imported."""
    for path, module in _sources():
        name = module.removesuffix(".__init__")
        if not any(part.startswith("_") for part in name.split(".")):
            yield from _module_entries(_RENAMED.get(name, name), path)


def _sources() -> Iterator[tuple[Path, str]]:
    """Yield the library's .py files that are read, with their modules' names, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_PACKAGES.isdisjoint(parts):
            yield path, ".".join(parts)


def _module_entries(module: str, path: Path) -> Iterator[Entry]:
    tree = ast.parse(path.read_bytes())
    yield from _entry(module, "module", tree)
    shown = public_prefixes(module, path, tree)
    for node in _definitions(tree.body):
        name = f"{shown.get(node.name, module)}.{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from _entry(name, "class", node)
            for method in _definitions(node.body):
                if not isinstance(method, ast.ClassDef):
                    yield from _entry(f"{name}.{method.name}", "method", method)
        else:
            yield from _entry(name, "function", node)


_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(body: list[ast.stmt]) -> Iterator[_Definition]:
    """Public classes and functions of a body, also those inside `if` and `try`."""
    for node in body:
        if isinstance(node, _Definition):
            if not node.name.startswith("_"):
                yield node
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions(node.body + node.orelse)


def _entry(name: str, kind: str, node: ast.Module | _Definition) -> Iterator[Entry]:
    sentence = first_sentence(ast.get_docstring(node))
    if sentence is None:
        return
    signature = None
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        signature = _signature(node)
    yield Entry(name, kind, signature, sentence)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    text = f"{node.name}({ast.unparse(node.args)})"
    return text if len(text) <= _MAX_SIGNATURE else None


# == The docstrings as a text, and a temporary datastore of them for REST ==========================
#
# The embedded demo's questions are about them. Paragraphs are unwrapped, as in rendered
# documentation; above a docstring is the name that it documents.


DocumentationKind = Literal["all", "disjoint"]


@contextmanager
def documentation_store(
    target: Path, kind: DocumentationKind, *, progress: Callable[[str], None] = lambda _: None
) -> Iterator[Path]:
    """Yield a datastore for `target`'s vocabulary; "disjoint" leaves out texts with an answer."""
    answers = [pair.answer for pair in demo_pairs()] if kind == "disjoint" else []
    with tempfile.TemporaryDirectory(prefix="specrun-bench-") as folder:
        progress("reading the standard library's documentation")
        text = Path(folder) / "documentation.txt"
        text.write_text(documentation(answers), encoding="utf-8")
        store = Path(folder) / f"{kind}.store"
        progress("making a datastore of it")
        with Model(target, vocab_only=True) as model:
            build_store([text], model.vocabulary, store, model=target.name)
        yield store


def store_description(kind: DocumentationKind) -> str:
    """Return the note for readers about the store."""
    what = "rest retrieves from the docstrings of the standard library"
    if kind == "disjoint":
        return f"{what} without those that hold one of the answers (disjoint from the answers)"
    return f"{what}, which the questions are about: the store holds the answers"


def documentation(without: Sequence[str] = ()) -> str:
    """Return all docstrings of this Python's standard library that hold no text of `without`."""
    parts: dict[str, str] = {}
    for name, doc in (*_of_files(), *((name, doc) for name, _, _, doc in native_entries())):
        text = _unwrapped(doc)
        if text and not any(excluded in text for excluded in without):
            parts.setdefault(text, f"{name}\n{text}\n")
    return "\n".join(parts.values())


def _of_files() -> Iterator[tuple[str, str]]:
    for path, module in _sources():
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | _Definition) and (doc := ast.get_docstring(node)):
                yield getattr(node, "name", module), doc


def _unwrapped(doc: str | None) -> str:
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(doc or ""))
    return "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())
