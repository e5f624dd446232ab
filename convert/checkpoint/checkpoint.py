"""A Hugging Face checkpoint folder: its config, its tensors by name, its tokenizer files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.errors import FileMissingError, MalformedFileError, UnsupportedModelError
from specrun.convert.checkpoint.json_file import JsonObject, read_json_object, unique_keys
from specrun.convert.checkpoint.pickled_file import PICKLE_ENDINGS, read_pickle
from specrun.convert.checkpoint.safetensors_file import read_safetensors
from specrun.convert.checkpoint.source_tensor import SourceTensor
from specrun.convert.names import Named

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED_WEIGHTS = "pytorch_model.bin"
_PICKLED_INDEX = "pytorch_model.bin.index.json"
# Pickles that lie beside weights and are none.
_NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")


@dataclass(frozen=True, slots=True)
class Checkpoint(Named):
    """An opened folder: nothing of the weights is in memory until a tensor is read."""

    folder: Path
    config: JsonObject
    tensors: Mapping[str, SourceTensor]

    @property
    def shown(self) -> str:
        """The folder."""
        return str(self.folder)

    def optional(self, name: str) -> JsonObject:
        """Return the JSON file `name` of the folder, an empty object where it is absent."""
        path = self.folder / name
        return read_json_object(path) if path.exists() else JsonObject({}, str(path))

    def tensor(self, name: str, shape: tuple[int, ...]) -> SourceTensor:
        """Return a tensor; raises MalformedFileError if it is missing or has another shape."""
        stored = self.tensors.get(name)
        if stored is None:
            raise self.malformed(f"has no tensor {name}: the checkpoint is incomplete")
        if stored.shape != shape:
            raise MalformedFileError(
                f"{stored.path} has {name} of shape {stored.shape}, where {shape} is needed"
            )
        return stored


def open_checkpoint(
    folder: Path, *, allow_pickle: bool = False, also_named: Collection[str] = ()
) -> Checkpoint:
    """Open a folder with config.json and weights, in one file or in several with an index.

    Weights are read from safetensors; where there are none and `allow_pickle` is given, from
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
    config = read_json_object(folder / "config.json")
    return Checkpoint(folder, config, _find_tensors(folder, also_named, allow_pickle=allow_pickle))


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

    Raises MalformedFileError for a tensor that is not where the index says, or in two files.
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
