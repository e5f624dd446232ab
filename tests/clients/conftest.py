"""A server with a scripted model, and a place where a client runs: a home and a repository."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.recording_proxy import Recorded, recording
from support.loopback_server import serving
from support.scripted_model import write_scripted

from specrun.runtime.engine import Engine

INSTALLED = Path(os.environ.get("SPECRUN_CLIENTS", Path(__file__).parents[2] / ".clients"))
CALC = "def add(a, b):\n    return a - b\n"


@dataclass
class Desk:
    """Where a client runs: a repository with one faulty file, and a home of its own."""

    folder: Path
    home: Path
    server: Recorded | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        assert self.server is not None
        return self.server.address

    def run(self, *command: str | Path, seconds: float = 180, **environment: str) -> str:
        """Run a client to its end; return what it printed. It reaches loopback alone."""
        own = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "TERM": "dumb",
            "LANG": "C.UTF-8",
            "NO_COLOR": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            **{
                name: self.address
                for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy")
            },
        }
        done = subprocess.run(
            [str(part) for part in command],
            cwd=self.folder,
            env={**own, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}\n{self.server}"[:12000]
        return done.stdout


def program(*parts: str) -> Path:
    """Return the path of an installed client, or skip the test."""
    path = INSTALLED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{parts[-1]} is not installed: run `make test-clients`")
    return path


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    folder, home = tmp_path / "repository", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    (folder / "calc.py").write_text(CALC)
    for line in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", *line.split()], cwd=folder, check=True)
    return Desk(folder, home)


@contextmanager
def scripted(desk: Desk, turns: Sequence[str], **options: Any) -> Iterator[Recorded]:
    """Serve a model that says `turns`, for the client at this desk."""
    path = desk.home.parent / "scripted.gguf"
    path.unlink(missing_ok=True)
    write_scripted(path, turns, **options)
    with Engine(path, slots=2, n_ctx=65536, n_threads=2, trust=True) as engine:
        with serving(engine, model="scripted") as address, recording(address) as recorded:
            desk.server = recorded
            yield recorded
