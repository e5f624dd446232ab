"""The Hugging Face hub: names of its files, downloads checked by SHA-256, and the cache."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from specrun.bindings.errors import (
    FileMissingError,
    HubError,
    MalformedFileError,
    MissingPackageError,
    OptionError,
    SpecrunError,
)
from specrun.bindings.files import atomic_path, require_free_space

# == Hub repositories: names, `OWNER/REPO[:QUANT]`, and llama.cpp's choice of files ================
#
# `-hf` means the same file here as in llama.cpp: that of the quantization named, otherwise Q4_K_M,
# Q8_0 or the first model of the repository; a model in parts is all of its parts. Projectors of
# pictures (`mmproj`), importance matrices and heads that draft are no models.


HUB_PREFIX = "hf:"
"""The beginning of names that the hub may have, as in hf:OWNER/REPO:Q8_0."""

_NAME = re.compile(r"([\w.-]+)/([\w.-]+)(?::([\w.-]+))?", re.ASCII)
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_QUANTIZATION = re.compile(
    r"[-._]((?:UD-)?(?:I?Q\d[A-Z0-9_]*|B?F16|F32|TQ\d_\d|MXFP4[A-Z0-9_]*|NVFP4))$", re.IGNORECASE
)
_DEFAULT_TAGS = ("Q4_K_M", "Q8_0")
HEADS = ("mtp-", "eagle3-", "dflash-", "dspark-")
"""The beginnings of the names of heads that lie beside their models."""

_NEVER_MODELS = ("mmproj", "imatrix")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the hub, and the wanted quantization; "": the usual one."""

    owner: str
    repo: str
    tag: str = ""

    @property
    def repo_id(self) -> str:
        """OWNER/REPO, as the hub has it."""
        return f"{self.owner}/{self.repo}"

    def __str__(self) -> str:
        return f"{self.repo_id}:{self.tag}" if self.tag else self.repo_id

    @classmethod
    def parse(cls, text: str) -> HubName:
        """Return the name that `text` is, with or without `hf:`; raises OptionError for others."""
        match = _NAME.fullmatch(text.removeprefix(HUB_PREFIX).strip())
        if match is None or {match[1], match[2]} & {".", ".."} or ".." in text or "--" in text:
            raise OptionError(
                f"{text!r} names no repository of the hub: give OWNER/REPO, or OWNER/REPO:QUANT"
            )
        tag = match[3] or ""
        return cls(match[1], match[2], "" if tag == "latest" else tag)


def choose_files(names: Sequence[str], tag: str) -> tuple[str, ...]:
    """Return the files of a listing that are its model with this tag, "": its usual one.

    The first file is the one to open; a model that is split has others. A tag may also be the
    whole name of a file. Heads are chosen if a repository has nothing else, or if the tag begins
    as their names do (`HEADS`): dflash-, or dflash-Q8_0. Without such a file the answer is empty.
    """
    weights = [name for name in names if is_weights_file(name)]
    heads = {name: part for name in weights for part in HEADS if part in name.rpartition("/")[2]}
    models = [name for name in weights if name not in heads]
    kind = next((part for part in HEADS if tag.startswith(part)), "")
    if kind:
        models, tag = [name for name in weights if heads.get(name) == kind], tag[len(kind) :]
        weights = models
    firsts = [name for name in models or weights if is_first_part(name)]
    for wanted in (tag,) if tag else _DEFAULT_TAGS:
        pattern = re.compile(rf"{re.escape(wanted)}([.-]|$)", re.IGNORECASE)
        for name in firsts:
            if pattern.search(name):
                return parts_of(name, names)
    return () if tag or not firsts else parts_of(firsts[0], names)


def parts_of(first: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return all parts of a split model in order, of those that are there; else `first` alone."""
    stem, _, count = _place(first)
    if count == 1:
        return (first,)
    parts = (name for name in names if name.endswith(".gguf"))
    places = {name: _place(name) for name in parts}
    same = [name for name, place in places.items() if (place[0], place[2]) == (stem, count)]
    return tuple(sorted(same, key=lambda name: places[name][1]))


def n_parts(name: str) -> int:
    """Return of how many parts the model is to which a file belongs."""
    return _place(name)[2]


def is_first_part(name: str) -> bool:
    """Whether a model is opened by this file."""
    return _place(name)[1] == 1


def is_weights_file(name: str) -> bool:
    """Whether a file holds a model, or heads that draft for one, by its name."""
    base = name.rpartition("/")[2]
    return base.endswith(".gguf") and not any(part in base for part in _NEVER_MODELS)


def stem_of(name: str) -> str:
    """Return the name of a file without folders, .gguf and the number of its part."""
    return _place(name.rpartition("/")[2])[0]


def tag_of(name: str) -> str:
    """Return the quantization in a file's name, in capitals; "": it has none."""
    match = _QUANTIZATION.search(stem_of(name))
    return "" if match is None else match[1].upper()


def _place(name: str) -> tuple[str, int, int]:
    """Return the name without .gguf and part, the number of the part, and how many there are."""
    match = _PART.fullmatch(name)
    if match is None:
        return name.removesuffix(".gguf"), 1, 1
    return match[1], int(match[2]), int(match[3])


# == The hub's cache on this disk: llama.cpp's and huggingface_hub's, in the same layout ===========
#
#     models--OWNER--REPO/refs/main               the commit that was fetched last
#     models--OWNER--REPO/snapshots/COMMIT/FILE   a link to
#     models--OWNER--REPO/blobs/ETAG              the file; ETAG is its SHA-256
#
# Blobs may be links themselves, into a store that several caches share.


MAIN = "main"


def hub_folders() -> list[Path]:
    """Return the folders that may hold repositories: llama.cpp's own, if one is set, the hub's.

    The first is the one that is fetched into.
    """
    environment = os.environ
    hub = [environment.get("HF_HUB_CACHE", ""), environment.get("HUGGINGFACE_HUB_CACHE", "")]
    hub += [
        str(Path(environment[name]) / below) if environment.get(name) else ""
        for name, below in (("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub"))
    ]
    hub.append(str(Path.home() / ".cache" / "huggingface" / "hub"))
    said = [environment.get("LLAMA_CACHE", ""), next(filter(None, hub))]
    found = (Path(os.path.expandvars(text)).expanduser() for text in said if text)
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class CachedRepo:
    """The folder of one repository in a cache; nothing of it need be there."""

    folder: Path

    @classmethod
    def of(cls, name: HubName, cache: Path | None = None) -> CachedRepo:
        """Return the folder of a repository, in the cache that is fetched into or another."""
        return cls((cache or hub_folders()[0]) / f"models--{name.owner}--{name.repo}")

    @property
    def repo_id(self) -> str:
        """OWNER/REPO; "" if the folder has another kind of name."""
        kind, _, rest = self.folder.name.partition("--")
        owner, dashes, repo = rest.partition("--")
        return f"{owner}/{repo}" if kind == "models" and dashes and owner and repo else ""

    def blob(self, etag: str) -> Path:
        """Return the path of the file with this hash."""
        return self.folder / "blobs" / etag

    def lock(self, etag: str) -> Path:
        """Return the lock that huggingface_hub takes while it fetches the file."""
        return self.folder.parent / ".locks" / self.folder.name / f"{etag}.lock"

    def snapshot(self, commit: str) -> Path:
        """Return the folder with the files of a commit under their names."""
        return self.folder / "snapshots" / commit

    def main(self) -> str | None:
        """Return the commit that was fetched last, None if there is none."""
        try:
            commit = (self.folder / "refs" / MAIN).read_text("ascii").strip()
        except (OSError, ValueError):
            return None
        return commit if commit.isalnum() else None

    def set_main(self, commit: str) -> None:
        """Remember the commit that was fetched last."""
        if self.main() != commit:
            path = self.folder / "refs" / MAIN
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(path, force=True) as aside:
                aside.write_text(commit, "ascii")

    def link(self, commit: str, name: str, etag: str) -> Path:
        """Give a blob its name in the snapshot of a commit, and return that."""
        blob, path = self.blob(etag), self.snapshot(commit).joinpath(*name.split("/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and path.samefile(blob):
            return path
        path.unlink(missing_ok=True)  # a link to nothing, or to a damaged file
        try:
            path.symlink_to(os.path.relpath(blob, path.parent))
        except OSError:
            if sys.platform != "win32":
                raise
            blob.replace(path)  # huggingface_hub moves it, too, if links are forbidden
        return path

    def files(self, commit: str) -> list[str]:
        """Return the names in a snapshot, those that can be opened, in order."""
        folder = self.snapshot(commit)
        there = (path for path in folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(folder).as_posix() for path in there)

    def find(self, tag: str) -> Path | None:
        """Return the first file of the model with a tag that was fetched, None without it."""
        commit = self.main()
        if commit is None:
            return None
        chosen = choose_files(self.files(commit), tag)
        if not chosen or len(chosen) != n_parts(chosen[0]):
            return None
        return self.snapshot(commit) / chosen[0]


def find_cached(name: HubName) -> Path | None:
    """Return the first file of a model that some cache of the hub has, None without one."""
    found = (CachedRepo.of(name, cache).find(name.tag) for cache in hub_folders())
    return next((path for path in found if path is not None), None)


# == Downloads =====================================================================================
#
# A file gets its name in the cache only when it is whole and its hash is the hub's. The part of an
# interrupted download is `blobs/ETAG.incomplete`; the next download appends to it.
# huggingface_hub (listing, access, transfer) is imported when something is fetched, never before.


Progress = Callable[[str, int, int], None]
"""Receives the current step, the bytes that are done and the bytes in all."""

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
        """Whether a file has the hash; `progress` receives the number of bytes read."""
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
    """Whether the hub is not to be used: within `without_hub`, or by HF_HUB_OFFLINE."""
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

    Offline (`is_offline`), and if the hub cannot be reached, the cache's copy is taken; `warn`
    receives the latter.

    Raises FileMissingError if there is no such repository or file, or none in the cache if only
    the cache may be used, HubError if the hub cannot be reached or refuses, MalformedFileError if
    the file has another hash than the hub's, and SpecrunError if the disk is full.
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
    """Return the newest commit of a repository on the hub and the GGUF files in it."""
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
    """Fetch the missing files of a model; they get their names when all are complete."""
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
    """Fetch a file's blob, from the end of an interrupted download."""
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
            error.add_note("the fetched part is kept: the same command continues")
            raise
        if not file.matches(partial, lambda n: progress(f"checking {file.name}", n, file.size)):
            partial.unlink()
            problem = (
                f"{name.repo_id}/{file.name}, as the hub sent it, lacks the hash that the hub lists"
            )
            raise MalformedFileError(f"{problem} ({file.etag}): it was removed, try again")
        partial.replace(repo.blob(file.etag))


def _transfer(
    name: HubName, commit: str, file: HubFile, opened: BinaryIO, progress: Callable[[int], None]
) -> None:
    """Append the rest of a file to its part; a broken connection is opened again."""
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
    """A file that reports its length after each write, at most ten times a second."""

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
    """Whether a blob is whole, by its size; others are fetched again."""
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
    # An interrupt loses unwritten bytes, and progress counts written ones: 10 MB at a time.
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
    """Raise huggingface_hub's errors as sentences with an advice."""
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
        reason = " ".join(str(error).split()) or type(error).__name__
        problem = f"{place} cannot be reached for {name} ({reason})"
        raise HubError(f"{problem}; the same command continues") from error
    except OSError as error:
        if error.errno is not None:
            raise
        problem = f"the hub did not send the whole of {name}"
        raise HubError(f"{problem}; the same command continues") from error
    except (ValueError, TypeError, KeyError) as error:  # no JSON, or another object
        raise HubError(f"the hub's answer about {name.repo_id} cannot be read") from error


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
        return HubError(f"the hub requires a pause (HTTP 429): fetch {name} {after}")
    return HubError(f"the hub answered {name.repo_id} with HTTP {status}: try again later")
