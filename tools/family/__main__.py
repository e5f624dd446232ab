"""`python tools/family models|heads ...`: make the embedded models, or train their heads."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Import the family's scripts from the folder above, and run the one that is named."""
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from family import heads, models

    programs = {"models": models.main, "heads": heads.main}
    name, *arguments = sys.argv[1:] or ["-h"]
    if name not in programs:
        raise SystemExit("usage: python tools/family models|heads [-h] [options]")
    programs[name](arguments)


if __name__ == "__main__":
    main()
