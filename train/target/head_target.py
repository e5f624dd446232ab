"""The target that heads learn from: its tokens, matrices and hidden states.

Two kinds: a Hugging Face folder, which torch computes, and a GGUF file, which llama.cpp does. What
trains does not know which of them it has.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path

import torch

from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.convert.checkpoint import open_checkpoint
from specrun.runtime.offload import resolve_gpu_layers
from specrun.train.data.file_tokens import FileTokens
from specrun.train.data.own_answers import runnable_target
from specrun.train.data.target_tokens import TargetTokenizer, TargetTokens
from specrun.train.target.features import FeatureSource, ModelFeatures
from specrun.train.target.file_shape import (
    check_file_target,
    check_taps,
    expert_count,
    file_shape,
)
from specrun.train.target.hf_model import TargetMatrices, load_hf_model
from specrun.train.target.target_shape import ModelShape, target_shape
from specrun.train.target.teacher import (
    LogitProbe,
    TeacherFeatures,
    check_teacher,
    teacher_matrices,
)
from specrun.train.trainer.precision import dtype_name


class HeadTarget(ABC):
    """What training asks of a target.

    `path` is where its weights lie, and `caution` what users should know before they train heads
    for it, or "".
    """

    path: Path
    shape: ModelShape
    tokens: TargetTokens
    caution: str = ""

    @abstractmethod
    def check_taps(self, taps: tuple[int, ...]) -> None:
        """Raise UnsupportedModelError unless it gives the inputs of the layers `taps`."""

    @abstractmethod
    def computed_in(self, precision: torch.dtype) -> str:
        """Return what names the arithmetic of its states, where training is in `precision`."""

    @abstractmethod
    def runnable(self, place: Path, note: Callable[[str], None]) -> AbstractContextManager[Path]:
        """Return what yields it as a GGUF file, made for a while in `place` where there is none."""

    @abstractmethod
    def states(
        self, taps: tuple[int, ...], longest: int, device: torch.device, precision: torch.dtype
    ) -> AbstractContextManager[FeatureSource]:
        """Return what opens the source of states of sequences of up to `longest` tokens."""

    @abstractmethod
    def matrices(self, device: torch.device, precision: torch.dtype) -> TargetMatrices:
        """Return its embedding and output matrix; its states have been opened before."""


class FolderTarget(HeadTarget):
    """A Hugging Face folder, computed by torch."""

    def __init__(self, folder: Path) -> None:
        self.path, self.shape, self.tokens = folder, target_shape(folder), TargetTokenizer(folder)
        self._matrices: TargetMatrices | None = None

    def check_taps(self, taps: tuple[int, ...]) -> None:
        """Every architecture of transformers gives the inputs of its layers."""

    def computed_in(self, precision: torch.dtype) -> str:
        """Return the precision's name."""
        return dtype_name(precision)

    def runnable(self, place: Path, note: Callable[[str], None]) -> AbstractContextManager[Path]:
        """Convert the folder in float16 for as long as it is run."""
        return runnable_target(self.path, place, note)

    @contextmanager
    def states(
        self, taps: tuple[int, ...], longest: int, device: torch.device, precision: torch.dtype
    ) -> Iterator[FeatureSource]:
        """Load the model; of its weights the matrices stay afterwards."""
        model = load_hf_model(self.path, device, precision)
        self._matrices = model.matrices
        yield ModelFeatures(model, taps)

    def matrices(self, device: torch.device, precision: torch.dtype) -> TargetMatrices:
        """Return those of the model that was loaded for its states."""
        if self._matrices is None:
            self._matrices = load_hf_model(self.path, device, precision).matrices
        return self._matrices


class FileTarget(HeadTarget):
    """A GGUF file, computed by llama.cpp; torch only holds its two matrices, dequantized.

    `shape` and `tokens` are the file's, or those of the folder that it was converted from.
    """

    def __init__(
        self, path: Path, shape: ModelShape, tokens: TargetTokens, *, n_threads: int = 0
    ) -> None:
        self.path, self.shape, self.tokens = path, shape, tokens
        experts = expert_count(path)
        if experts:
            self.caution = (
                f"{path.name} has {experts} experts a layer: every drafted token may read others, "
                "so a head gains less than for a dense target"
            )
        self._n_threads = n_threads
        self._probe: LogitProbe | None = None

    def check_taps(self, taps: tuple[int, ...]) -> None:
        """Raise UnsupportedModelError unless llama.cpp hands out layer inputs of this file."""
        if taps:
            check_taps(self.path)

    def computed_in(self, precision: torch.dtype) -> str:
        """Return llama.cpp's name: its arithmetic does not depend on torch's."""
        return "llama.cpp"

    def runnable(self, place: Path, note: Callable[[str], None]) -> AbstractContextManager[Path]:
        """The file itself."""
        return nullcontext(self.path)

    @contextmanager
    def states(
        self, taps: tuple[int, ...], longest: int, device: torch.device, precision: torch.dtype
    ) -> Iterator[FeatureSource]:
        """Load the model in llama.cpp; its memory is free again when this ends."""
        layers = resolve_gpu_layers("auto", self.path)
        with (
            Model(self.path, n_gpu_layers=layers) as model,
            closing(TeacherFeatures(model, longest, taps, n_threads=self._n_threads)) as source,
        ):
            self._probe = source.probe()
            yield source

    def matrices(self, device: torch.device, precision: torch.dtype) -> TargetMatrices:
        """Dequantize both; raises UnsupportedModelError unless they make llama.cpp's logits."""
        found = teacher_matrices(self.path, device, precision)
        if self._probe is not None:
            self._probe.check(found, self.path)
        return found


def open_head_target(target: Path, teacher: Path | None, *, n_threads: int = 0) -> HeadTarget:
    """Return a folder or a GGUF file as a target; `teacher` is a folder's GGUF file.

    Reads no weights. Raises OptionError, FileMissingError, MalformedFileError, PairError for a
    teacher of another model, UnsupportedModelError for what no head can be made for.
    """
    if is_file_target(target):
        if teacher is not None:
            raise OptionError(
                f"--target {target} is a GGUF file, which gives its own states: leave out --teacher"
            )
        check_file_target(target)
        return FileTarget(target, file_shape(target), FileTokens(target), n_threads=n_threads)
    if teacher is None:
        return FolderTarget(target)
    shape, tokens = target_shape(target), TargetTokenizer(target)
    check_teacher(teacher, tokens, shape)
    return FileTarget(teacher, shape, tokens, n_threads=n_threads)


def is_file_target(target: Path) -> bool:
    """Whether a target is meant to be a GGUF file, though it may not be there."""
    return target.is_file() or (target.suffix == ".gguf" and not target.is_dir())


def weight_bytes(target: Path, number_size: int) -> int:
    """Return the memory of all weights: as a GGUF file has them, or of numbers of a size."""
    if target.is_file():
        return target.stat().st_size
    tensors = open_checkpoint(target).tensors.values()
    return number_size * sum(math.prod(tensor.shape) for tensor in tensors)
