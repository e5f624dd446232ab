"""Hugging Face checkpoint folders: config, tensors by name, safetensors and pickled files."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import (
    FileMissingError,
    MalformedFileError,
    MissingPackageError,
    SpecrunError,
    UnsupportedModelError,
)
from specrun.bindings.files import open_regular
from specrun.convert.checkpoint.json_file import (
    JsonObject,
    named_errors,
    parse_json_object,
    read_json_object,
    unique_keys,
)
from specrun.convert.checkpoint.source_tensor import NUMBER_TYPES, SourceTensor
from specrun.convert.names import Named

# == Pickled files (.bin, .pt, .pth), opened by torch with `weights_only=True` only ================
#
# A pickle is a program. `weights_only` lets it build tensors and plain containers and nothing else.
# If it refuses a file, the file is refused: there is no second try.


PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
# Before 2.6 a file could get around weights_only (CVE-2025-32434).
_SAFE_TORCH = (2, 6)
_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_TYPES |= {"int64": "I64", "int32": "I32", "bool": "BOOL"}
# torch's errors for damaged files, in addition to OSError.
_DAMAGED = (RuntimeError, ValueError, EOFError, OSError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class _PickledTensor(SourceTensor):
    """A tensor that torch has mapped from its file: pages are read when their numbers are."""

    tensor: Any

    def raw(self, start: int, count: int) -> npt.NDArray[Any]:
        """Return a view of a piece, as `SourceTensor.raw`."""
        import torch

        flat = self.tensor.reshape(-1)[start : start + count]
        if self.type_name == "BF16":
            flat = flat.view(torch.uint16)
        array: npt.NDArray[Any] = flat.numpy()
        return array.astype(np.dtype(NUMBER_TYPES[self.type_name]), copy=False)


def read_pickle(path: Path) -> dict[str, _PickledTensor]:
    """Open a pickled state dict and return its tensors by name; their numbers stay in the file.

    Raises FileMissingError, MalformedFileError, UnsupportedModelError for a file that is no mapping
    of names to tensors or needs more than tensors, SpecrunError if torch is missing or too old
    to open it safely.
    """
    content = load_pickle(path)
    for inner in ("state_dict", "model"):  # as training programs wrap it
        if isinstance(content, Mapping) and isinstance(content.get(inner), Mapping):
            content = content[inner]
    if not isinstance(content, Mapping) or not content:
        raise UnsupportedModelError(f"{path} holds a {type(content).__name__}, not tensors by name")
    return {str(name): _pickled(path, str(name), tensor) for name, tensor in content.items()}


def load_pickle(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    """Return the content of torch's file: tensors and plain containers; raises as `read_pickle`."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"opening {path}", "torch", "train") from error
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _SAFE_TORCH:
        raise SpecrunError(f"torch {torch.__version__} cannot open {path} safely: get 2.6 or later")
    with named_errors(path), open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
    if size and not zipfile.is_zipfile(path):
        raise UnsupportedModelError(
            f"{path} is not a file that torch 1.6 or later saved, or is truncated: "
            "get the checkpoint as safetensors, or download it again"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise UnsupportedModelError(
            f"{path} contains more than tensors, which could run code: nothing of it was run; "
            "get the checkpoint as safetensors"
        ) from error
    except _DAMAGED as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise MalformedFileError(f"{path} is damaged ({reason}); download it again") from error


def _pickled(path: Path, name: str, tensor: Any) -> _PickledTensor:  # noqa: ANN401 - anything
    kind = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
    if kind not in _TYPES or str(tensor.layout) != "torch.strided":
        known = ", ".join(_TYPES)
        raise UnsupportedModelError(f"{path} stores {name} as {kind}: only dense {known} are read")
    if tensor.numel() == 0:
        raise MalformedFileError(f"{path} is damaged: {name} is empty; download it again")
    return _PickledTensor(path, name, _TYPES[kind], tuple(tensor.shape), tensor.detach())


# == Safetensors files: the header is checked, numbers are read one tensor or piece at a time ======
#
# The format: a length of 8 bytes (little-endian), a JSON object of that length with type, shape and
# extent of each tensor, and the data. Read here because numpy has no bfloat16, which the
# safetensors package needs. Nothing is mapped: a mapped file that shrinks ends the process.


_LARGEST_HEADER = 100_000_000  # the format's own limit
_AGAIN = "download it again"


def read_array(
    path: Path, kind: npt.DTypeLike, shape: tuple[int, ...], offset: int
) -> npt.NDArray[Any]:
    """Return the array of `shape` whose numbers begin `offset` bytes into the file.

    Raises MalformedFileError if the file ends before, FileMissingError if it cannot be read.
    """
    try:
        array: npt.NDArray[Any] = np.fromfile(path, kind, count=prod(shape), offset=offset)
    except OSError as error:
        raise FileMissingError(f"{path} cannot be read any more ({error.strerror})") from error
    if array.size != prod(shape):
        raise MalformedFileError(f"{path} became shorter while it was read")
    return array.reshape(shape)


@dataclass(frozen=True, slots=True)
class _StoredTensor(SourceTensor):
    """A tensor in a safetensors file; `offset` counts from the start of the file, in bytes."""

    offset: int

    def raw(self, start: int, count: int) -> npt.NDArray[Any]:
        """Read a piece from the file, as `SourceTensor.raw`."""
        kind = np.dtype(NUMBER_TYPES[self.type_name])
        return read_array(self.path, kind, (count,), self.offset + start * kind.itemsize)


def read_safetensors(path: Path) -> dict[str, _StoredTensor]:
    """Read and check the header of a safetensors file and return its tensors by name.

    Raises FileMissingError if it cannot be read, MalformedFileError if it is truncated or
    contradicts itself, UnsupportedModelError if it has numbers of an unknown type.
    """
    with named_errors(path), open_regular(path) as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(_LARGEST_HEADER, size - 8):
            raise MalformedFileError(f"{path} is truncated, or not a safetensors file; {_AGAIN}")
        header = parse_json_object(file.read(length), f"the header of {path}", unique_keys)
    names = [name for name in header.values if name != "__metadata__"]
    tensors = {name: _stored(path, header, name, 8 + length, size) for name in names}
    _require_whole(path, tensors.values(), 8 + length, size)
    return tensors


def _require_whole(path: Path, tensors: Iterable[_StoredTensor], start: int, size: int) -> None:
    """Raise MalformedFileError unless each byte of the data, from `start` on, is one tensor's.

    The format demands that; a header that breaks it gives a tensor the numbers of another, or none
    of its own.
    """
    end, before = start, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset != end:
            found, wanted = tensor.offset - start, end - start
            what = f"overlaps {before}" if found < wanted else "follows a gap"
            where = f"it begins at byte {found:,} of the data, and the last one ends at {wanted:,}"
            raise MalformedFileError(f"{path} is damaged: {tensor.name} {what}: {where}; {_AGAIN}")
        end, before = end + tensor.n_bytes, tensor.name
    if end != size:
        what = f"no tensor has bytes {end - start:,} to {size - start:,} of its data"
        raise MalformedFileError(f"{path} is damaged: {what}; {_AGAIN}")


def _stored(path: Path, header: JsonObject, name: str, start: int, size: int) -> _StoredTensor:
    entry = header.object(name)
    type_name = entry.text("dtype")
    shape, extent = entry.items("shape"), entry.items("data_offsets")
    if type_name not in NUMBER_TYPES:
        raise UnsupportedModelError(f"{path} stores {name} as {type_name}, not {[*NUMBER_TYPES]}")
    if not all(type(n) is int and 0 <= n < 2**48 for n in (*shape, *extent)) or len(extent) != 2:
        raise MalformedFileError(f"{path} is damaged: the place of {name} makes no sense; {_AGAIN}")
    begin, end = extent
    n_bytes = prod(shape) * np.dtype(NUMBER_TYPES[type_name]).itemsize
    if end - begin != n_bytes or n_bytes == 0:
        takes = f"takes {end - begin:,} bytes instead of {n_bytes:,}"
        raise MalformedFileError(f"{path} is damaged: {name} of shape {shape} {takes}; {_AGAIN}")
    over = start + end - size
    if over > 0:
        raise MalformedFileError(f"{path} is truncated: {name} ends {over} bytes behind; {_AGAIN}")
    return _StoredTensor(path, name, type_name, tuple(shape), start + begin)


# == Folders =======================================================================================


_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED_WEIGHTS = "pytorch_model.bin"
_PICKLED_INDEX = "pytorch_model.bin.index.json"
# Pickles in folders of weights that are none.
_NOT_WEIGHTS = {"training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"}
_NOT_WEIGHTS |= {"mask_embedding.pt"}


@dataclass(frozen=True, slots=True)
class Checkpoint(Named):
    """An opened folder: nothing of the weights is in memory until a tensor is read.

    `allow_pickle`: files of torch beside the weights may be opened, too.
    """

    folder: Path
    config: JsonObject
    tensors: Mapping[str, SourceTensor]
    allow_pickle: bool = False

    @property
    def shown(self) -> str:
        """The folder."""
        return str(self.folder)

    def optional(self, name: str) -> JsonObject:
        """Return the JSON file `name` of the folder, an empty object if it is absent."""
        path = self.folder / name
        return read_json_object(path) if path.exists() else JsonObject({}, str(path))

    def tensor(self, name: str, shape: tuple[int, ...]) -> SourceTensor:
        """Return a tensor; raises MalformedFileError if it is missing or has another shape."""
        stored = self.tensors.get(name)
        if stored is None:
            raise self.malformed(f"has no tensor {name}: the checkpoint is incomplete")
        if stored.shape != shape:
            raise MalformedFileError(
                f"{stored.path} has {name} of shape {stored.shape}, and {shape} is needed"
            )
        return stored


def open_checkpoint(
    folder: Path, *, allow_pickle: bool = False, also_named: Collection[str] = ()
) -> Checkpoint:
    """Open a folder with config.json and weights, in one file or in several with an index.

    Weights are read from safetensors; if there are none and `allow_pickle` is given, from
    torch's pickles. A file with one of the names `also_named` (without ending) comes before those
    of the usual names. Raises FileMissingError, MalformedFileError, or UnsupportedModelError for
    pickles that are not allowed.
    """
    if not folder.is_dir():
        if folder.exists():
            raise FileMissingError(
                f"{folder} is a file; name the checkpoint's folder, which has a config.json"
            )
        raise FileMissingError(f"there is no folder {folder}; check the path")
    _refuse_adapter(folder)
    config = read_json_object(folder / "config.json")
    tensors = _find_tensors(folder, also_named, allow_pickle=allow_pickle)
    return Checkpoint(folder, config, tensors, allow_pickle)


def _refuse_adapter(folder: Path) -> None:
    """Raise UnsupportedModelError for a folder of PEFT's: changes of a model, and not a model."""
    adapter = folder / "adapter_config.json"
    if (folder / "config.json").exists() or not adapter.exists():
        return
    settings = read_json_object(adapter)
    kind, base = (settings.any(key) for key in ("peft_type", "base_model_name_or_path"))
    raise UnsupportedModelError(
        f"{folder} is an adapter ({str(kind or 'PEFT')[:20]}) for {str(base or 'a model')[:80]}: "
        "convert that model here, the adapter with llama.cpp's convert_lora_to_gguf.py, and give "
        "it as --lora"
    )


def _find_tensors(
    folder: Path, also_named: Collection[str], *, allow_pickle: bool
) -> Mapping[str, SourceTensor]:
    for name in also_named:
        if (folder / f"{name}.safetensors").exists():
            return read_safetensors(folder / f"{name}.safetensors")
    pickles = _pickles(folder)
    own = [name for name in pickles if Path(name).stem in also_named]
    if (folder / _INDEX).exists() and not own:
        return _read_shards(folder / _INDEX, (".safetensors",), read_safetensors)
    if (folder / _WEIGHTS).exists() and not own:
        return read_safetensors(folder / _WEIGHTS)
    if pickles and not allow_pickle:
        raise UnsupportedModelError(
            f"{folder} has its weights in {(own or pickles)[0]}, a pickle, which can run code when "
            "it is opened: get the checkpoint as safetensors, or open it with --allow-pickle, "
            "which lets it build tensors only"
        )
    if own:
        return read_pickle(folder / own[0])
    if (folder / _PICKLED_INDEX).exists():
        return _read_shards(folder / _PICKLED_INDEX, PICKLE_ENDINGS, read_pickle)
    if _PICKLED_WEIGHTS in pickles:
        return read_pickle(folder / _PICKLED_WEIGHTS)
    if len(pickles) == 1:
        return read_pickle(folder / pickles[0])
    if pickles:
        raise UnsupportedModelError(f"{folder} has pickles {pickles[:4]} and no {_PICKLED_INDEX}")
    raise FileMissingError(f"{folder} has neither {_WEIGHTS} nor {_INDEX}: is it complete?")


def _pickles(folder: Path) -> list[str]:
    found = (path.name for path in folder.iterdir() if path.suffix in PICKLE_ENDINGS)
    return sorted(name for name in found if name not in _NOT_WEIGHTS)


def _read_shards(
    index_file: Path, endings: tuple[str, ...], read: Callable[[Path], Mapping[str, SourceTensor]]
) -> dict[str, SourceTensor]:
    """Return the tensors of the files that an index names, also those that it leaves out.

    Raises MalformedFileError for a tensor that is missing at its indexed place, or in two files.
    """
    index, folder = read_json_object(index_file, unique_keys), index_file.parent
    names = index.object("weight_map")
    shards: dict[str, Mapping[str, SourceTensor]] = {}
    for name in names.values:
        file_name = names.text(name)
        # A name from the index must not lead out of the folder.
        inside = Path(file_name).name == file_name and "\\" not in file_name
        if not file_name.endswith(endings) or not inside:
            raise index.malformed(f"puts {name} into {file_name!r}, not a file of the folder")
        if file_name not in shards:
            shards[file_name] = read(folder / file_name)
        if name not in shards[file_name]:
            raise MalformedFileError(f"{folder / file_name} lacks the tensor {name} of the index")
    if not shards:
        raise index.malformed("names no tensors")
    tensors: dict[str, SourceTensor] = {}
    for shard in shards.values():
        for name, tensor in shard.items():
            if name in tensors:
                both = f"{tensors[name].path.name} and in {tensor.path.name}"
                raise index.malformed(f"belongs to files of which two have {name}: it is in {both}")
            tensors[name] = tensor
    return tensors
