"""Datastores as files: what is built is found again, what is damaged or foreign is refused, nothing
half-written."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specrun.bindings.contexts.context import Context
from specrun.bindings.errors import (
    FileMissingError,
    MalformedFileError,
    ModelError,
    OptionError,
    PairError,
    SpecrunError,
)
from specrun.bindings.models.model import Model
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime.drafters.retrieval import (
    HEADER_BYTES,
    ContextIndex,
    StoreHeader,
    build_store,
    open_store,
    read_reference,
    read_store_header,
    text_pieces,
    verify_store,
    write_store_header,
)
from specrun.runtime.drafters.retrieval import datastore as building

TEXT = (
    "the quick brown fox jumps over the lazy dog\n" * 3
    + "pack my box with five dozen liquor jugs\n"
)


@pytest.fixture(scope="module")
def vocabulary(tiny_model: Path) -> Iterator[Vocabulary]:
    with Model(tiny_model, vocab_only=True) as model:
        yield model.vocabulary


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def store(corpus: Path, vocabulary: Vocabulary) -> Path:
    path = corpus.with_name("a.store")
    build_store([corpus], vocabulary, path, model="tiny.gguf")
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_stored_is_found_again(store: Path, vocabulary: Vocabulary):
    index = open_store(store, vocabulary)
    query = vocabulary.tokenize("five dozen", add_special=False)
    match, following = index.nearest(query, 1, 30, 1)[0]
    assert match == min(len(query), 16)
    assert vocabulary.detokenize(following) == " liquor jugs\n"
    assert verify_store(store)


def test_the_header_says_what_the_store_holds(store: Path, vocabulary: Vocabulary):
    header = read_store_header(store)
    assert (header.n_words, header.vocabulary, header.model) == (
        vocabulary.size,
        vocabulary.fingerprint.hex(),
        "tiny.gguf",
    )
    assert (header.n_files, header.n_text_bytes) == (1, len(TEXT))
    assert header.offsets[-1] == store.stat().st_size
    # All tokens but the first of the text have something before them.
    assert header.n_positions == len(vocabulary.tokenize(TEXT, add_special=False)) - 1


def test_texts_are_kept_apart(tmp_path: Path, vocabulary: Vocabulary):
    """Nothing follows the end of a text, and no match reaches back over its beginning."""

    def opened(name: str, *texts: str) -> ContextIndex:
        files = [tmp_path / f"{name}{number}" for number in range(len(texts))]
        for path, text in zip(files, texts, strict=True):
            path.write_text(text, encoding="utf-8")
        build_store(files, vocabulary, tmp_path / name, model="m")
        return open_store(tmp_path / name, vocabulary)

    def found(index: ContextIndex, query: str) -> list[tuple[int, str]]:
        nearest = index.nearest(vocabulary.tokenize(query, add_special=False), 1, 5, 2)
        return [(match, vocabulary.detokenize(following)) for match, following in nearest]

    apart, joined = (
        opened("apart", "one two", "", "three four"),
        opened("joined", "one twothree four"),
    )
    for query, separate, together in (
        ("one ", [(4, "two")], [(4, "twoth")]),
        ("two", [], [(3, "three")]),
        ("one twoth", [(2, "ree f")], [(9, "ree f")]),
    ):
        assert found(apart, query) == separate
        assert found(joined, query) == together


def test_the_same_corpus_gives_the_same_file(corpus: Path, store: Path, vocabulary: Vocabulary):
    build_store([corpus], vocabulary, corpus.with_name("b.store"), model="tiny.gguf")
    assert corpus.with_name("b.store").read_bytes() == store.read_bytes()


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.text(max_size=60), st.integers(1, 20))
def test_pieces_of_a_text_are_the_text(tmp_path, text: str, size: int):
    path = tmp_path / "t"
    data = text.encode("utf-8", "replace")
    path.write_bytes(data)
    pieces = list(text_pieces(path, max(size, 5)))
    assert "".join(piece for piece, _ in pieces) == data.decode()
    assert sum(n for _, n in pieces) == len(data)


# -- what is refused -------------------------------------------------------------------------------


def test_a_store_of_another_vocabulary_is_refused(
    store: Path, tiny_small_vocab: Path, vocabulary: Vocabulary
):
    with Model(tiny_small_vocab, vocab_only=True) as other:
        with pytest.raises(
            PairError,
            match=f"{vocabulary.fingerprint.hex()[:12]}.*{other.vocabulary.fingerprint.hex()[:12]}",
        ):
            open_store(store, other.vocabulary)


def test_the_hash_depends_on_every_token(
    vocabulary: Vocabulary, tiny_flat_twin: Path, tiny_small_vocab: Path
):
    with (
        Model(tiny_flat_twin, vocab_only=True) as twin,
        Model(tiny_small_vocab, vocab_only=True) as other,
    ):
        assert twin.vocabulary.fingerprint.hex() == vocabulary.fingerprint.hex()
        assert other.vocabulary.fingerprint.hex() != vocabulary.fingerprint.hex()


@pytest.mark.parametrize(
    "size", [0, 10, 30, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 100, -1]
)
def test_a_truncated_store_is_refused(store: Path, vocabulary: Vocabulary, size: int):
    data = store.read_bytes()
    store.write_bytes(data[:size])
    with pytest.raises(MalformedFileError, match=r"a\.store"):
        open_store(store, vocabulary)


def test_foreign_files_and_versions_are_refused(
    store: Path, vocabulary: Vocabulary, tiny_model: Path
):
    with pytest.raises(MalformedFileError, match="not a datastore"):
        open_store(tiny_model, vocabulary)
    data = bytearray(store.read_bytes())
    data[len(b"specrun datastore\n")] = 9
    store.write_bytes(data)
    with pytest.raises(MalformedFileError, match="version 9"):
        open_store(store, vocabulary)
    with pytest.raises(FileMissingError, match=r"none\.store"):
        open_store(store.with_name("none.store"), vocabulary)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_tokens": 2**40},
        {"n_positions": 0},
        {"n_positions": -5},
        {"n_positions": 10**9},
        {"n_words": 0},
        {"n_words": 2**31},
        {"n_tokens": 1.5},
        {"vocabulary": 7},
        {"extra": 1},
    ],
    ids=str,
)
def test_a_header_that_cannot_be_true_is_refused(
    store: Path, vocabulary: Vocabulary, changes: dict
):
    values = {**dataclasses.asdict(read_store_header(store)), **changes}
    with_header(store, json.dumps(values).encode())
    with pytest.raises(MalformedFileError, match="build it again"):
        open_store(store, vocabulary)


@pytest.mark.parametrize("text", [b"[" * 3000, b'{"n_tokens": Infinity}', b"\xff", b"", b"[]"])
def test_a_header_of_junk_is_refused(store: Path, vocabulary: Vocabulary, text: bytes):
    with_header(store, text)
    with pytest.raises(MalformedFileError, match="build it again"):
        open_store(store, vocabulary)


def with_header(store: Path, text: bytes) -> None:
    data = bytearray(store.read_bytes())
    start = len(b"specrun datastore\n") + 8
    data[start - 4 : start] = len(text).to_bytes(4, "little")
    data[start:HEADER_BYTES] = text.ljust(HEADER_BYTES - start, b"\0")
    store.write_bytes(data)


def test_damage_behind_the_header_is_seen_by_the_checksum(store: Path):
    data = bytearray(store.read_bytes())
    data[-3] ^= 1
    store.write_bytes(data)
    assert not verify_store(store)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", OptionError, "0 tokens.*at least 2"),
        (b"a", OptionError, "1 tokens.*at least 2"),
        (b"good\n\xff\xfe", ModelError, r"UTF-8 text \(byte 6\)"),
        (b"x" * 100 + b"\xc3", ModelError, r"UTF-8 text \(byte 101\)"),
    ],
)
def test_a_corpus_that_cannot_be_stored_writes_nothing(
    tmp_path: Path, vocabulary: Vocabulary, content: bytes, error: type[Exception], message: str
):
    (tmp_path / "in").write_bytes(content)
    with pytest.raises(error, match=message):
        build_store([tmp_path / "in"], vocabulary, tmp_path / "out", model="m")
    assert names(tmp_path) == ["in"]


def test_files_that_are_missing_or_too_many_tokens_are_refused(
    corpus: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
):
    for name in ("none.txt", "."):
        with pytest.raises(FileMissingError):
            build_store(
                [corpus, corpus.parent / name], vocabulary, corpus.with_name("out"), model="m"
            )
    monkeypatch.setattr(building, "_MOST_TOKENS", 50)
    with pytest.raises(OptionError, match="more than 50 tokens"):
        build_store([corpus], vocabulary, corpus.with_name("out"), model="m")
    monkeypatch.setattr(building, "_BYTES_PER_TOKEN", 1e18)
    with pytest.raises(SpecrunError, match="free"):
        build_store([corpus], vocabulary, corpus.with_name("out"), model="m")
    assert names(corpus.parent) == ["corpus.txt"]


def test_nothing_is_overwritten_without_force_and_no_input_ever(
    store: Path, corpus: Path, vocabulary: Vocabulary
):
    before = store.read_bytes()
    with pytest.raises(OptionError, match="--force"):
        build_store([corpus], vocabulary, store, model="m")
    with pytest.raises(OptionError, match="one of the texts"):
        build_store([corpus], vocabulary, corpus, model="m", force=True)
    assert (store.read_bytes(), corpus.read_text()) == (before, TEXT)
    build_store([corpus], vocabulary, store, model="other", force=True)
    assert read_store_header(store).model == "other"


@pytest.mark.parametrize("phase", ["reading", "ordering"])
def test_ctrl_c_leaves_nothing_behind(corpus: Path, vocabulary: Vocabulary, phase: str):
    def interrupt(what: str, _done: int, _total: int) -> None:
        if what == phase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_store([corpus], vocabulary, corpus.with_name("out"), model="m", progress=interrupt)
    assert names(corpus.parent) == ["corpus.txt"]


KILLED = """
import sys, time
from pathlib import Path
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.retrieval.datastore import build_store
model, corpus, output, phase = sys.argv[1:]
def wait(what, done, total):
    if what == phase:
        print("now", flush=True)
        time.sleep(60)
with Model(model, vocab_only=True) as opened:
    build_store([Path(corpus)], opened.vocabulary, Path(output), model="new", force=True, progress=wait)
"""  # noqa: E501 - as it is shown


@pytest.mark.parametrize("phase", ["reading", "ordering"])
def test_a_store_survives_kill_9_while_it_is_saved(
    store: Path, corpus: Path, tiny_model: Path, phase: str
):
    before = store.read_bytes()
    command = [sys.executable, "-c", KILLED, str(tiny_model), str(corpus), str(store), phase]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"now\n"
        os.kill(child.pid, signal.SIGKILL)
    assert store.read_bytes() == before
    assert verify_store(store)


# -- reference texts, and the vocabulary alone -----------------------------------------------------


def test_a_reference_is_found_in(corpus: Path, vocabulary: Vocabulary):
    index = read_reference(corpus, vocabulary)
    query = vocabulary.tokenize("five dozen", add_special=False)
    assert vocabulary.detokenize(index.nearest(query, 1, 30, 1)[0][1]) == " liquor jugs\n"


@pytest.mark.parametrize(
    ("content", "error"),
    [(b"", OptionError), (b"\xff", ModelError), (b"a" * (9 << 20), OptionError)],
    ids=["empty", "not UTF-8", "huge"],
)
def test_a_reference_that_cannot_be_used(
    tmp_path: Path, vocabulary: Vocabulary, content: bytes, error: type[Exception]
):
    (tmp_path / "r.txt").write_bytes(content)
    with pytest.raises(error, match=r"r\.txt"):
        read_reference(tmp_path / "r.txt", vocabulary)
    with pytest.raises(FileMissingError):
        read_reference(tmp_path / "none.txt", vocabulary)


def test_a_vocabulary_alone_evaluates_nothing(tiny_model: Path):
    with Model(tiny_model, vocab_only=True) as vocab_model, Model(tiny_model) as whole:
        assert vocab_model.vocabulary.tokenize("abc") == whole.vocabulary.tokenize("abc")
        with pytest.raises(OptionError, match="only the vocabulary"):
            Context(vocab_model)


def test_headers_fit_their_place(tmp_path: Path):
    header = StoreHeader(2**31, 2**31 - 99, 2**20, "f" * 64, "m" * 200, 10**6, 2**50, 2**32 - 1)
    with (tmp_path / "h").open("wb") as file:
        write_store_header(file, header)
    assert (tmp_path / "h").stat().st_size == HEADER_BYTES
