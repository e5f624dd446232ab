"""Files of a Llama under the name of another architecture that has the same tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFWriter


def as_architecture(
    source: Path, path: Path, name: str, more: Mapping[str, npt.NDArray[np.float32]] | None = None
) -> Path:
    """Copy a file of architecture llama, its keys renamed, with `more` tensors."""
    reader, writer = GGUFReader(source), GGUFWriter(path, name)
    for key, known in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        element = known.types[-1] if len(known.types) > 1 else None
        renamed = f"{name}.{key.removeprefix('llama.')}" if key.startswith("llama.") else key
        writer.add_key_value(renamed, known.contents(), known.types[0], element)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    for tensor_name, array in (more or {}).items():
        writer.add_tensor(tensor_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def qwen3_norms(layers: int, head_size: int) -> dict[str, npt.NDArray[np.float32]]:
    """The norms of queries and keys that Qwen 3 has beside a Llama's tensors."""
    names = [f"blk.{layer}.attn_{part}_norm.weight" for layer in range(layers) for part in "qk"]
    return dict.fromkeys(names, np.ones(head_size, np.float32))
