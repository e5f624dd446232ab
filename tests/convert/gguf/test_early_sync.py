"""Syncing while writing: how often, and that failures are not lost."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from specrun.convert.gguf import EarlySync
from specrun.convert.gguf import writer as early_sync


def test_stretches_are_synced_by_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(early_sync, "_sync", calls.append)
    monkeypatch.setattr(early_sync, "_STRETCH", 10)
    with (tmp_path / "file").open("wb") as file:
        with EarlySync(file) as synced:
            synced.wrote(9)
        assert calls == []
        with EarlySync(file) as synced:
            synced.wrote(9)
            synced.wrote(1)
        assert calls == [file.fileno()]


@pytest.mark.parametrize("more", [0, 10])
def test_a_failing_disk_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(early_sync, "_sync", fail)
    monkeypatch.setattr(early_sync, "_STRETCH", 10)
    with (
        (tmp_path / "file").open("wb") as file,
        pytest.raises(OSError, match="the disk is gone"),
        EarlySync(file) as synced,
    ):
        synced.wrote(10)
        synced.wrote(more)


def test_an_error_of_the_writer_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(early_sync, "_sync", fail)
    monkeypatch.setattr(early_sync, "_STRETCH", 10)
    with (
        (tmp_path / "file").open("wb") as file,
        pytest.raises(KeyboardInterrupt),
        EarlySync(file) as synced,
    ):
        synced.wrote(10)
        raise KeyboardInterrupt
