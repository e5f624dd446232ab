"""NextN blocks (multi-token prediction, MTP): the files with them, the architectures that draft.

A NextN block is one more decoder layer behind the trunk that predicts one token further, from the
trunk's last hidden state and the next token's embedding (DeepSeek-V3, 2412.19437, section 2.2).
`{arch}.nextn_predict_layers` is the number of such blocks among a file's `block_count`; whether
their tensors are in the file is another matter.

The lists below were read in the sources of llama.cpp 0c1e570 (llama-cpp-python 0.3.36): it
asserts, or runs the wrong graph, if an architecture has no graph for its NextN blocks.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.bindings.gguf import GGUFHeader, TensorInfo, read_header
from specrun.bindings.library import cpp_names, exported_function

_WITH_GRAPHS = """
    bailingmoe3 cohere2moe deepseek2 deepseek32 deepseek4 glm-dsa glm4moe hy_v3 mimo2
    nemotron_h_moe qwen35 qwen35moe qwen3next step35
"""
NEXTN_ARCHITECTURES = tuple(_WITH_GRAPHS.split())
"""Whose NextN blocks llama.cpp has a graph for."""

SEVERAL_BLOCKS = ("hy_v3", "mimo2", "step35")
"""Those that may have several blocks, one for each drafted token; the others assert one."""

_WITH_STATES = """
    bailingmoe3 deepseek4 glm5-next kimi-k3 lfm2 lfm2moe nemotron_h nemotron_h_moe qwen35 qwen35moe
    qwen4exp
"""
ROLLBACK_ARCHITECTURES = tuple(_WITH_STATES.split())
"""Recurrent and hybrid architectures that can take back tokens of the last evaluation."""

_MOST_BLOCKS = 64
_SPLIT_NAME = re.compile(r"(?P<base>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class NextnBlocks:
    """NextN blocks in a model's files: `count` of them, of `n_parameters` numbers.

    A model that only declares them has 0. `alone`: they are there without the model
    that they belong to, as in llama.cpp's `mtp-*.gguf`.
    """

    count: int = 0
    n_parameters: int = 0
    alone: bool = False


def read_nextn(path: Path, header: GGUFHeader) -> NextnBlocks:
    """Return the NextN blocks of a model by its files' headers; `header` is that of the first."""
    n_nextn = _declared(header)[1]
    ours = nextn_tensors(path, header)
    if not ours:
        return NextnBlocks()
    n_parameters = sum(tensor.n_elements for tensor in ours)
    names = {tensor.name for part in split_headers(path, header) for tensor in part.tensors}
    return NextnBlocks(n_nextn, n_parameters, alone="blk.0.attn_norm.weight" not in names)


def nextn_tensors(path: Path, header: GGUFHeader) -> list[TensorInfo]:
    """Return the tensors of a model's NextN blocks; none if not all blocks are there."""
    n_all, n_nextn = _declared(header)
    if not n_nextn:
        return []
    tensors = [tensor for part in split_headers(path, header) for tensor in part.tensors]
    names = {tensor.name for tensor in tensors}
    blocks = [f"blk.{block}." for block in range(n_all - n_nextn, n_all)]
    if not all(f"{block}nextn.eh_proj.weight" in names for block in blocks):
        return []
    return [tensor for tensor in tensors if tensor.name.startswith(tuple(blocks))]


def split_headers(path: Path, header: GGUFHeader) -> list[GGUFHeader]:
    """Return the header of a model's first file, and those of its other files that are there."""
    others = split_paths(path, header)[1:]
    return [header, *(read_header(other, named=False) for other in others)]


def split_paths(path: Path, header: GGUFHeader) -> list[Path]:
    """Return the files of a model that are there, the one with this header first.

    llama.cpp names them `base-00001-of-00003.gguf` and so on, and loads no incomplete model.
    """
    count = header.metadata.get("split.count")
    if not isinstance(count, int) or not 1 < count < 10**5:
        return [path]
    names = (split_name(path, part) for part in range(1, count + 1))
    others = (path.with_name(name) for name in names if name not in (None, path.name))
    return [path, *(other for other in others if other.is_file())]


def split_name(path: Path, part: int) -> str | None:
    """Return the name of a part of a split model, from 1 on, by that of another; None if it has
    none."""
    name = _SPLIT_NAME.fullmatch(path.name)
    return None if name is None else f"{name['base']}-{part:05}-of-{name['count']}.gguf"


def _declared(header: GGUFHeader) -> tuple[int, int]:
    """Return a file's number of blocks, and how many of them are NextN blocks."""
    counts = []
    for key in ("block_count", "nextn_predict_layers"):
        value = header.metadata.get(f"{header.architecture}.{key}")
        counts.append(value if isinstance(value, int) and not isinstance(value, bool) else 0)
    n_all, n_nextn = counts
    return (n_all, n_nextn) if 0 < n_nextn <= min(n_all, _MOST_BLOCKS) else (n_all, 0)


# -- llama.cpp's functions, which it has not declared stable yet -----------------------------------

_SHOW = cpp_names("llama_set_embeddings_nextn", "void", "llama_context *", "bool", "bool")
_ROWS = cpp_names("llama_get_embeddings_nextn", "float *", "llama_context *")
_SELECT = cpp_names("llama_set_nextn_layer_offset", "void", "llama_context *", "int32_t")


def show_nextn_states(context: Any, *, only_rows: bool = False) -> None:  # noqa: ANN401 - a ctypes pointer
    """Let a context give the states that NextN blocks read: every token's, or only rows'."""
    show = exported_function(_SHOW, None, ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool)
    show(context, True, only_rows)


def nextn_rows() -> Any:  # noqa: ANN401 - a ctypes function
    """Return the function for the addresses of a context's states."""
    return exported_function(_ROWS, ctypes.c_void_p, ctypes.c_void_p)


def select_nextn_block(context: Any, block: int) -> None:  # noqa: ANN401 - a ctypes pointer
    """Let an MTP context evaluate another block: 0 is the first one behind the trunk."""
    exported_function(_SELECT, None, ctypes.c_void_p, ctypes.c_int32)(context, block)
