"""Golden records: what a redesign must not change, kept as JSON beside the tests.

`GOLDEN=write pytest tests/golden` writes them anew. A changed record needs a reason in the commit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "records"


def check(name: str, found: dict[str, Any]) -> None:
    """Compare what was found with a record, key by key."""
    path = _FOLDER / f"{name}.json"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        return
    wanted = json.loads(path.read_text())
    assert sorted(found) == sorted(wanted)
    for key, value in wanted.items():
        assert json.loads(json.dumps(found[key])) == value, f"{name}: {key}"
