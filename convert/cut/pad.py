"""Padded models: the cost of a larger model and the output of the smaller."""

from __future__ import annotations

import functools
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.bindings.files import check_target
from specrun.bindings.gguf import PADDED_PARAMETERS, TensorInfo
from specrun.convert.checkpoint import stored_as
from specrun.convert.gguf import STORED_TYPES, GGUFSource, Metadata, PlannedTensor, Progress

# == Padded feed-forward layers ====================================================================
#
# The feed-forward layers get more inner units whose outputs are multiplied by zero: every
# evaluation reads and multiplies the added weights, and the result stays. Layers, attention, KV
# memory and hidden states are as before, so a small trained model can stand in for a large one in
# measurements of speed.


PADDED_FROM = "specrun.padded_from"
"""The metadata key with the file name of the model as it was before padding."""

_STEP = 256  # widths stay multiples of this, so that the file can be quantized to any type
# Of gate, up and down matrices alone, with no norms or experts between them: zeros in the last are
# zeros at the end.
_ARCHITECTURES = (
    *("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "mistral3", "olmo2", "granite"),
    "smollm3",
)
_SPREAD = 0.02  # of the added weights: ordinary numbers, neither denormal nor large
_CHUNK = 1 << 22  # how many numbers are drawn at a time
_FFN = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.weight")
_FFN_OTHER = re.compile(r"blk\.\d+\.ffn_(?!norm\.weight$)")
_MOST_PARAMETERS = 10**13

Load = Callable[[], npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class PadReport:
    """The result of padding: parameters in all and added, the feed-forward widths."""

    output: Path
    n_parameters: int
    added_parameters: int
    source_width: int
    width: int
    n_bytes: int


def pad_ffn(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    parameters: int,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> PadReport:
    """Write `source`, widened to about `parameters` parameters, to `output`; its outputs stay.

    `source` is a GGUF model of an architecture with plain feed-forward layers (Llama, Qwen 2 and 3,
    Gemma 1 to 3, ...) in F32, F16 or BF16; Q8_0 is read too and written as F16. The feed-forward
    width becomes a multiple of 256. The added input weights are random from a fixed seed, the added
    output weights zero; the file's metadata has both (PADDED_PARAMETERS, PADDED_FROM).

    Raises OptionError if `parameters` is not above the source's count, or `output` exists without
    `force`; UnsupportedModelError for other architectures and types, and for experts;
    FileMissingError, MalformedFileError. Nothing is left behind on failure.
    """
    target = Path(output)
    check_target(target, force=force)
    model = GGUFSource(source)
    _check(model)
    old = model.count(f"{model.header.architecture}.feed_forward_length")
    new = _new_width(model, old, parameters)
    tensors = list(_plan(model, old, new))
    total = sum(prod(tensor.shape) for tensor in tensors)
    added = total - model.header.n_parameters
    metadata = _metadata(model, new, added)
    n_bytes = model.write_changed(target, metadata, tensors, force=force, progress=progress)
    return PadReport(target, total, added, old, new, n_bytes)


def _check(model: GGUFSource) -> None:
    if model.header.architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise model.unsupported(f"is a {model.header.architecture}: only {known} can be padded")
    for name in model.tensors:
        if _FFN_OTHER.match(name) and not _FFN.fullmatch(name):
            raise model.unsupported(f"has {name}: only plain feed-forward layers can be padded")


def _new_width(model: GGUFSource, old: int, parameters: int) -> int:
    now = model.header.n_parameters
    if not now < parameters <= _MOST_PARAMETERS:
        wish = f"pad to more than that, not to {parameters:,}"
        raise OptionError(f"{model.path} has {now:,} parameters: {wish}")
    name = model.header.architecture
    per_unit = 3 * model.count(f"{name}.embedding_length") * model.count(f"{name}.block_count")
    new = round((old + (parameters - now) / per_unit) / _STEP) * _STEP
    if new <= old:
        least = now + ((old // _STEP + 1) * _STEP - old) * per_unit
        raise OptionError(f"{model.path} can be padded to {least:,} or more, not to {parameters:,}")
    return new


def _metadata(model: GGUFSource, width: int, added: int) -> Metadata:
    metadata = model.metadata()
    metadata.count(f"{model.header.architecture}.feed_forward_length", width)
    metadata.remove("general.size_label")  # it would now be wrong
    if any(tensor.type_name == "Q8_0" for tensor in model.header.tensors):
        metadata.count("general.file_type", 1)  # F16
    metadata.large_count(PADDED_PARAMETERS, added + model.header.n_padded)
    if PADDED_FROM not in metadata:
        metadata.text(PADDED_FROM, model.path.name)
    return metadata


def _plan(model: GGUFSource, old: int, new: int) -> Iterator[PlannedTensor]:
    width = model.count(f"{model.header.architecture}.embedding_length")
    found = 0
    for tensor in model.header.tensors:
        shape = tensor.shape[::-1]
        kind, load = _read(model, tensor)
        if match := _FFN.fullmatch(tensor.name):
            found += 1
            down = match[1] == "down"
            if shape != ((width, old) if down else (old, width)):
                raise model.unsupported(f"has {tensor.name} of the unexpected shape {shape}")
            change = _with_zero_columns if down else _with_random_rows
            load = functools.partial(change, load, kind, tensor.name, new)
            shape = (width, new) if down else (new, width)
        yield PlannedTensor(tensor.name, shape, kind, load)
    expected = 3 * model.count(f"{model.header.architecture}.block_count")
    if found != expected:
        raise model.unsupported(f"has {found} feed-forward matrices instead of {expected}")


def _read(model: GGUFSource, tensor: TensorInfo) -> tuple[str, Load]:
    """Return the type of a tensor once read, and what reads it: plain types stay."""
    if tensor.type_name in STORED_TYPES:
        return tensor.type_name, functools.partial(model.stored, tensor)
    if tensor.type_name == "Q8_0":
        return "F16", lambda: model.numbers(tensor).astype(np.float16)
    raise model.unsupported(
        f"stores {tensor.name} as {tensor.type_name}: only F32, F16, BF16 and Q8_0 can be read"
    )


def _with_zero_columns(load: Load, _kind: str, _name: str, new: int) -> npt.NDArray[Any]:
    array = load()
    padded = np.zeros((array.shape[0], new), array.dtype)  # all bits zero is 0.0 in BF16 too
    padded[:, : array.shape[1]] = array
    return padded


def _with_random_rows(load: Load, kind: str, name: str, new: int) -> npt.NDArray[Any]:
    array = load()
    old, width = array.shape
    padded = np.empty((new, width), array.dtype)
    padded[:old] = array
    source = np.random.default_rng(zlib.crc32(name.encode()))
    step = max(1, _CHUNK // width)
    for start in range(old, new, step):
        rows = min(step, new - start)
        drawn = source.standard_normal((rows, width), dtype=np.float32) * np.float32(_SPREAD)
        padded[start : start + rows] = stored_as(drawn, kind, name)
    return padded


# == Padded targets of any size, in a temporary file ===============================================


_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMBG]?)", re.IGNORECASE)


def parse_parameters(text: str) -> int:
    """Return the count that "400M", "1.5B" or "400000000" names."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"{text!r} is not a number of parameters, such as 400M or 1.5B")
    count = int(float(match[1]) * _FACTORS[match[2].upper()])
    if count < 1:
        raise OptionError(f"{text!r} parameters: give a positive number, such as 400M")
    return count


@contextmanager
def padded_target(
    source: Path,
    parameters: int | None,
    *,
    keep: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Path]:
    """Yield `source` widened to about `parameters` parameters, or `source` itself for None.

    The file goes into a temporary folder and away with it, or to `keep` (which must not exist).
    Free space is checked before anything is written.
    """
    if parameters is None:
        yield source
        return

    progress(f"padding {source.name} to {parameters / 1e6:,.0f}M parameters")
    if keep is not None:
        yield pad_ffn(source, keep, parameters).output
        return
    with tempfile.TemporaryDirectory(prefix="specrun-bench-") as folder:
        yield pad_ffn(source, Path(folder) / source.name, parameters).output
