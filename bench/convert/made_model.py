"""An F16 model of a wanted size for measurements: a made-up checkpoint, converted."""

from __future__ import annotations

import shutil
from pathlib import Path

from specrun.bench.convert.made_checkpoint import write_checkpoint
from specrun.convert import convert_checkpoint
from specrun.runtime.atomic import require_free_space

__all__ = ["write_f16_model"]


def write_f16_model(path: Path, n_bytes: int) -> None:
    """Write a model of about `n_bytes` to `path`; meanwhile twice as much is needed beside it."""
    require_free_space(path.parent, 2 * n_bytes)
    checkpoint = path.parent / "checkpoint"
    checkpoint.mkdir()
    write_checkpoint(checkpoint, n_bytes)
    convert_checkpoint(checkpoint, path, outtype="f16")
    shutil.rmtree(checkpoint)
