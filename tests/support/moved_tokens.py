"""Copies of a model whose tokens have other ids, and of which some are lost."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, GGUFWriter

_LISTS = ("tokens", "scores", "token_type")
_BY_TOKEN = ("token_embd.weight", "output.weight")


def with_moved_tokens(
    source: Path, path: Path, *, seed: int = 1, lost: Collection[int] = ()
) -> npt.NDArray[np.intp]:
    """Write a copy; return for each new id the old one.

    The tokens `lost` get a text that nothing has, of as many bytes: the model goes on saying them,
    and nobody can read them.
    """
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(path, architecture)
    size = len(reader.fields["tokenizer.ggml.tokens"].contents())
    order = np.random.default_rng(seed).permutation(size)
    places = np.argsort(order)
    for key, known in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        name = key.removeprefix("tokenizer.ggml.")
        element = known.types[-1] if len(known.types) > 1 else None
        contents = known.contents()
        if name in _LISTS:
            contents = [contents[old] for old in order]
            if name == "tokens":
                contents = [
                    f"\ue000{old}\ue001" if old in lost else text
                    for old, text in zip(order, contents, strict=True)
                ]
            if name == "token_type":
                contents = [
                    1 if old in lost else kind for old, kind in zip(order, contents, strict=True)
                ]
        elif known.types[0] == GGUFValueType.UINT32 and name.endswith("_token_id"):
            contents = int(places[contents])
        writer.add_key_value(key, contents, known.types[0], element)
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if tensor.name in _BY_TOKEN:
            data = data[order]
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return order
