"""Importance matrices measured on a text: which inputs of each weight matrix are large.

The error of a weight costs as much as the square of the input it is multiplied with; quantizing
with the sums of these squares spares the weights that matter.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts import Batch, Context, ContextOptions, InputObserver, InputSums
from specrun.bindings.errors import OptionError, PairError
from specrun.bindings.files import check_target, require_writable
from specrun.bindings.models import Model
from specrun.convert.quantize.imatrix_file import (
    ImportanceEntry,
    ImportanceMatrix,
    read_importance,
    write_importance,
)
from specrun.convert.quantize.quantize import n_inputs

ChunkProgress = Callable[[int, int], None]
"""Called with the chunks done and the chunks in all."""


@dataclass(frozen=True, slots=True)
class ImportanceOptions:
    """How a matrix is made; names and meanings are llama-imatrix's.

    The text is cut into chunks of `n_ctx` tokens, each read in a context of its own; reading starts
    with `first_chunk` and ends after `chunks` of them (-1: all). `process_output` sums the inputs
    of the output matrix, too. `output_frequency` is how many chunks are done between two writes of
    the file; `save_frequency`, if not 0, how many between copies named FILE.at_CHUNKS.
    """

    n_ctx: int = 512
    n_batch: int = 512
    n_threads: int = 0
    n_gpu_layers: int = 0
    first_chunk: int = 0
    chunks: int = -1
    process_output: bool = False
    parse_special: bool = False
    output_frequency: int = 10
    save_frequency: int = 0

    def __post_init__(self) -> None:
        least_values = {"n_ctx": 16, "n_batch": 16, "output_frequency": 1}
        least_values |= {"first_chunk": 0, "chunks": -1, "save_frequency": 0}
        for name, least in least_values.items():
            if getattr(self, name) < least:
                raise OptionError(f"{name} is {getattr(self, name)}: give at least {least}")


@dataclass(frozen=True, slots=True)
class ImportanceReport:
    """The result of a measurement: `chunks` now, `chunk_count` with those before; `n_partial`
    matrices have experts that no token was sent to."""

    output: Path
    chunks: int
    chunk_count: int
    tokens: int
    n_entries: int
    n_partial: int
    native_seconds: float


def measure_importance(
    model: str | os.PathLike[str],
    text: str,
    output: str | os.PathLike[str],
    options: ImportanceOptions | None = None,
    *,
    dataset: str = "",
    in_files: Sequence[str | os.PathLike[str]] = (),
    resume: bool = False,
    force: bool = False,
    progress: ChunkProgress | None = None,
) -> ImportanceReport:
    """Evaluate `text` and write the importance matrix to `output`, as llama-imatrix does.

    `dataset` names the text in the file. `in_files` are matrices to add to. `resume` continues at
    the end of the file `output`: it must be of the same text and chunk size; without it `force` is
    needed to replace a file. An interrupt keeps the chunks that are done.

    Raises OptionError (too short a text, `output` exists, nothing to resume), PairError (a matrix
    of another model), FileMissingError, MalformedFileError, errors of loading and evaluating
    models.
    """
    options = options or ImportanceOptions()
    target = Path(output)
    text_hash = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
    if resume and target.exists():
        matrix, options = _resumed(target, text_hash, options)
        force = True
    else:
        check_target(target, force=force)
        matrix = ImportanceMatrix(
            text_sha256=text_hash, chunk_size=options.n_ctx, next_chunk=options.first_chunk
        )
        for path in in_files:
            _add_matrix(matrix, read_importance(path), str(path))
    if dataset and dataset not in matrix.datasets:
        matrix.datasets = (*matrix.datasets, dataset)
    # Before the model is loaded: hours of evaluation must not end at a folder without write access.
    require_writable(target)
    with Model(model, n_gpu_layers=options.n_gpu_layers) as loaded:
        _check_fits(loaded, matrix)
        chunks = _chunks(loaded, text, options)
        if not chunks:
            if not resume:
                raise OptionError(_too_short(loaded, text, options))
            return _report(target, matrix, 0, 0, 0.0)  # it was complete
        return _Measurement(loaded, options, matrix, target, force).run(chunks, progress)


def merge_importance(
    in_files: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    chunk_size: int = 512,
    force: bool = False,
) -> ImportanceReport:
    """Add matrices of one model up, from several texts or in the legacy format, and write the sum.

    `chunk_size` is the number of tokens of a counted chunk, which legacy files lack. Raises as
    `measure_importance`.
    """
    if not in_files:
        raise OptionError(
            "there is no text and no matrix: give -f TEXT, or --in-file to add matrices up"
        )
    matrix = ImportanceMatrix(chunk_size=chunk_size)
    for path in in_files:
        _add_matrix(matrix, read_importance(path), str(path))
    write_importance(output, matrix, force=force)
    return _report(Path(output), matrix, 0, 0, 0.0)


class _Measurement:
    """One run over chunks of tokens, which commits whole chunks only."""

    def __init__(
        self,
        model: Model,
        options: ImportanceOptions,
        matrix: ImportanceMatrix,
        target: Path,
        force: bool,
    ) -> None:
        self.options, self.matrix, self.target, self.force = options, matrix, target, force
        wanted = ("blk.", "output.weight") if options.process_output else ("blk.",)
        self.observer = InputObserver(lambda name: name.startswith(wanted))
        n_batch = min(options.n_batch, options.n_ctx)
        self.batch = Batch(n_batch, 1)
        # Every token gives a row: otherwise the last layers are computed for the rows that do.
        context_options = ContextOptions(
            n_ctx=options.n_ctx,
            n_batch=n_batch,
            n_ubatch=n_batch,
            n_outputs=n_batch,
            n_threads=options.n_threads,
        )
        self.context = Context(model, context_options, observer=self.observer)

    def run(
        self, chunks: Sequence[Sequence[int]], progress: ChunkProgress | None
    ) -> ImportanceReport:
        done = 0
        try:
            for chunk in chunks:
                # A chunk counts as a whole or not at all: a run continues at `next_chunk`.
                self._commit(self._sums_of(chunk))
                done += 1
                last = done == len(chunks)
                if last or done % self.options.output_frequency == 0:
                    self._save(self.target)
                if self.options.save_frequency and done % self.options.save_frequency == 0:
                    copy = f"{self.target}.at_{self.matrix.chunk_count}"
                    write_importance(copy, self.matrix, force=True)
                if progress is not None:
                    progress(done, len(chunks))
        except KeyboardInterrupt:
            if done:
                self._save(self.target)
            raise
        finally:
            self.context.close()
        tokens = sum(len(chunk) for chunk in chunks)
        return _report(self.target, self.matrix, done, tokens, self.context.native_seconds)

    def _sums_of(self, chunk: Sequence[int]) -> dict[str, InputSums]:
        # Each chunk in a context of its own, as llama-imatrix reads them.
        self.context.memory.clear()
        # Of a chunk longer than a batch, later tokens see the earlier ones through the KV memory.
        for start in range(0, len(chunk), self.batch.capacity):
            tokens = chunk[start : start + self.batch.capacity]
            self.batch.fill_chain(tokens, start, [0], len(tokens))
            self.context.decode(self.batch)
        return self.observer.take()

    def _commit(self, sums: dict[str, InputSums]) -> None:
        for name, entry in sums.items():
            _add(self.matrix, name, *entry)
        self.matrix.chunk_count += 1
        self.matrix.next_chunk = (self.matrix.next_chunk or 0) + 1

    def _save(self, path: Path) -> None:
        write_importance(path, self.matrix, force=self.force)
        self.force = True  # it is ours now


def _chunks(model: Model, text: str, options: ImportanceOptions) -> list[list[int]]:
    """Cut the text into chunks of `n_ctx` tokens, with BOS as the first of each if it is used."""
    vocabulary = model.vocabulary
    if options.n_ctx > model.n_ctx_train:
        raise OptionError(
            f"chunks of {options.n_ctx} tokens are more than the {model.n_ctx_train} that "
            f"{model.path} was trained on"
        )
    tokens = vocabulary.tokenize(text, parse_special=options.parse_special)
    there = len(tokens) // options.n_ctx
    last = there if options.chunks < 0 else min(there, options.first_chunk + options.chunks)
    chunks = []
    for number in range(options.first_chunk, last):
        chunk = list(tokens[number * options.n_ctx : (number + 1) * options.n_ctx])
        if vocabulary.adds_bos and vocabulary.bos is not None:
            # BOS replaces a token, as in llama-imatrix: chunks keep their size.
            chunk[0] = vocabulary.bos
        chunks.append(chunk)
    return chunks


def _too_short(model: Model, text: str, options: ImportanceOptions) -> str:
    n_tokens = len(model.vocabulary.tokenize(text, parse_special=options.parse_special))
    n_chunks = n_tokens // options.n_ctx
    have = f"the text has {n_tokens:,} tokens, {n_chunks} chunks of {options.n_ctx}"
    wish = "one is needed at least"
    if options.first_chunk:
        wish = f"reading starts with chunk {options.first_chunk}"
    return f"{have}, and {wish}: give a longer text, or smaller chunks (-c)"


def _resumed(
    target: Path, text_hash: str, options: ImportanceOptions
) -> tuple[ImportanceMatrix, ImportanceOptions]:
    matrix = read_importance(target)
    if matrix.next_chunk is None:
        raise OptionError(
            f"{target} does not name its last chunk: it was not made by specrun; add to it with "
            "--in-file and --chunk"
        )
    what = ""
    if matrix.text_sha256 != text_hash:
        what = "text"
    elif matrix.chunk_size != options.n_ctx:
        what = f"chunk size ({matrix.chunk_size} tokens)"
    if what:
        raise OptionError(
            f"{target} was made with another {what}: resume with the same, or add to it with "
            "--in-file"
        )
    left = options.chunks
    if left >= 0:
        left = max(0, options.first_chunk + options.chunks - matrix.next_chunk)
    return matrix, replace(options, first_chunk=matrix.next_chunk, chunks=left)


def _check_fits(model: Model, matrix: ImportanceMatrix) -> None:
    tensors = {tensor.name: tensor for tensor in model.header.tensors}
    for name, entry in matrix.entries.items():
        tensor = tensors.get(name)
        if tensor is None or entry.sums.size != n_inputs(tensor):
            raise PairError(
                f"the importance matrix to go on from is of another model: {name} does not fit "
                f"{model.path}"
            )


def _add_matrix(matrix: ImportanceMatrix, other: ImportanceMatrix, shown: str) -> None:
    # Legacy files count chunks of unknown size, and hold means times chunks: this run's is taken.
    scale = matrix.chunk_size if other.chunk_size == 0 else 1
    for name, entry in other.entries.items():
        mine = matrix.entries.get(name)
        if mine is not None and mine.sums.size != entry.sums.size:
            sizes = f"{entry.sums.size} inputs for {name}, not {mine.sums.size}"
            raise PairError(f"{shown} is of another model: it has {sizes}")
        _add(matrix, name, entry.sums * np.float32(scale), entry.counts * scale)
    known = matrix.datasets
    matrix.datasets += tuple(dataset for dataset in other.datasets if dataset not in known)
    # An expert sees a part of the tokens: the largest count is their number.
    tokens = max(int(entry.counts.max()) for entry in matrix.entries.values())
    matrix.chunk_count = max(matrix.chunk_count, tokens // matrix.chunk_size)


def _add(
    matrix: ImportanceMatrix,
    name: str,
    sums: npt.NDArray[np.float32],
    counts: npt.NDArray[np.int64],
) -> None:
    entry = matrix.entries.get(name)
    if entry is None:
        matrix.entries[name] = ImportanceEntry(sums.copy(), counts.copy())
        return
    # Old files have one count for all experts of a matrix.
    n = max(len(entry.counts), len(counts))
    entry.counts = np.broadcast_to(entry.counts, n) + np.broadcast_to(counts, n)
    entry.sums = (entry.sums.reshape(-1) + sums.reshape(-1)).reshape(n, -1)


def _report(
    target: Path, matrix: ImportanceMatrix, chunks: int, tokens: int, native_seconds: float
) -> ImportanceReport:
    partial = sum(bool((entry.counts == 0).any()) for entry in matrix.entries.values())
    return ImportanceReport(
        target, chunks, matrix.chunk_count, tokens, len(matrix.entries), partial, native_seconds
    )
