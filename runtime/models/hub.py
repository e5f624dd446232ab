"""Models of the Hugging Face hub: fetched into llama.cpp's cache, resumed, and checked by SHA-256.

A file gets its name in the cache only when it is whole and its hash is the hub's. What an
interrupted download left lies in `blobs/ETAG.incomplete`; the next one goes on behind it.
huggingface_hub (listing, access, transfer) is imported when something is fetched, never before.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from specrun.bindings.atomic import require_free_space
from specrun.bindings.errors import (
    FileMissingError,
    HubError,
    MalformedFileError,
    MissingPackageError,
    SpecrunError,
)
from specrun.runtime.models.hub_cache import CachedRepo, find_cached
from specrun.runtime.models.hub_files import HubName, choose_files, is_weights_file, n_parts, tag_of

Progress = Callable[[str, int, int], None]
"""Told what is under way, the bytes that are done and the bytes in all."""

_LISTING_SECONDS = 20.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_YES = {"1", "on", "yes", "true"}
CHUNK_BYTES = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the hub lists it: its size in bytes, and the hash that names its blob.

    `etag` is the SHA-256 of a large file, and git's SHA-1 of a small one.
    """

    name: str
    size: int
    etag: str

    def matches(self, path: Path, progress: Callable[[int], None]) -> bool:
        """Whether a file has the hash; `progress` is told how many bytes were read."""
        is_large = len(self.etag) == 64
        digest = hashlib.sha256() if is_large else hashlib.sha1(usedforsecurity=False)
        if not is_large:
            digest.update(f"blob {path.stat().st_size}\0".encode())
        done = 0
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                progress(done)
        return digest.hexdigest() == self.etag


_asks_nobody: ContextVar[bool] = ContextVar("_asks_nobody", default=False)


@contextmanager
def without_hub() -> Iterator[None]:
    """Take models from the cache only, within the block."""
    token = _asks_nobody.set(True)
    try:
        yield
    finally:
        _asks_nobody.reset(token)


def is_offline() -> bool:
    """Whether the hub may not be asked: within `without_hub`, or by HF_HUB_OFFLINE."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    forbidden = any(os.environ.get(name, "").lower() in _YES for name in names)
    return forbidden or _asks_nobody.get()


def fetch_model(
    name: HubName,
    *,
    progress: Progress | None = None,
    warn: Callable[[str], None] | None = None,
) -> Path:
    """Return the file of a model of the hub, fetched if the cache lacks it: its first part.

    Offline (`is_offline`), and where the hub cannot be reached, the cache's copy is taken; of the
    latter `warn` is told.

    Raises FileMissingError if there is no such repository or file, or none in the cache where only
    that may be asked, HubError if the hub cannot be reached or refuses, MalformedFileError if what
    it sent has another hash than it said, and SpecrunError if the disk is full.
    """
    if is_offline():
        cached = find_cached(name)
        if cached is None:
            advice = "leave out --offline (HF_HUB_OFFLINE) to fetch it"
            raise FileMissingError(f"{name} is not in the cache: {advice}")
        return cached
    try:
        with _reported(name):
            commit, listed = _listing(name)
    except HubError as error:
        cached = find_cached(name)
        if cached is None:
            raise
        (warn or _log.warning)(f"{error}. The copy in the cache is used")
        return cached
    return _fetch(name, commit, _chosen(name, listed), progress or (lambda *_: None))


def _listing(name: HubName) -> tuple[str, list[HubFile]]:
    """Ask the hub for the newest commit of a repository and the GGUF files in it."""
    hub = _hub()
    api = hub.HfApi(endpoint=_endpoint(), token=hub.get_token() or False)
    told = api.model_info(name.repo_id, files_metadata=True, timeout=_LISTING_SECONDS)
    files = []
    for file in told.siblings or ():
        etag = file.blob_id if file.lfs is None else file.lfs.sha256
        if is_weights_file(file.rfilename) and file.size is not None and etag:
            files.append(HubFile(file.rfilename, file.size, etag))
    hashes = [str(told.sha), *(file.etag for file in files)]
    if not all(_is_safe(file.name) for file in files) or not all(map(str.isalnum, hashes)):
        raise HubError(f"the hub lists {name.repo_id} with names that cannot be those of files")
    return str(told.sha), files


def _is_safe(name: str) -> bool:
    """Whether a name stays within the folder it is put into, on any system."""
    path = PurePosixPath(name)
    inside = not path.is_absolute() and ".." not in path.parts
    return bool(path.parts) and inside and not set(name) & set('\\:*?"<>|\0') and name.isprintable()


def _chosen(name: HubName, listed: list[HubFile]) -> list[HubFile]:
    files = {file.name: file for file in listed}
    names = choose_files(list(files), name.tag)
    if not names:
        tags = dict.fromkeys(filter(None, map(tag_of, files)))
        there = f"it has {', '.join(tags)}" if tags else f"it has {', '.join(list(files)[:3])}"
        what = f"no GGUF file {name.tag}: {there}" if files else "no GGUF file of a model"
        raise FileMissingError(f"{name.repo_id} has {what}")
    if len(names) != n_parts(names[0]):
        there = f"{len(names)} of its {n_parts(names[0])} parts"
        raise FileMissingError(f"{name}: the hub has only {there}; choose another quantization")
    return [files[part] for part in names]


def _fetch(name: HubName, commit: str, files: list[HubFile], progress: Progress) -> Path:
    """Fetch what is missing of a model's files; they get their names when all are there."""
    repo = CachedRepo.of(name)
    with _full_disk_named(repo.folder):
        repo.blob("").mkdir(parents=True, exist_ok=True)
        missing = [file for file in files if not _is_there(repo, file)]
        partial = sum(min(_size(_partial(repo, file)), file.size) for file in missing)
        require_free_space(repo.folder, sum(file.size for file in missing) - partial)
        for number, file in enumerate(missing, 1):
            part = f" ({number} of {len(missing)})" if len(missing) > 1 else ""
            with _reported(name):
                _fetch_file(name, repo, commit, file, f"{file.name}{part}", progress)
        named = [repo.link(commit, file.name, file.etag) for file in files]
        repo.set_main(commit)
        return named[0]


def _fetch_file(
    name: HubName,
    repo: CachedRepo,
    commit: str,
    file: HubFile,
    shown: str,
    progress: Progress,
) -> None:
    """Fetch a file's blob, from where an interrupted download ended."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    lock, partial = repo.lock(file.etag), _partial(repo, file)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if _is_there(repo, file):
            return  # another process was first
        if _size(partial) > file.size:
            partial.unlink()
        try:
            with partial.open("ab") as opened:
                _transfer(name, commit, file, opened, lambda n: progress(shown, n, file.size))
                opened.flush()
                os.fsync(opened.fileno())
        except OSError as error:
            if error.errno in _FULL:
                partial.unlink(missing_ok=True)  # it would keep the disk full
            raise
        except KeyboardInterrupt as error:
            error.add_note("what was fetched is kept: the same command goes on behind it")
            raise
        if not file.matches(partial, lambda n: progress(f"checking {file.name}", n, file.size)):
            partial.unlink()
            problem = f"what the hub sent as {name.repo_id}/{file.name} has not the hash it lists"
            raise MalformedFileError(f"{problem} ({file.etag}): it was removed, try again")
        partial.replace(repo.blob(file.etag))


def _transfer(
    name: HubName, commit: str, file: HubFile, opened: BinaryIO, progress: Callable[[int], None]
) -> None:
    """Append the rest of a file to what is there; a connection that breaks is taken up again."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
    from huggingface_hub.utils.tqdm import silent_tqdm

    hub = _hub()
    done = opened.seek(0, os.SEEK_END)
    progress(done)
    http_get(
        hub.hf_hub_url(name.repo_id, file.name, revision=commit, endpoint=_endpoint()),
        cast("BinaryIO", _Counted(opened, progress)),
        resume_size=done,
        headers=build_hf_headers(token=hub.get_token() or False, library_name="specrun"),
        expected_size=file.size,
        tqdm_class=cast("Any", silent_tqdm),
    )


class _Counted:
    """A file that tells how long it is after each write, at most ten times a second."""

    def __init__(self, file: BinaryIO, progress: Callable[[int], None]) -> None:
        self._file, self._progress, self._told = file, progress, 0.0
        self.seek, self.tell, self.truncate = file.seek, file.tell, file.truncate

    def write(self, data: bytes) -> int:
        written = self._file.write(data)
        if time.monotonic() - self._told > 0.1:
            self._told = time.monotonic()
            self._progress(self._file.tell())
        return written


def _partial(repo: CachedRepo, file: HubFile) -> Path:
    return repo.blob(f"{file.etag}.incomplete")


def _is_there(repo: CachedRepo, file: HubFile) -> bool:
    """Whether a blob is whole, by its size: what is not is fetched again."""
    return _size(repo.blob(file.etag)) == file.size


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _hub() -> Any:  # noqa: ANN401 - a module
    try:
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.utils import logging as hub_logging
    except ImportError as error:
        raise MissingPackageError("fetching models", "huggingface_hub") from error
    # Its warnings are about attempts that it repeats by itself.
    hub_logging.set_verbosity(logging.ERROR)
    # An interrupt loses what is not written yet, and progress is told when it is: 10 MB at a time.
    constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
    return huggingface_hub


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


@contextmanager
def _full_disk_named(folder: Path) -> Iterator[None]:
    try:
        yield
    except SpecrunError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise SpecrunError(f"the disk of {folder} is full: free some space") from error
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise SpecrunError(f"{folder} cannot be written ({reason}); set HF_HUB_CACHE") from error


@contextmanager
def _reported(name: HubName) -> Iterator[None]:
    """Raise what huggingface_hub raises as a sentence that says what to do."""
    _hub()
    from httpx2 import HTTPError
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        yield
    except GatedRepoError as error:
        advice = "accept its terms on the hub's page, and set HF_TOKEN"
        raise FileMissingError(f"{name.repo_id} is not open to everybody: {advice}") from error
    except RepositoryNotFoundError as error:
        advice = "check the name, or set HF_TOKEN if it is private"
        raise FileMissingError(f"the hub has no repository {name.repo_id}: {advice}") from error
    except HfHubHTTPError as error:
        raise _refusal(name, error.response) from error
    except HTTPError as error:
        place = _endpoint() or "the hub"
        problem = f"{place} cannot be reached for {name} ({_reason(error)})"
        raise HubError(f"{problem}; the same command goes on where it ended") from error
    except OSError as error:
        if error.errno is not None:
            raise
        problem = f"the hub did not send the whole of {name}"
        raise HubError(f"{problem}; the same command goes on where it ended") from error
    except (ValueError, TypeError, KeyError) as error:  # what should be JSON is something else
        raise HubError(f"the hub's answer about {name.repo_id} cannot be read") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _refusal(name: HubName, response: Any) -> SpecrunError:  # noqa: ANN401 - an HTTP response
    status = response.status_code
    if status in (401, 403):
        problem = f"the hub refuses {name.repo_id} (HTTP {status})"
        return FileMissingError(f"{problem}: check HF_TOKEN, or that it may read this repository")
    if status == 404:
        return FileMissingError(f"the hub has no {name} (HTTP 404): check the name")
    if status == 429:
        wait = str(response.headers.get("Retry-After", ""))
        after = f"in {wait} seconds" if wait.isdecimal() else "later"
        return HubError(f"the hub asks for a pause (HTTP 429): fetch {name} {after}")
    return HubError(f"the hub answered {name.repo_id} with HTTP {status}: try again later")
