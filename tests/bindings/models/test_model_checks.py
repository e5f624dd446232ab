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
EPSILON = "llama.attention.layer_norm_rms_epsilon"
CASES: tuple[tuple[str, Change, Change, str], ...] = (
    (
        "llama",
        number("llama.block_count", 513),
        number("llama.block_count", 512),
        "513 as llama.block_count, not 1 to 512",
    ),
    (
        "llama",
        number("llama.block_count", 0),
        number("llama.block_count", 1),
        "0 as llama.block_count",
    ),
    ("llama", number(EPSILON, -1e-5, "f"), number(EPSILON, 0.0, "f"), "layer_norm_rms_epsilon"),
    ("llama", number(EPSILON, math.nan, "f"), number(EPSILON, 1.0, "f"), "NaN as llama"),
    ("llama", number(EPSILON, math.inf, "f"), number(EPSILON, 1e-12, "f"), "must be positive"),
    (
        "llama",
        number("llama.rope.freq_base", -1.0, "f"),
        number("llama.rope.freq_base", 1e6, "f"),
        "rope.freq_base",
    ),
    (
        "llama",
        text("llama.rope.scaling.type", "ntk"),
        text("llama.rope.scaling.type", "yarn"),
        "'ntk'",
    ),
    (
        "llama",
        number("llama.rope.dimension_count", 6),
        number("llama.rope.dimension_count", 8),
        "6 as llama.rope.dimension_count, not 8 to 8",
    ),
    (
        "glm4moe",
        number("glm4moe.rope.dimension_count", 0),
        number("glm4moe.rope.dimension_count", 2),
        "not 2 to 16",
    ),
    (
        "glm4moe",
        number("glm4moe.rope.dimension_count", 18),
        number("glm4moe.rope.dimension_count", 16),
        "not 2 to 16",
    ),
    (
        "glm4moe",
        number("glm4moe.rope.dimension_count", 7),
        number("glm4moe.rope.dimension_count", 6),
        "odd number",
    ),
    (
        "llama",
        number("llama.attention.head_count_kv", 3),
        number("llama.attention.head_count_kv", 4),
        "cannot share",
    ),
    (
        "llama",
        number("llama.attention.head_count", 0),
        number("llama.attention.head_count", 4),
        "0 attention heads that cannot share",
    ),
    (
        "llama",
        numbers("llama.attention.head_count_kv", 2, 3),
        numbers("llama.attention.head_count_kv", 2, 0),
        "cannot share",
    ),
    ("llama", number("llama.expert_used_count", 1), number("llama.expert_used_count", 0), "expert"),
    ("llama", stored_as(NORM, "F16"), stored_as(QUERY, "F16"), "needs such rows in F32"),
    ("llama", stored_as(QUERY, "F64"), stored_as(QUERY, "Q4_0"), "nothing can be multiplied by"),
    ("llama", stored_as(QUERY, "Q8_1"), stored_as("output.weight", "F16"), QUERY),
    (
        "glm4moe",
        number("glm4moe.expert_count", 1025),
        number("glm4moe.expert_count", 1024),
        "not 0 to 1,024",
    ),
    (
        "glm4moe",
        number("glm4moe.expert_used_count", 4),
        number("glm4moe.expert_used_count", 3),
        "not 1 to 3",
    ),
    (
        "glm4moe",
        numbers("glm4moe.expert_used_count", 1, 2, 9, 2),
        numbers("glm4moe.expert_used_count", 1, 2, 3, 2),
        "9 as",
    ),
    (
        "glm4moe",
        number("glm4moe.expert_group_count", 3),
        number("glm4moe.expert_group_count", 1),
        "expert_group_count",
    ),
    (
        "glm4moe",
        number("glm4moe.nextn_predict_layers", 9),
        number("glm4moe.nextn_predict_layers", 1),
        "nextn_predict",
    ),
    (
        "qwen35",
        numbers("qwen35.rope.dimension_sections", 3, 3, 33, 0),
        numbers("qwen35.rope.dimension_sections", 3, 3, 2, 0),
        "dimension_sections",
    ),
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
