"""The files that Cython compiles, interpreted: equal bits, and the same proofs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.build_cases import digests
from support.mutated_source import IS_COMPILED, source_of

from specrun.runtime.heads import places
from specrun.runtime.laws import law, noise
from specrun.runtime.trees import growth

pytestmark = pytest.mark.long

TESTS = Path(__file__).parents[1]
COMPILED = (law, noise, growth, places)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the tests' own modules."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=TESTS.parent,
        check=False,
    )


@pytest.mark.skipif(not IS_COMPILED, reason="nothing was compiled")
def test_both_builds_give_equal_bits() -> None:
    done = run("-m", "support.build_cases", "interpreted")
    assert done.returncode == 0, done.stderr
    interpreted, compiled = json.loads(done.stdout), digests()
    assert interpreted.pop("files")[0].endswith("law.py")
    assert not compiled.pop("files")[0].endswith(".py")
    for kind, found in compiled.items():
        assert found == interpreted[kind], kind
        assert len(set(found)) > 100


@pytest.mark.skipif(not IS_COMPILED, reason="nothing was compiled")
def test_what_was_compiled_is_what_the_files_say() -> None:
    """A checkout that was changed without being installed again would be proven in vain."""
    for module in COMPILED:
        built, source = Path(str(module.__file__)), source_of(module)
        sources = [source, source.with_suffix(".pxd")]
        newest = max(path.stat().st_mtime for path in sources if path.exists())
        problem = f"{source.name} is newer than its compiled module: pip install -e ."
        assert built.stat().st_mtime >= newest, problem


@pytest.mark.skipif(not IS_COMPILED, reason="nothing was compiled")
def test_the_interpreted_files_are_proven_alike() -> None:
    """The enumerations and their controls, also those that only interpreted classes allow."""
    proofs = ["test_compiled_exactness.py", "test_other_noise.py"]
    files = [str(TESTS / "runtime" / name) for name in proofs]
    quiet = ["-q", "-p", "no:cacheprovider"]
    done = run("-m", "pytest", "-p", "support.interpreted", *quiet, *files)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "compiled classes do not change" not in done.stdout
