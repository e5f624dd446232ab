"""Stores of models below a home folder, laid out as the programs that own them do."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path


def in_hub(home: Path, repo: str, name: str, source: Path, commit: str = "a" * 40) -> Path:
    """Put a file into the hub's cache, as huggingface_hub and llama.cpp do."""
    folder = home / ".cache/huggingface/hub" / f"models--{repo.replace('/', '--')}"
    blob = folder / "blobs" / hashlib.sha256(source.read_bytes()).hexdigest()
    path = folder / "snapshots" / commit / name
    for made in (blob.parent, path.parent, folder / "refs"):
        made.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, blob)
    path.symlink_to(os.path.relpath(blob, path.parent))
    (folder / "refs/main").write_text(commit)
    return path


def in_ollama(home: Path, name: str, tag: str, source: Path, host: str = "") -> Path:
    """Put a file into ollama's store: a manifest that names a blob."""
    folder = home / ".ollama/models"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    blob = folder / "blobs" / f"sha256-{digest}"
    namespace = name if "/" in name else f"library/{name}"
    manifest = folder / "manifests" / (host or "registry.ollama.ai") / namespace / tag
    blob.parent.mkdir(parents=True, exist_ok=True)
    manifest.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, blob)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{'0' * 64}"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


def in_studio(home: Path, repo: str, name: str, source: Path) -> Path:
    """Put a file into LM Studio's folder."""
    path = home / ".lmstudio/models" / repo / name
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, path)
    return path


def in_llama(home: Path, name: str, source: Path) -> Path:
    """Put a file into llama.cpp's older cache."""
    path = home / ".cache/llama.cpp" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, path)
    return path
