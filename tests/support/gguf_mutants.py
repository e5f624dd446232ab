"""Mutants of GGUF files: one small file taken apart, changed in one to three places, put together.

Most changes are made to the parts, and the file is then laid out anew: a change of bytes alone
would mostly be refused for its extents, and never reach the code behind.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specrun.bindings.gguf import TENSOR_TYPES

_UINT32, _FLOAT32, _STRING, _ARRAY = 4, 6, 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
_STRINGS = struct.pack("<I", _STRING)  # how an array of strings begins
_ALIGNMENT = 32
_MOST_DATA = 1 << 20  # of a tensor whose shape or type was changed; larger ones stay too short
_INTEGERS = (0, 1, 2, 3, 5, 7, 8, 33, 255, 256, 511, 513, 1025, 65535, 1 << 20, 2**31 - 1, 2**31)
_INTEGERS += (2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1, -1)
_FLOATS = (0.0, -0.0, -1.0, -1e-5, 1e-45, 1e30, 3.4e38, math.inf, -math.inf, math.nan, 0.5, 2.0)
_TEXTS = (b"", b"\0", b"a\0b", b"\xff\xfe", b"\xc3", b"x" * 70, b"llama", b"gpt2", b"none", b"yarn")
_TEXTS += (
    b"bert",
    b"t5",
    b"rwkv",
    b"linear",
    b"longrope",
    b"mean",
    b"gemma2",
    b"{{",
    b"%s%n",
    b"default",
)
_NAMES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "mamba",
    "rwkv6",
    "falcon",
)
_NAMES += ("gpt2", "bert", "t5", "deepseek2", "qwen35", "glm4moe", "mixtral", "granite", "olmo2")


@dataclass(frozen=True)
class Entry:
    """A key of the metadata: its type's code and its value as the file has it."""

    key: bytes
    code: int
    raw: bytes


@dataclass(frozen=True)
class Tensor:
    """A tensor: sizes in ggml's order, the number of its type, its bytes."""

    name: bytes
    sizes: tuple[int, ...]
    code: int
    data: bytes


@dataclass
class Parts:
    """A GGUF file taken apart; `offsets` None: the tensors lie one after the other."""

    entries: list[Entry]
    tensors: list[Tensor]
    offsets: list[int] | None = None
    more_entries: int = 0
    more_tensors: int = 0

    def laid_out(self) -> bytes:
        """Return the file."""
        head = b"GGUF" + struct.pack(
            "<IQQ",
            3,
            max(0, len(self.tensors) + self.more_tensors),
            max(0, len(self.entries) + self.more_entries),
        )
        for entry in self.entries:
            head += _text(entry.key) + struct.pack("<I", entry.code) + entry.raw
        data, offsets = b"", []
        for tensor in self.tensors:
            offsets.append(len(data))
            data += tensor.data + bytes(-len(tensor.data) % _ALIGNMENT)
        for tensor, offset in zip(self.tensors, self.offsets or offsets, strict=False):
            head += _text(tensor.name) + struct.pack("<I", len(tensor.sizes))
            head += struct.pack(f"<{len(tensor.sizes)}Q", *tensor.sizes)
            head += struct.pack("<IQ", tensor.code, offset)
        return head + bytes(-len(head) % _ALIGNMENT) + data


def _text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def take_apart(path: Path) -> Parts:
    """Return the parts of a sound file of the default alignment."""
    data = path.read_bytes()
    _, n_tensors, n_entries = struct.unpack_from("<IQQ", data, 4)
    place = 24

    def number(layout: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from(f"<{layout}", data, place)
        place += struct.calcsize(layout)
        return int(value)

    def text() -> bytes:
        nonlocal place
        length = number("Q")
        place += length
        return data[place - length : place]

    def skip(code: int) -> None:
        nonlocal place
        if code == _STRING:
            text()
        elif code == _ARRAY:
            element, count = number("I"), number("Q")
            if element == _STRING:
                for _ in range(count):
                    text()
            else:
                place += count * struct.calcsize(_SCALARS[element])
        else:
            place += struct.calcsize(_SCALARS[code])

    entries, found = [], []
    for _ in range(n_entries):
        key, code, start = text(), number("I"), place
        skip(code)
        entries.append(Entry(key, code, data[start:place]))
    for _ in range(n_tensors):
        name, n_sizes = text(), number("I")
        sizes = tuple([number("Q") for _ in range(n_sizes)])
        found.append((name, sizes, number("I"), number("Q")))
    start = -(-place // _ALIGNMENT) * _ALIGNMENT
    tensors = [
        Tensor(name, sizes, code, data[start + offset : start + offset + _n_bytes(sizes, code)])
        for name, sizes, code, offset in found
    ]
    return Parts(entries, tensors)


def _n_bytes(sizes: tuple[int, ...], code: int) -> int:
    kind = TENSOR_TYPES[code]
    return math.prod(sizes) // kind.block_size * kind.block_bytes


def mutant(parts: Parts, seed: int) -> bytes:
    """Return the mutant of this number: always the same one."""
    dice = random.Random(seed)
    changed = Parts(list(parts.entries), list(parts.tensors))
    for _ in range(dice.choice((1, 1, 1, 1, 2, 3))):
        dice.choices(_PARTS, _PART_WEIGHTS)[0](changed, dice)
    data = changed.laid_out()
    if dice.random() < 0.15:
        data = dice.choice(_BYTES)(data, dice)
    return data


# -- changes of parts ------------------------------------------------------------------------------


def _change_scalar(parts: Parts, dice: random.Random) -> None:
    """Give a number of the architecture, or of the tokenizer, another value."""
    places = [i for i, entry in enumerate(parts.entries) if entry.code in _SCALARS]
    if places:
        place = dice.choice(places)
        entry = parts.entries[place]
        raw = _packed(_SCALARS[entry.code], entry.raw, dice)
        parts.entries[place] = replace(entry, raw=raw)


def _packed(layout: str, old: bytes, dice: random.Random) -> bytes:
    if len(old) != struct.calcsize(layout):
        old = bytes(struct.calcsize(layout))  # a value whose type was changed before
    if layout in "fd":
        return struct.pack(
            f"<{layout}", dice.choice((*_FLOATS, -struct.unpack(f"<{layout}", old)[0]))
        )
    (before,) = struct.unpack(f"<{layout}", old)
    near = (before + 1, before - 1, 2 * before, before // 2, 3 * before)
    value = dice.choice(_INTEGERS if dice.random() < 0.6 else near)
    return (value % (1 << 8 * len(old))).to_bytes(len(old), "little")


def _change_array(parts: Parts, dice: random.Random) -> None:
    """Change elements, length or element type of an array of numbers."""
    places = [
        place
        for place, entry in enumerate(parts.entries)
        if entry.code == _ARRAY and len(entry.raw) >= 12 and entry.raw[0] in _SCALARS
    ]
    if not places:
        return
    place = dice.choice(places)
    entry = parts.entries[place]
    element, count = struct.unpack_from("<IQ", entry.raw)
    if element not in _SCALARS:
        return
    width = struct.calcsize(_SCALARS[element])
    if len(entry.raw) != 12 + width * count:
        return  # no array: its type was changed before
    values = [entry.raw[12 + width * i : 12 + width * (i + 1)] for i in range(count)]
    kind = dice.randrange(3)
    if kind == 0 and values:
        for _ in range(dice.choice((1, 1, 5))):
            at = dice.randrange(count)
            values[at] = _packed(_SCALARS[element], values[at], dice)
    elif kind == 1:
        values = values[: dice.randrange(count + 1)] if dice.random() < 0.5 else values * 2
    else:
        same = [code for code, c in _SCALARS.items() if struct.calcsize(c) == width]
        element = dice.choice(same)
    raw = struct.pack("<IQ", element, len(values)) + b"".join(values)
    parts.entries[place] = replace(entry, raw=raw)


def _change_text(parts: Parts, dice: random.Random) -> None:
    """Give a text, or one text of a list, another value."""
    places = [
        place
        for place, entry in enumerate(parts.entries)
        if entry.code == _STRING or (entry.code == _ARRAY and entry.raw[:4] == _STRINGS)
    ]
    if not places:
        return
    place = dice.choice(places)
    entry = parts.entries[place]
    if entry.code == _STRING:
        parts.entries[place] = replace(entry, raw=_text(dice.choice(_TEXTS)))
        return
    (count,) = struct.unpack_from("<Q", entry.raw, 4)
    texts, at = [], 12
    if 8 * count > len(entry.raw):
        return  # no array: its type was changed before
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", entry.raw, at)
        texts.append(entry.raw[at + 8 : at + 8 + length])
        at += 8 + length
    kind = dice.randrange(3)
    if kind == 0 and texts:
        texts[dice.randrange(count)] = dice.choice((*_TEXTS, dice.choice(texts)))
    elif kind == 1:
        dice.shuffle(texts)
    else:
        texts = texts[: dice.randrange(count + 1)]
    raw = struct.pack("<IQ", _STRING, len(texts)) + b"".join(map(_text, texts))
    parts.entries[place] = replace(entry, raw=raw)


def _change_type(parts: Parts, dice: random.Random) -> None:
    """Say another type of a value, its bytes as they are or as that type has them."""
    place = dice.randrange(len(parts.entries))
    code = dice.choice((*_SCALARS, _STRING, _ARRAY, 13))
    entry = parts.entries[place]
    if code in _SCALARS and dice.random() < 0.8:
        raw = _packed(_SCALARS[code], bytes(struct.calcsize(_SCALARS[code])), dice)
        entry = replace(entry, raw=raw)
    parts.entries[place] = replace(entry, code=code)


def _change_entries(parts: Parts, dice: random.Random) -> None:
    """Drop, repeat, swap or invent keys."""
    kind, place = dice.randrange(4), dice.randrange(len(parts.entries))
    if kind == 0:
        del parts.entries[place]
    elif kind == 1:
        parts.entries.append(parts.entries[place])
    elif kind == 2:
        other = dice.randrange(len(parts.entries))
        mine, theirs = parts.entries[place], parts.entries[other]
        parts.entries[place] = replace(theirs, key=mine.key)
        parts.entries[other] = replace(mine, key=theirs.key)
    else:
        name = _architecture(parts)
        key = name + b"." + dice.choice(_KEYS)
        if dice.random() < 0.5:
            number = dice.choice(_INTEGERS) % 2**32
            parts.entries.append(Entry(key, _UINT32, struct.pack("<I", number)))
        else:
            parts.entries.append(Entry(key, _FLOAT32, struct.pack("<f", dice.choice(_FLOATS))))


_KEYS = b"""
    expert_count expert_used_count expert_group_count expert_group_used_count nextn_predict_layers
    attention.key_length attention.value_length attention.sliding_window attention.causal
    attention.layer_norm_epsilon attention.group_norm_epsilon pooling_type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.attn_factor attn_logit_softcapping
    final_logit_softcapping attention.clamp_kqv attention.max_alibi_bias ssm.conv_kernel
    ssm.inner_size ssm.state_size ssm.time_step_rank ssm.group_count logit_scale embedding_scale
    residual_scale attention.scale vocab_size attention.q_lora_rank leading_dense_block_count
    full_attention_interval rope.dimension_count attention.shared_kv_layers embedding_length_out
    decoder_block_count attention.temperature_length expert_weights_scale expert_gating_func
    rope.freq_base
""".split()


def _architecture(parts: Parts) -> bytes:
    raws = [entry.raw[8:] for entry in parts.entries if entry.key == b"general.architecture"]
    return raws[0] if raws else b"llama"


def _rename_architecture(parts: Parts, dice: random.Random) -> None:
    """Call the file another architecture's, its keys too: other graphs over the same tensors."""
    old, new = _architecture(parts), dice.choice(_NAMES).encode()
    for place, entry in enumerate(parts.entries):
        if entry.key == b"general.architecture":
            parts.entries[place] = replace(entry, raw=_text(new))
        elif entry.key.startswith(old + b"."):
            parts.entries[place] = replace(entry, key=new + entry.key[len(old) :])


def _change_tensor_type(parts: Parts, dice: random.Random) -> None:
    place = dice.randrange(len(parts.tensors))
    code = dice.choice(tuple(TENSOR_TYPES)) if dice.random() < 0.95 else dice.randrange(64)
    parts.tensors[place] = _refilled(replace(parts.tensors[place], code=code), dice)


def _change_sizes(parts: Parts, dice: random.Random) -> None:
    place = dice.randrange(len(parts.tensors))
    sizes = list(parts.tensors[place].sizes) or [1]
    kind = dice.randrange(5)
    if kind == 0:
        sizes.reverse()
    elif kind == 1:
        at = dice.randrange(len(sizes))
        sizes[at] = dice.choice((0, 1, sizes[at] + 1, sizes[at] * 2, sizes[at] // 2, sizes[at] - 1))
    elif kind == 2:
        sizes.append(dice.choice((1, 2)))
    elif kind == 3:
        sizes.pop()
    else:
        sizes[dice.randrange(len(sizes))] = dice.choice(_INTEGERS) % 2**64
    parts.tensors[place] = _refilled(replace(parts.tensors[place], sizes=tuple(sizes)), dice)


def _refilled(tensor: Tensor, dice: random.Random) -> Tensor:
    """Return the tensor with as many bytes as its sizes and type ask for, if they are not many."""
    if tensor.code not in TENSOR_TYPES:
        return tensor
    wanted = _n_bytes(tensor.sizes, tensor.code)
    if wanted > _MOST_DATA:
        return tensor
    more = dice.randbytes(max(0, wanted - len(tensor.data)))
    return replace(tensor, data=(tensor.data + more)[:wanted])


def _change_tensors(parts: Parts, dice: random.Random) -> None:
    """Drop, repeat, rename or swap tensors."""
    kind, place = dice.randrange(4), dice.randrange(len(parts.tensors))
    tensor, other = parts.tensors[place], dice.choice(parts.tensors)
    if kind == 0 and len(parts.tensors) > 1:
        del parts.tensors[place]
    elif kind == 1:
        parts.tensors.append(tensor)
    elif kind == 2:
        name = dice.choice((b"", b"x" * 70, b"\xff", other.name + b".", b"rope_freqs.weight"))
        parts.tensors[place] = replace(tensor, name=name)
    else:
        parts.tensors[place] = replace(other, name=tensor.name)


def _change_data(parts: Parts, dice: random.Random) -> None:
    """Fill a tensor with other bits: not numbers, infinities, or anything."""
    place = dice.randrange(len(parts.tensors))
    tensor = parts.tensors[place]
    n_bytes = len(tensor.data)
    pattern = dice.choice((b"\xff", b"\0", b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b""))
    data = (pattern * n_bytes)[:n_bytes] if pattern else dice.randbytes(n_bytes)
    parts.tensors[place] = replace(tensor, data=data)


def _change_layout(parts: Parts, dice: random.Random) -> None:
    """Let offsets or counts be wrong."""
    kind = dice.randrange(3)
    if kind == 0:
        parts.offsets = [32 * dice.randrange(4096) for _ in parts.tensors]
    elif kind == 1:
        parts.more_tensors = dice.choice((-1, 1, 1 << 20))
    else:
        parts.more_entries = dice.choice((-1, 1, 1 << 20))


_CHANGES: dict[Callable[[Parts, random.Random], None], int] = {
    _change_scalar: 8,
    _change_array: 4,
    _change_text: 4,
    _change_type: 2,
    _change_entries: 4,
    _rename_architecture: 2,
    _change_tensor_type: 5,
    _change_sizes: 4,
    _change_tensors: 3,
    _change_data: 2,
    _change_layout: 1,
}
_PARTS, _PART_WEIGHTS = list(_CHANGES), list(_CHANGES.values())


# -- changes of bytes ------------------------------------------------------------------------------


def _flip(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 4, 32))):
        changed[dice.randrange(min(len(data), 1 << dice.randrange(5, 24)))] ^= 1 << dice.randrange(
            8
        )
    return bytes(changed)


def _overwrite(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(min(len(data) - 8, 1 << dice.randrange(5, 24)))
    number = struct.pack("<Q", dice.choice(_INTEGERS) % 2**64)[: dice.choice((4, 8))]
    return data[:at] + number + data[at + len(number) :]


def _truncate(data: bytes, dice: random.Random) -> bytes:
    return data[: dice.randrange(len(data))]


def _append(data: bytes, dice: random.Random) -> bytes:
    return data + dice.randbytes(dice.randrange(1, 5000))


_BYTES: tuple[Any, ...] = (_flip, _flip, _overwrite, _truncate, _append)
