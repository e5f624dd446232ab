"""The hub's cache on this disk: llama.cpp's and huggingface_hub's own, in the same layout.

    models--OWNER--REPO/refs/main               the commit that was fetched last
    models--OWNER--REPO/snapshots/COMMIT/FILE   a link to
    models--OWNER--REPO/blobs/ETAG              the file; ETAG is its SHA-256

Blobs may be links themselves, into a store that several caches share.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.atomic import atomic_path
from specrun.runtime.models.hub_files import HubName, choose_files, n_parts

MAIN = "main"


def hub_folder() -> Path:
    """Return the folder that repositories are fetched into, in llama.cpp's order."""
    return hub_folders()[0]


def hub_folders() -> list[Path]:
    """Return the folders that may hold repositories: llama.cpp's own, where one is set, and the
    hub's."""
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
        return cls((cache or hub_folder()) / f"models--{name.owner}--{name.repo}")

    @property
    def repo_id(self) -> str:
        """OWNER/REPO; "" where the folder is called otherwise."""
        kind, _, rest = self.folder.name.partition("--")
        owner, dashes, repo = rest.partition("--")
        return f"{owner}/{repo}" if kind == "models" and dashes and owner and repo else ""

    def blob(self, etag: str) -> Path:
        """Return where the file with this hash lies."""
        return self.folder / "blobs" / etag

    def lock(self, etag: str) -> Path:
        """Return the lock that huggingface_hub takes while it fetches the file."""
        return self.folder.parent / ".locks" / self.folder.name / f"{etag}.lock"

    def snapshot(self, commit: str) -> Path:
        """Return the folder with the files of a commit under their names."""
        return self.folder / "snapshots" / commit

    def main(self) -> str | None:
        """Return the commit that was fetched last, None where there is none."""
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
        path.unlink(missing_ok=True)  # a link that leads nowhere, or to what was damaged
        try:
            path.symlink_to(os.path.relpath(blob, path.parent))
        except OSError:
            if sys.platform != "win32":
                raise
            blob.replace(path)  # where links are forbidden, huggingface_hub moves it, too
        return path

    def files(self, commit: str) -> list[str]:
        """Return the names in a snapshot, those that can be opened, in order."""
        folder = self.snapshot(commit)
        return sorted(path.relative_to(folder).as_posix() for path in _files_below(folder))

    def find(self, tag: str) -> Path | None:
        """Return the first file of the model with a tag that was fetched, None without it."""
        commit = self.main()
        if commit is None:
            return None
        chosen = choose_files(self.files(commit), tag)
        if not chosen or len(chosen) != n_parts(chosen[0]):
            return None
        return self.snapshot(commit) / chosen[0]


def _files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def find_cached(name: HubName) -> Path | None:
    """Return the first file of a model that some cache of the hub has, None without one."""
    found = (CachedRepo.of(name, cache).find(name.tag) for cache in hub_folders())
    return next((path for path in found if path is not None), None)
