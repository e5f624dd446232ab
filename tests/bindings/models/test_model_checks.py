"""Headers that would end the process: each is refused by name, and its sound neighbours are not."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.gguf_mutants import Entry, Parts, take_apart
from support.tiny_nextn import write_tiny_glm4moe, write_tiny_qwen35

from specrun.bindings.errors import MalformedFileError
from specrun.bindings.gguf import read_header
from specrun.bindings.models import check_model

_NUMBERS = {"F16": 1, "Q4_0": 2, "I32": 26, "F64": 28, "Q8_1": 9}
Change = Callable[[Parts], None]


@pytest.fixture(scope="module")
def sources(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parts]:
    folder = tmp_path_factory.mktemp("checks")
    moe, hybrid = folder / "moe.gguf", folder / "hybrid.gguf"
    write_tiny_glm4moe(moe)
    write_tiny_qwen35(hybrid)
    files = {"llama": tiny_model, "glm4moe": moe, "qwen35": hybrid}
    return {name: take_apart(path) for name, path in files.items()}


def number(name: str, value: float, layout: str = "I") -> Change:
    """Return a change that sets a number of the architecture."""
    code = {"I": 4, "i": 5, "f": 6}[layout]
    return raw(name, code, struct.pack(f"<{layout}", value))


def raw(name: str, code: int, value: bytes) -> Change:
    def change(parts: Parts) -> None:
        key = name.encode()
        parts.entries = [entry for entry in parts.entries if entry.key != key]
        parts.entries.append(Entry(key, code, value))

    return change


def text(name: str, value: str) -> Change:
    return raw(name, 8, struct.pack("<Q", len(value)) + value.encode())


def numbers(name: str, *values: int) -> Change:
    return raw(name, 9, struct.pack(f"<IQ{len(values)}i", 5, len(values), *values))


def stored_as(name: str, kind: str) -> Change:
    def change(parts: Parts) -> None:
        (place,) = (i for i, tensor in enumerate(parts.tensors) if tensor.name == name.encode())
        tensor = replace(parts.tensors[place], code=_NUMBERS[kind])
        parts.tensors[place] = replace(tensor, data=bytes(8 * math.prod(tensor.sizes)))

    return change


def checked(parts: Parts, change: Change, folder: Path, *, vocab_only: bool = False) -> None:
    changed = Parts(list(parts.entries), list(parts.tensors))
    change(changed)
    path = folder / "changed.gguf"
    path.write_bytes(changed.laid_out())
    check_model(path, read_header(path), vocab_only=vocab_only)


NORM, QUERY = "blk.0.attn_norm.weight", "blk.0.attn_q.weight"
EPSILON = "attention.layer_norm_rms_epsilon"
# Base, key without its architecture, a wrong value and its sound neighbour, words of the refusal.
COUNTS: tuple[tuple[str, str, int, int, str], ...] = (
    ("llama", "block_count", 513, 512, "513 as llama.block_count, not 1 to 512"),
    ("llama", "block_count", 0, 1, "0 as llama.block_count"),
    ("llama", "rope.dimension_count", 6, 8, "6 as llama.rope.dimension_count, not 8 to 8"),
    ("glm4moe", "rope.dimension_count", 0, 2, "not 2 to 16"),
    ("glm4moe", "rope.dimension_count", 18, 16, "not 2 to 16"),
    ("glm4moe", "rope.dimension_count", 7, 6, "odd number"),
    ("llama", "attention.head_count_kv", 3, 4, "cannot share"),
    ("llama", "attention.head_count", 0, 4, "0 attention heads that cannot share"),
    ("llama", "expert_used_count", 1, 0, "expert"),
    ("glm4moe", "expert_count", 1025, 1024, "not 0 to 1,024"),
    ("glm4moe", "expert_used_count", 4, 3, "not 1 to 3"),
    ("glm4moe", "expert_group_count", 3, 1, "expert_group_count"),
    ("glm4moe", "nextn_predict_layers", 9, 1, "nextn_predict"),
)
NUMBERS: tuple[tuple[str, str, float, float, str], ...] = (
    ("llama", EPSILON, -1e-5, 0.0, "layer_norm_rms_epsilon"),
    ("llama", EPSILON, math.nan, 1.0, "NaN as llama"),
    ("llama", EPSILON, math.inf, 1e-12, "must be positive"),
    ("llama", "rope.freq_base", -1.0, 1e6, "rope.freq_base"),
)
LISTS: tuple[tuple[str, str, tuple[int, ...], tuple[int, ...], str], ...] = (
    ("llama", "attention.head_count_kv", (2, 3), (2, 0), "cannot share"),
    ("glm4moe", "expert_used_count", (1, 2, 9, 2), (1, 2, 3, 2), "9 as"),
    ("qwen35", "rope.dimension_sections", (3, 3, 33, 0), (3, 3, 2, 0), "dimension_sections"),
)
CASES: tuple[tuple[str, Change, Change, str], ...] = (
    *((b, number(f"{b}.{k}", w), number(f"{b}.{k}", r), said) for b, k, w, r, said in COUNTS),
    *(
        (b, number(f"{b}.{k}", w, "f"), number(f"{b}.{k}", r, "f"), said)
        for b, k, w, r, said in NUMBERS
    ),
    *((b, numbers(f"{b}.{k}", *w), numbers(f"{b}.{k}", *r), said) for b, k, w, r, said in LISTS),
    (
        "llama",
        text("llama.rope.scaling.type", "ntk"),
        text("llama.rope.scaling.type", "yarn"),
        "'ntk'",
    ),
    ("llama", stored_as(NORM, "F16"), stored_as(QUERY, "F16"), "needs such rows in F32"),
    ("llama", stored_as(QUERY, "F64"), stored_as(QUERY, "Q4_0"), "nothing can be multiplied by"),
    ("llama", stored_as(QUERY, "Q8_1"), stored_as("output.weight", "F16"), QUERY),
)


@pytest.mark.parametrize(("base", "wrong", "right", "match"), CASES)
def test_what_llama_asserts_on_is_refused_by_name(
    sources: dict[str, Parts], tmp_path: Path, base: str, wrong: Change, right: Change, match: str
) -> None:
    checked(sources[base], lambda _: None, tmp_path)
    checked(sources[base], right, tmp_path)
    with pytest.raises(MalformedFileError, match=match):
        checked(sources[base], wrong, tmp_path)


def test_of_a_vocabulary_alone_the_rest_does_not_matter(
    sources: dict[str, Parts], tmp_path: Path
) -> None:
    checked(sources["llama"], number("llama.block_count", 0), tmp_path, vocab_only=True)
