"""The process that `checkpoint_to_f16` measures: converts one checkpoint, and says how long it
took."""

from __future__ import annotations

import os
import sys

from specrun.bench.convert.child import report_run
from specrun.convert import convert_checkpoint


def _main(source: str, output: str) -> None:
    report_run(
        lambda: convert_checkpoint(source, output, outtype="f16", force=True),
        lambda text: os.write(1, text.encode()),
    )


if __name__ == "__main__":
    _main(*sys.argv[1:])
