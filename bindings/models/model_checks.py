"""Checks of a model's header for values on which llama.cpp asserts, which ends the process.

Read in the sources of llama.cpp 4df29be4f (llama-model.cpp, llama-vocab.cpp, ggml-cpu) and found by
mutating small models. `trial` finds cases that are missing here, and cannot name them so well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import NoReturn

from specrun.bindings.errors import MalformedFileError, ModelLoadError, UnsupportedModelError
from specrun.bindings.gguf import ArrayValue, GGUFHeader, MetadataValue, TensorInfo
from specrun.bindings.models.nextn import split_headers, split_name, split_paths

_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# Types without a kernel that multiplies by them: integers that are no quantization, double
# precision, and those that only activations are brought to.
_NEVER_MULTIPLIED = frozenset(("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"))
_ADDED = re.compile(r"norm|\.bias$|ssm_|^rope_f")
_TABLE = "tid2eid"  # matrices of indices, not of weights
_AGAIN = "convert the model again"
# Whose graphs assert that positions rotate whole heads (`n_embd_head == n_rot`).
_WHOLE_HEADS_OF = """
    apertus arcee arctic baichuan chameleon codeshell cogvlm cohere2moe dbrx deci deepseek
    dots1 dream ernie4_5 ernie4_5-moe exaone exaone-moe exaone4 falcon granite grok grovemoe
    hunyuan-moe hunyuan_vl hy_v3 internlm2 jais2 llada llada-moe llama llama4 maincoder mellum
    mistral3 olmo olmo2 olmoe orion paddleocr pangu-embedded plamo qwen2 qwen2moe qwen2vl
    qwen3 qwen3moe qwen3vl qwen3vlmoe rnd1 seed_oss smallthinker smollm3 starcoder2 talkie
    xverse
"""
_WHOLE_HEADS = frozenset(_WHOLE_HEADS_OF.split())


def check_model(path: Path, header: GGUFHeader, *, vocab_only: bool = False) -> None:
    """Raise MalformedFileError for a header that would end the process, with the key and value.

    `vocab_only`: only the parts that llama.cpp then reads.
    """
    check_is_model(path, header)
    check = _Checks(path, header)
    check.tokens()
    if vocab_only:
        return
    check.counts()
    check.numbers()
    for part in split_headers(path, header):
        check_types(path, part.tensors)


def check_is_model(path: Path, header: GGUFHeader) -> None:
    """Raise UnsupportedModelError for a file that belongs to a model: it names the next step."""
    metadata = header.metadata
    kind = metadata.get("general.type")
    if kind == "adapter":
        advice = "give it as --lora, beside the model (-m) that it was trained for"
        raise UnsupportedModelError(f"{path} is a LoRA adapter: {advice}")
    if kind == "mmproj" or header.architecture == "clip":
        advice = "give the model's own file; specrun reads text alone"
        raise UnsupportedModelError(f"{path} is the part of a model that sees (mmproj): {advice}")
    number, count = metadata.get("split.no"), metadata.get("split.count")
    if not isinstance(number, int) or not isinstance(count, int) or count < 2:
        return
    if number > 0:
        first = split_name(path, 1) or f"NAME-00001-of-{count:05}.gguf"
        problem = f"{path} is part {number + 1} of {count} of a model"
        raise UnsupportedModelError(f"{problem}: give the first one, {first}")
    if split_name(path, 1) is None:
        problem = f"{path} is the first of {count} parts of a model, which are found by their names"
        wanted = f"NAME-00001-of-{count:05}.gguf"
        raise UnsupportedModelError(f"{problem}: name it as the others are, {wanted}")
    there = {part.name for part in split_paths(path, header)}
    missing = [
        name
        for part in range(1, count + 1)
        if (name := split_name(path, part)) is not None and name not in there
    ]
    if missing:
        listed = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        problem = f"{path} is the first of {count} parts of a model, and {listed} is not beside it"
        raise ModelLoadError(f"{problem}: download all parts into one folder")


class _Checks:
    """The header of one model, and how to refuse it."""

    def __init__(self, path: Path, header: GGUFHeader) -> None:
        self._path, self._metadata = path, header.metadata
        self._prefix = f"{header.architecture}."

    def _fail(self, problem: str) -> NoReturn:
        raise MalformedFileError(f"{self._path} {problem}: {_AGAIN}")

    def _value(self, name: str) -> MetadataValue | None:
        return self._metadata.get(self._prefix + name)

    def _integers(self, name: str) -> list[int]:
        """Return a value of the architecture as a list: one for all layers, or one for each."""
        value = self._value(name)
        items = list(value) if isinstance(value, ArrayValue) else [value]
        return [item for item in items if isinstance(item, int) and not isinstance(item, bool)]

    def _count(self, name: str) -> int:
        """Return a count; 0 if it is absent, or of a type that llama.cpp refuses itself."""
        return (self._integers(name) or [0])[0]

    def _within(self, name: str, count: int, least: int, most: int) -> None:
        if not least <= count <= most:
            self._fail(f"has {count:,} as {self._prefix}{name}, not {least} to {most:,}")

    def tokens(self) -> None:
        """Refuse a vocabulary with a token twice."""
        tokens = self._metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, ArrayValue) or tokens.element_type != "string":
            return
        first: dict[bytes, int] = {}
        for token in range(len(tokens)):
            # As llama.cpp reads them: cut at a zero byte, empty ones with names of their own.
            text = tokens.bytes_at(token).split(b"\0", 1)[0] or b"[EMPTY_%d]" % token
            if first.setdefault(text, token) != token:
                shown = text.decode("utf-8", "replace")
                places = f"as tokens {first[text]} and {token}"
                self._fail(f"has the token {shown!r} twice in its vocabulary, {places}")

    def counts(self) -> None:
        """Refuse layers, experts and heads that are too many or do not divide each other."""
        if self._value("block_count") is not None:
            layers = self._count("block_count")
            self._within("block_count", layers, 1, _MAX_LAYERS)
            self._within("nextn_predict_layers", self._count("nextn_predict_layers"), 0, layers)
        self._experts()
        heads = self._integers("attention.head_count") or [0]
        groups = self._integers("attention.head_count_kv") or [0]
        layers = max(len(heads), len(groups))
        both = zip(_repeated(heads, layers), _repeated(groups, layers), strict=True)
        for n_heads, n_groups in both:
            alone = not any(heads) and n_groups > 0
            if alone or min(n_heads, n_groups) < 0 or (n_groups and n_heads % n_groups):
                shared = f"{n_groups} of keys and values ({self._prefix}attention.head_count_kv)"
                self._fail(f"has {n_heads} attention heads that cannot share {shared}")
        self._rotations(heads)

    def _rotations(self, heads: Sequence[int]) -> None:
        """Refuse positions that rotate more numbers than a head has, an odd number, or none."""
        size = self._count("attention.key_length")
        # As llama.cpp has it: by the first layer with heads.
        first = next((count for count in heads if count > 0), 1)
        size = size or self._count("embedding_length") // first
        if self._value("rope.dimension_count") is not None and max(heads) > 0:
            rotated = self._count("rope.dimension_count")
            whole = self._prefix[:-1] in _WHOLE_HEADS
            self._within("rope.dimension_count", rotated, size if whole else 2, size)
            if rotated % 2:
                self._fail(f"has {rotated} as {self._prefix}rope.dimension_count, an odd number")
        sections = self._integers("rope.dimension_sections")
        if min(sections, default=0) < 0 or sum(sections) > size:
            self._fail(f"has {sections} as {self._prefix}rope.dimension_sections of {size} numbers")

    def _experts(self) -> None:
        experts, groups = self._count("expert_count"), self._count("expert_group_count")
        self._within("expert_count", experts, 0, _MAX_EXPERTS)
        used = max(self._integers("expert_used_count"), default=0)
        if experts <= 1 and self._prefix.startswith("hunyuan"):
            return  # llama.cpp reads them as dense
        self._within("expert_used_count", used, min(experts, 1), experts)
        self._within("expert_group_count", groups, 0, max(0, experts - 1))
        if groups > 1:
            if experts % groups:
                self._fail(f"has {experts} experts in {groups} groups, which do not divide them")
            in_use = self._count("expert_group_used_count")
            self._within("expert_group_used_count", in_use, 1, groups - 1)

    def numbers(self) -> None:
        """Refuse numbers that no model has, and a scaling of positions that is not known."""
        for key, value in self._metadata.items():
            if not key.startswith(self._prefix):
                continue
            name = key.removeprefix(self._prefix)
            if isinstance(value, float) and math.isnan(value):
                self._fail(f"has NaN as {key}")
            if name.endswith("epsilon") or name == "rope.freq_base":
                self._positive(key, value)
        scaling = self._value("rope.scaling.type")
        if isinstance(scaling, str) and scaling not in _ROPE_SCALINGS:
            known = ", ".join(_ROPE_SCALINGS)
            self._fail(f"scales positions by {scaling[:40]!r}, and llama.cpp supports {known}")

    def _positive(self, key: str, value: MetadataValue) -> None:
        for number in value if isinstance(value, ArrayValue) else (value,):
            if isinstance(number, float) and not 0.0 <= number < math.inf:
                self._fail(f"has {number} as {key}, which must be positive")


def check_types(path: Path, tensors: Iterable[TensorInfo]) -> None:
    """Raise MalformedFileError for a tensor of a type that ggml's CPU kernels do not compute with.

    Rows that are added or multiplied element by element must be F32, as every converter writes
    them; matrices must be of a type that something can be multiplied by.
    """
    for tensor in tensors:
        is_row = tensor.n_elements == (tensor.shape or (1,))[0]
        has = f"{path} has {tensor.name} in {tensor.type_name}"
        if is_row and tensor.type_name != "F32" and _ADDED.search(tensor.name):
            raise MalformedFileError(f"{has}, and llama.cpp needs such rows in F32: {_AGAIN}")
        is_matrix = not is_row and tensor.name.endswith(".weight") and _TABLE not in tensor.name
        if is_matrix and tensor.type_name in _NEVER_MULTIPLIED:
            raise MalformedFileError(f"{has}, which nothing can be multiplied by: {_AGAIN}")


def _repeated(values: Sequence[int], count: int) -> Iterator[int]:
    """Return one value for each layer, the last again if there are too few."""
    return chain(values, repeat(values[-1], count - len(values)))
