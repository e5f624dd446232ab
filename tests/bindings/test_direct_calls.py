"""Calls of llama.cpp's functions: compiled and by ctypes they do the same."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from support.tiny_models import F32

from specrun.bindings import direct_calls
from specrun.bindings.contexts import Batch, Context, ContextOptions
from specrun.bindings.direct_calls import CALLS
from specrun.bindings.library import address_of, llama
from specrun.bindings.models import Model

compiled = pytest.mark.skipif(CALLS is None, reason="nothing was compiled")


@pytest.fixture
def model(tiny_model) -> Iterator[Model]:
    with Model(tiny_model) as opened:
        yield opened


@pytest.fixture(params=["compiled", "ctypes"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "ctypes":
        monkeypatch.setattr(direct_calls, "CALLS", None)
    elif CALLS is None:
        pytest.skip("nothing was compiled")
    return str(request.param)


def test_pieces_are_those_that_llama_cpp_writes(model, way):
    piece, handle = direct_calls.piece_function(), model.vocabulary._handle
    assert (type(piece).__name__ == "partial") == (way == "compiled")
    write = llama().llama_token_to_piece
    for special in (False, True):
        for token in range(model.vocabulary.size):
            buffer = direct_calls.ctypes.create_string_buffer(256)
            count = write(handle, token, buffer, len(buffer), 0, special)
            assert piece(handle, token, special) == buffer.raw[:count]


def test_a_piece_may_be_of_any_length(way, monkeypatch):
    """The function is called again with as much room as it returned."""
    text = b"long" * 40
    asked: list[int] = []

    def write(_vocabulary, _token, buffer, size, _lstrip, _special) -> int:
        asked.append(size)
        if size < len(text):
            return -len(text)
        direct_calls.ctypes.memmove(buffer, text, len(text))
        return len(text)

    number, pointer = direct_calls.ctypes.c_int32, direct_calls.ctypes.c_void_p
    kind = direct_calls.ctypes.CFUNCTYPE(
        number, pointer, number, pointer, number, number, direct_calls.ctypes.c_bool
    )
    function = kind(write)
    address = direct_calls.ctypes.cast(function, pointer).value
    monkeypatch.setattr(direct_calls, "address_of", lambda _name: address)
    monkeypatch.setattr(direct_calls, "call", lambda _name: function)
    assert direct_calls.piece_function()(1, 2, False) == text
    assert asked == [64, len(text)]


def test_rows_and_memory_are_the_same_either_way(model, way):
    """Two sequences share a prefix, one of them drops a part: rows and last positions."""
    options = ContextOptions(**F32, n_sequences=2, n_outputs=2, n_batch=8)
    with Context(model, options) as context:
        batch = Batch(8, 2)
        batch.fill_chain([11, 12, 13], 0, (0,), 1)
        first = np.array(context.decode(batch).logits(0))
        memory = context.memory
        assert (type(memory._remove).__name__ == "partial") == (way == "compiled")
        memory.branch(0, 1, 0, 2)
        assert (memory.last_position(0), memory.last_position(1)) == (2, 1)
        memory.truncate(2, sequence=0)
        assert (memory.last_position(0), memory.last_position(1)) == (1, 1)
        batch.fill_chain([13], 2, (1,), 1)
        assert np.allclose(context.decode(batch).logits(0), first, rtol=1e-3, atol=1e-4)


@compiled
def test_what_is_no_address_or_no_number_of_32_bits_is_refused():
    function = address_of("llama_memory_seq_rm")
    for arguments, error, problem in (
        ((0, 1, 0, 0, -1), ValueError, "null"),
        ((function, 0, 0, 0, -1), ValueError, "null"),
        ((function, 1, 2**31, 0, -1), OverflowError, "too large"),
        ((function, 1, 0, "a", -1), TypeError, "integer"),
        ((function, 1, 0), TypeError, r"5 positional arguments \(3 given\)"),
    ):
        with pytest.raises(error, match=problem):
            CALLS.remove(*arguments)
    with pytest.raises(TypeError, match=r"2 positional arguments \(1 given\)"):
        CALLS.address(function)
    with pytest.raises(TypeError, match=r"6 positional arguments \(5 given\)"):
        CALLS.share(function, 1, 0, 1, 0)
    with pytest.raises(TypeError, match=r"4 positional arguments \(3 given\)"):
        CALLS.piece(function, 1, 0)
    right = (function, function, 0, 1, 1, 1, 1)
    for place, wrong, error in (
        *[(place, 0, ValueError) for place in (0, 1, 3, 4)],
        *[(place, 2**31, OverflowError) for place in (5, 6)],
        *[(place, "1", TypeError) for place in range(7)],
    ):
        with pytest.raises(error):
            CALLS.step(*right[:place], wrong, *right[place + 1 :])
    with pytest.raises(TypeError):
        CALLS.step(*right[:-1])


def test_calls_that_were_compiled_before_a_change_are_not_used(monkeypatch):
    whole = SimpleNamespace(**dict.fromkeys(direct_calls.NAMES, len))
    older = SimpleNamespace(address=len)
    for found, used in ((whole, True), (older, False)):
        monkeypatch.setattr(direct_calls.importlib, "import_module", lambda _name, it=found: it)
        assert (direct_calls._load() is found) == used
