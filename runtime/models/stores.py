"""Model stores: the GGUF files that the hub, llama.cpp, ollama and LM Studio keep on this disk.

Everything is read only, from names and links alone; `names` reads the headers. Broken entries
(links to nothing, manifests that are no JSON) are reported as problems and not changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specrun.runtime.models.hub import (
    CachedRepo,
    choose_files,
    hub_folders,
    is_first_part,
    is_weights_file,
    n_parts,
    parts_of,
    stem_of,
    tag_of,
)
from specrun.runtime.models.model_set import SET_FILE

_MAX_MANIFEST_BYTES = 1 << 20
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_OLLAMA_HOST, _OLLAMA_NAMESPACE = "registry.ollama.ai", "library"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in a store: the name that opens it, its aliases, and its files in order."""

    name: str
    store: str
    files: tuple[Path, ...]
    aliases: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The file to open."""
        return self.files[0]


@dataclass(frozen=True, slots=True)
class StoredModels:
    """The models that were found, and the broken entries of the stores, a sentence each."""

    models: tuple[StoredModel, ...]
    problems: tuple[str, ...]


def stored_models() -> StoredModels:
    """Return every model of the stores, and their broken entries."""
    found: list[StoredModel] = []
    problems: list[str] = []
    for scan in (_hub_models, _llama_models, _ollama_models, _studio_models):
        try:
            for item in scan():
                if isinstance(item, str):
                    problems.append(item)
                else:
                    found.append(item)
        except OSError as error:
            problems.append(f"{error.filename} cannot be read ({error.strerror})")
    return StoredModels(tuple(found), tuple(problems))


# -- Hugging Face ----------------------------------------------------------------------------------


def _hub_models() -> Iterator[StoredModel | str]:
    for cache in hub_folders():
        for folder in _folders(cache):
            repo = CachedRepo(folder)
            if repo.repo_id:
                yield from _repo_models(repo)


def _repo_models(repo: CachedRepo) -> Iterator[StoredModel | str]:
    """Yield the models of a repository, those of the commit that was fetched last first.

    A file that did not change from commit to commit is one blob, and reported once.
    """
    main = repo.main()
    commits = [folder.name for folder in _folders(repo.folder / "snapshots")]
    seen: set[Path] = set()
    for commit in sorted(commits, key=lambda commit: commit != main):
        snapshot = repo.snapshot(commit)
        names = repo.files(commit)
        for path in snapshot.rglob("*.gguf"):
            if path.is_symlink() and not path.exists():
                yield f"{path} is a link to a file that is not there"
        where = "hub" if commit == main else f"hub, commit {commit[:7]}"
        for item in _named_models(repo.repo_id, where, snapshot, names, newest=commit == main):
            if isinstance(item, str):
                yield item
            elif (blob := item.path.resolve()) not in seen:
                seen.add(blob)
                yield item


def _named_models(
    repo_id: str, store: str, folder: Path, names: list[str], *, newest: bool = True
) -> Iterator[StoredModel | str]:
    """Yield the models among the files of a repository, by their names for -hf if possible."""
    weights = [name for name in names if is_weights_file(name)]
    for parts in _whole_models(folder, names):
        if isinstance(parts, str):
            yield parts
            continue
        first, tag = parts[0], tag_of(parts[0])
        if not tag or choose_files(weights, tag) != parts:
            tag = stem_of(first)
        repo = repo_id.rpartition("/")[2]
        aliases = (repo_id, repo, f"{repo}:{tag}", stem_of(first), first.rpartition("/")[2])
        name = f"{repo_id}:{tag}" if newest else f"{repo_id}:{tag}@{folder.name[:7]}"
        yield StoredModel(name, store, tuple(folder / part for part in parts), aliases)


def _whole_models(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, ...] | str]:
    """Yield the files of each model among the names in a folder; a sentence if some are missing."""
    weights = [name for name in names if is_weights_file(name)]
    for first in filter(is_first_part, weights):
        parts = parts_of(first, weights)
        if len(parts) < n_parts(first):
            yield f"{folder / first} has only {len(parts)} of its {n_parts(first)} parts"
        else:
            yield parts


# -- A folder of the user's own --------------------------------------------------------------------


def folder_models(folder: Path) -> Iterator[StoredModel | str]:
    """Yield the models in a folder and in those below it, by the names of their files.

    A folder below it that holds a model set is one model, by the folder's name.
    """
    sets = {path.parent for path in folder.rglob(SET_FILE) if path.parent != folder}
    for place in sorted(sets):
        yield StoredModel(place.name, "folder", (place,), (place.relative_to(folder).as_posix(),))
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.gguf")
        if path.is_file() and sets.isdisjoint(path.parents)
    )
    for parts in _whole_models(folder, names):
        if isinstance(parts, str):
            yield parts
            continue
        first, files = parts[0], tuple(folder / part for part in parts)
        aliases = (first, first.removesuffix(".gguf"), files[0].name)
        yield StoredModel(stem_of(first), "folder", files, aliases)


# -- llama.cpp's older cache: files side by side ---------------------------------------------------


def _llama_models() -> Iterator[StoredModel | str]:
    for folder in _llama_folders():
        names = sorted(path.name for path in folder.glob("*.gguf") if path.is_file())
        for parts in _whole_models(folder, names):
            if isinstance(parts, str):
                yield parts
                continue
            files = tuple(folder / part for part in parts)
            yield StoredModel(stem_of(parts[0]), "llama.cpp", files, (parts[0],))


def _llama_folders() -> list[Path]:
    given = os.environ.get("LLAMA_CACHE")
    if sys.platform == "darwin":
        home = Path.home() / "Library" / "Caches"
    elif os.name == "nt":
        home = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    usual = home / "llama.cpp"
    return list(dict.fromkeys([Path(given).expanduser(), usual] if given else [usual]))


# -- ollama: manifests that name blobs by their hashes ---------------------------------------------


def _ollama_models() -> Iterator[StoredModel | str]:
    given = os.environ.get("OLLAMA_MODELS")
    homes = [Path.home()]
    if sys.platform == "linux":
        homes.append(Path("/usr/share/ollama"))  # the home of its service
    usual = [home / ".ollama" / "models" for home in homes]
    for folder in [Path(given).expanduser()] if given else usual:
        for manifest in sorted((folder / "manifests").glob("*/*/*/*")):
            if manifest.is_file():
                yield from _ollama_model(folder, manifest)


def _ollama_model(folder: Path, manifest: Path) -> Iterator[StoredModel | str]:
    host, namespace, model, tag = manifest.relative_to(folder / "manifests").parts
    digest = _model_digest(manifest)
    if digest is None:
        yield f"{manifest} is not a manifest that names a model"
        return
    if not digest:
        return  # a model of other parts, which are no GGUF files
    blob = folder / "blobs" / f"sha256-{digest}"
    if not blob.is_file():
        yield f"{manifest} names a file that is not there ({blob.name[:19]}...)"
        return
    name = model if namespace == _OLLAMA_NAMESPACE else f"{namespace}/{model}"
    name = name if host == _OLLAMA_HOST else f"{host}/{name}"
    aliases = (f"{model}:{tag}", *((name, model) if tag == "latest" else ()), model)
    yield StoredModel(f"{name}:{tag}", "ollama", (blob,), aliases)


def _model_digest(manifest: Path) -> str | None:
    """Return the SHA-256 of a manifest's model, "" if it has none, None if it is broken."""
    try:
        if manifest.stat().st_size > _MAX_MANIFEST_BYTES:
            return None
        layers = json.loads(manifest.read_bytes())["layers"]
        models = [layer for layer in layers if layer["mediaType"] == _OLLAMA_MODEL]
        if not models:
            return ""
        match = _DIGEST.fullmatch(models[0]["digest"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return match[1] if match else None


# -- LM Studio: a folder a publisher, and in it a folder a repository ------------------------------


def _studio_models() -> Iterator[StoredModel | str]:
    for publisher in _folders(_studio_home() / "models"):
        for folder in _folders(publisher):
            names = sorted(
                path.relative_to(folder).as_posix()
                for path in folder.rglob("*.gguf")
                if path.is_file()
            )
            repo_id = f"{publisher.name}/{folder.name}"
            yield from _named_models(repo_id, "LM Studio", folder, names)


def _studio_home() -> Path:
    home = Path.home()
    with contextlib.suppress(OSError, ValueError):
        pointed = (home / ".lmstudio-home-pointer").read_text("utf-8").strip()
        if pointed:
            return Path(pointed).expanduser()
    older = home / ".cache" / "lm-studio"
    return older if older.is_dir() else home / ".lmstudio"


def _folders(folder: Path) -> list[Path]:
    """Return the folders in a folder, none if it does not exist."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
