"""Caches in a folder of the test's own, and nobody's environment."""

from __future__ import annotations

from pathlib import Path

import pytest

_NAMES = (
    *("LLAMA_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "HF_ENDPOINT", "HF_TOKEN"),
    *("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "OLLAMA_MODELS", "XDG_CACHE_HOME"),
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without models."""
    for name in _NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    monkeypatch.setattr("specrun.runtime.models.hub.CHUNK_BYTES", 1000)
    return tmp_path
