"""The target's hidden states on disk, computed once: chunks of whole sequences in float16.

A folder holds `manifest.json` and `features-NNNNN.safetensors`, each chunk written whole or not at all, so that an
interrupted computation goes on where it was. A chunk that float16 cannot hold is kept in float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specrun.bindings.errors import SpecrunError
from specrun.runtime.atomic import atomic_path
from specrun.train.features import Features, FeatureSource
from specrun.train.token_corpus import TokenBatch, TokenCorpus

__all__ = ["CachedFeatures", "cache_bytes", "check_cache_space", "fill_cache"]

_FORMAT = 1
_CHUNK_TOKENS = 16384
_LARGEST = float(torch.finfo(torch.float16).max)
Progress = Callable[[int, int], None]


def cache_bytes(corpus: TokenCorpus, hidden: int, n_taps: int) -> int:
    """Return how many bytes a cache of a corpus takes: two for each number."""
    return 2 * hidden * (1 + n_taps) * sum(len(one) for one in corpus.sequences)


def check_cache_space(folder: Path, n_bytes: int) -> None:
    """Raise SpecrunError with both numbers unless the disk of `folder` has room for a cache."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < n_bytes:
        raise SpecrunError(
            f"the feature cache needs {n_bytes / 2**30:.2f} GiB in {folder} and {free / 2**30:.2f} GiB are free: "
            "name another disk with --features, train on fewer texts, or use --cache no"
        )


def fill_cache(
    folder: Path,
    corpus: TokenCorpus,
    source: FeatureSource,
    device: torch.device,
    identity: dict[str, Any],
    progress: Progress | None = None,
) -> CachedFeatures:
    """Compute what is missing in `folder` and return the cache.

    `identity` says what the states belong to; chunks of anything else are thrown away. `progress` is called with
    the sequences done and all.
    """
    manifest = {"format": _FORMAT, "corpus": corpus.digest, "taps": list(source.taps), **identity}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "manifest.json"
    if _read_manifest(path) != manifest:
        for old in folder.glob("features-*.safetensors"):
            old.unlink()
        with atomic_path(path, force=True) as aside:
            aside.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    cache = CachedFeatures(folder, corpus, source.taps)
    for number, (first, last) in enumerate(cache.chunks):
        chunk = cache.path(number)
        if not chunk.exists():
            _write_chunk(chunk, corpus, source, device, range(first, last))
        if progress is not None:
            progress(last, len(corpus.sequences))
    return cache


class CachedFeatures:
    """Reads the states of any sequences of a filled cache."""

    def __init__(self, folder: Path, corpus: TokenCorpus, taps: tuple[int, ...]) -> None:
        self.folder = folder
        self.taps = taps
        self.chunks = _plan_chunks([len(one) for one in corpus.sequences])
        self._place: dict[int, tuple[int, int, int]] = {}
        for number, (first, last) in enumerate(self.chunks):
            start = 0
            for sequence in range(first, last):
                end = start + len(corpus.sequences[sequence])
                self._place[sequence] = (number, start, end)
                start = end
        self._open: dict[int, Any] = {}

    def path(self, number: int) -> Path:
        """Return the file of a chunk."""
        return self.folder / f"features-{number:05}.safetensors"

    def features(self, batch: TokenBatch) -> Features:
        """Return the states of a batch, zero at padding."""
        final = self._padded("final", batch)
        return Features(final, self._padded("taps", batch) if self.taps else None)

    def remove(self) -> None:
        """Delete the cache, and its folder if nothing else is in it."""
        self._open.clear()
        for number in range(len(self.chunks)):
            self.path(number).unlink(missing_ok=True)
        (self.folder / "manifest.json").unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _padded(self, name: str, batch: TokenBatch) -> Tensor:
        rows = [self._read(name, number) for number in batch.numbers]
        found = torch.zeros(len(rows), batch.ids.shape[1], rows[0].shape[1], device=batch.ids.device)
        for row, states in enumerate(rows):
            found[row, : len(states)] = states.to(found.device)
        return found

    def _read(self, name: str, sequence: int) -> Tensor:
        number, start, end = self._place[sequence]
        if number not in self._open:
            try:
                self._open[number] = safe_open(self.path(number), "pt")
            except Exception as error:  # safetensors' own class, or the system's
                raise SpecrunError(f"{self.path(number)} cannot be read ({error}): remove the cache") from error
        states: Tensor = self._open[number].get_slice(name)[start:end]
        return states.float()


def _plan_chunks(lengths: list[int]) -> list[tuple[int, int]]:
    """Return the first and the last-plus-one sequence of each chunk."""
    chunks: list[tuple[int, int]] = []
    first, size = 0, 0
    for number, length in enumerate(lengths):
        if size and size + length > _CHUNK_TOKENS:
            chunks.append((first, number))
            first, size = number, 0
        size += length
    return [*chunks, (first, len(lengths))]


def _write_chunk(path: Path, corpus: TokenCorpus, source: FeatureSource, device: torch.device, numbers: range) -> None:
    parts: dict[str, list[Tensor]] = {"final": [], "taps": []}
    for number in numbers:  # one at a time: no padding, no surprise of memory
        found = source.features(corpus.batch([number]).to(device))
        parts["final"].append(_half(found.final[0]))
        if found.taps is not None:
            parts["taps"].append(_half(found.taps[0]))
    tensors = {name: torch.cat(_one_type(states)).contiguous() for name, states in parts.items() if states}
    with atomic_path(path, force=True) as aside:
        save_file(tensors, aside)


def _half(states: Tensor) -> Tensor:
    states = states.detach().float().cpu()
    return states.half() if float(states.abs().max()) < _LARGEST else states


def _one_type(states: list[Tensor]) -> list[Tensor]:
    wide = any(one.dtype == torch.float32 for one in states)
    return [one.float() if wide else one for one in states]


def _read_manifest(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
