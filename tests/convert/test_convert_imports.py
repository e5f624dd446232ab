"""Imports of the converter: their cost, and their message."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )


def test_importing_loads_neither_torch_nor_llama_cpp_and_prints_nothing() -> None:
    heavy = "{'torch', 'llama_cpp', 'transformers', 'tqdm'}"
    result = run(f"import sys, specrun.convert; sys.exit(len({heavy} & set(sys.modules)))")
    assert (result.stdout, result.stderr, result.returncode) == ("", "", 0)


def test_a_missing_gguf_package_is_named_with_the_remedy() -> None:
    result = run("import sys; sys.modules['gguf'] = None\nimport specrun.convert")
    assert result.stderr.splitlines()[-1].endswith("-e '.[convert]' in specrun's folder")
    assert "MissingPackageError: this needs the package gguf: " in result.stderr
