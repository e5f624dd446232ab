"""The target's hidden states on disk, computed once: chunks of whole sequences in float16.

Whatever states depend on (corpus, layers, weights, precision) is their manifest. A folder of caches
holds one folder for each manifest, named by its hash, so that heads which read other states leave
one another's alone. In it are `manifest.json` and `features-NNNNN.safetensors`, each chunk written
whole or not at all, so that an interrupted computation goes on where it was. A chunk that float16
cannot hold is kept in float32.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specrun.bindings.errors import SpecrunError
from specrun.train.data.token_corpus import TokenBatch, TokenCorpus
from specrun.train.target.features import Features, FeatureSource
from specrun.train.trainer.model_folder import write_json, write_weights

_FORMAT = 2
_CHUNK_TOKENS = 16384
_MANIFEST, _CHUNKS = "manifest.json", "features-*.safetensors"
_NAME_LENGTH = 12
_LARGEST = float(torch.finfo(torch.float16).max)
Progress = Callable[[int, int], None]


def cache_bytes(corpus: TokenCorpus, hidden: int, n_taps: int) -> int:
    """Return how many bytes a cache of a corpus takes: two for each number."""
    return 2 * hidden * (1 + n_taps) * sum(len(sequence) for sequence in corpus.sequences)


@dataclass(frozen=True, slots=True)
class CachePlace:
    """The place of states of `corpus` and inputs of the layers `taps`, in the folder `root`.

    Another value of anything in `manifest` makes other states.
    """

    root: Path
    corpus: TokenCorpus
    taps: tuple[int, ...]
    manifest: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        root: Path,
        corpus: TokenCorpus,
        taps: tuple[int, ...],
        *,
        precision: str,
        identity: Mapping[str, Any],
    ) -> CachePlace:
        """Return the place of states computed in `precision` from the weights of `identity`."""
        about = {"corpus": corpus.digest, "taps": list(taps), "precision": precision}
        return cls(root, corpus, taps, {"format": _FORMAT, **about, **identity})

    @property
    def folder(self) -> Path:
        """The folder of these states alone."""
        text = json.dumps(dict(self.manifest), sort_keys=True)
        return self.root / hashlib.sha256(text.encode()).hexdigest()[:_NAME_LENGTH]

    def missing_bytes(self, hidden: int) -> int:
        """Return how many bytes of states of width `hidden` are still to be written."""
        if _read_manifest(self.folder / _MANIFEST) != self.manifest:
            return cache_bytes(self.corpus, hidden, len(self.taps))
        cache, texts = CachedFeatures(self.folder, self.corpus, self.taps), self.corpus.sequences
        tokens = sum(
            sum(map(len, texts[first:last]))
            for chunk, (first, last) in enumerate(cache.chunks)
            if not cache.path(chunk).exists()
        )
        return 2 * hidden * (1 + len(self.taps)) * tokens


def check_cache_space(folder: Path, n_bytes: int) -> None:
    """Raise SpecrunError with both numbers unless the disk of `folder` has room for a cache."""
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < n_bytes:
        raise SpecrunError(
            f"the feature cache needs {n_bytes / 2**30:.2f} GiB in {folder} and "
            f"{free / 2**30:.2f} GiB are free: name another disk with --features, train on fewer "
            "texts, or use --cache no"
        )


def fill_cache(
    place: CachePlace, source: FeatureSource, device: torch.device, progress: Progress | None = None
) -> CachedFeatures:
    """Compute what is missing in `place` and return the cache; other states beside it stay.

    `progress` is called with the sequences done and all. Raises SpecrunError where the folder
    cannot be made, or holds states that its manifest does not tell of.
    """
    folder, corpus = place.folder, place.corpus
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecrunError(
            f"{folder} cannot be made ({error.strerror}): name another with --features"
        ) from error
    path = folder / _MANIFEST
    if _read_manifest(path) != place.manifest:
        if path.exists() or any(folder.glob(_CHUNKS)):
            raise SpecrunError(f"{path} does not tell of the states in its folder: remove {folder}")
        write_json(path, dict(place.manifest))
    cache = CachedFeatures(folder, corpus, place.taps)
    for number, (first, last) in enumerate(cache.chunks):
        chunk = cache.path(number)
        if not chunk.exists():
            _write_chunk(chunk, corpus, source, device, range(first, last))
        if progress is not None:
            progress(last, len(corpus.sequences))
    return cache


def remove_caches(root: Path) -> None:
    """Delete all states in a folder of caches; files that are none of a cache's stay."""
    if not root.is_dir():
        return
    for folder in [*(file for file in root.iterdir() if _is_cache(file)), root]:
        # Names of files that a killed process was writing begin with a dot.
        names = (_MANIFEST, _CHUNKS, f".{_MANIFEST}.*.partial", f".{_CHUNKS}.*.partial")
        for path in [path for name in names for path in folder.glob(name)]:
            path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()


def _is_cache(folder: Path) -> bool:
    named = len(folder.name) == _NAME_LENGTH and not set(folder.name) - set("0123456789abcdef")
    return named and folder.is_dir() and not folder.is_symlink()


class CachedFeatures:
    """Reads the states of any sequences of a filled cache."""

    def __init__(self, folder: Path, corpus: TokenCorpus, taps: tuple[int, ...]) -> None:
        self.folder = folder
        self.taps = taps
        self.chunks = _plan_chunks([len(sequence) for sequence in corpus.sequences])
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

    def close(self) -> None:
        """Let go of the files, so that they can be deleted everywhere; reading opens them again."""
        self._open.clear()

    def _padded(self, name: str, batch: TokenBatch) -> Tensor:
        rows = [self._read(name, number) for number in batch.numbers]
        found = torch.zeros(*batch.ids.shape, rows[0].shape[1], device=batch.ids.device)
        for row, states in enumerate(rows):
            found[row, : len(states)] = states.to(found.device)
        return found

    def _read(self, name: str, sequence: int) -> Tensor:
        number, start, end = self._place[sequence]
        if number not in self._open:
            try:
                self._open[number] = safe_open(self.path(number), "pt")
            except Exception as error:  # safetensors' own class, or the system's
                path = self.path(number)
                raise SpecrunError(f"{path} cannot be read ({error}): remove the cache") from error
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


def _write_chunk(
    path: Path, corpus: TokenCorpus, source: FeatureSource, device: torch.device, numbers: range
) -> None:
    parts: dict[str, list[Tensor]] = {"final": [], "taps": []}
    for number in numbers:  # one at a time: no padding, no surprise of memory
        found = source.features(corpus.batch([number]).to(device))
        parts["final"].append(_half(found.final[0]))
        if found.taps is not None:
            parts["taps"].append(_half(found.taps[0]))
    # torch.cat widens all to float32 where one text's states are too large for float16.
    write_weights(path, {name: torch.cat(states) for name, states in parts.items() if states})


def _half(states: Tensor) -> Tensor:
    states = states.detach().float().cpu()
    return states.half() if float(states.abs().max()) < _LARGEST else states


def _read_manifest(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
