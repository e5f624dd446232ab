"""Pickled weights: only if allowed, as tensors only, and never by another way when that
fails."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_checkpoints import llama_config, llama_tensors

from specrun.bindings.errors import MalformedFileError, SpecrunError, UnsupportedModelError
from specrun.convert import convert_checkpoint
from specrun.convert.checkpoint import read_pickle

torch = pytest.importorskip("torch")
WEIGHTS, PICKLE = "model.safetensors", "pytorch_model.bin"


def state(kind: Any = None) -> dict[str, Any]:
    tensors = {
        name: torch.from_numpy(array) for name, array in llama_tensors(llama_config()).items()
    }
    return tensors if kind is None else {name: tensor.to(kind) for name, tensor in tensors.items()}


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def folder(write_checkpoint) -> Path:
    return write_checkpoint(**{WEIGHTS: None})


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_same_file_as_from_safetensors(tmp_path: Path, write_checkpoint, wrapped: bool) -> None:
    convert_checkpoint(write_checkpoint(), tmp_path / "safe.gguf")
    folder = write_checkpoint(**{WEIGHTS: None})
    torch.save({"state_dict": state()} if wrapped else state(), folder / PICKLE)
    convert_checkpoint(folder, tmp_path / "pickle.gguf", allow_pickle=True)
    assert (tmp_path / "pickle.gguf").read_bytes() == (tmp_path / "safe.gguf").read_bytes()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_sixteen_bits(tmp_path: Path, folder: Path, kind: Any) -> None:
    torch.save(state(kind), folder / PICKLE)
    tensors = read_pickle(folder / PICKLE)
    wanted = state(kind)["lm_head.weight"].float().numpy()
    np.testing.assert_array_equal(tensors["lm_head.weight"].read().astype(np.float32), wanted)
    assert convert_checkpoint(
        folder, tmp_path / "m.gguf", outtype="auto", allow_pickle=True
    ).type_name in (
        "BF16",
        "F16",
    )


def test_shards_with_an_index(tmp_path: Path, write_checkpoint) -> None:
    names = list(state())
    parts = {"a.bin": names[::2], "b.bin": names[1::2]}
    index = {"weight_map": {name: part for part, held in parts.items() for name in held}}
    folder = write_checkpoint(**{WEIGHTS: None, "pytorch_model.bin.index.json": index})
    for part, held in parts.items():
        torch.save({name: state()[name] for name in held}, folder / part)
    with pytest.raises(UnsupportedModelError, match=r"a\.bin, a pickle"):
        convert_checkpoint(folder, tmp_path / "m.gguf")
    assert convert_checkpoint(folder, tmp_path / "m.gguf", allow_pickle=True).n_tensors == len(
        names
    )


def test_safetensors_come_first(tmp_path: Path, write_checkpoint) -> None:
    folder = write_checkpoint()
    (folder / PICKLE).write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    convert_checkpoint(folder, tmp_path / "m.gguf", allow_pickle=True)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("allowed", [False, True])
def test_code_in_a_pickle_never_runs(
    tmp_path: Path, folder: Path, zipped: bool, allowed: bool
) -> None:
    canary = Canary(tmp_path / "canary")
    content = {**state(), "lm_head.weight": canary}
    if zipped:
        torch.save(content, folder / PICKLE)
    else:
        (folder / PICKLE).write_bytes(pickle.dumps(canary))
    with pytest.raises(
        UnsupportedModelError, match=r"a pickle|could run code|not a file that torch"
    ):
        convert_checkpoint(folder, tmp_path / "m.gguf", allow_pickle=allowed)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint"}
    pickle.loads(pickle.dumps(canary))  # it would have sung
    assert (tmp_path / "canary").is_dir()


def test_a_pickle_that_does_not_hold_tensors(tmp_path: Path, folder: Path) -> None:
    torch.save([1, 2], folder / PICKLE)
    with pytest.raises(UnsupportedModelError, match="holds a list, not tensors by name"):
        convert_checkpoint(folder, tmp_path / "m.gguf", allow_pickle=True)
    torch.save({"lm_head.weight": "text"}, folder / PICKLE)
    with pytest.raises(UnsupportedModelError, match=r"stores lm_head\.weight as str"):
        convert_checkpoint(folder, tmp_path / "m.gguf", allow_pickle=True)


def test_a_truncated_pickle(tmp_path: Path, folder: Path) -> None:
    torch.save(state(), folder / PICKLE)
    whole = (folder / PICKLE).read_bytes()
    for length in (0, 100, len(whole) // 2, len(whole) - 1):
        (folder / PICKLE).write_bytes(whole[:length])
        with pytest.raises((MalformedFileError, UnsupportedModelError)):
            convert_checkpoint(folder, tmp_path / "m.gguf", allow_pickle=True)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint"}


def test_a_torch_that_cannot_be_trusted_is_refused(
    tmp_path: Path, folder: Path, monkeypatch
) -> None:
    torch.save(state(), folder / PICKLE)
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    with pytest.raises(SpecrunError, match=r"torch 2\.5\.1\+cpu cannot open .* safely"):
        convert_checkpoint(folder, tmp_path / "m.gguf", allow_pickle=True)
