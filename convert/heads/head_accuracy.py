"""Accuracies that calibration measured, kept in the head's own file or as a CSV beside it."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

from specrun.bindings.errors import OptionError
from specrun.bindings.files import atomic_path
from specrun.convert.gguf import GGUFSource, Progress, write_gguf
from specrun.runtime.heads import DEPTHS_KEY, KEY, Accuracy


def store_accuracy(
    path: str | os.PathLike[str],
    accuracy: Accuracy,
    *,
    n_positions: int,
    progress: Progress | None = None,
) -> int:
    """Write accuracies into a head's file, over earlier ones; return its size in bytes.

    The file is written anew beside the old one and then takes its place, every tensor bit by bit as
    it was: whoever reads it meanwhile, or stops this, has the old one. Raises OptionError if there
    is nothing to keep, and the errors of `write_gguf`.
    """
    head = GGUFSource(path)
    ranks = max(map(len, accuracy), default=0)
    if not any(accuracy[0] if accuracy else ()):
        raise OptionError("no guess of these heads was ever right: there is nothing to keep")
    metadata, kind = head.metadata(), head.header.architecture
    filled = [[*row, *[0.0] * (ranks - len(row))] for row in accuracy]
    metadata.numbers(f"{kind}.{KEY}", [share for row in filled for share in row])
    metadata.count(f"{kind}.{DEPTHS_KEY}", len(accuracy))
    metadata.count(f"{kind}.{KEY}_positions", n_positions)
    tensors = [head.unchanged(tensor, tensor.name) for tensor in head.header.tensors]
    # The place a link points to: the link itself stays.
    place = Path(path).resolve()
    return write_gguf(
        place, kind, metadata, tensors, force=True, progress=progress, source=head.path
    )


def write_accuracy_csv(
    path: str | os.PathLike[str], accuracy: Accuracy, alone: Accuracy = (), *, force: bool = False
) -> None:
    """Write accuracies for `read_accuracy_csv`, those of each head alone in a fourth column.

    Raises OptionError if the file exists and `force` is not given. Nothing is left behind on
    failure.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["head", "rank", "accuracy", "accuracy_alone"])
    for depth, row in enumerate(accuracy):
        for rank, share in enumerate(row):
            measured = depth < len(alone) and rank < len(alone[depth])
            own = f"{alone[depth][rank]:.6f}" if measured else ""
            writer.writerow([depth, rank, f"{share:.6f}", own])
    with atomic_path(path, force=force) as aside:
        aside.write_text(text.getvalue(), encoding="utf-8")
