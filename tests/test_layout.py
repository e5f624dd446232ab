"""The layout is the architecture: who may import whom, who may print, and what the packages promise."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["bindings", "runtime", "convert", "train", "bench", "cli"]
FILES = sorted(path for package in ORDER for path in (ROOT / package).rglob("*.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """Every module a file imports; with `top_level_only`, what importing the file itself would run."""
    left: list[ast.AST] = [ast.parse(path.read_text())]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            left.extend(node.orelse if top_level_only else [*node.body, *node.orelse])
        elif not (top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            left.extend(ast.iter_child_nodes(node))


def roots(path: Path, **options) -> set[str]:
    return {name.split(".")[0] for name in imports(path, **options)}


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def test_there_is_something_to_check():
    assert len(FILES) > 50


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_nothing_imports_upwards(path):
    allowed = ORDER[: ORDER.index(package_of(path)) + 1]
    ours = {name.split(".")[1] for name in imports(path) if name.startswith("specrun.")}
    assert ours <= set(allowed)
    # One file loaded under two names breaks isinstance.
    assert not roots(path) & {*ORDER, "tests"}


@pytest.mark.parametrize("path", [path for path in FILES if package_of(path) != "bindings"], ids=name_of)
def test_only_bindings_touch_native_code(path):
    assert not roots(path) & {"llama_cpp", "ctypes", "cffi"}


@pytest.mark.parametrize("path", [path for path in FILES if package_of(path) in ("bindings", "runtime")], ids=name_of)
def test_bindings_and_runtime_never_import_torch(path):
    assert not roots(path) & {"torch", "gguf", "safetensors", "tokenizers", "matplotlib"}


@pytest.mark.parametrize("path", [path for path in FILES if package_of(path) != "cli"], ids=name_of)
def test_only_the_command_line_imports_what_terminals_need(path):
    assert not roots(path) & {"click", "rich", "prompt_toolkit"}


def test_only_convert_writes_gguf_files():
    assert {package_of(path) for path in FILES if "GGUFWriter" in path.read_text()} == {"convert"}


@pytest.mark.parametrize("path", [path for path in FILES if package_of(path) in ("convert", "cli")], ids=name_of)
def test_convert_and_cli_import_torch_only_when_needed(path):
    assert "torch" not in roots(path, top_level_only=True)


@pytest.mark.parametrize("path", [path for path in FILES if package_of(path) != "cli"], ids=name_of)
def test_only_the_command_line_prints(path):
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    assert not [call for call in calls if isinstance(call, ast.Name) and call.id in ("print", "input")]
    assert not [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr") and ast.unparse(node.value) == "sys"
    ]


def test_every_folder_is_packaged():
    found = {
        ".".join(("specrun", *path.parent.relative_to(ROOT).parts))
        for package in ORDER
        for path in (ROOT / package).rglob("__init__.py")
    }
    settings = PYPROJECT["tool"]["setuptools"]
    assert set(settings["packages"]) == found
    assert settings["package-dir"] == {f"specrun.{package}": package for package in ORDER}


@pytest.mark.parametrize("package", ORDER)
def test_every_package_is_typed(package):
    assert (ROOT / package / "py.typed").is_file()
    assert "py.typed" in PYPROJECT["tool"]["setuptools"]["package-data"]["*"]


def test_specrun_is_a_namespace():
    assert not (ROOT / "specrun").exists()
    assert importlib.import_module("specrun").__file__ is None


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=name_of)
def test_every_folder_with_code_is_a_package(folder):
    assert (folder / "__init__.py").is_file()


def exported(path: Path) -> list[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


LIBRARY = [path for path in FILES if package_of(path) in ("bindings", "runtime", "convert") and exported(path)]


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_public_names_exist_and_are_documented(path):
    parts = ("specrun", *path.relative_to(ROOT).with_suffix("").parts)
    module = importlib.import_module(".".join(part for part in parts if part != "__init__"))
    assert module.__doc__
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{name} has no docstring"
            # A dataclass without one gets its signature.
            assert not value.__doc__.startswith(f"{name}("), f"{name} has no docstring"


LOADED = """
import sys
import specrun.runtime
heavy = {"llama_cpp", "torch", "gguf", "jinja2", "click", "rich", "hypothesis", "matplotlib", "transformers"}
print(sorted(heavy & set(sys.modules)))
"""


def test_importing_the_runtime_loads_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
