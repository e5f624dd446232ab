"""Models of the hub: fetched, resumed and checked, with every fault that a hub may have."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from support.mock_hub import COMMIT, mock_hub

from specrun.bindings.errors import (
    FileMissingError,
    HubError,
    MalformedFileError,
    OptionError,
    SpecrunError,
)
from specrun.runtime.models import HubName, fetch_model, hub, without_hub
from specrun.runtime.models.hub import hub_folders

NAME = HubName.parse("ann/tiny-GGUF")
Q4, Q8 = b"GGUF four" * 5000, b"GGUF eight" * 9000
PARTS = {f"big-Q6_K-0000{n}-of-00003.gguf": f"GGUF part {n}".encode() * 3000 for n in (1, 2, 3)}
FILES = {
    "README.md": b"# tiny",
    "mmproj-tiny-Q4_K_M.gguf": b"GGUF eyes",
    "tiny-Q8_0.gguf": Q8,
    "tiny-Q4_K_M.gguf": Q4,
    **PARTS,
}


def cached(home: Path) -> list[str]:
    """Return the names of all files of the cache but locks and the tag, without their folders."""
    files = (path for path in (home / ".cache").rglob("*") if path.is_file())
    return sorted(path.name for path in files if path.suffix not in (".lock", ".TAG"))


@pytest.fixture
def served(home: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with mock_hub({"ann/tiny-GGUF": FILES}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_a_model_is_fetched_once_into_the_layout_of_the_hub(home, served) -> None:
    told: list[tuple[str, int, int]] = []
    path = fetch_model(NAME, progress=lambda *step: told.append(step))
    assert path.read_bytes() == Q4
    repo = home / ".cache/huggingface/hub/models--ann--tiny-GGUF"
    assert path == repo / "snapshots" / COMMIT / "tiny-Q4_K_M.gguf"
    assert path.resolve() == repo / "blobs" / hashlib.sha256(Q4).hexdigest()
    assert not os.path.isabs(os.readlink(path))
    assert (repo / "refs/main").read_text() == COMMIT
    assert told[0] == ("tiny-Q4_K_M.gguf", 0, len(Q4))
    assert told[-1] == ("checking tiny-Q4_K_M.gguf", len(Q4), len(Q4))
    assert fetch_model(NAME) == path
    assert served.transfers == [("tiny-Q4_K_M.gguf", None)]


def test_huggingface_hub_finds_what_was_fetched(home, served) -> None:
    from huggingface_hub import scan_cache_dir, try_to_load_from_cache

    path = fetch_model(NAME)
    folder = hub_folders()[0]
    found = try_to_load_from_cache("ann/tiny-GGUF", path.name, cache_dir=folder)
    assert found == str(path)
    scanned = scan_cache_dir(folder)
    assert not scanned.warnings
    assert [repo.size_on_disk for repo in scanned.repos] == [len(Q4)]


def test_a_tag_names_the_file_and_parts_come_together(home, served) -> None:
    assert fetch_model(HubName.parse("hf:ann/tiny-GGUF:q8_0")).read_bytes() == Q8
    first = fetch_model(HubName.parse("ann/tiny-GGUF:Q6_K"))
    assert first.name == "big-Q6_K-00001-of-00003.gguf"
    assert {path.name: path.read_bytes() for path in first.parent.glob("big*")} == PARTS


def test_small_files_are_checked_by_gits_hash(home, monkeypatch) -> None:
    with mock_hub({"ann/tiny-GGUF": {"a.small.gguf": b"GGUF"}}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        assert fetch_model(NAME).read_bytes() == b"GGUF"


def test_an_interrupted_download_goes_on_where_it_ended(home, served) -> None:
    served.fault = "half"
    with pytest.raises(HubError, match="the same command continues"):
        fetch_model(NAME)
    digest = hashlib.sha256(Q4).hexdigest()
    assert cached(home) == [f"{digest}.incomplete"]
    size = next((home / ".cache").rglob("*.incomplete")).stat().st_size
    assert 0 < size < len(Q4)
    served.fault = ""
    served.requests.clear()
    assert fetch_model(NAME).read_bytes() == Q4
    assert served.transfers == [("tiny-Q4_K_M.gguf", f"bytes={size}-")]
    assert cached(home) == [digest, "main", "tiny-Q4_K_M.gguf"]


def test_ctrl_c_keeps_what_was_fetched(home, served) -> None:
    def interrupt(_what: str, done: int, _total: int) -> None:
        if done > 20_000:
            raise KeyboardInterrupt

    # Progress is reported at most ten times a second: here at once.
    hub.time.monotonic, before = iter(range(10**6)).__next__, hub.time.monotonic
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            fetch_model(NAME, progress=interrupt)
    finally:
        hub.time.monotonic = before
    assert "the same command continues" in caught.value.__notes__[0]
    kept = next((home / ".cache").rglob("*.incomplete")).stat().st_size
    assert fetch_model(NAME).read_bytes() == Q4
    assert [span for _, span in served.transfers] == [None, f"bytes={kept}-"]


def test_a_connection_that_breaks_once_is_taken_up_at_once(home, served) -> None:
    served.fault = "once half"
    assert fetch_model(NAME).read_bytes() == Q4
    assert [span for _, span in served.transfers] == [None, f"bytes={len(Q4) // 2 // 1000 * 1000}-"]


def test_a_wrong_start_is_found_by_the_hash_and_removed(home, served) -> None:
    """The start of a file in the cache may be anything: the whole is hashed."""
    blobs = home / ".cache/huggingface/hub/models--ann--tiny-GGUF/blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(Q4).hexdigest()}.incomplete").write_bytes(b"x" * 100)
    with pytest.raises(MalformedFileError, match="lacks the hash"):
        fetch_model(NAME)
    assert cached(home) == []
    assert fetch_model(NAME).read_bytes() == Q4


def test_wrong_bytes_never_get_a_name(home, served) -> None:
    served.fault = "wrong"
    with pytest.raises(MalformedFileError, match="try again"):
        fetch_model(NAME)
    assert cached(home) == []


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("404", FileMissingError, "HTTP 404"),
        ("401", FileMissingError, "HF_TOKEN"),
        ("403", FileMissingError, "HF_TOKEN"),
        ("429", HubError, "in 7 seconds"),
        ("500", HubError, "HTTP 500"),
        ("no json", HubError, "cannot be read"),
    ],
)
def test_refusals_are_sentences(home, served, fault: str, kind: type[SpecrunError], said: str):
    served.fault = fault
    with pytest.raises(kind, match=said) as caught:
        fetch_model(NAME)
    assert "\n" not in str(caught.value)
    assert "ann/tiny-GGUF" in str(caught.value)
    assert cached(home) == []


def test_a_repository_or_file_that_is_not_there(home, served) -> None:
    with pytest.raises(FileMissingError, match="no repository ann/other"):
        fetch_model(HubName.parse("ann/other"))
    with pytest.raises(FileMissingError, match="no GGUF file Q2_K: it has Q8_0, Q4_K_M, Q6_K"):
        fetch_model(HubName.parse("ann/tiny-GGUF:Q2_K"))
    served.repos["ann/text"] = {"README.md": b"nothing"}
    with pytest.raises(FileMissingError, match="no GGUF file of a model"):
        fetch_model(HubName.parse("ann/text"))
    del served.repos["ann/tiny-GGUF"]["big-Q6_K-00002-of-00003.gguf"]
    with pytest.raises(FileMissingError, match="only 2 of its 3 parts"):
        fetch_model(HubName.parse("ann/tiny-GGUF:Q6_K"))


@pytest.mark.parametrize("name", ["../../up.gguf", "/etc/up.gguf", "a\\..\\up.gguf", "c:x.gguf"])
def test_names_that_lead_out_of_the_cache_are_refused(home, served, name: str) -> None:
    served.repos["ann/tiny-GGUF"] = {name: b"GGUF"}
    with pytest.raises(HubError, match="cannot be those of files"):
        fetch_model(NAME)
    assert cached(home) == []


def test_a_private_repository_needs_the_token(home, served, monkeypatch) -> None:
    served.token = "secret"
    with pytest.raises(FileMissingError, match="HF_TOKEN"):
        fetch_model(NAME)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "secret")
    assert fetch_model(NAME).read_bytes() == Q4


def test_offline_the_cache_answers_and_nobody_is_asked(home, served, monkeypatch) -> None:
    with without_hub(), pytest.raises(FileMissingError, match="not in the cache"):
        fetch_model(NAME)
    assert served.requests == []
    path = fetch_model(NAME)
    served.requests.clear()
    with without_hub():
        assert fetch_model(NAME) == path
        with pytest.raises(FileMissingError, match="not in the cache"):
            fetch_model(HubName.parse("ann/tiny-GGUF:Q8_0"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch_model(NAME) == path
    assert served.requests == []


def test_where_the_hub_is_away_the_cache_answers(home, served, monkeypatch) -> None:
    path = fetch_model(NAME)
    warnings: list[str] = []
    served.fault = "500"
    assert fetch_model(NAME, warn=warnings.append) == path
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch_model(NAME, warn=warnings.append) == path
    assert [text.endswith("The copy in the cache is used") for text in warnings] == [True, True]
    with pytest.raises(HubError, match="cannot be reached"):
        fetch_model(HubName.parse("ann/tiny-GGUF:Q8_0"))


def test_a_new_commit_is_fetched_and_shares_what_did_not_change(home, served) -> None:
    fetch_model(HubName.parse("ann/tiny-GGUF:Q8_0"))
    fetch_model(NAME)
    served.requests.clear()
    served.commit = "f" * 40
    served.repos["ann/tiny-GGUF"]["tiny-Q4_K_M.gguf"] = b"GGUF newer"
    try:
        assert fetch_model(NAME).read_bytes() == b"GGUF newer"
        assert fetch_model(HubName.parse("ann/tiny-GGUF:Q8_0")).parent.name == "f" * 40
        assert [name for name, _ in served.transfers] == ["tiny-Q4_K_M.gguf"]
    finally:
        FILES["tiny-Q4_K_M.gguf"] = Q4


def test_what_is_broken_in_the_cache_is_fetched_again(home, served) -> None:
    path = fetch_model(NAME)
    path.resolve().write_bytes(b"GGUF cut")
    assert fetch_model(NAME).read_bytes() == Q4
    path.resolve().unlink()
    assert fetch_model(NAME).read_bytes() == Q4
    path.unlink()
    path.symlink_to("nowhere")
    assert fetch_model(NAME).read_bytes() == Q4


def test_a_disk_that_is_full_is_said_before_and_leaves_nothing(home, served, monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: os.terminal_size((0, 0)) and _usage(100))
    with pytest.raises(SpecrunError, match="are free"):
        fetch_model(NAME)
    assert cached(home) == []
    assert served.transfers == []


def _usage(free: int) -> Any:
    import shutil

    return shutil._ntuple_diskusage(free, 0, free)  # type: ignore[attr-defined]


def test_a_disk_that_fills_up_leaves_nothing(home, served, monkeypatch) -> None:
    def write(_self: object, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub._Counted, "write", write)
    with pytest.raises(SpecrunError, match="is full"):
        fetch_model(NAME)
    assert cached(home) == []


def test_a_cache_that_cannot_be_written(home, served) -> None:
    (home / ".cache").write_text("a file where the folder should be")
    with pytest.raises(SpecrunError, match="cannot be written"):
        fetch_model(NAME)


@pytest.mark.parametrize(
    "text", ["tiny", "a/b/c", "a/b:", "a/..", "../a", "a b/c", "a/b:c:d", "a/b--c", "", "hf:"]
)
def test_names_that_are_no_repositories(text: str) -> None:
    with pytest.raises(OptionError, match="OWNER/REPO"):
        HubName.parse(text)


def test_the_cache_lies_where_llama_cpp_has_it(home, monkeypatch) -> None:
    order = [
        ("XDG_CACHE_HOME", "xdg", "xdg/huggingface/hub"),
        ("HF_HOME", "hf", "hf/hub"),
        ("HUGGINGFACE_HUB_CACHE", "old", "old"),
        ("HF_HUB_CACHE", "new", "new"),
        ("LLAMA_CACHE", "llama", "llama"),
    ]
    assert hub_folders() == [home / ".cache/huggingface/hub"]
    for name, value, expected in order:
        monkeypatch.setenv(name, value)
        assert hub_folders()[0] == Path(expected)
    assert hub_folders() == [Path("llama"), Path("new")]
