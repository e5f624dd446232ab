"""A file written through atomic_path appears whole or not at all, and never over another by
accident."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from specrun.bindings.errors import FileMissingError, OptionError, SpecrunError
from specrun.bindings.files import atomic_path, require_free_space


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "out.bin"
    with atomic_path(target) as aside:
        assert aside.parent == tmp_path
        assert aside.stat().st_size == 0
        aside.write_bytes(b"whole")
        assert not target.exists()
    assert target.read_bytes() == b"whole"
    assert names(tmp_path) == ["out.bin"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("force", [False, True])
def test_a_failure_leaves_everything_as_it_was(
    tmp_path: Path, error: type[BaseException], force: bool
) -> None:
    target = tmp_path / "out.bin"
    if force:
        target.write_bytes(b"before")

    def fail_halfway() -> None:
        with atomic_path(target, force=force) as aside:
            aside.write_bytes(b"half")
            raise error

    with pytest.raises(error):
        fail_halfway()
    assert names(tmp_path) == (["out.bin"] if force else [])
    assert not force or target.read_bytes() == b"before"


def test_an_existing_file_needs_force(tmp_path: Path) -> None:
    target = tmp_path / "out.bin"
    target.write_bytes(b"before")
    with pytest.raises(OptionError, match=r"out\.bin already exists.*--force"), atomic_path(target):
        pytest.fail("the block ran")
    with atomic_path(target, force=True) as aside:
        aside.write_bytes(b"after")
    assert target.read_bytes() == b"after"
    assert names(tmp_path) == ["out.bin"]


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "out.bin"

    def write_while_another_does() -> None:
        with atomic_path(target) as aside:
            aside.write_bytes(b"ours")
            target.write_bytes(b"theirs")

    with pytest.raises(OptionError, match="already exists"):
        write_while_another_does()
    assert target.read_bytes() == b"theirs"
    assert names(tmp_path) == ["out.bin"]


def test_a_dangling_link_counts_as_existing(tmp_path: Path) -> None:
    (tmp_path / "out.bin").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OptionError, match="already exists"), atomic_path(tmp_path / "out.bin"):
        pytest.fail("the block ran")


def test_force_replaces_a_link_and_not_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"precious")
    (tmp_path / "out.bin").symlink_to(tmp_path / "elsewhere")
    with atomic_path(tmp_path / "out.bin", force=True) as aside:
        aside.write_bytes(b"ours")
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"
    assert not (tmp_path / "out.bin").is_symlink()


def test_a_link_put_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"precious")

    def swap() -> None:
        with atomic_path(tmp_path / "out.bin") as aside:
            aside.unlink()
            aside.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(SpecrunError, match="replaced by something that is not a file"):
        swap()
    assert names(tmp_path) == ["elsewhere"]


def test_missing_folders_and_folders_as_targets(tmp_path: Path) -> None:
    missing = r"no folder .*none to write out\.bin into"
    with pytest.raises(FileMissingError, match=missing), atomic_path(tmp_path / "none" / "out.bin"):
        pytest.fail("the block ran")
    with pytest.raises(OptionError, match="is a folder"), atomic_path(tmp_path, force=True):
        pytest.fail("the block ran")


def test_the_umask_decides_who_may_read(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with atomic_path(tmp_path / "out.bin"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out.bin").stat().st_mode) == 0o640


def test_long_names_fit(tmp_path: Path) -> None:
    name = "ж" * 120 + ".gguf"  # 245 of the 255 bytes a name may have
    with atomic_path(tmp_path / name) as aside:
        aside.write_bytes(b"x")
    assert names(tmp_path) == [name]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named(tmp_path: Path, code: int) -> None:
    with pytest.raises(SpecrunError, match="disk is full"), atomic_path(tmp_path / "out.bin"):
        raise OSError(code, "full")
    assert not names(tmp_path)


def test_the_file_is_synced_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch
) -> None:
    events: list[str] = []
    sync, replace = os.fsync, Path.replace

    def record_sync(descriptor: int) -> None:
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    def record_replace(path: Path, target: Path) -> Path:
        events.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(Path, "replace", record_replace)
    with atomic_path(tmp_path / "out.bin"):
        pass
    assert events == ["file", "rename", "folder"]


def test_free_space(tmp_path: Path) -> None:
    require_free_space(tmp_path, 1)
    with pytest.raises(SpecrunError, match=r"1,000,000,000\.0 MB are needed in .* free some space"):
        require_free_space(tmp_path, 10**15)
