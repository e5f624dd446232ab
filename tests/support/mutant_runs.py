"""Mutants of models and heads, opened one after the other in a process that may die of them.

`python -m support.mutant_runs COUNT` (in tests/) opens that many over all files and prints how they
ended. A worker opens each as a trial does, in its own process, and where that goes well as a user
does; the runner counts what it says, and with what it died. What died in the trial, and a sample of
the others, is then opened as a user does, trial and all, by a worker that must not die.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import random
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.gguf_mutants import Parts, mutant, take_apart

BLOCKS = ("dflash", "dflash2", "dspark")
HEADS = ("medusa", "hydra", "eagle", "eagle3", *BLOCKS)
MODELS = ("llama", "qwen2", "qwen3", "gemma", "qwen35", "glm4moe")
SPARE_BYTES = 300 << 20  # what opening may take above the size of the file
_PATIENCE_S = 150.0  # a trial is given 120 s
_TRIAL_BYTES = 1 << 30


@dataclass(frozen=True)
class Outcome:
    """How a mutant ended: `ending` is what was said, or the signal; `stage` where it was."""

    base: str
    seed: int
    stage: str
    ending: str
    detail: str = ""
    excess_bytes: int = 0

    @property
    def died(self) -> bool:
        """Whether it ended or hung the process it was in."""
        return self.ending.startswith("signal") or self.ending == "hang"

    @property
    def is_lost(self) -> bool:
        """Whether it did not end in order: where it was a trial, nobody else notices."""
        return self.died or self.ending in ("foreign exception", "refused for memory")

    @property
    def is_fault(self) -> bool:
        """Whether a user would have met it: what a trial dies of does not count."""
        wrong = self.died or self.ending == "foreign exception"
        return (wrong and self.stage != "trial") or self.excess_bytes > SPARE_BYTES


def write_bases(folder: Path) -> None:
    """Write the files that mutants are made of: `MODELS`, and `HEADS` for the first of them."""
    from specrun.convert.random_model import RandomLlama, write_random_llama
    from support.renamed_models import as_architecture, qwen3_norms
    from support.tiny_dflash import TinyDFlash
    from support.tiny_eagle import random_eagle
    from support.tiny_eagle3 import random_eagle3
    from support.tiny_heads import random_medusa
    from support.tiny_hydra import random_hydra
    from support.tiny_models import CHAT
    from support.tiny_nextn import write_tiny_glm4moe, write_tiny_qwen35

    llama, spec = folder / "llama.gguf", RandomLlama(**{**CHAT, "layers": 6})
    write_random_llama(llama, spec)
    for name, more in {"qwen2": {}, "qwen3": qwen3_norms(spec.layers, 8), "gemma": {}}.items():
        as_architecture(llama, folder / f"{name}.gguf", name, more)
    write_tiny_glm4moe(folder / "glm4moe.gguf")
    for name in BLOCKS:
        TinyDFlash(name, draft_tokens=80 if name == "dspark" else 0).write(
            folder / f"{name}.gguf", llama
        )
    write_tiny_qwen35(folder / "qwen35.gguf")
    width, vocab = spec.width, spec.vocab_size
    random_medusa(width, vocab).write(folder / "medusa.gguf", vocab)
    random_hydra(width, vocab, prefix=True).write(folder / "hydra.gguf", vocab)
    random_eagle(width).write(folder / "eagle.gguf", vocab)
    random_eagle3(width, vocab).write(folder / "eagle3.gguf", llama)


# -- the worker ------------------------------------------------------------------------------------


class _Opener:
    """Opens mutants in a process that they may end."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._parts = folder, dict[str, Parts]()
        self._target, self._path = folder / "llama.gguf", folder / f"mutant-{os.getpid()}.gguf"

    def open(self, base: str, seed: int, *, product: bool) -> None:
        """Open a mutant, saying before each stage what it is, and in the end how it went."""
        parts = self._parts.setdefault(base, take_apart(self._folder / f"{base}.gguf"))
        data = mutant(parts, seed)
        self._path.write_bytes(data)
        before = _reset_peak()
        if product:
            ending, detail = self._stage("product", base, seed, None)
        else:
            ending, detail = self._stage("trial", base, seed, _TRIAL_BYTES + len(data))
            if ending == "ran":
                ending, detail = self._stage("use", base, seed, None)
        excess = _kilobytes("VmHWM") * 1024 - before - len(data)
        _say(ending=ending, detail=detail, excess_bytes=excess)

    def _stage(self, stage: str, base: str, seed: int, most: int | None) -> tuple[str, str]:
        import resource

        from specrun.bindings.models.trial import trusting_files

        _say(stage=stage)
        no_limit = resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_DATA, (no_limit if most is None else most, no_limit))
        with nullcontext() if stage == "product" else trusting_files():
            return _ending(lambda: self._try(base) if stage == "trial" else self._use(base, seed))

    def _try(self, base: str) -> None:
        from specrun.bindings.trial_worker import try_model
        from specrun.runtime.engine.trial import try_head

        if base in HEADS:
            try_head([str(self._target), str(self._path)])
        else:
            try_model(self._path)

    def _use(self, base: str, seed: int) -> None:
        """Ask for four tokens, as users do; every other model with NextN blocks drafts itself."""
        from specrun.runtime import Runtime

        head = base in HEADS
        opened = self._target if head else self._path
        own = "mtp" if base in ("qwen35", "glm4moe") and seed // 10 % 2 else "prompt-lookup"
        method = "dflash" if base in BLOCKS else base
        drafter = f'{method}("{self._path}")' if head else own
        with Runtime(opened, drafter, n_ctx=256, n_gpu_layers=0) as runtime:
            runtime.generate("ab ab ab", max_tokens=4)


def work(folder: Path) -> None:
    """Open mutants as the lines of standard input name them."""
    from specrun.bindings.library import llama

    llama()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    opener = _Opener(folder)
    for line in sys.stdin:
        opener.open(**json.loads(line))


def _ending(attempt: Callable[[], None]) -> tuple[str, str]:
    from specrun.bindings.errors import MalformedFileError, OutOfMemoryError, SpecrunError

    try:
        attempt()
    except MalformedFileError as error:
        return "refused by a check", str(error)
    except (OutOfMemoryError, MemoryError) as error:
        return "refused for memory", str(error)
    except SpecrunError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "foreign exception", f"{type(error).__name__}: {error}"
    return "ran", ""


def _say(**what: object) -> None:
    os.write(1, b"\n>" + json.dumps(what).encode() + b"\n")


def _reset_peak() -> int:
    """Let the peak of memory start anew; return what is in use, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _kilobytes("VmRSS") * 1024


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# -- the runner ------------------------------------------------------------------------------------


class Worker:
    """A worker that is started again when it has died; `folder` has the files of `write_bases`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._process, self._rest = folder, None, b""
        self._errors = (folder / f"errors-{id(self)}.txt").open("w+b")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._errors.close()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        tests = Path(__file__).parent.parent
        paths = [str(tests), *filter(None, sys.path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "GGML_NO_BACKTRACE": "1"}
        command = [sys.executable, "-m", "support.mutant_runs", "--work", str(self._folder)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, env=environment
        )

    def open(self, base: str, seed: int, *, product: bool = False) -> Outcome:
        """Return how a mutant ended; `product`: opened as a user does, with a trial before."""
        if self._process is None:
            self._process, self._rest = self._start(), b""
        self._errors.seek(0)
        self._errors.truncate()
        process = self._process
        job = json.dumps({"base": base, "seed": seed, "product": product}) + "\n"
        process.stdin.write(job.encode())
        process.stdin.flush()
        stage = "start"
        for event in self._events(process):
            if "ending" in event:
                return Outcome(base, seed, stage, **event)
            stage = event["stage"]
        hung = process.poll() is None and not self._ended(process)
        self._stop()
        ending = "hang" if hung else f"signal {-process.returncode}"
        self._errors.seek(0)
        words = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        named = [line for line in words if "GGML_ASSERT" in line or "ggml_abort" in line]
        return Outcome(base, seed, stage, ending, (named or words or [""])[-1][-300:])

    def _events(self, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
        """Yield what the worker says; ends when it is silent for too long, or has ended."""
        output = process.stdout.fileno()
        while select.select([output], [], [], _PATIENCE_S)[0]:
            data = os.read(output, 1 << 16)
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from (json.loads(line[1:]) for line in lines if line.startswith(b">"))

    def _ended(self, process: subprocess.Popen[bytes]) -> bool:
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            return False
        return True


def run(folder: Path, count: int, bases: Sequence[str] = MODELS + HEADS) -> Iterator[Outcome]:
    """Open `count` mutants, in turn of each file, as trials do."""
    with Worker(folder) as worker:
        for seed in range(count):
            yield worker.open(bases[seed % len(bases)], seed)


def again_as_users_do(folder: Path, outcomes: Sequence[Outcome], sample: int) -> Iterator[Outcome]:
    """Open what a trial did not survive, and so many of the others, as a user does."""
    lost = [outcome for outcome in outcomes if outcome.is_lost]
    others = [outcome for outcome in outcomes if not outcome.is_lost]
    with Worker(folder) as worker:
        for outcome in lost + random.Random(0).sample(others, min(sample, len(others))):
            yield worker.open(outcome.base, outcome.seed, product=True)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return how many ended how, below each other."""
    counts = collections.Counter(f"{outcome.stage}: {outcome.ending}" for outcome in outcomes)
    most = max(outcome.excess_bytes for outcome in outcomes) / 1e6
    lines = [f"{number:7} {ending}" for ending, number in sorted(counts.items())]
    return "\n".join([*lines, f"{most:7.1f} MB above the size of the file at most"])


def main(count: int, sample: int = 300) -> None:
    """Print what a whole run gives, and every mutant that a trial or a user lost."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = name
        write_bases(folder)
        outcomes = list(_shown(run(folder, count)))
        sys.stdout.write(f"as trials do:\n{table(outcomes)}\n")
        again = list(_shown(again_as_users_do(folder, outcomes, sample)))
        sys.stdout.write(f"as users do:\n{table(again)}\n")


def _shown(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
    for number, outcome in enumerate(outcomes):
        if outcome.is_lost or outcome.is_fault:
            sys.stdout.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
        if number % 500 == 0:
            sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        yield outcome


if __name__ == "__main__":
    if sys.argv[1] == "--work":
        work(Path(sys.argv[2]))
    else:
        main(*map(int, sys.argv[1:]))
