"""A plugin of pytest (-p support.interpreted): no file is replaced by what Cython made of it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class SourcesFirst(importlib.abc.MetaPathFinder):
    """Finds the Python file of a module that was compiled, too."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a module's file beside its compiled one, None for all others."""
        if not name.startswith("specrun.") or path is None:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        if found is None or not isinstance(found.loader, importlib.machinery.ExtensionFileLoader):
            return None
        source = Path(str(found.origin)).parent / f"{name.rpartition('.')[2]}.py"
        return importlib.util.spec_from_file_location(name, source) if source.exists() else None


assert not any(name.startswith("specrun.runtime") for name in sys.modules)
sys.meta_path.insert(0, SourcesFirst())
