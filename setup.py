"""The compiled parts; all else is in pyproject.toml.

Cython compiles each of `COMPILED` with the C types of the .pxd file beside it. The result is
installed beside the Python file and imported in its place. Each of `WRAPPERS` hands functions in C
to Python. Without a compiler the package is installed all the same: Python interprets the first,
and has its own in place of the others.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import Extension, setup

COMPILED = (
    "runtime/laws/law.py",
    "runtime/laws/noise.py",
    "runtime/trees/growth.py",
    "runtime/heads/places.py",
)

# Vectors, also where Python itself was built with -O2; products are rounded before they are added.
OPTIONS = ["-O3", "-ffp-contract=off"]

WRAPPERS = {
    "bindings/direct_calls/_calls.pyx": (),
    "runtime/laws/_rows.pyx": ("runtime/laws/masses.c", "runtime/laws/highest.c"),
}
"""The files that they are linked with."""


def extensions() -> list[Extension]:
    """Return the modules that Cython makes; none where Cython is not installed."""
    try:
        from Cython.Build import cythonize
    except ImportError:
        return []
    # Cython finds a .pxd file by the module's name: in folders that are named like the packages.
    root = Path("build/cython")
    shutil.rmtree(root, ignore_errors=True)  # what an earlier build made of other sources
    made = [extension(root, Path(source), (), ["-O2", *OPTIONS[1:]]) for source in COMPILED]
    made += [extension(root, Path(source), own, OPTIONS) for source, own in WRAPPERS.items()]
    found: list[Extension] = cythonize(made, include_path=[str(root)], language_level=3)
    for each in found:
        each.optional = True
    return found


def extension(root: Path, source: Path, linked: tuple[str, ...], options: list[str]) -> Extension:
    """Return a module, whose sources are copied below `root`."""
    for path in (source, source.with_suffix(".pxd")):
        if path.exists():
            copied = root / "specrun" / path
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copied)
    return Extension(
        ".".join(("specrun", *source.with_suffix("").parts)),
        [str(root / "specrun" / source), *linked],
        include_dirs=[str(source.parent)],
        depends=["runtime/laws/row.h"] if linked else [],
        extra_compile_args=options,
    )


setup(ext_modules=extensions())
