"""The header check: its reading, its refusals and their words; no file makes it
hang."""

from __future__ import annotations

import ctypes
import os
import random
import re
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from llama_cpp import llama_cpp

from specrun.bindings.errors import FileMissingError, MalformedFileError
from specrun.bindings.gguf import (
    FILE_TYPE_NAMES,
    MAX_HEADER_BYTES,
    MAX_STRINGS,
    REMOVED_TENSOR_TYPES,
    TENSOR_TYPES,
    ArrayValue,
    GGUFHeader,
    TensorInfo,
    read_header,
)

UINT32, BOOL, STRING, ARRAY, UINT64 = 4, 7, 8, 9, 10
F32, Q8_0 = 0, 8


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw)) + raw


def entry(key: str | bytes, code: int, value: bytes) -> bytes:
    return string(key) + u32(code) + value


def elements(code: int, count: int, values: bytes = b"") -> bytes:
    return u32(code) + u64(count) + values


def tensor(
    name: str | bytes = "w", shape: tuple[int, ...] = (8,), code: int = F32, offset: int = 0
) -> bytes:
    return string(name) + u32(len(shape)) + b"".join(map(u64, shape)) + u32(code) + u64(offset)


ARCHITECTURE = entry("general.architecture", STRING, string("llama"))


def make(
    *entries: bytes,
    tensors: tuple[bytes, ...] = (),
    data: int = 0,
    version: int = 3,
    alignment: int = 32,
    architecture: bytes = ARCHITECTURE,
    n_keys: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    """Return a GGUF file of these parts, each of them free to be wrong."""
    keys = [part for part in (architecture, *entries) if part]
    head = b"GGUF" + u32(version)
    head += u64(len(tensors) if n_tensors is None else n_tensors) + u64(
        len(keys) if n_keys is None else n_keys
    )
    head += b"".join(keys) + b"".join(tensors)
    return head + (bytes(-len(head) % alignment) + bytes(data) if tensors else b"")


@contextmanager
def at_once(seconds: float = 1.0) -> Iterator[None]:
    started = time.perf_counter()
    yield
    assert time.perf_counter() - started < seconds


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def read_bytes(path: Path, content: bytes) -> GGUFHeader:
    path.write_bytes(content)
    return read_header(path)


def refusal(path: Path, content: bytes) -> str:
    """Return the sentence that `content` is refused with, having checked that it is one."""
    path.write_bytes(content)
    with at_once(), pytest.raises(MalformedFileError) as caught:
        read_header(path)
    message = str(caught.value)
    assert message.startswith(f"{path} "), "the file is named"
    assert message.isprintable(), "nothing from the file reaches the terminal raw"
    assert len(message) < len(str(path)) + 400
    assert "; " in message, "what to do is said"
    return message.removeprefix(f"{path} ")


# ---------------------------------------------------------------- sound files


def test_the_smallest_file_passes(path: Path) -> None:
    header = read_bytes(path, make())
    assert (header.version, header.architecture, header.alignment) == (3, "llama", 32)
    assert header.tensors == ()
    assert header.n_parameters == 0
    assert header.file_type_name is None
    assert dict(header.metadata) == {"general.architecture": "llama"}


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_are_read_with_absolute_offsets(path: Path, version: int) -> None:
    infos = (tensor("b", (32, 2), Q8_0, 128), tensor("a", (8, 3), F32, 0))
    content = make(tensors=infos, data=128 + 68, version=version)
    header = read_bytes(path, content)
    start = len(content) - 128 - 68
    assert header.version == version
    assert header.file_size == len(content)
    assert header.tensors == (
        TensorInfo("b", (32, 2), "Q8_0", 68, start + 128),
        TensorInfo("a", (8, 3), "F32", 96, start),
    )
    assert header.n_parameters == 64 + 24
    assert header.tensor_type_counts == {"Q8_0": 1, "F32": 1}


def test_a_tensor_without_dimensions_is_one_number(path: Path) -> None:
    header = read_bytes(path, make(tensors=(tensor("scale", ()),), data=4))
    assert (header.tensors[0].shape, header.tensors[0].n_elements, header.tensors[0].n_bytes) == (
        (),
        1,
        4,
    )


def test_another_alignment_moves_the_data(path: Path) -> None:
    wide = entry("general.alignment", UINT32, u32(4096))
    infos = (tensor("a"), tensor("b", offset=4096))
    header = read_bytes(path, make(wide, tensors=infos, data=4096 + 32, alignment=4096))
    assert header.alignment == 4096
    assert [info.offset for info in header.tensors] == [4096, 8192]


@pytest.mark.parametrize(
    ("code", "name"), [(15, "Q4_K_M"), (1024 + 15, "Q4_K_M"), (999, "unknown (999)")]
)
def test_the_file_type_has_a_name(path: Path, code: int, name: str) -> None:
    assert (
        read_bytes(path, make(entry("general.file_type", UINT32, u32(code)))).file_type_name == name
    )


def test_a_part_of_a_split_model_is_accepted(path: Path) -> None:
    header = read_bytes(path, make(entry("split.count", 2, b"\3\0"), entry("split.no", 2, b"\1\0")))
    assert header.metadata["split.count"] == 3


def test_text_that_is_not_utf8_is_kept_as_bytes(path: Path) -> None:
    words = entry(
        "tokens", ARRAY, elements(STRING, 3, string(b"\xff\xfe") + string("") + string("ü"))
    )
    header = read_bytes(path, make(words, entry("general.name", STRING, string(b"a\xff"))))
    value = header.metadata["tokens"]
    assert isinstance(value, ArrayValue)
    assert value.tolist() == ["\ufffd\ufffd", "", "ü"]
    assert [value.bytes_at(i) for i in (0, 1, -1)] == [b"\xff\xfe", b"", "ü".encode()]
    assert header.metadata["general.name"] == "a\ufffd"


def test_arrays_are_sequences(path: Path) -> None:
    numbers = entry("numbers", ARRAY, elements(UINT32, 3, u32(7) + u32(8) + u32(9)))
    words = entry("tokens", ARRAY, elements(STRING, 2, string("one") + string("two")))
    flags = entry("flags", ARRAY, elements(BOOL, 3, b"\0\1\2"))
    empty = entry("empty", ARRAY, elements(STRING, 0))
    metadata = read_bytes(path, make(numbers, words, flags, empty)).metadata
    values = {key: value for key, value in metadata.items() if isinstance(value, ArrayValue)}
    assert {key: value.tolist() for key, value in values.items()} == {
        "numbers": [7, 8, 9],
        "tokens": ["one", "two"],
        "flags": [False, True, True],
        "empty": [],
    }
    assert [len(value) for value in values.values()] == [3, 2, 3, 0]
    assert (
        values["numbers"][-1],
        values["numbers"][1:],
        values["tokens"][1],
        values["tokens"][::-1],
    ) == (
        9,
        [8, 9],
        "two",
        ["two", "one"],
    )
    assert "two" in values["tokens"]
    assert values["tokens"].index("two") == 1
    assert values["numbers"].to_numpy().tolist() == [7, 8, 9]
    assert values["flags"].to_numpy().dtype == np.bool_
    assert repr(values["tokens"]) == "<ArrayValue of 2 x string>"
    for wrong in (2, -3):
        with pytest.raises(IndexError):
            values["tokens"][wrong]
    with pytest.raises(TypeError, match="no numpy form"):
        values["tokens"].to_numpy()
    with pytest.raises(TypeError, match="no strings"):
        values["numbers"].bytes_at(0)


def test_arrays_are_equal_when_type_and_bytes_are(path: Path) -> None:
    def value(code: int, values: bytes) -> ArrayValue:
        found = read_bytes(path, make(entry("k", ARRAY, elements(code, 1, values)))).metadata["k"]
        assert isinstance(found, ArrayValue)
        return found

    assert value(STRING, string("a")) == value(STRING, string("a"))
    assert hash(value(STRING, string("a"))) == hash(value(STRING, string("a")))
    assert value(STRING, string("a")) != value(STRING, string("b"))
    assert value(4, u32(1)) != value(5, u32(1))
    assert value(4, u32(1)) != [1]


def test_values_survive_the_file(path: Path) -> None:
    value = read_bytes(path, make(entry("k", ARRAY, elements(STRING, 1, string("kept"))))).metadata[
        "k"
    ]
    path.unlink()
    assert isinstance(value, ArrayValue)
    assert value[0] == "kept"


@pytest.fixture
def written(path: Path) -> tuple[Path, dict[str, Any], dict[str, np.ndarray]]:
    """A file from gguf's own writer with every value type, and the written values."""
    writer = gguf.GGUFWriter(path, "llama")
    scalars: dict[str, tuple[Callable[[str, Any], None], Any]] = {
        "t.uint8": (writer.add_uint8, 255),
        "t.int8": (writer.add_int8, -128),
        "t.uint16": (writer.add_uint16, 65535),
        "t.int16": (writer.add_int16, -32768),
        "t.uint32": (writer.add_uint32, 2**32 - 1),
        "t.int32": (writer.add_int32, -(2**31)),
        "t.float32": (writer.add_float32, 0.5),
        "t.bool": (writer.add_bool, True),
        "t.string": (writer.add_string, "größer 🦙"),
        "t.uint64": (writer.add_uint64, 2**64 - 1),
        "t.int64": (writer.add_int64, -(2**63)),
        "t.float64": (writer.add_float64, 0.1),
        "t.ints": (writer.add_array, [1, -2, 3]),
        "t.floats": (writer.add_array, [0.5, -1.5]),
        "t.bools": (writer.add_array, [True, False]),
        "t.tokens": (writer.add_array, ["", "a", "größer 🦙"]),
    }
    for key, (add, value) in scalars.items():
        add(key, value)
    tensors: dict[str, np.ndarray] = {
        "f32": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        "f16": np.arange(5, dtype=np.float16),
        "i8": np.arange(3, dtype=np.int8),
        "i64": np.arange(2, dtype=np.int64),
    }
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    packed = gguf.quants.quantize(
        np.ones((2, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("q8_0", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, {key: value for key, (_, value) in scalars.items()}, tensors


def test_what_gguf_writes_reads_back_equal(
    written: tuple[Path, dict[str, Any], dict[str, np.ndarray]],
) -> None:
    path, values, tensors = written
    header = read_header(path)
    plain = {k: v.tolist() if isinstance(v, ArrayValue) else v for k, v in header.metadata.items()}
    assert plain == {"general.architecture": "llama", **values}
    assert [type(plain[key]) for key in values] == [type(value) for value in values.values()]
    content = path.read_bytes()
    found = {info.name: info for info in header.tensors}
    assert list(found) == [*tensors, "q8_0"]
    for name, data in tensors.items():
        info = found[name]
        assert info.shape == data.shape[::-1], "ggml counts the row first"
        assert content[info.offset : info.offset + info.n_bytes] == data.tobytes()
        assert info.type_name == name.upper()
    assert (found["q8_0"].shape, found["q8_0"].n_bytes) == ((64, 2), 2 * 2 * 34)
    theirs = gguf.GGUFReader(path).tensors
    assert [tensor.data_offset for tensor in theirs] == [info.offset for info in found.values()]


def test_a_vocabulary_of_128k_tokens_takes_no_call_for_each(path: Path) -> None:
    count = 128 * 1024
    texts = b"".join(string(f"word{i}") for i in range(count))
    merges = b"".join(string(f"w{i} ord{i}") for i in range(count))
    entries = [
        entry("tokenizer.ggml.tokens", ARRAY, elements(STRING, count, texts)),
        entry("tokenizer.ggml.merges", ARRAY, elements(STRING, count, merges)),
        entry("tokenizer.ggml.scores", ARRAY, elements(6, count, bytes(4 * count))),
        entry("tokenizer.ggml.token_type", ARRAY, elements(5, count, bytes(4 * count))),
    ]
    path.write_bytes(make(*entries))
    calls = 0

    def count_calls(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count_calls)
    try:
        header = read_header(path)
    finally:
        sys.setprofile(None)
    assert calls < 1000  # 390,000 strings and numbers; reading them one by one takes a call each
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, ArrayValue)
    assert (len(tokens), tokens[0], tokens[count - 1]) == (count, "word0", f"word{count - 1}")


# ---------------------------------------------------------------- the tables


def test_the_tensor_types_are_ggufs() -> None:
    theirs = {int(kind): (kind.name, *size) for kind, size in GGML_QUANT_SIZES.items()}
    ours = {code: tuple(kind) for code, kind in TENSOR_TYPES.items()}
    assert theirs.pop(9) == ("Q8_1", 32, 40), (
        "ggml's own blocks have 36 bytes: two halves and 32 numbers"
    )
    assert ours.pop(9) == ("Q8_1", 32, 36)
    assert {code: kind for code, kind in ours.items() if code in theirs} == theirs
    assert {kind[0] for code, kind in ours.items() if code not in theirs} == {"Q2_0"}


def test_the_tensor_types_are_llama_cpps() -> None:
    # Prototypes of our own: those of the library object are shared with everyone in the process.
    block_bytes = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_int)(
        ("ggml_type_size", llama_cpp._lib)
    )
    block_size = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int)(("ggml_blck_size", llama_cpp._lib))
    name = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)(("ggml_type_name", llama_cpp._lib))
    native = {
        code: (name(code).decode().upper(), block_size(code), block_bytes(code))
        for code in range(43)
    }
    assert {code: kind for code, kind in native.items() if kind[2]} == {
        code: (kind.name.upper(), kind.block_size, kind.block_bytes)
        for code, kind in TENSOR_TYPES.items()
    }
    assert {code for code, kind in native.items() if not kind[2]} == set(REMOVED_TENSOR_TYPES)


def test_the_file_types_are_ggufs() -> None:
    prefix = re.compile("^(ALL|MOSTLY)_")
    theirs = {
        int(kind): prefix.sub("", kind.name)
        for kind in gguf.LlamaFileType
        if kind.name != "GUESSED"
    }
    known = {name: code for code, name in FILE_TYPE_NAMES.items()}
    assert set(theirs.values()) <= set(known)
    native = {
        re.sub("^LLAMA_FTYPE_(ALL|MOSTLY)_", "", name): getattr(llama_cpp, name)
        for name in dir(llama_cpp)
        if name.startswith("LLAMA_FTYPE_") and not name.endswith("GUESSED")
    }
    assert native
    for name, code in native.items():
        assert known.get(name) == code, name


# ---------------------------------------------------------------- refused: not there, or not a file


def missing(path: str | os.PathLike[str]) -> str:
    with at_once(), pytest.raises(FileMissingError) as caught:
        read_header(path)
    return str(caught.value)


def test_a_path_that_leads_nowhere(tmp_path: Path, path: Path) -> None:
    assert missing(path) == f"there is no file {path}; check the path"
    assert missing(tmp_path) == f"{tmp_path} is a directory; name the GGUF file in it"
    path.write_bytes(b"")
    assert "cannot be read (Not a directory)" in missing(path / "below")
    assert missing("a\0b") == r"'a\x00b' cannot be the name of a file; check the path"
    assert missing("\x1b[2J") == r"there is no file '\x1b[2J'; check the path"
    assert missing("x" * 5000).endswith("check its permissions")


def test_an_unreadable_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")  # chmod would not stop root

    monkeypatch.setattr("specrun.bindings.gguf.header.os.open", refuse)
    assert missing(path) == f"{path} cannot be read (Permission denied); check its permissions"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_named_pipe_is_not_waited_for(path: Path) -> None:
    os.mkfifo(path)
    assert missing(path) == f"{path} is not a regular file; name a GGUF file"


SAFETENSORS = u64(20) + b'{"w":{"dtype":"F32"}}' + bytes(64)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty; download it again"),
        (b"GG", "is cut off after 2 bytes; download it again"),
        (SAFETENSORS, "it seems to be a safetensors file; convert it with `specrun convert`"),
        (
            b"PK\x03\x04" + bytes(60),
            "it seems to be a zip archive, as PyTorch checkpoints are; convert it",
        ),
        (b"\x80\x02}q\x00.", "it seems to be a Python pickle"),
        (b"\x80\x04\x95", "it seems to be a Python pickle"),
        (
            b"\n<!DOCTYPE html><html>",
            "it seems to be a web page or a server's error message; download the file",
        ),
        (b"<?xml version='1.0'?><Error>", "it seems to be a web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it seems to be a git-lfs pointer"),
        (b'{"error": "not found"}', "it seems to be JSON text; name the .gguf file"),
        (b"tjgg\1\0\0\0", "it seems to be an old ggml file from before GGUF"),
        (b"\x1f\x8b\x08\x00", "it seems to be a compressed archive; unpack it first"),
        (bytes(100), "it seems to be a download that never wrote its beginning; download it again"),
        (b"FUGG" + bytes(100), "it seems to be a big-endian GGUF file"),
        (
            b"\x1b[2Jhello",
            "it starts with the bytes 1b 5b 32 4a instead of 'GGUF'; check the path or download",
        ),
    ],
)
def test_other_files_are_recognised(path: Path, content: bytes, words: str) -> None:
    assert words in refusal(path, content)


# ---------------------------------------------------------------- refused: the header

HUGE = 2**63
DEEP = elements(ARRAY, 1, elements(ARRAY, 1, elements(UINT32, 0)))

BAD_HEADERS: dict[str, tuple[bytes, str]] = {
    "big-endian": (
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        "is a big-endian GGUF file, which cannot be read here; get the little-endian file",
    ),
    "version 0": (make(version=0), "has the unknown GGUF version 0; update"),
    "version 1": (make(version=1), "is a GGUF file of version 1, which llama.cpp no longer reads"),
    "version 4": (
        make(version=4),
        "has the unknown GGUF version 4; update specrun, or download it again",
    ),
    "no counts": (
        make()[:20],
        "is truncated or damaged: its number of metadata keys needs 8 bytes, and 4 are",
    ),
    "2^63 keys": (
        make(n_keys=HUGE),
        "it announces 9,223,372,036,854,775,808 metadata keys with 45 bytes left",
    ),
    "2^64-1 tensors": (
        make(n_tensors=2 * HUGE - 1),
        "it announces 18,446,744,073,709,551,615 tensors with 45",
    ),
    "too many keys": (
        make(n_keys=65_537) + bytes(14 * 65_537),
        "it announces 65,537 metadata keys, more than the 65,536 that any model could need",
    ),
    "too many tensors": (
        make(n_tensors=262_145) + bytes(24 * 262_145),
        "it announces 262,145 tensors, more than the 262,144 that any model could need",
    ),
    "a key is missing": (
        make(n_keys=2) + bytes(20),
        "metadata key 2 of 2 has no name",
    ),
    "a long key": (
        make(string("k" * 65_536) + u32(UINT32) + u32(1)),
        "metadata key 2 of 2 has 65,536 bytes, more than 65,535",
    ),
    "key of 2^63 bytes": (
        make(u64(HUGE) + bytes(14)),
        "metadata key 2 of 2 has 9,223,372,036,854,775,808 bytes, more than 65,535",
    ),
    "key not UTF-8": (make(entry(b"\xff", UINT32, u32(1))), "metadata key 2 of 2 is not UTF-8"),
    "zero in a key": (
        make(entry(b"a\0b", UINT32, u32(1))),
        "metadata key 2 of 2 contains a zero byte",
    ),
    "key twice": (
        make(entry("k", UINT32, u32(1)), entry("k", UINT32, u32(2))),
        "is damaged: the metadata key 'k' is there twice; download it again",
    ),
    "control codes": (
        make(entry("\x1b[2J", UINT32, u32(1)), entry("\x1b[2J", UINT32, u32(2))),
        r"the metadata key '\x1b[2J' is there twice",
    ),
    "unknown value type": (
        make(entry("k", 13, u32(1))),
        "the value of the metadata key 'k' has the unknown type 13",
    ),
    "short value": (
        make(entry("k", UINT64, u32(1))),
        "the value of the metadata key 'k' needs 8 bytes, and 4 are left",
    ),
    "string of 2^63 bytes": (
        make(entry("k", STRING, u64(HUGE))),
        "the value of the metadata key 'k' needs 9,223,372,036,854,775,808 bytes, and 0 are left",
    ),
    "array of 2^63": (
        make(entry("k", ARRAY, elements(UINT32, HUGE))),
        (
            "the metadata key 'k' announces 9,223,372,036,854,775,808 elements of type uint32 "
            "with 0 "
            "bytes left"
        ),
    ),
    "array one too long": (
        make(entry("k", ARRAY, elements(UINT32, 3, bytes(11)))),
        "the metadata key 'k' announces 3 elements of type uint32 with 11 bytes left",
    ),
    "2^61 strings": (
        make(entry("k", ARRAY, elements(STRING, 2**61, bytes(64)))),
        (
            "the metadata key 'k' announces 2,305,843,009,213,693,952 elements of type string with "
            "64 bytes left"
        ),
    ),
    "array with a string of 2^63": (
        make(entry("k", ARRAY, elements(STRING, 2, string("a") + u64(HUGE)))),
        "the value of the metadata key 'k' needs 9,223,372,036,854,775,825 bytes, and 17 are left",
    ),
    "array with a string of 2^64-1": (
        make(entry("k", ARRAY, elements(STRING, 1, u64(2 * HUGE - 1)))),
        "needs 18,446,744,073,709,551,623 bytes, and 8 are left",
    ),
    "array that ends early": (
        make(entry("k", ARRAY, elements(STRING, 2, string("abcdefgh")))),
        "the value of the metadata key 'k' needs 24 bytes, and 16 are left",
    ),
    "array of arrays": (
        make(entry("k", ARRAY, DEEP)),
        "the value of the metadata key 'k' is an array of arrays, which llama.cpp does not read",
    ),
    "array of unknown": (
        make(entry("k", ARRAY, elements(99, 0))),
        "is an array of the unknown type 99",
    ),
    "no architecture": (
        make(entry("k", UINT32, u32(1)), architecture=b""),
        "does not name its architecture (general.architecture); convert the model again",
    ),
    "no keys at all": (make(architecture=b""), "does not name its architecture"),
    "architecture is a number": (
        make(architecture=entry("general.architecture", UINT32, u32(7))),
        "general.architecture is 7 instead of a name",
    ),
    "architecture is empty": (
        make(architecture=entry("general.architecture", STRING, string(""))),
        "general.architecture is '', which cannot be a name",
    ),
    "architecture is an essay": (
        make(architecture=entry("general.architecture", STRING, string("a" * 100_000))),
        "a...', which cannot be a name",
    ),
    "alignment 0": (
        make(entry("general.alignment", UINT32, u32(0))),
        "general.alignment is 0, not a power of",
    ),
    "alignment 48": (
        make(entry("general.alignment", UINT32, u32(48))),
        "general.alignment is 48, not a power",
    ),
    "alignment 2 MiB": (
        make(entry("general.alignment", UINT32, u32(2 << 20))),
        "general.alignment is 2,097,152, not a power of two up to 1,048,576",
    ),
    "alignment as uint64": (
        make(entry("general.alignment", UINT64, u64(32))),
        "general.alignment is '32', which is not of type uint32",
    ),
    "alignment as text": (
        make(entry("general.alignment", STRING, string("32"))),
        "general.alignment is '32', which is not of type uint32",
    ),
}

BAD_TENSORS: dict[str, tuple[bytes, str]] = {
    "name twice": (
        make(tensors=(tensor("w"), tensor("w", offset=32)), data=64),
        "is damaged: the tensor 'w' is there twice; download it again",
    ),
    "name of 64 bytes": (
        make(tensors=(tensor("w" * 64),), data=32),
        "the name of tensor 1 of 1 has 64 bytes, more than 63",
    ),
    "name not UTF-8": (
        make(tensors=(tensor(b"\xc3"),), data=32),
        "the name of tensor 1 of 1 is not UTF-8",
    ),
    "zero in a name": (
        make(tensors=(tensor(b"a\0"),), data=32),
        "name of tensor 1 of 1 contains a zero byte",
    ),
    "five dimensions": (
        make(tensors=(tensor(shape=(1, 1, 1, 1, 1)),), data=32),
        "tensor 1 of 1 ('w') has 5 dimensions, more than 4",
    ),
    "2^32-1 dimensions": (
        make(tensors=(string("w") + u32(2**32 - 1) + bytes(64),), data=32),
        "tensor 1 of 1 ('w') has 4,294,967,295 dimensions, more than 4",
    ),
    "a dimension of 0": (
        make(tensors=(tensor(shape=(8, 0)),), data=32),
        "tensor 1 of 1 ('w') has the impossible shape (8, 0)",
    ),
    "product of 2^64": (
        make(tensors=(tensor(shape=(2**32, 2**32)),), data=32),
        "tensor 1 of 1 ('w') has the impossible shape (4294967296, 4294967296)",
    ),
    "product of 2^63": (
        make(tensors=(tensor(shape=(2**62, 2)),), data=32),
        "has the impossible shape",
    ),
    "row of half a block": (
        make(tensors=(tensor(shape=(48, 2), code=Q8_0),), data=128),
        "tensor 1 of 1 ('w') has rows of 48, not a multiple of the 32 of a Q8_0 block",
    ),
    "a quantized number": (
        make(tensors=(tensor(shape=(), code=Q8_0),), data=64),
        "has rows of 1, not a multiple of the 32 of a Q8_0 block",
    ),
    "removed type": (
        make(tensors=(tensor(code=31),), data=32),
        (
            "has tensor 1 of 1 ('w') in the type Q4_0_4_4, which llama.cpp has removed; get a "
            "newer "
            "conversion"
        ),
    ),
    "unknown type": (
        make(tensors=(tensor(code=43),), data=32),
        "has tensor 1 of 1 ('w') in the unknown type 43; update specrun, or download it again",
    ),
    "crooked offset": (
        make(tensors=(tensor(offset=4),), data=64),
        "the tensor 'w' is at offset 4, not a multiple of 32",
    ),
    "overlap": (
        make(tensors=(tensor("a", (16,)), tensor("b", offset=32)), data=64),
        "is damaged: the tensors 'a' and 'b' overlap; download it again",
    ),
    "the same place": (
        make(tensors=(tensor("a"), tensor("b")), data=64),
        "the tensors 'a' and 'b' overlap",
    ),
    "one inside another": (
        make(
            tensors=(tensor("a", (64,)), tensor("b", offset=64), tensor("c", offset=256)), data=512
        ),
        "the tensors 'a' and 'b' overlap",
    ),
    "offset of 2^63": (
        make(tensors=(tensor(offset=HUGE),), data=32),
        "is truncated: 160 bytes of 9.2 EB are",
    ),
    "data missing": (
        make(tensors=(tensor(shape=(1000, 1000)),), data=1_000_000 - 128),
        "is truncated: 1.0 MB of 4.0 MB are there (3,000,128 bytes are missing); download it again",
    ),
    "one byte missing": (
        make(tensors=(tensor(),), data=31),
        "is truncated: 159 bytes of 160 bytes are there (1 bytes are missing); download it again",
    ),
    "a cut tensor": (
        make(n_tensors=1) + tensor()[:24],
        "tensor 1 of 1 ('w') needs 4 bytes, and 3 are left",
    ),
}


@pytest.mark.parametrize(("content", "words"), BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_bad_metadata_is_refused(path: Path, content: bytes, words: str) -> None:
    assert words in refusal(path, content)


@pytest.mark.parametrize(("content", "words"), BAD_TENSORS.values(), ids=BAD_TENSORS.keys())
def test_bad_tensors_are_refused(path: Path, content: bytes, words: str) -> None:
    assert words in refusal(path, content)


def test_the_49_bytes_that_hang_other_readers(path: Path) -> None:
    content = make(entry("k", ARRAY, elements(UINT32, HUGE)), architecture=b"")
    assert len(content) == 49
    with at_once(0.1):
        assert "announces 9,223,372,036,854,775,808 elements" in refusal(path, content)


def test_a_sparse_file_does_not_fill_the_memory(path: Path) -> None:
    """A file may be large at no cost, so its size alone cannot be the bound."""
    with path.open("wb") as file:
        file.write(make(entry("k", ARRAY, elements(0, 2**35))))
        file.truncate(2**36)
    with (
        at_once(),
        pytest.raises(
            MalformedFileError, match=f"header is larger than {MAX_HEADER_BYTES:,} bytes"
        ),
    ):
        read_header(path)
    with path.open("wb") as file:
        file.write(make(entry("k", ARRAY, elements(STRING, MAX_STRINGS + 1))))
        file.truncate(2**36)
    with at_once(), pytest.raises(MalformedFileError, match=f"above {MAX_STRINGS:,} strings"):
        read_header(path)


def test_a_file_that_shrinks_while_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(make()[:60])

    class Status:
        st_size = 1000
        st_mode = path.stat().st_mode

    monkeypatch.setattr("specrun.bindings.gguf.header.os.fstat", lambda _: Status)
    with pytest.raises(MalformedFileError, match="it shrank to 60 bytes while it was being read"):
        read_header(path)


# ---------------------------------------------------------------- refused: anything else

SOUND = make(
    entry("general.file_type", UINT32, u32(1)),
    entry(
        "tokenizer.ggml.tokens", ARRAY, elements(STRING, 3, string("a") + string("") + string("cc"))
    ),
    entry("numbers", ARRAY, elements(UINT32, 2, u32(1) + u32(2))),
    tensors=(tensor("a", (32, 2), Q8_0), tensor("b", (3,), offset=96)),
    data=128,
)
PADDING = 32 - 12  # behind the last tensor


def survives(path: Path, content: bytes) -> bool:
    """Return whether `content` passes; it may also be refused, but only in our words and at
    once."""
    path.write_bytes(content)
    with at_once():
        try:
            header = read_header(path)
        except MalformedFileError:
            return False
    for value in header.metadata.values():
        if isinstance(value, ArrayValue):
            assert len(value.tolist()) == len(value)
    for info in header.tensors:
        assert info.offset + info.n_bytes <= len(content)
    return bool(header.architecture) and header.n_parameters >= 0


def test_what_does_not_survive_is_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of all tests that call `survives`: a foreign error, and a tensor that lies behind
    the file's end."""
    module = sys.modules[__name__]
    path.write_bytes(SOUND)
    real = read_header(path)

    def fails(_path: Path) -> GGUFHeader:
        raise KeyError("general.architecture")

    monkeypatch.setattr(module, "read_header", fails)
    with pytest.raises(KeyError):
        survives(path, SOUND)
    monkeypatch.setattr(module, "read_header", lambda _path: real)
    assert survives(path, SOUND)
    with pytest.raises(AssertionError):
        survives(path, SOUND[: len(SOUND) // 2])


def test_every_truncation_is_refused(path: Path) -> None:
    passed = [size for size in range(len(SOUND) + 1) if survives(path, SOUND[:size])]
    assert passed == list(range(len(SOUND) - PADDING, len(SOUND) + 1)), (
        "only padding may be missing"
    )


def test_flipped_bytes_never_hang_or_crash(path: Path) -> None:
    rng = random.Random(20)
    outcomes = set()
    for _ in range(400):
        content = bytearray(SOUND)
        for _ in range(rng.choice((1, 1, 2, 8))):
            content[rng.randrange(len(content) - 128)] = rng.choice(
                (0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256))
            )
        outcomes.add(survives(path, bytes(content)))
    assert outcomes == {True, False}, "some flips are harmless, some are not"


FUZZ = settings(
    derandomize=True,
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@FUZZ
@given(st.binary(max_size=300))
@example(b"")
def test_garbage_is_refused(path: Path, content: bytes) -> None:
    assert not survives(path, content)


@FUZZ
@given(st.binary(max_size=300), st.integers(0, 20), st.integers(0, 20))
def test_garbage_behind_a_sound_beginning(
    path: Path, content: bytes, n_tensors: int, n_keys: int
) -> None:
    # Either outcome is right; `survives` itself fails on foreign errors, hangs and headers that do
    # not hold.
    survives(path, b"GGUF" + u32(3) + u64(n_tensors) + u64(n_keys) + ARCHITECTURE + content)


COUNTS = st.one_of(
    st.integers(0, 5),
    st.integers(0, 2**64 - 1),
    st.sampled_from([2**31, 2**32 - 1, 2**63, 2**64 - 1]),
)
ENTRIES = st.builds(
    entry,
    st.one_of(st.text(max_size=5), st.binary(max_size=5)),
    st.integers(0, 14),
    st.one_of(
        st.binary(max_size=24),
        st.builds(elements, st.integers(0, 13), COUNTS, st.binary(max_size=40)),
    ),
)
TENSORS = st.builds(
    tensor,
    st.text(max_size=5),
    st.lists(COUNTS, max_size=6).map(tuple),
    st.integers(0, 45),
    st.one_of(st.integers(0, 5).map(lambda n: 32 * n), COUNTS),
)


@FUZZ
@given(st.lists(ENTRIES, max_size=4), st.lists(TENSORS, max_size=4), st.integers(0, 400))
def test_nearly_sound_files(
    path: Path, entries: list[bytes], tensors: list[bytes], data: int
) -> None:
    # As above: `survives` is the check.
    survives(path, make(*entries, tensors=tuple(tensors), data=data))
