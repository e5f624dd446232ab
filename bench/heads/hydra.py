"""Evaluations of Hydra's first head, for each number of paths, and of Hydra++'s prefix layer for one position."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from specrun.bench.heads.evaluation import Evaluation
from specrun.bindings.gguf_header import read_header
from specrun.bindings.model import Model
from specrun.runtime.heads.hydra_head import HydraHead

__all__ = ["hydra_evaluations"]

_FLOAT_BYTES = 4


def hydra_evaluations(
    path: Path, model: Model, n_threads: int, widths: Sequence[int], opened: ExitStack, *, ranks: int, cached: int
) -> list[Evaluation]:
    """Return the evaluations of a file with one head and a prefix layer, which has seen `cached` positions before."""
    n_cells = cached + 1
    head = opened.enter_context(closing(HydraHead(path, model, ranks=[ranks], n_threads=n_threads)))
    layer = opened.enter_context(closing(head.cells(n_cells))).prefix
    assert layer is not None
    states = np.random.default_rng(0).standard_normal((n_cells, model.n_embd), dtype=np.float32)
    layer.evaluate(states[:cached], 0, 0)
    sizes = {one.name: one.n_bytes for one in read_header(path).tensors}
    in_layer = sum(n_bytes for name, n_bytes in sizes.items() if name.startswith("hydra.prefix."))
    embedding = next(one for one in model.header.tensors if one.name == "token_embd.weight")
    row = embedding.n_bytes // embedding.shape[1]

    def evaluation(width: int) -> Evaluation:
        paths = [[token] for token in range(width)]
        return Evaluation(
            "hydra",
            width,
            sum(sizes.values()) - in_layer + width * row,
            lambda: head.best_words(states[0], paths),
            lambda: head.native_seconds,
        )

    keys_and_values = 2 * cached * layer.kv_size * _FLOAT_BYTES
    return [
        *(evaluation(width) for width in widths),
        Evaluation(
            "hydra++ layer",
            1,
            in_layer + keys_and_values,
            lambda: layer.evaluate(states[cached:], cached, cached),
            lambda: head.native_seconds,
        ),
    ]
