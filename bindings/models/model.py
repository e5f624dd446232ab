"""GGUF models (llama_model) and LoRA adapters, loaded after their headers were checked."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from specrun.bindings.errors import (
    ClosedError,
    MalformedFileError,
    ModelLoadError,
    OptionError,
    OutOfMemoryError,
    PairError,
    UnsupportedModelError,
)
from specrun.bindings.functions import call
from specrun.bindings.gguf import GGUFHeader, read_header
from specrun.bindings.library import NativeHandle, last_native_errors, llama
from specrun.bindings.machine.placement import current_placement, resolve_placement
from specrun.bindings.machine.workers import freed_while_there
from specrun.bindings.models.model_checks import check_model
from specrun.bindings.models.nextn import ROLLBACK_ARCHITECTURES, read_nextn
from specrun.bindings.models.trial import require_tried
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.bindings.threads import FORK

# == LoRA adapters (Hu et al. 2021, 2106.09685): W + scale alpha / r B A ===========================
#
# llama.cpp adds them in every evaluation of the contexts that they are set on; the file of the
# model and its memory do not change. An adapter's file is checked before llama.cpp reads it.


_PARTS = (".lora_a", ".lora_b")
_INTEGERS = ("I8", "I16", "I32", "I64", "F64")  # which ggml multiplies no states by


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
        """Return the file and the scale of FILE or FILE:SCALE."""
        file, colon, scale = text.rpartition(":")
        if colon and not Path(text).exists():
            try:
                return cls(Path(file).expanduser(), float(scale))
            except ValueError:
                if Path(file).expanduser().is_file():
                    raise OptionError(f"{text}: the scale {scale!r} is not a number") from None
        return cls(Path(text).expanduser())


def _load_lora(model: Model, lora: LoraFile) -> Any:  # noqa: ANN401 - a ctypes pointer
    """Return llama.cpp's adapter, which lives as long as the model.

    Raises FileMissingError, MalformedFileError for a file that is no LoRA adapter, or of tensors
    that the model lacks, and PairError for one of another architecture.
    """
    _check(model, lora.path, read_header(lora.path, named=False))
    last_native_errors()
    adapter = call("llama_adapter_lora_init")(model.handle, bytes(lora.path))
    if not adapter:
        reason = last_native_errors() or "llama.cpp gives no reason"
        raise MalformedFileError(f"{lora.path} is no adapter for {model.path}: {reason}")
    return adapter


def set_loras(context: Any, adapters: list[tuple[Any, float]]) -> None:  # noqa: ANN401 - pointers
    """Let a context evaluate with these adapters, each with its scale."""
    count = len(adapters)
    handles = (ctypes.c_void_p * count)(*(adapter for adapter, _ in adapters))
    scales = (ctypes.c_float * count)(*(scale for _, scale in adapters))
    if call("llama_set_adapters_lora")(context, handles, count, scales):
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


# == Models ========================================================================================


# llama_load_mode
_MMAP, _COPY, _MMAP_LOCKED = 1, 0, 3

_UNKNOWN = "unknown model architecture"  # llama.cpp's words
_POOLINGS = {1: "mean", 2: "first", 3: "last"}  # llama_pooling_type


Progress = Callable[[float], bool]
_watching: ContextVar[Progress | None] = ContextVar("watching", default=None)


@contextmanager
def watched_loading(report: Progress) -> Iterator[None]:
    """Call `report` with 0.0..1.0 while models are loaded in the block, in this thread.

    It may return False to stop the loading.
    """
    before = _watching.set(report)
    try:
        yield
    finally:
        _watching.reset(before)


class Reader(Protocol):
    """A context of a model."""

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed."""


class Model:
    """A target or draft model. Owns native memory: use it as a context manager or call `close()`.

    Parameters: `n_gpu_layers` is how many layers go to the GPU (-1 all), ignored if there is
    none; `use_mmap` maps the file instead of reading it; `use_mlock` keeps it in RAM; `vocab_only`
    loads the vocabulary alone, for uses without evaluation; `load_nextn` loads the NextN blocks
    too, if the file has any; `drafts` puts it on the devices of drafts (`placing`). A file that was
    not seen before is tried in another process first (`trial`). Raises `FileMissingError`,
    `MalformedFileError`, `ModelLoadError`, `OutOfMemoryError`.
    """

    _only_counts = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = 0,
        use_mmap: bool = True,
        use_mlock: bool = False,
        vocab_only: bool = False,
        load_nextn: bool = False,
        drafts: bool = False,
    ) -> None:
        self._handle: Any = None
        self._contexts: weakref.WeakSet[Reader] = weakref.WeakSet()
        self._vocab_only = vocab_only
        self.loras: tuple[LoraFile, ...] = ()
        self.adapters: list[tuple[Any, float]] = []
        if n_gpu_layers < -1:
            raise OptionError(f"n_gpu_layers is {n_gpu_layers}: give -1 (all) or a count of layers")
        FORK.check()
        self.path = Path(path)
        self.header: GGUFHeader = read_header(self.path)
        check_model(self.path, self.header, vocab_only=vocab_only)
        self.nextn = read_nextn(self.path, self.header)
        require_tried(self.path, self.header, vocab_only=vocab_only, only_counts=self._only_counts)
        self.has_loaded_nextn = load_nextn and self.nextn.count > 0
        self._native = llama()
        placed = resolve_placement(current_placement(drafts=drafts))
        placed.check_patterns(self.header)
        self.n_gpu_layers = placed.layers_offloaded(n_gpu_layers)
        """How many layers are on devices (-1: all)."""
        self.placed = placed if self.n_gpu_layers else placed.without_layers()
        self._handle = self._load(n_gpu_layers, use_mmap, use_mlock)
        # Read once: llama.cpp overwrites it when a context scales positions.
        self._n_ctx_train = int(self._native.llama_model_n_ctx_train(self._handle))
        vocabulary = self._native.llama_model_get_vocab(self._handle)
        self.vocabulary = Vocabulary(NativeHandle(vocabulary, None, self._handle))
        # Before any context exists, so that none can be made of a vocabulary-only file.
        if self.vocabulary.kind == "none" or self.vocabulary.size <= 0:
            self.close()
            problem = f"{self.path} has no vocabulary: it cannot read or write text"
            raise UnsupportedModelError(problem)
        missing = self.vocabulary.missing_token
        if missing:
            self.close()
            problem = f"{self.path} puts a token {missing} to every text, and has none"
            raise MalformedFileError(f"{problem}: convert the model again")

    def _load(self, n_gpu_layers: int, use_mmap: bool, use_mlock: bool) -> Any:  # noqa: ANN401
        params = self._native.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        self.placed.apply(params)
        params.vocab_only = self._vocab_only
        params.load_mtp = self.has_loaded_nextn
        params.load_mode = (_MMAP_LOCKED if use_mlock else _MMAP) if use_mmap else _COPY
        params.no_alloc = self._only_counts
        report = None if self._only_counts else _watching.get()
        if report is not None:
            params.progress_callback = self._native.llama_progress_callback(
                lambda fraction, _data: bool(report(fraction))
            )
        last_native_errors()
        handle = self._native.llama_model_load_from_file(os.fsencode(self.path), params)
        if handle:
            free = freed_while_there(self._native.llama_model_free, self.placed.workers)
            return NativeHandle(handle, free)
        reason = last_native_errors() or "llama.cpp gave no reason"
        if "alloc" in reason or "out of memory" in reason.lower():
            advice = "Use a smaller quantization or fewer GPU layers (-ngl)"
            raise OutOfMemoryError(f"no memory to load {self.path}: {reason}. {advice}")
        if _UNKNOWN in reason:
            kind = (
                f"{self.path} holds '{self.header.architecture}', no model that llama.cpp supports"
            )
            head = "a head drafts for a target: give it with -md, beside -m"
            newer = "a model that is newer than this llama.cpp needs a newer specrun"
            raise ModelLoadError(f"{kind}; {head}; {newer}")
        raise ModelLoadError(f"llama.cpp cannot load {self.path}: {reason}")

    def add_lora(self, lora: LoraFile) -> None:
        """Add an adapter to every context that is made from now on; the model frees it."""
        adapter = _load_lora(self, lora)
        self.adapters.append((adapter, lora.scale))
        self.loras = (*self.loras, lora)

    @property
    def handle(self) -> Any:  # noqa: ANN401 - a ctypes pointer
        """The native pointer; raises `ClosedError` after `close()`."""
        handle = self._handle  # read once: another thread may close it
        if handle is None:
            raise ClosedError(f"the model {self.path} is closed")
        return handle

    def close(self) -> None:
        """Free the native memory, once no call is in it; calling it again does nothing.

        Contexts must be closed first.
        """
        n_open = sum(context.is_open for context in self._contexts)
        if n_open and self._handle is not None:
            raise ClosedError(f"close the {n_open} contexts of {self.path} before the model")
        self._handle = None
        self.vocabulary.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- properties of the model -------------------------------------------------------------------

    @property
    def architecture(self) -> str:
        """`general.architecture` of the file, such as "llama" or "qwen3"."""
        return self.header.architecture

    @property
    def description(self) -> str:
        """llama.cpp's one-line description, such as "llama 1B Q8_0"."""
        buffer = ctypes.create_string_buffer(256)
        self._native.llama_model_desc(self.handle, buffer, 256)
        return buffer.value.decode("utf-8", "replace")

    @property
    def n_ctx_train(self) -> int:
        """The context length the model was trained with."""
        return self._n_ctx_train

    @property
    def has_rope(self) -> bool:
        """Whether positions are rotary, so that they can be scaled."""
        return int(self._native.llama_model_rope_type(self.handle)) >= 0

    @property
    def rope_scaling_kind(self) -> str:
        """The file's scaling of positions: "none", "linear", "yarn", ...; "" if it has none."""
        value = self.header.metadata.get(f"{self.architecture}.rope.scaling.type")
        return value if isinstance(value, str) else ""

    @property
    def rope_factor(self) -> float:
        """How many times the original context the file's own scaling makes `n_ctx_train`."""
        return rope_factor(self.header)

    @property
    def n_embd(self) -> int:
        """The width of the hidden states."""
        return int(self._native.llama_model_n_embd(self.handle))

    @property
    def n_embd_out(self) -> int:
        """The width of the states that NextN blocks read: mostly that of the hidden states."""
        return int(self._native.llama_model_n_embd_out(self.handle))

    @property
    def n_layer(self) -> int:
        """The number of layers, without NextN blocks."""
        return int(self._native.llama_model_n_layer(self.handle))

    @property
    def n_params(self) -> int:
        """The number of parameters."""
        return int(self._native.llama_model_n_params(self.handle))

    @property
    def n_bytes(self) -> int:
        """The size of all tensors in bytes."""
        return int(self._native.llama_model_size(self.handle))

    @functools.cached_property
    def can_branch(self) -> bool:
        """Whether the memory can drop and share positions: recurrent and hybrid models cannot."""
        native, handle = self._native, self.handle
        return not (native.llama_model_is_recurrent(handle) or native.llama_model_is_hybrid(handle))

    @property
    def can_roll_back(self) -> bool:
        """Whether a memory that cannot branch can take back tokens of the last evaluation."""
        return not self.can_branch and self.architecture in ROLLBACK_ARCHITECTURES

    @property
    def can_generate(self) -> bool:
        """Whether it is a left-to-right decoder, not an encoder, a pair of both or diffusion."""
        native, handle = self._native, self.handle
        encodes = native.llama_model_has_encoder(handle) or native.llama_model_is_diffusion(handle)
        return bool(native.llama_model_has_decoder(handle)) and not encodes

    @property
    def pooling(self) -> str | None:
        """How the states of a text become its embedding, if the model was trained to make any."""
        value = self.header.metadata.get(f"{self.architecture}.pooling_type")
        return _POOLINGS.get(value) if isinstance(value, int) else None

    @property
    def chat_template(self) -> str | None:
        """The Jinja text of the file's chat template, or None."""
        return self._template(None)

    @property
    def tool_template(self) -> str | None:
        """The text of the template for conversations with tools, if that is another one."""
        return self._template(b"tool_use")

    def _template(self, name: bytes | None) -> str | None:
        text: bytes | None = self._native.llama_model_chat_template(self.handle, name)
        return text.decode("utf-8", "replace") if text else None

    def metadata(self) -> dict[str, str]:
        """Return the scalar metadata as llama.cpp prints it, key by key."""
        return dict(self._metadata_items())

    def _metadata_items(self) -> Iterator[tuple[str, str]]:
        native, handle = self._native, self.handle
        readers = native.llama_model_meta_key_by_index, native.llama_model_meta_val_str_by_index
        for index in range(native.llama_model_meta_count(handle)):
            texts = []
            for read in readers:
                size = max(read(handle, index, ctypes.create_string_buffer(1), 1), 0) + 1
                buffer = ctypes.create_string_buffer(size)
                read(handle, index, buffer, size)
                texts.append(buffer.value.decode("utf-8", "replace"))
            yield texts[0], texts[1]

    def require_weights(self) -> None:
        """Raise `OptionError` if only the vocabulary was loaded."""
        if self._vocab_only:
            problem = f"only the vocabulary of {self.path} was loaded"
            raise OptionError(f"{problem}: it cannot evaluate anything")

    def adopt(self, context: Reader) -> None:
        """Register a context that reads this model, so that the model is closed after it."""
        self._contexts.add(context)


def rope_factor(header: GGUFHeader) -> float:
    """Return the factor of a file's own stretching of positions, 1 without any."""
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        factor = header.metadata.get(f"{header.architecture}.{key}")
        if isinstance(factor, (int, float)) and factor > 0.0:
            return float(factor)
    return 1.0
