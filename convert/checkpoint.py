"""A Hugging Face checkpoint folder: its config, its tensors by name, its tokenizer files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.errors import FileMissingError, MalformedFileError, UnsupportedModelError
from specrun.convert.json_file import JsonObject, read_json_object
from specrun.convert.safetensors_file import StoredTensor, read_safetensors

__all__ = ["Checkpoint", "open_checkpoint"]

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened folder: nothing of the weights is in memory until a tensor is read."""

    folder: Path
    config: JsonObject
    tensors: dict[str, StoredTensor]

    def optional(self, name: str) -> JsonObject:
        """Return the JSON file `name` of the folder, an empty object where it is absent."""
        path = self.folder / name
        return read_json_object(path) if path.exists() else JsonObject({}, str(path))

    def tensor(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Return a tensor; raises MalformedFileError if it is missing or has another shape."""
        stored = self.tensors.get(name)
        if stored is None:
            raise MalformedFileError(f"{self.folder} has no tensor {name}: the checkpoint is incomplete")
        if stored.shape != shape:
            raise MalformedFileError(
                f"{stored.path} has {name} of shape {stored.shape}, and {self.config.shown} asks for {shape}"
            )
        return stored


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a folder with config.json and safetensors weights, in one file or in several with an index.

    Raises FileMissingError, MalformedFileError, or UnsupportedModelError for weights that are pickles.
    """
    if not folder.is_dir():
        if folder.exists():
            raise FileMissingError(f"{folder} is a file; name the checkpoint's folder, which has a config.json")
        raise FileMissingError(f"there is no folder {folder}; check the path")
    config = read_json_object(folder / "config.json")
    return Checkpoint(folder, config, _find_tensors(folder))


def _find_tensors(folder: Path) -> dict[str, StoredTensor]:
    if (folder / _INDEX).exists():
        return _read_shards(folder)
    if (folder / _WEIGHTS).exists():
        return read_safetensors(folder / _WEIGHTS)
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise UnsupportedModelError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run code when it is opened: "
            "get the checkpoint as safetensors"
        )
    raise FileMissingError(f"there is neither {_WEIGHTS} nor {_INDEX} in {folder}; is the checkpoint complete?")


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    index = read_json_object(folder / _INDEX)
    names = index.object("weight_map")
    shards: dict[str, dict[str, StoredTensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name in names.values:
        file_name = names.text(name)
        # A name from the index must not lead out of the folder.
        if not file_name.endswith(".safetensors") or Path(file_name).name != file_name or "\\" in file_name:
            raise MalformedFileError(f"{index.shown} puts {name} into {file_name!r}, not a file of the folder")
        if file_name not in shards:
            shards[file_name] = read_safetensors(folder / file_name)
        if name not in shards[file_name]:
            raise MalformedFileError(f"{folder / file_name} lacks the tensor {name} that {_INDEX} puts there")
        tensors[name] = shards[file_name][name]
    if not tensors:
        raise MalformedFileError(f"{index.shown} names no tensors")
    return tensors
