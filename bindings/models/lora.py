"""LoRA adapters (Hu et al. 2021, 2106.09685): W + scale alpha / r B A, beside a model's weights.

llama.cpp adds them in every evaluation of the contexts that they are set on; the file of the model
and its memory stay as they are. What a file says is checked before llama.cpp sees it.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrun.bindings.errors import MalformedFileError, OptionError, PairError
from specrun.bindings.gguf import GGUFHeader, read_any_header
from specrun.bindings.library import last_native_errors, native_function

if TYPE_CHECKING:
    from specrun.bindings.models.model import Model

_PARTS = (".lora_a", ".lora_b")
_INTEGERS = ("I8", "I16", "I32", "I64", "F64")  # which ggml multiplies no states by
_pointer, _text = ctypes.c_void_p, ctypes.c_char_p


@dataclass(frozen=True, slots=True)
class LoraFile:
    """An adapter's GGUF file, and how much of it is added (1: as it was trained)."""

    path: Path
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise OptionError(f"the scale of {self.path} is {self.scale}: give a finite number")

    def __str__(self) -> str:
        return f"{self.path}:{self.scale:g}"

    @classmethod
    def parse(cls, text: str) -> LoraFile:
        """Return what FILE or FILE:SCALE names."""
        file, colon, scale = text.rpartition(":")
        if colon and not Path(text).exists():
            try:
                return cls(Path(file).expanduser(), float(scale))
            except ValueError:
                if Path(file).expanduser().is_file():
                    raise OptionError(f"{text}: the scale {scale!r} is not a number") from None
        return cls(Path(text).expanduser())


def load_lora(model: Model, lora: LoraFile) -> Any:  # noqa: ANN401 - a ctypes pointer
    """Return llama.cpp's adapter, which lives as long as the model.

    Raises FileMissingError, MalformedFileError for what is no LoRA adapter, or of tensors that the
    model lacks, and PairError for one of another architecture.
    """
    _check(model, lora.path, read_any_header(lora.path))
    load = native_function("llama_adapter_lora_init", _pointer, _pointer, _text)
    last_native_errors()
    adapter = load(model.handle, bytes(lora.path))
    if not adapter:
        reason = last_native_errors() or "llama.cpp does not say why"
        raise MalformedFileError(f"{lora.path} is no adapter for {model.path}: {reason}")
    return adapter


def set_loras(context: Any, adapters: list[tuple[Any, float]]) -> None:  # noqa: ANN401 - pointers
    """Let a context evaluate with these adapters, each with its scale."""
    count = len(adapters)
    handles = (_pointer * count)(*(adapter for adapter, _ in adapters))
    scales = (ctypes.c_float * count)(*(scale for _, scale in adapters))
    kinds = _pointer, _pointer, ctypes.c_size_t, _pointer
    assign = native_function("llama_set_adapters_lora", ctypes.c_int32, *kinds)
    if assign(context, ctypes.addressof(handles), count, ctypes.addressof(scales)):
        raise OptionError(f"llama.cpp refuses these {count} adapters together")


def _check(model: Model, path: Path, header: GGUFHeader) -> None:
    """Raise unless a header is that of an adapter for a model of this architecture."""
    metadata = header.metadata
    kind = metadata.get("general.type"), metadata.get("adapter.type")
    if kind != ("adapter", "lora"):
        raise MalformedFileError(f"{path} is no LoRA adapter: llama.cpp's convert_lora makes one")
    made_for = metadata.get("general.architecture")
    if made_for != model.architecture:
        kinds = f"made for {made_for}, and the model is of architecture {model.architecture}"
        raise PairError(f"{path} does not fit {model.path}: it is {kinds}")
    alpha = metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise MalformedFileError(f"{path} has {alpha!r} as adapter.lora.alpha")
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    for tensor in header.tensors:
        if not tensor.name.endswith(_PARTS) or tensor.type_name in _INTEGERS:
            raise MalformedFileError(f"{path} has {tensor.name} ({tensor.type_name}) in it")
        name = tensor.name.rpartition(".")[0]
        first, second = (shapes.get(f"{name}{part}", ()) for part in _PARTS)
        if len(first) != 2 or len(second) != 2 or first[1] != second[0]:
            shown = f"{list(first)} and {list(second)}"
            raise MalformedFileError(f"{path}: the parts of {name} do not fit ({shown})")
