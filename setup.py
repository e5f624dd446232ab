"""The compiled parts; all else is in pyproject.toml.

Cython compiles each of `COMPILED` with the C types of the .pxd file beside it. The result is
installed beside the Python file and imported in its place. Without a compiler the package is
installed all the same, and Python interprets these files.
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


def c_extensions() -> list[Extension]:
    """Return the modules that are written in C."""
    calls = ["bindings/direct_calls/calls.c"]
    return [
        Extension(
            "specrun.runtime.laws._rows",
            ["runtime/laws/rows.c", "runtime/laws/highest.c"],
            depends=["runtime/laws/highest.h", "runtime/laws/widths.h"],
            extra_compile_args=OPTIONS,
        ),
        Extension("specrun.bindings.direct_calls._calls", calls),
    ]


def cython_extensions() -> list[Extension]:
    """Return the modules that Cython makes of Python files; none where Cython is not installed."""
    try:
        from Cython.Build import cythonize
    except ImportError:
        return []
    # Cython finds a .pxd file by the module's name: in folders that are named like the packages.
    root = Path("build/cython")
    shutil.rmtree(root, ignore_errors=True)  # what an earlier build made of other sources
    extensions = []
    for source in COMPILED:
        for path in (Path(source), Path(source).with_suffix(".pxd")):
            if path.exists():
                copied = root / "specrun" / path
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copied)
        name = ".".join(("specrun", *Path(source).with_suffix("").parts))
        sources = [str(root / "specrun" / source)]
        extensions.append(Extension(name, sources, extra_compile_args=["-O2", *OPTIONS[1:]]))
    found: list[Extension] = cythonize(extensions, include_path=[str(root)], language_level=3)
    return found


extensions = c_extensions() + cython_extensions()
for extension in extensions:
    extension.optional = True
setup(ext_modules=extensions)
