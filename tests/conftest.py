"""Tiny models with byte-level tokens and a chat template, written once a session."""

from __future__ import annotations

import atexit
import gc
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import gguf
import pytest
from support.tiny_models import CHAT

from specrun.bindings.machine import other_load
from specrun.bindings.models.trial import remember_written
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.drafters import build
from specrun.runtime.laws import sampling


def _share_cores() -> None:
    """Give each process of a run with several (`pytest -n`) its share of the cores.

    Contexts and torch take a thread for each core by default. Beside other processes these threads
    wait for each other at every operation: a run takes three times the work.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and hasattr(os, "sched_setaffinity"):
        number, count = int(worker[2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[number::count] or [cores[number % len(cores)]])


_share_cores()

# Processes and the commands that they start compile the sources once, not each for itself.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What tests try, measure or plan is neither read from the user's cache nor left there; the commands
# that they start know the files that were written here.
_CACHE = tempfile.mkdtemp(prefix="specrun-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE
# Nor are the user's settings read, or what the user's work has left.
os.environ["XDG_CONFIG_HOME"] = os.path.join(_CACHE, "config")
os.environ["XDG_STATE_HOME"] = os.path.join(_CACHE, "state")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)

# Tests run beside one another: what measures time must not wait for a quiet machine.
os.environ["SPECRUN_ANYWAY"] = "1"
other_load._SPARE = 1e9


class _KnownGGUFWriter(gguf.GGUFWriter):
    """Takes what it writes for tried, as specrun's own writer does: a trial takes a second."""

    def close(self) -> None:
        super().close()
        if self.path is not None and self.path.is_file():
            remember_written(Path(self.path))


gguf.GGUFWriter = _KnownGGUFWriter  # type: ignore[misc]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of a test's own: nothing that others measured or planned is in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


_TIMED = build._timed

_LONG = 50
"""How many tests a long one stands for."""


class _SeedsOfTest:
    """The seeds that answers without one get in a test: the same in every run."""

    def __init__(self, test: str) -> None:
        self.randbits = random.Random(test).getrandbits


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What depends on a random seed, or on how long a round takes, would fail once in a while.

    Drafters without a model are timed in tests that are marked `timed`, and bring a clock.
    """
    sampling.secrets = _SeedsOfTest(item.nodeid)  # type: ignore[assignment]
    timed = item.get_closest_marker("timed") is not None
    build._timed = _TIMED if timed else lambda drafter, _pace, _env: drafter  # type: ignore[assignment]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without looking for garbage: modules and tests stay until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files for several processes: those that take longest first, none at the end alone.

    A process takes a file at a time (`--dist loadfile`), and by itself xdist counts tests.
    """
    if not hasattr(config, "workerinput"):
        return
    weights: Counter[Path] = Counter()
    for item in items:
        weights[item.path] += 1 if item.get_closest_marker("long") is None else _LONG
    items.sort(key=lambda item: -weights[item.path])  # tests of a file stay together


def pytest_configure(config: pytest.Config) -> None:
    """Have xdist hand out files in the order of the tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.fixture(autouse=True, scope="module")
def _profiles_of_module() -> Iterator[None]:
    """Forget the profiles that a module's tests stored: other modules' files have the same content.

    Their names are that of the content. A stored curve changes what is drafted and padded.
    """
    yield
    shutil.rmtree(Path(_CACHE, "specrun", "profiles"), ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Sweeps run whole on demand: the normal run takes a sample of each, always the same."""
    parser.addoption("--sweep", choices=("sampled", "whole"), default="sampled")


@pytest.fixture(scope="session")
def whole_sweep(request: pytest.FixtureRequest) -> bool:
    """Whether every point of a sweep is to be tried (`--sweep whole`), or a sample."""
    return bool(request.config.getoption("--sweep") == "whole")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny models")  # with a space, as paths may have


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> Path:
    """A target of 320 tokens: 256 bytes, some pairs of letters, three control tokens."""
    path = tiny_folder / "target.gguf"
    write_random_llama(path, RandomLlama(**CHAT))
    return path


@pytest.fixture(scope="session")
def tiny_deep_model(tiny_folder: Path) -> Path:
    """The target's vocabulary in six layers, of which drafters may read some."""
    path = tiny_folder / "six layers.gguf"
    write_random_llama(path, RandomLlama(**{**CHAT, "layers": 6}))
    return path


@pytest.fixture(scope="session")
def tiny_drafter(tiny_folder: Path) -> Path:
    """The target's vocabulary, smaller and of another seed: it agrees by chance only."""
    path = tiny_folder / "drafter.gguf"
    write_random_llama(path, RandomLlama(**{**CHAT, "width": 16, "layers": 1, "seed": 1}))
    return path


@pytest.fixture(scope="session")
def tiny_flat_twin(tiny_folder: Path) -> Path:
    """The target with flatter laws: as a drafter it is accepted often, not always."""
    path = tiny_folder / "twin.gguf"
    write_random_llama(path, RandomLlama(**{**CHAT, "scale": 2.0}))
    return path


@pytest.fixture(scope="session")
def tiny_small_vocab(tiny_folder: Path) -> Path:
    """A model of 64 tokens without template, which fits none of the others."""
    path = tiny_folder / "small vocab.gguf"
    write_random_llama(path, RandomLlama(vocab_size=64, scale=3.0))
    return path


def pytest_unconfigure() -> None:
    """Close what llama-cpp-python leaves open: a run is to end without its ResourceWarning."""
    module = sys.modules.get("llama_cpp._utils")
    for name in ("outnull_file", "errnull_file"):
        opened = getattr(module, name, None)
        if opened is not None:
            opened.close()
