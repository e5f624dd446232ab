"""The target's hidden states, computed for each batch or kept on disk."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from specrun.bindings.errors import SpecrunError
from specrun.bindings.files import DAMAGE, count_in, text_in
from specrun.train.data.corpus import TokenBatch, TokenCorpus
from specrun.train.data.store import Progress
from specrun.train.target.hf_model import HFModel
from specrun.train.trainer.model_folder import write_json, write_weights

# == States of a batch =============================================================================


@dataclass(frozen=True, slots=True)
class Features:
    """Final normed states [B, T, h], and the tapped layers' inputs side by side [B, T, taps h]."""

    final: Tensor
    taps: Tensor | None


@dataclass(frozen=True, slots=True)
class TextStates:
    """A text's tokens, and its states: final ones [T, h], tapped ones [T, taps h] or None."""

    ids: NDArray[np.int32]
    final: Tensor
    taps: Tensor | None


class FeatureSource(Protocol):
    """Gives the target's states for a batch; those of padding mean nothing."""

    taps: tuple[int, ...]

    def features(self, batch: TokenBatch) -> Features:
        """Return the states of a batch, on the batch's device, without gradients."""


class ModelFeatures:
    """Computes states anew for every batch."""

    def __init__(self, model: HFModel, taps: tuple[int, ...] = ()) -> None:
        self.taps = taps
        self._model = model

    @torch.no_grad()
    def features(self, batch: TokenBatch) -> Features:
        """Return the states of a batch."""
        final, taps = self._model.hidden_states(batch.ids, self.taps)
        return Features(final.float(), None if taps is None else taps.float())


class AnswerStates:
    """Final states, and inputs of the layers `taps`, of prompts that are answered at once.

    The states of answers are computed with them: noted then, they take a disk's time, while a
    second evaluation takes half as long as the answers did. These have up to `n_longest` tokens.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], n_longest: int, taps: tuple[int, ...]
    ) -> None:
        self.taps = taps
        self._prompts = prompts
        self._longest = max(map(len, prompts), default=0) + n_longest
        self._n_noted = torch.zeros(len(prompts), dtype=torch.long)
        self._states: Tensor | None = None

    def note(self, rows: Sequence[int], states: Tensor) -> None:
        """Receive the states [len(rows), T, (1 + taps) h] of the rows' next tokens.

        The first are those of all prompts, padded on the left; then each row has one more token.
        """
        if self._states is None:
            self._states = states.new_empty(len(self._prompts), self._longest, states.shape[-1])
            for row, prompt in enumerate(self._prompts):
                self._states[row, : len(prompt)] = states[row, states.shape[1] - len(prompt) :]
                self._n_noted[row] = len(prompt)
            return
        index = torch.tensor(rows, dtype=torch.long)
        self._states[index, self._n_noted[index]] = states[:, 0]
        self._n_noted[index] += 1

    def has(self, row: int, answer: Sequence[int]) -> bool:
        """Return whether all tokens of an answer were evaluated: the last one comes late."""
        return len(self._prompts[row]) + len(answer) <= int(self._n_noted[row])

    def of(self, row: int, answer: Sequence[int], hidden: int) -> TextStates:
        """Return the states of width `hidden` of a prompt and its whole answer."""
        assert self._states is not None
        ids = [*self._prompts[row], *answer]
        final, taps = self._states[row, : len(ids)].tensor_split([hidden], -1)
        return TextStates(np.array(ids, np.int32), final, taps if self.taps else None)


# == States on disk, computed once: chunks of whole texts in float16 ===============================
#
# A cache's manifest holds all that states depend on besides the text: layers, weights, precision. A
# folder of caches holds one folder for each manifest, named by its hash, so that heads which read
# other states leave one another's alone. In it are `manifest.json` and `features-HASH.safetensors`,
# each chunk written whole or not at all, so that an interrupted computation goes on where it was. A
# chunk names its texts by the hash of their tokens: states that one corpus has left, another reads.
# A chunk that float16 cannot hold is kept in float32.


_FORMAT = 3
_CHUNK_TOKENS = 16384
_MANIFEST, _CHUNKS = "manifest.json", "features-*.safetensors"
_NAME_LENGTH = 12
_LARGEST = float(torch.finfo(torch.float16).max)


class FeatureCache:
    """States of texts on disk: final ones of width `hidden`, and inputs of the layers `taps`.

    Those of other weights (`identity`), layers or `precision` lie in another `folder` of `root`.
    Nothing is read or written before `open`.
    """

    def __init__(
        self,
        root: Path,
        taps: tuple[int, ...],
        hidden: int,
        *,
        precision: str,
        identity: Mapping[str, Any],
    ) -> None:
        self.root, self.taps, self._hidden = root, taps, hidden
        about = {"taps": list(taps), "precision": precision}
        self._manifest = {"format": _FORMAT, **about, **identity}
        text = json.dumps(self._manifest, sort_keys=True)
        self.folder = root / hashlib.sha256(text.encode()).hexdigest()[:_NAME_LENGTH]
        self._places: dict[str, tuple[Path, int, int]] = {}
        self._open: dict[Path, Any] = {}

    def bytes_of(self, corpus: TokenCorpus) -> int:
        """Return how many bytes the states of a corpus take: two for each number."""
        return 2 * self._hidden * (1 + len(self.taps)) * sum(map(len, corpus.sequences))

    def missing_bytes(self, corpus: TokenCorpus) -> int:
        """Return how many bytes of states are still to be written."""
        self._places = {}
        if _read_manifest(self.folder / _MANIFEST) == self._manifest:
            self._read_list()
        texts = [text for text in corpus.sequences if text_key(text.ids) not in self._places]
        return self.bytes_of(replace(corpus, sequences=tuple(texts)))

    def require_space(self, n_bytes: int) -> None:
        """Raise SpecrunError with both numbers unless the disk has room for so many bytes."""
        place = self.folder
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if free < n_bytes:
            raise SpecrunError(
                f"the feature cache needs {n_bytes / 2**30:.2f} GiB in {self.folder} and "
                f"{free / 2**30:.2f} GiB are free: name another disk with --features, train on "
                "fewer texts, or use --cache no"
            )

    def open(self) -> FeatureCache:
        """Make the folder if there is none, read the list of its texts, and return the cache.

        Raises SpecrunError if the folder cannot be made, a chunk cannot be read, or there are
        states that the manifest does not list.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecrunError(
                f"{self.folder} cannot be made ({error.strerror}): name another with --features"
            ) from error
        path = self.folder / _MANIFEST
        if _read_manifest(path) != self._manifest:
            if path.exists() or any(self.folder.glob(_CHUNKS)):
                stray = f"{path} does not tell of the states in its folder"
                raise SpecrunError(f"{stray}: remove {self.folder}")
            write_json(path, self._manifest)
        self._read_list()
        return self

    def fill(
        self,
        corpus: TokenCorpus,
        source: FeatureSource,
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        """Compute the missing states of a corpus; raises as `open`.

        `progress` is called with the texts done and all.
        """
        self.open()
        numbers = {text_key(text.ids): number for number, text in enumerate(corpus.sequences)}
        missing = sorted(number for text, number in numbers.items() if text not in self._places)

        def computed(number: int) -> TextStates:  # alone: no padding, no surprise of memory
            found = source.features(corpus.batch([number]).to(device))
            taps = None if found.taps is None else found.taps[0]
            return TextStates(corpus.sequences[number].ids, found.final[0], taps)

        done = len(corpus.sequences) - len(missing)
        for first, last in _plan_chunks([len(corpus.sequences[number]) for number in missing]):
            self.keep(map(computed, missing[first:last]))
            done += last - first
            if progress is not None:
                progress(done, len(corpus.sequences))

    @property
    def texts(self) -> frozenset[str]:
        """The hashes of all texts."""
        return frozenset(self._places)

    @property
    def chunks(self) -> list[Path]:
        """The files that texts are read from."""
        return sorted({path for path, _, _ in self._places.values()})

    def keep(self, texts: Iterable[TextStates]) -> None:
        """Write the states of texts as one chunk; those that are there are not written again."""
        new = {key: each for each in texts if (key := text_key(each.ids)) not in self._places}
        if not new:
            return
        parts = {"final": [_half(each.final) for each in new.values()]}
        if self.taps:
            parts["taps"] = [_half(each.taps) for each in new.values() if each.taps is not None]
        lengths = [[key, len(each.ids)] for key, each in new.items()]
        # By its contents: another process that fills the same folder writes other names.
        name = hashlib.sha256(json.dumps(lengths).encode()).hexdigest()[:_NAME_LENGTH]
        path = self.folder / f"features-{name}.safetensors"
        # torch.cat widens all to float32 if one text's states are too large for float16.
        tensors = {part: torch.cat(states) for part, states in parts.items()}
        write_weights(path, tensors, texts=json.dumps(lengths))
        self._add(path, lengths)

    def features(self, batch: TokenBatch) -> Features:
        """Return the states of a batch of texts that are all there, zero at padding."""
        ids, valid = batch.ids.cpu().numpy(), batch.valid.cpu().numpy()
        texts = [row[marks] for row, marks in zip(ids, valid, strict=True)]

        def padded(name: str) -> Tensor:
            rows = [self.read(name, text) for text in texts]
            found = torch.zeros(*batch.ids.shape, rows[0].shape[1], device=batch.ids.device)
            for row, states in enumerate(rows):
                found[row, : len(states)] = states.to(found.device)
            return found

        return Features(padded("final"), padded("taps") if self.taps else None)

    def read(self, name: str, ids: NDArray[Any]) -> Tensor:
        """Return the states of a text, "final" or "taps", in float32."""
        path, start, end = self._places[text_key(ids)]
        states: Tensor = self._opened(path).get_slice(name)[start:end]
        return states.float()

    def close(self) -> None:
        """Let go of the files, so that they can be deleted everywhere; reading opens them again."""
        self._open.clear()

    def _read_list(self) -> None:
        """Read the list of texts; raises SpecrunError if a chunk cannot be read."""
        self._places = {}
        self.close()
        for path in sorted(self.folder.glob(_CHUNKS)):
            metadata = self._opened(path).metadata()
            try:
                texts = [(text_in(key), count_in(n)) for key, n in json.loads(metadata["texts"])]
            except DAMAGE as error:
                problem = f"{path} does not name its texts: remove the cache"
                raise SpecrunError(problem) from error
            self._add(path, texts)
        self.close()

    def _add(self, path: Path, lengths: Sequence[Sequence[Any]]) -> None:
        start = 0
        for key, length in lengths:
            self._places[key] = (path, start, start + length)
            start += length

    def _opened(self, path: Path) -> Any:  # noqa: ANN401 - safetensors' own class
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, "pt")
            except Exception as error:  # safetensors' own class, or the system's
                raise SpecrunError(f"{path} cannot be read ({error}): remove the cache") from error
        return self._open[path]


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


def text_key(ids: NDArray[Any]) -> str:
    """Return the hash by which a text's states are found."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()[:24]


def _plan_chunks(lengths: list[int]) -> list[tuple[int, int]]:
    """Return the first and the last-plus-one text of each chunk."""
    chunks: list[tuple[int, int]] = []
    first, size = 0, 0
    for number, length in enumerate(lengths):
        if size and size + length > _CHUNK_TOKENS:
            chunks.append((first, number))
            first, size = number, 0
        size += length
    return [*chunks, (first, len(lengths))] if lengths else []


def _half(states: Tensor) -> Tensor:
    states = states.detach().float().cpu()
    return states.half() if float(states.abs().max()) < _LARGEST else states


def _read_manifest(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
