"""The target that heads learn from: its tokens, matrices, hidden states and answers.

Two kinds: a Hugging Face folder, which torch computes, and a GGUF file, which llama.cpp does; if
torch is faster, on a GPU or a CPU with AVX-512, and has the memory, it computes the file of a
Llama, too. Trainings do not depend on which of them it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from specrun.bindings.contexts.rows import LAYER_INPUT_ARCHITECTURES
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.gguf import read_header
from specrun.bindings.models.model import Model
from specrun.convert.gguf import GGUFSource
from specrun.runtime.memory import resolve_gpu_layers
from specrun.train.data.answers import Answerer, FileAnswerer, runnable_target
from specrun.train.data.tokens import FileTokens, TargetTokenizer, TargetTokens
from specrun.train.target.file_target import (
    TeacherFeatures,
    check_file_target,
    check_matrices,
    check_teacher,
    teacher_matrices,
)
from specrun.train.target.from_gguf import llama_file_bytes, load_llama_file
from specrun.train.target.hf_model import HFModel, TargetMatrices, load_hf_model
from specrun.train.target.sampling import TorchAnswerer
from specrun.train.target.shape import ModelShape, checkpoint_size, file_shape, target_shape
from specrun.train.target.states import FeatureCache, FeatureSource, ModelFeatures
from specrun.train.trainer.memory import free_memory
from specrun.train.trainer.settings import dtype_name


class HeadTarget(ABC):
    """The interface of a target for training.

    `path` are its weights, `caution` is a warning before heads are trained for it, or "",
    `computed_by` the library that computes its states, and `leaves_states` is true if
    those of its answers are kept as they are given: a GPU computes them again in less time than
    they take to a disk. What torch computes is in the `precision` that is set.
    """

    path: Path
    shape: ModelShape
    tokens: TargetTokens
    caution: str = ""
    computed_by: str = "torch"
    leaves_states: bool = False
    precision: torch.dtype = torch.float32

    @abstractmethod
    def check_taps(self, taps: tuple[int, ...]) -> None:
        """Raise UnsupportedModelError unless it gives the inputs of the layers `taps`."""

    @abstractmethod
    def computed_in(self, precision: torch.dtype) -> str:
        """Return a name for the arithmetic of its states, if training is in `precision`."""

    @abstractmethod
    def weight_bytes(self, number_size: int) -> int:
        """Return the memory of its weights while its states are computed; numbers have a size."""

    @abstractmethod
    def answerer(
        self, place: Path, note: Callable[[str], None], kept: FeatureCache | None = None
    ) -> AbstractContextManager[Answerer]:
        """Return a context that opens it for answers; `place` holds a temporary file for them.

        If it leaves states, those of prompts and answers stay in `kept`.
        """

    @abstractmethod
    def states(self, taps: tuple[int, ...], longest: int) -> AbstractContextManager[FeatureSource]:
        """Return a context with the source of states of sequences of up to `longest` tokens."""

    @abstractmethod
    def matrices(self) -> TargetMatrices:
        """Return its embedding and output matrix; its states have been opened before."""


class TorchTarget(HeadTarget):
    """A target that torch computes on a device: a folder's, or the numbers of a Llama's file."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path, self._device, self._is_file = path, device, path.is_file()
        if self._is_file:
            self.shape, self.tokens = file_shape(GGUFSource(path)), FileTokens(path)
        else:
            self.shape, self.tokens = target_shape(path), TargetTokenizer(path)
        self._answers = self._is_file or _torch_is_faster(device)
        self.leaves_states = self._answers and device.type == "cpu"
        self._matrices: TargetMatrices | None = None

    def _load(self) -> HFModel:
        """Return the whole model, frozen."""
        load = load_llama_file if self._is_file else load_hf_model
        return load(self.path, self._device, self.precision)

    def check_taps(self, taps: tuple[int, ...]) -> None:
        """Every architecture of transformers gives the inputs of its layers."""

    def computed_in(self, precision: torch.dtype) -> str:
        """Return the precision's name, for a file torch's too: llama.cpp computes others."""
        return f"{'torch ' if self._is_file else ''}{dtype_name(precision)}"

    def weight_bytes(self, number_size: int) -> int:
        """Return those of all tensors in torch."""
        if self._is_file:
            return llama_file_bytes(self.path, number_size)
        return number_size * checkpoint_size(self.path)

    @contextmanager
    def answerer(
        self, place: Path, note: Callable[[str], None], kept: FeatureCache | None = None
    ) -> Iterator[Answerer]:
        """Let torch answer, or llama.cpp a converted folder if that is faster."""
        if self._answers:
            yield TorchAnswerer(self._load(), self.shape, self.tokens, kept)
        else:
            with runnable_target(self.path, place, note) as path:
                yield FileAnswerer(path)

    @contextmanager
    def states(self, taps: tuple[int, ...], longest: int) -> Iterator[FeatureSource]:
        """Load the model; of its weights the matrices stay afterwards."""
        model = self._load()
        self._matrices = model.matrices
        yield ModelFeatures(model, taps)

    def matrices(self) -> TargetMatrices:
        """Return those of the model that was loaded for its states."""
        if self._matrices is None:
            self._matrices = self._load().matrices
        return self._matrices


class FileTarget(HeadTarget):
    """A GGUF file, computed by llama.cpp; torch only holds its two matrices, dequantized.

    `shape` and `tokens` are the file's, or those of the folder that it was converted from.
    """

    computed_by = "llama.cpp"

    def __init__(
        self,
        path: Path,
        shape: ModelShape,
        tokens: TargetTokens,
        device: torch.device,
        *,
        n_threads: int = 0,
    ) -> None:
        self.path, self.shape, self.tokens, self._device = path, shape, tokens, device
        header = read_header(path)
        self._architecture = header.architecture
        experts = header.metadata.get(f"{header.architecture}.expert_count")
        if isinstance(experts, int) and experts:
            self.caution = (
                f"{path.name} has {experts} experts a layer: every drafted token may read others, "
                "so a head gains less than for a dense target"
            )
        self._n_threads = n_threads
        self._probe: tuple[Tensor, Tensor] | None = None

    def check_taps(self, taps: tuple[int, ...]) -> None:
        """Raise UnsupportedModelError unless llama.cpp hands out layer inputs of this file."""
        if taps and self._architecture not in LAYER_INPUT_ARCHITECTURES:
            raise UnsupportedModelError(
                f"{self.path} is a {self._architecture} model, whose layer inputs llama.cpp does "
                "not hand out, and EAGLE-3 reads them: train eagle, medusa or hydra, which read "
                "its final states"
            )

    def computed_in(self, precision: torch.dtype) -> str:
        """Return llama.cpp's name: its arithmetic does not depend on torch's."""
        return self.computed_by

    def weight_bytes(self, number_size: int) -> int:
        """Return the file's size and that of its matrices in torch."""
        return (
            self.path.stat().st_size + 2 * number_size * self.shape.vocab_size * self.shape.hidden
        )

    def answerer(
        self, place: Path, note: Callable[[str], None], kept: FeatureCache | None = None
    ) -> AbstractContextManager[Answerer]:
        """Let our runtime run the file."""
        return nullcontext(FileAnswerer(self.path))

    @contextmanager
    def states(self, taps: tuple[int, ...], longest: int) -> Iterator[FeatureSource]:
        """Load the model in llama.cpp; its memory is free again when this ends."""
        layers = resolve_gpu_layers("auto", self.path)
        with (
            Model(self.path, n_gpu_layers=layers) as model,
            closing(TeacherFeatures(model, longest, taps, n_threads=self._n_threads)) as source,
        ):
            self._probe = source.probe()
            yield source

    def matrices(self) -> TargetMatrices:
        """Dequantize both; raises UnsupportedModelError unless they make llama.cpp's logits."""
        found = teacher_matrices(self.path, self._device, self.precision)
        if self._probe is not None:
            check_matrices(found, *self._probe, self.path)
        return found


def open_head_target(
    target: Path, teacher: Path | None, *, device: torch.device, n_threads: int = 0
) -> HeadTarget:
    """Return a folder or a GGUF file as a target; `teacher` is a folder's GGUF file.

    Torch computes a folder, and a Llama's file if it is faster on `device` than llama.cpp and
    twice the file's numbers fit there. Reads no weights. Raises OptionError, FileMissingError,
    MalformedFileError, PairError for a teacher of another model, UnsupportedModelError for a model
    that can have no head.
    """
    if is_file_target(target):
        if teacher is not None:
            raise OptionError(
                f"--target {target} is a GGUF file, which gives its own states: leave out --teacher"
            )
        check_file_target(target)
        if _torch_is_faster(device) and _fits_as_llama(target, device):
            return TorchTarget(target, device)
        return FileTarget(
            target, file_shape(GGUFSource(target)), FileTokens(target), device, n_threads=n_threads
        )
    if teacher is None:
        return TorchTarget(target, device)
    shape, tokens = target_shape(target), TargetTokenizer(target)
    check_teacher(teacher, tokens, shape)
    return FileTarget(teacher, shape, tokens, device, n_threads=n_threads)


def _torch_is_faster(device: torch.device) -> bool:
    """Return whether torch answers and computes states faster than llama.cpp with the same device.

    On a CPU with AVX-512 both came twice as fast (docs/measurements.md has the figures); others
    were not measured.
    """
    return device.type != "cpu" or torch.backends.cpu.get_cpu_capability() == "AVX512"


def _fits_as_llama(path: Path, device: torch.device) -> bool:
    """Return whether torch can read a file back, with memory left for the training."""
    size = 4 if device.type == "cpu" else 2
    try:
        return 2 * llama_file_bytes(path, size) <= free_memory(device)
    except UnsupportedModelError:
        return False


def is_file_target(target: Path) -> bool:
    """Whether a target is meant to be a GGUF file, though it may not be there."""
    return target.is_file() or (target.suffix == ".gguf" and not target.is_dir())
