"""Layout of the packages: which may import which, which may print, and what they promise."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

from support.layout import (
    Floor,
    Source,
    folders_without_init,
    forbidden_imports,
    import_circles,
    imports_back_up,
    imports_upwards,
    long_lines,
    mixed_names,
    printing,
    read_sources,
    undocumented,
    unplaced,
    variables_called_one,
)

ROOT = Path(__file__).resolve().parent.parent
ORDER = ["bindings", "runtime", "convert", "train", "bench", "cli"]
SOURCES = read_sources(ROOT, ORDER)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

FLOORS = (
    Floor("foundations", ("grammar", "laws", "language", "chat", "demo")),
    Floor("trees and acceptance", ("trees", "acceptance")),
    Floor("a round", ("round",)),
    Floor("heads", ("heads",)),
    Floor("memory and models", ("memory", "models")),
    Floor("planning", ("planning", "online")),
    Floor("what all methods share", ("drafters",)),
    Floor(
        "methods",
        (
            "drafters/draft_model",
            "drafters/eagle",
            "drafters/early_exit",
            "drafters/hydra",
            "drafters/lookahead",
            "drafters/lookahead_positions",
            "drafters/medusa",
            "drafters/mtp",
            "drafters/ngram",
            "drafters/partial",
            "drafters/retrieval",
        ),
    ),
    Floor("combinators", ("drafters/combinators",)),
    Floor("engine and tuning", ("engine", "tuning", "__init__")),
)
"""The floors of `specrun.runtime`, lowest first: nothing imports from a higher one."""


def of(*packages: str) -> list[Source]:
    return [source for source in SOURCES if source.parts[0] in packages]


def all_but(*packages: str) -> list[Source]:
    return [source for source in SOURCES if source.parts[0] not in packages]


def test_there_is_something_to_check():
    assert len(SOURCES) > 50
    assert {source.parts[0] for source in SOURCES} == set(ORDER)


def test_nothing_imports_upwards():
    assert imports_upwards(SOURCES, ORDER) == []


def test_only_bindings_touch_native_code():
    assert forbidden_imports(all_but("bindings"), ("llama_cpp", "ctypes", "cffi")) == []


def test_bindings_and_runtime_never_import_torch():
    heavy = ("torch", "gguf", "safetensors", "tokenizers", "matplotlib")
    assert forbidden_imports(of("bindings", "runtime"), heavy) == []


def test_only_the_command_line_imports_what_terminals_need():
    assert forbidden_imports(all_but("cli"), ("click", "rich", "prompt_toolkit")) == []


def test_nothing_installed_imports_the_tools():
    assert forbidden_imports(SOURCES, ("measure", "family")) == []


def test_only_convert_writes_gguf_files():
    assert {source.parts[0] for source in SOURCES if "GGUFWriter" in source.text} == {"convert"}


def test_convert_and_cli_import_torch_only_when_needed():
    assert forbidden_imports(of("convert", "cli"), ("torch",), top_level_only=True) == []


def test_only_the_command_line_prints():
    assert printing(all_but("cli")) == []


def test_every_folder_with_code_is_packaged_and_typed():
    assert folders_without_init(SOURCES) == []
    settings = PYPROJECT["tool"]["setuptools"]
    folders = {".".join(("specrun", *source.parts[:-1])) for source in SOURCES}
    assert set(settings["packages"]) == {"specrun", *folders}
    places = {f"specrun.{package}": package for package in ORDER}
    assert settings["package-dir"] == {"specrun": "package", **places}
    assert [package for package in ORDER if not (ROOT / package / "py.typed").is_file()] == []
    assert "py.typed" in settings["package-data"]["*"]


def test_the_package_hands_on_names_of_the_runtime_and_holds_nothing_else():
    own = [path.name for path in (ROOT / "package").iterdir() if path.name != "__pycache__"]
    assert sorted(own) == ["__init__.py", "py.typed"]
    package, runtime = map(importlib.import_module, ("specrun", "specrun.runtime"))
    assert package.__all__ == runtime.__all__
    assert all(getattr(package, name) is getattr(runtime, name) for name in package.__all__)
    assert package.__version__ == importlib.metadata.version("specrun")


def test_public_names_exist_and_are_documented():
    assert mixed_names(SOURCES) == []
    assert undocumented(SOURCES) == []


ALONE = """
import sys
before = set(sys.modules)
import specrun.runtime
print(sorted(name for name in set(sys.modules) - before if name.startswith(("specrun", "numpy"))))
"""


def test_importing_the_runtime_loads_its_face_alone():
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60, check=True
    )
    faces = ["specrun.bindings", "specrun.bindings.faces", "specrun.runtime"]
    assert [name for name in ast.literal_eval(done.stdout) if name != "specrun"] == faces


LOADED = """
import sys
from specrun.runtime import Engine, Runtime, SamplingParams
heavy = {"llama_cpp", "torch", "gguf", "jinja2", "click", "rich", "hypothesis", "matplotlib", "transformers"}
heavy |= {"huggingface_hub", "httpx2", "http.client", "ssl", "llguidance", "importlib.metadata"}
heavy |= {"concurrent.futures", "asyncio", "multiprocessing", "specrun.runtime.tuning"}
heavy |= {f"specrun.runtime.{name}" for name in ("engine.opening", "heads", "memory", "planning")}
heavy |= {"specrun.bindings.ggml", "specrun.bindings.models.model", "specrun.runtime.drafters.build"}
print(sorted(heavy & set(sys.modules)))
"""  # noqa: E501 - as it is shown


def test_the_first_names_of_the_runtime_load_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


# -- the floors of the runtime ---------------------------------------------------------------------


def test_everything_in_the_runtime_is_on_a_floor():
    assert unplaced(SOURCES, "runtime", FLOORS) == []


def test_nothing_in_the_runtime_imports_back_up():
    assert imports_back_up(SOURCES, "runtime", FLOORS) == []


def test_folders_of_the_runtime_import_in_no_circle():
    assert import_circles(SOURCES, "runtime", FLOORS) == []


def test_the_sources_read_well():
    assert long_lines(SOURCES, 100) == []
    assert variables_called_one(SOURCES) == []
