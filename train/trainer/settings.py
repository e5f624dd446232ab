"""Settings of a training: steps, learning rate, optimizer, precision and device."""

from __future__ import annotations

import dataclasses
import functools
import math
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from specrun.bindings.errors import OptionError

# == Precision and device: bfloat16 is tried by computing, not by reading flags ====================
#
# A virtual machine may advertise bfloat16 instructions that end the process when they are used, so
# the trial runs in a process of its own.


PRECISIONS = ("auto", "float32", "bfloat16")
_SECONDS = 60
_WORTHWHILE = 1.2  # times the speed of float32

# Prints how many times faster bfloat16 is, for products as training makes them, forward and
# backward: with rows of weights. Without bfloat16 instructions (AVX-512 of 2019) `rows @ weight` is
# 1.6 times as fast in bfloat16, and the products of layers .75 times.
_TRIAL = """
import sys, time, torch
device = torch.device(sys.argv[1])
threads, n_rows, width, repeats = map(int, sys.argv[2:])
torch.set_num_threads(threads)
def wait():
    if device.type == "cuda":
        torch.cuda.synchronize(device)
def seconds(dtype):
    weight = torch.randn(width, width, device=device, requires_grad=True)
    rows = torch.randn(n_rows, width, device=device)
    best = 1e9
    for _ in range(6):
        wait()
        started = time.perf_counter()
        for _ in range(repeats):
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                products = torch.nn.functional.linear(rows, weight)
                loss = torch.nn.functional.silu(products).float().square().mean()
            loss.backward()
        if not bool(torch.isfinite(weight.grad).all()):
            sys.exit(1)
        wait()
        best = min(best, time.perf_counter() - started)
    return best
print(seconds(torch.float32) / seconds(torch.bfloat16))
"""


def trial_size(device_type: str) -> tuple[int, int, int]:
    """Return (rows, width, repeats) of timed products [rows, width] x [width, width].

    A device computes them for longer than it takes to launch and to cast them. On a CPU two billion
    operations are tens of milliseconds; a GPU has done them before its next kernel is launched, and
    would seem as fast in float32 as in bfloat16.
    """
    return (512, 1024, 1) if device_type == "cpu" else (4096, 4096, 4)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type of numbers in files and options, such as "float32"."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def bfloat16_gain(device: str, n_threads: int) -> float | None:
    """Return how much faster bfloat16 products are; None if they fail or take too long."""
    size = trial_size(torch.device(device).type)
    command = [sys.executable, "-c", _TRIAL, device, str(n_threads), *map(str, size)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        return float(done.stdout) if done.returncode == 0 else None
    except (subprocess.TimeoutExpired, ValueError, OSError):
        return None


def usable_precision(wanted: str, device: torch.device, earlier: str | None = None) -> torch.dtype:
    """Return the precision of products: "auto" is bfloat16 if it works and is faster.

    A resumed run goes on in its `earlier` one if it is left the choice: a second trial on a busy
    machine may fall differently, and the losses would part. Raises OptionError if bfloat16 is
    requested, or was computed in before, and fails on this machine.
    """
    if wanted == "auto" and earlier in PRECISIONS:
        wanted = earlier
    if wanted == "float32":
        return torch.float32
    if wanted not in PRECISIONS:
        raise OptionError(f"precision {wanted!r}: use one of {', '.join(PRECISIONS)}")
    gain = bfloat16_gain(str(device), torch.get_num_threads())
    if wanted == "bfloat16" and gain is None:
        raise OptionError(f"bfloat16 was tried on {device} and failed: use --precision float32")
    is_faster = gain is not None and gain >= _WORTHWHILE
    return torch.bfloat16 if wanted == "bfloat16" or is_faster else torch.float32


def usable_device(wanted: str) -> torch.device:
    """Return the device to train on: "auto" is the first GPU that torch sees, else the CPU."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.zeros(1, device=device)
    except Exception as error:  # torch names an unknown or absent device in several ways
        raise OptionError(f"torch cannot compute on {wanted!r}: use auto, cpu or cuda") from error
    return device


def device_name(device: torch.device) -> str:
    """Return the name of the very GPU that computes, "CPU" for the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


# == Steps, learning rate and optimizer ============================================================


MatrixOptimizer = Literal["adamw", "muon"]


@dataclass(frozen=True, slots=True)
class TrainingDefaults:
    """Defaults of the training of a kind of model."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 0.5
    weight_decay: float = 0.0
    matrix_optimizer: MatrixOptimizer = "adamw"


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """How long and how fast to learn; a resumed run must have the same `identity`.

    `learning_rate` is the peak, after `warmup_steps` of a straight rise; it then falls as a cosine
    to 0. With `decay` it stays at the peak instead until the last share `decay` of the steps, in
    which it falls in a straight line. `matrix_optimizer` trains the hidden matrices that a learner
    names, AdamW all else. `clip_norm` bounds the length
    of the gradient, `measure_every` counts steps between measures (0: only at the end).
    """

    steps: int
    learning_rate: float
    tokens_per_batch: int = 4096
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    measure_every: int = 0
    seed: int = 0
    save_seconds: float = 180.0
    precision: torch.dtype = torch.float32
    decay: float | None = None
    matrix_optimizer: MatrixOptimizer = "adamw"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise OptionError(f"{self.steps} steps: give at least 1")
        if not 0 < self.learning_rate < 10:
            rate = f"a learning rate of {self.learning_rate:g}"
            raise OptionError(f"{rate}: give a number above 0, such as 1e-3")
        if self.tokens_per_batch < 1:
            raise OptionError(f"{self.tokens_per_batch} tokens in a batch: give at least 1")
        known = get_args(MatrixOptimizer)
        if self.matrix_optimizer not in known:
            given = f"the matrices' optimizer is {self.matrix_optimizer!r}"
            raise OptionError(f"{given}: use one of {', '.join(known)}")
        if self.decay is not None and not 0 < self.decay <= 1:
            share = f"a decay over {self.decay:g} of the steps"
            raise OptionError(f"{share}: give a share above 0, at most 1")

    def rate_factor(self, step: int) -> float:
        """Return the factor of the peak learning rate at a step, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.decay is not None:
            return min(1.0, (self.steps - step) / (self.decay * self.steps))
        share = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, share)))

    @property
    def precision_name(self) -> str:
        """The precision as users write it."""
        return dtype_name(self.precision)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that a checkpoint's run and a resumed one must share.

        Not how often it is saved, nor its precision, nor the end of a plateau, which may be put off
        while it lasts. Defaults are left out, as in the checkpoints of versions without
        these settings.
        """
        values = dataclasses.asdict(self)
        left_out = ["save_seconds", "precision", "decay" if self.decay is None else "steps"]
        if self.matrix_optimizer == "adamw":
            left_out.append("matrix_optimizer")
        for name in left_out:
            del values[name]
        # Lists, as checkpoints give them back; the final rate was a setting once.
        return {**values, "betas": list(self.betas), "final_rate": 0.0}
