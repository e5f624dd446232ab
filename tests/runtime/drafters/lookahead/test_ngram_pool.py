"""The pool of n-grams: against a plain model of it, and its file under every kind of damage."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plain_lookahead import PlainPool

from specrun.bindings.errors import FileMissingError, MalformedFileError, ModelError, OptionError
from specrun.runtime.drafters.lookahead import NgramPool, NgramStore, load_pool, save_pool


@dataclass(frozen=True)
class Vocabulary:
    """As much of a vocabulary as a pool's file needs."""

    size: int = 1000
    fingerprint: bytes = b"f" * 32


VOCABULARY = Vocabulary()


NGRAMS = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=4).map(tuple), max_size=40)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(NGRAMS, st.integers(1, 3), st.integers(1, 3))
def test_keeps_what_a_plain_model_keeps(ngrams, per_key, max_keys):
    pool, plain = NgramPool(4, per_key=per_key, max_keys=max_keys), PlainPool(per_key, max_keys)
    for ngram in ngrams:
        pool.add(ngram)
        plain.add(ngram)
    for first in range(4):
        assert pool.guesses(first) == plain.guesses(first)
        assert pool.guesses(first, 1) == plain.guesses(first)[:1]
    assert len(pool) == len(plain.used) <= per_key * max_keys


@settings(max_examples=40, deadline=None, derandomize=True)
@given(NGRAMS, NGRAMS)
def test_a_copy_and_a_rebuilt_pool_are_equal_and_independent(ngrams, more):
    pool = NgramPool(4, per_key=3, max_keys=3)
    pool.update(ngrams)
    copy, rebuilt = pool.copy(), NgramPool(4, per_key=3, max_keys=3)
    rebuilt.update(pool)
    before = list(pool)
    assert list(copy) == list(rebuilt) == before
    for equal in (copy, rebuilt):
        equal.update(more)
    assert list(copy) == list(rebuilt)
    assert list(pool) == before


def test_a_text_is_every_ngram_that_ends_in_its_new_part():
    store = NgramStore(NgramPool(3))
    assert store.add_text([1, 2, 3, 4], 0, 3) == list(store.pool) == [(1, 2, 3), (2, 3, 4)]
    store.forget()
    assert store.add_text([1, 2, 3, 4, 5], 3, 3) == list(store.pool) == [(2, 3, 4), (3, 4, 5)]
    store.forget()
    assert store.add_text([1, 2, 3, 4], 3, 2) == list(store.pool) == [(3, 4)]
    store.forget()
    assert store.add_text([1, 2], 0, 3) == list(store.pool) == []


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ((1, 1, 1), "n-grams of 1 tokens"),
        ((65, 1, 1), "n-grams of 65 tokens"),
        ((4, 0, 1), "with 0 n-grams each"),
        ((4, 1, 0), "a pool of 0 first tokens"),
        ((4, 1 << 12, 1 << 11), "at most 4194304 together"),
    ],
    ids=str,
)
def test_bounds_that_make_no_sense_are_refused(sizes, problem):
    with pytest.raises(OptionError, match=problem):
        NgramPool(sizes[0], per_key=sizes[1], max_keys=sizes[2])


@pytest.mark.parametrize("ngram", [(1,), (1, 2, 3, 4)], ids=str)
def test_ngrams_that_do_not_fit_are_refused(ngram):
    with pytest.raises(OptionError, match=f"an n-gram of {len(ngram)} tokens in a pool for 2 to 3"):
        NgramPool(3).add(ngram)


# -- the file --------------------------------------------------------------------------------------


def some_pool() -> NgramPool:
    pool = NgramPool(4, per_key=3)
    pool.update([(1, 2, 3, 4), (5, 6), (1, 9, 9), (1, 2, 3, 4), (999, 0, 1, 2)])
    return pool


def test_a_saved_pool_comes_back_with_its_order(tmp_path):
    save_pool(some_pool(), tmp_path / "a.pool", VOCABULARY)
    loaded = load_pool(tmp_path / "a.pool", VOCABULARY)
    assert (list(loaded), loaded.n) == (list(some_pool()), 4)
    assert loaded.guesses(1) == [(2, 3, 4), (9, 9)]
    assert [path.name for path in tmp_path.iterdir()] == ["a.pool"]


def test_smaller_bounds_keep_the_latest_and_cut(tmp_path):
    save_pool(some_pool(), tmp_path / "a.pool", VOCABULARY)
    assert list(load_pool(tmp_path / "a.pool", VOCABULARY, n=3, per_key=1, max_keys=2)) == [
        (1, 2, 3),
        (999, 0, 1),
    ]


def test_an_empty_pool_is_a_pool(tmp_path):
    save_pool(NgramPool(4), tmp_path / "a.pool", VOCABULARY)
    assert len(load_pool(tmp_path / "a.pool", VOCABULARY)) == 0


def test_a_missing_file_a_folder_and_a_missing_folder(tmp_path):
    with pytest.raises(FileMissingError, match="there is no file"):
        load_pool(tmp_path / "none.pool", VOCABULARY)
    with pytest.raises(OptionError, match="folder"):
        load_pool(tmp_path, VOCABULARY)
    with pytest.raises(FileMissingError, match="no folder"):
        save_pool(some_pool(), tmp_path / "none" / "a.pool", VOCABULARY)


@pytest.mark.parametrize(
    "other", [Vocabulary(size=999), Vocabulary(fingerprint=b"g" * 32)], ids=["size", "words"]
)
def test_a_pool_of_another_vocabulary_is_refused(tmp_path, other):
    save_pool(some_pool(), tmp_path / "a.pool", VOCABULARY)
    with pytest.raises(ModelError, match="another vocabulary"):
        load_pool(tmp_path / "a.pool", other)


def test_every_truncation_and_every_flipped_byte_is_found(tmp_path):
    path = tmp_path / "a.pool"
    save_pool(some_pool(), path, VOCABULARY)
    sound = path.read_bytes()
    for length in range(len(sound)):
        path.write_bytes(sound[:length])
        with pytest.raises(MalformedFileError):
            load_pool(path, VOCABULARY)
    for place in range(len(sound)):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        with pytest.raises(MalformedFileError):
            load_pool(path, VOCABULARY)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"GGUF", "is not a pool"),
        (8, b"\2\0\0\0", "format version 2"),
        (12, b"\1\0\0\0", "contradicts itself"),  # longest n-gram
        (12, b"\3\0\0\0", "contradicts itself"),  # shorter than the n-grams
        (16, b"\xff" * 8, "instead of"),
        (24, b"\xff" * 8, "instead of"),
        (68, b"\0", "contradicts itself"),  # the first length
        (68 + 5, b"\xff\xff\xff\xff", "contradicts itself"),  # the first token: -1
        (68 + 5, b"\xe8\x03\0\0", "contradicts itself"),  # 1000, one too many
    ],
)
def test_a_hostile_file_with_a_right_checksum_is_refused(tmp_path, place, value, message):
    path = tmp_path / "a.pool"
    save_pool(some_pool(), path, VOCABULARY)
    content = bytearray(path.read_bytes()[:-32])
    content[place : place + len(value)] = value
    path.write_bytes(bytes(content) + hashlib.sha256(content).digest())
    with pytest.raises(MalformedFileError, match=message):
        load_pool(path, VOCABULARY)


KILLED = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from specrun.runtime.drafters.lookahead import NgramPool, save_pool
def write_half(path, content):
    with path.open("wb", buffering=0) as file:
        file.write(content[: len(content) // 2])
        print("now", flush=True)
        time.sleep(60)
Path.write_bytes = write_half
save_pool(NgramPool(4), sys.argv[1], SimpleNamespace(size=1000, fingerprint=b"f" * 32))
"""


@pytest.mark.skipif(os.name == "nt", reason="kill -9 is POSIX")
def test_a_kill_while_saving_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.pool"
    save_pool(some_pool(), path, VOCABULARY)
    command = [sys.executable, "-c", KILLED, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"now\n"
        child.kill()
    assert [*load_pool(path, VOCABULARY)] == [*some_pool()]
