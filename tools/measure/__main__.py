"""`python tools/measure NAME ...`: run a measurement of this checkout."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Import the measurements from the folder above, and run the one that is named."""
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from measure.command import measure

    measure(prog_name="python tools/measure")


if __name__ == "__main__":
    main()
