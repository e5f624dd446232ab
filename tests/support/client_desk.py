"""Where a client that nobody here wrote runs: a repository, a home, and a server on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.recording_proxy import Recorded, recording
from support.scripted_model import write_scripted

INSTALLED = Path(os.environ.get("SPECRUN_CLIENTS", Path(__file__).parents[2] / ".clients"))
PYTHON = ("python", "bin", "python")
SPECRUN = Path(sys.executable).with_name("specrun")
FAULTY = "def add(a, b):\n    return a - b\n"
REPAIRED = FAULTY.replace("-", "+")


def call(name: str, **arguments: Any) -> str:
    """A call of a tool, as the scripted model says it."""
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def program(*parts: str) -> Path:
    """Return the path of an installed client, or skip the test."""
    path = INSTALLED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{parts[-1]} is not installed: run `make test-clients`")
    return path


@dataclass
class Desk:
    """A repository with the faulty file calc.py, and a home without any settings."""

    folder: Path
    home: Path
    server: Recorded

    @classmethod
    def laid_out(cls, place: Path) -> Desk:
        """Make the folders, and the first commit."""
        folder, home = place / "repository", place / "home"
        folder.mkdir()
        home.mkdir()
        (folder / "calc.py").write_text(FAULTY)
        (home / ".gitconfig").write_text("[user]\nname = a\nemail = a@localhost\n")
        for line in ("init -q", "add .", "commit -qm first"):
            environment = {**os.environ, "HOME": str(home)}
            subprocess.run(["git", *line.split()], cwd=folder, check=True, env=environment)
        return cls(folder, home, Recorded())

    @property
    def file(self) -> Path:
        """The faulty file."""
        return self.folder / "calc.py"

    @contextmanager
    def served(self, model: Path, *options: object) -> Iterator[Recorded]:
        """Serve a model by `specrun serve`, through a proxy that refuses all other hosts."""
        chosen = ("-m", model, "-a", "local", "-np", 2, "-t", 2, "--trust", "--port", 0, *options)
        own = {name: value for name, value in os.environ.items() if "SPECRUN_" not in name}
        with subprocess.Popen(
            [str(SPECRUN), "serve", "--drafter", "none", *map(str, chosen)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=own,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                address = process.stdout.readline().strip()
                assert address, "the server did not start"
                with recording(address) as self.server:
                    yield self.server
            finally:
                process.kill()

    @contextmanager
    def scripted(self, *turns: str, **options: Any) -> Iterator[Recorded]:
        """Serve a model that says `turns`; `options` are those of `write_scripted`."""
        path = self.home.parent / "scripted.gguf"
        write_scripted(path, turns, **options)
        with self.served(path, "-c", options.get("context", 65536)) as server:
            yield server

    def run(self, *command: str | Path, seconds: float = 300, **environment: str) -> str:
        """Run a client to its end; return what it printed. It reaches loopback alone."""
        proxies = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy")
        own = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            **dict.fromkeys(proxies, self.server.address),
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
        said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\nfailed: {self.server.failed}"
        assert done.returncode == 0, said
        return done.stdout


def cached_share(reply: bytes) -> float:
    """Return how much of the prompt of a streamed or whole reply was in the cache."""
    found = [json.loads(line.removeprefix(b"data: ")) for line in _objects(reply)]
    usages = [one.get("usage") or (one.get("response") or {}).get("usage") for one in found]
    usage = [one for one in usages if one][-1]
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return float(cached / (cached + usage["input_tokens"]))
    kind = "prompt" if "prompt_tokens" in usage else "input"
    details = usage[f"{kind}_tokens_details"]
    return float(details["cached_tokens"] / usage[f"{kind}_tokens"])


def _objects(reply: bytes) -> Sequence[bytes]:
    lines = reply.splitlines()
    return [line for line in lines if line.startswith((b"data: {", b"{"))]
