"""The buffer of rejected drafts: what of a law is kept, how much fits, and its file, bound to a
target."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from specrun.bindings.errors import (
    FileMissingError,
    MalformedFileError,
    ModelError,
    OptionError,
)
from specrun.bindings.models.model import Model
from specrun.runtime.online import (
    BUFFER_NAME,
    BufferKey,
    RejectedAnswer,
    RejectionBuffer,
    RejectionNotes,
    kept_folders,
    learn_folder,
    likeliest,
    load_rejections,
    open_rejections,
    save_rejections,
)

KEY = BufferKey("target.gguf", "ab" * 32, "cd" * 32, 300)


def an_answer(seed: int, n_tokens: int = 20, n_places: int = 3, kept: int = 8) -> RejectedAnswer:
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((n_places, 300)).astype(np.float32) * 3
    laws = [likeliest(row, kept) for row in rows]
    positions = np.sort(generator.choice(n_tokens, n_places, replace=False)).astype(np.int32)
    tokens = generator.integers(0, 300, positions[-1] + 1).astype(np.int32)
    ids, logs = (np.stack(part) for part in zip(*laws, strict=True))
    return RejectedAnswer(tokens, positions, ids, logs)


def same(ours: RejectedAnswer, theirs: RejectedAnswer) -> bool:
    pairs = zip(dataclasses.astuple(ours), dataclasses.astuple(theirs), strict=True)
    return all(np.array_equal(one_side, other) for one_side, other in pairs)


def test_the_most_likely_tokens_are_kept_by_name_and_the_rest_in_sum() -> None:
    row = np.random.default_rng(0).standard_normal(300).astype(np.float32) * 4
    law = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    ids, logs = likeliest(row, 10)
    assert logs.dtype == np.float16
    assert set(ids.tolist()) == set(np.argsort(-law)[:10].tolist())
    assert (np.diff(ids) > 0).all()
    np.testing.assert_allclose(np.exp(logs[:-1].astype(float)), law[ids], rtol=6e-3)
    assert np.exp(float(logs[-1])) == pytest.approx(1.0 - law[ids].sum(), rel=6e-3)


def test_a_small_vocabulary_is_kept_whole_and_certainty_is_finite() -> None:
    ids, logs = likeliest(np.array([0.0, 100.0, -np.inf], np.float32), 8)
    assert ids.tolist() == [0, 1, 2]
    assert np.isfinite(logs).all()
    assert np.exp(logs.astype(float)).sum() == pytest.approx(1.0, abs=1e-3)
    with pytest.raises(OptionError, match="no distribution"):
        likeliest(np.full(4, -np.inf, np.float32), 2)


def test_an_answer_ends_with_its_last_rejected_draft() -> None:
    buffer = RejectionBuffer(kept_tokens=4)
    row = np.arange(10, dtype=np.float32)
    notes = RejectionNotes(buffer)
    notes.note(3, row)
    notes.note(5, row)
    notes.note(9, row)  # of a round that an interrupt took back
    notes.end_answer([7, 6, 5, 4, 3, 2, 1])
    notes.end_answer([1, 2, 3])  # nothing was rejected there
    (answer,) = buffer
    assert answer.tokens.tolist() == [7, 6, 5, 4, 3, 2]
    assert answer.positions.tolist() == [3, 5]
    assert answer.ids.tolist() == [[6, 7, 8, 9]] * 2
    assert buffer.n_places == 2


def test_the_oldest_answers_make_room() -> None:
    answers = [an_answer(seed) for seed in range(30)]
    most = sum(answer.n_bytes for answer in answers[-5:])
    buffer = RejectionBuffer(most_bytes=most)
    for answer in answers:
        buffer.add(answer)
        assert buffer.n_bytes <= most
    assert buffer.n_bytes == sum(answer.n_bytes for answer in buffer)
    assert all(map(same, buffer, answers[-len(buffer) :]))
    buffer.add(an_answer(99, n_tokens=100_000))
    assert all(map(same, buffer, answers[-len(buffer) :]))


def test_what_is_saved_is_what_is_read_and_only_the_owner_reads_it(tmp_path: Path) -> None:
    buffer, path = RejectionBuffer(), tmp_path / "a.bin"
    for seed in range(4):
        buffer.add(an_answer(seed, n_places=1 + seed))
    save_rejections(buffer, path, KEY)
    if os.name != "nt":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key, again = load_rejections(path, KEY)
    assert (key, len(again), again.n_places) == (KEY, 4, 10)
    assert all(map(same, again, buffer))
    save_rejections(RejectionBuffer(), path, KEY)
    assert load_rejections(path)[1].n_places == 0


def test_another_targets_buffer_is_refused_with_both_named(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    save_rejections(RejectionBuffer(), path, KEY)
    other = BufferKey("other.gguf", "ef" * 32, "cd" * 32, 300)
    with pytest.raises(
        ModelError,
        match=r"rejected drafts for target\.gguf \(hash abab.* is other\.gguf \(hash efef",
    ):
        load_rejections(path, other)


def _resealed(content: bytes) -> bytes:
    return content + hashlib.sha256(content).digest()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda whole: b"nonsense" * 20, "holds no rejected drafts"),
        (lambda whole: whole[:20], "cut off after 20 bytes"),
        (lambda whole: whole[:9] + b"\x07" + whole[10:], "format version 7"),
        (lambda whole: whole[:-40] + b"\x00" + whole[-39:], "checksum"),
        (lambda whole: _resealed(whole[:-36]), "bytes instead of"),
        (lambda whole: _resealed(whole[:-32].replace(b'"kept": 8', b'"kept": 0')), "contradicts"),
        (
            lambda whole: _resealed(whole[:-32].replace(b'"n_tokens": 300', b'"n_tokens": 100')),
            "contradicts",
        ),
    ],
)
def test_damaged_files_are_refused_in_a_sentence(tmp_path: Path, change, problem: str) -> None:
    buffer, path = RejectionBuffer(), tmp_path / "a.bin"
    buffer.add(an_answer(1))
    save_rejections(buffer, path, KEY)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(MalformedFileError, match=problem):
        load_rejections(path, KEY)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileMissingError, match="there is no file"):
        load_rejections(tmp_path / "none")


def test_nothing_is_kept_unless_asked_for(tiny_model, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with Model(tiny_model) as model:
        assert open_rejections(False, model) is None
        store = open_rejections(True, model)
        assert store is not None
        store.buffer.add(an_answer(1))
        store.close()
        assert list(tmp_path.iterdir()) == []
        assert kept_folders() == []
        kept = open_rejections("keep", model)
        assert kept is not None
        kept.close()
        assert not (learn_folder(kept.key) / BUFFER_NAME).exists()  # there is nothing to keep yet
        kept.buffer.add(an_answer(1))
        kept.close()
        assert kept_folders() == [learn_folder(kept.key)]
        again = open_rejections("keep", model)
        assert again is not None
        assert again.buffer.n_places == 3
