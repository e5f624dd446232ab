"""What there is to measure: records, and the pieces that fill them, each one command.

A piece is short enough for a session of half an hour. Its estimate is a count of tokens over a
guessed speed; pieces that are there correct the guess for those that are not.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from measure.benchmarks import models
from measure.benchmarks.records import ROOT
from specrun.bindings.errors import OptionError
from specrun.cli.options.types import read_parameters
from specrun.convert.cut.cut import cut_layers
from specrun.convert.cut.pad import pad_ffn
from specrun.runtime.demo import demo_questions, demo_target
from specrun.runtime.models.packaged import SMOLLM2

Set = Literal["real", "counted", "missing", "gpu"]
GPU_SHAPE = "8b"
CATEGORIES = ("questions", "code", "edits", "summaries", "chats")
PROGRAMS: Mapping[str, str] = {
    "specrun": "specrun",
    "measure": "python tools/measure",
    "offloaded": "python tools/measure/benchmarks/offloaded.py",
    "pytest": "python tools/measure/benchmarks/device_tests.py",
}


File = tuple[Callable[[], Path], str]
"""The maker of a file, and the name that records show."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One command of `specrun` or tools/measure that prints JSON; `labels` go into its results.

    `files` are those that words of the `line` such as "{target}" name, made in this order.
    """

    name: str
    program: str
    line: str
    seconds: float
    files: Mapping[str, File] = field(default_factory=dict)
    labels: Mapping[str, str | int | float] = field(default_factory=dict)

    def arguments(self, files: Mapping[str, object]) -> list[str]:
        """Return the words of the line with these files."""
        return [word.format(**files) for word in self.line.split()]

    @property
    def command(self) -> str:
        """The command as records show it, with the names of files alone."""
        shown = self.arguments({key: name for key, (_, name) in self.files.items()})
        words = (f'"{word}"' if " " in word or "(" in word else word for word in shown)
        return " ".join((PROGRAMS[self.program], *words))


@dataclass(frozen=True, slots=True)
class Planned:
    """A record of a set: its title and conditions, and its pieces in the order of their worth.

    Of a `counted` record no time is kept, so that it can be made on a busy machine.
    """

    name: str
    set: Set
    kind: str
    title: str
    conditions: str
    pieces: tuple[Piece, ...]
    counted: bool = False


def planned(name: str, gpu_shape: str = GPU_SHAPE) -> Planned:
    """Return a record's plan; raises OptionError for a name that is not planned."""
    found = {record.name: record for record in plans(gpu_shape)}
    if name not in found:
        raise OptionError(f"there is no record {name} to measure: there is {', '.join(found)}")
    return found[name]


def command_of(name: str) -> str:
    """Return the command that measures a record."""
    target = {"real": "benchmarks-real", "gpu": "benchmarks-gpu"}
    record = planned(name)
    return f"make {target.get(record.set, f'benchmarks-{record.set}')} ONLY={name}"


@functools.cache
def plans(gpu_shape: str = GPU_SHAPE) -> tuple[Planned, ...]:
    """Return all records that can be measured, those first that tell most."""
    return (*_peers(), *_curves(), *_cascades(), *_counted(), *_missing(), *_gpu(gpu_shape))


# == Files =========================================================================================


def _file(model: str, weights: str, padded: str = "") -> File:
    made = functools.partial(models.model_file, model, weights, padded)
    return made, models.file_name(model, weights, padded)


_HEAD = (lambda: SMOLLM2.shipped_head, SMOLLM2.shipped)
_DOCS = (lambda: ROOT / "docs" / "quickstart.md", "docs/quickstart.md")
_WEIGHTS = {models.SMOLLM: ("F16", "Q8_0", "Q4_1"), models.GEMMA: ("F16", "Q8_0", "Q4_K_M")}
_BYTES = {"F16": 2.0, "Q8_0": 1.06, "Q4_1": 0.63, "Q4_K_M": 0.6}
_PARAMETERS = {models.SMOLLM: 0.135, models.GEMMA: 0.27}  # billions
_GB_PER_SECOND = {1: 12.0, 2: 20.0}
_LIKELY_TYPES = ("ngram-simple", "ngram-mod")


def _token_seconds(model: str, weights: str, padded: str, threads: int) -> float:
    size = {"": _PARAMETERS[model], "400M": 0.4, "1B": 1.0}[padded]
    return size * _BYTES[weights] / _GB_PER_SECOND[threads] + 0.001


# == Real models, beside their peers ===============================================================


def _peers() -> Iterable[Planned]:
    for padded, model in itertools.product(models.PADDED, _WEIGHTS):
        name = "-".join(filter(None, ("peers", model.split("-")[0], padded.lower())))
        size = f"padded to {padded}, which costs time and changes no text" if padded else "as it is"
        yield Planned(
            name,
            "real",
            "peers",
            f"{model}, {size}",
            "Our suite of five categories, each question once, the same client for all programs, "
            "one slot each; all programs in turn, question by question."
            + (" A base model: texts are continued." if model == models.GEMMA else ""),
            tuple(_peer_pieces(model, padded)),
        )


def _peer_pieces(model: str, padded: str) -> Iterable[Piece]:
    """Order pieces so that one type and two threads are whole before the others begin.

    Every question is asked once: a server that keeps earlier answers would copy a second one. Of
    llama.cpp's n-gram drafters two are in all pieces, the rest in those of the first type. Padded
    models take long, so they have two threads and fewer questions; SmolLM2 of 400M has two types
    and both temperatures, the others F16 at 0.
    """
    is_short = padded == "1B" or (padded != "" and model == models.GEMMA)
    questions, tokens = (1, 48) if is_short else (2, 64) if padded else (3, 64)
    files = {"head": _HEAD} if model == models.SMOLLM else {}
    types, counts, temperatures = [*_WEIGHTS[model]], [2, 1], ["0", "0.8"]
    first = types[0]
    if padded:
        types, counts = types[:2], counts[:1]
    if is_short:
        types, temperatures = types[:1], temperatures[:1]
    for threads, weights, temperature in itertools.product(counts, types, temperatures):
        is_whole = (threads, weights, padded) == (2, first, "")
        arms = (12 if is_whole else 6) + 2 * len(files)
        target = _file(model, weights, padded)
        line = f"peers -m {{target}}{' -md {head}' if files else ''} --suite own "
        if not is_whole:
            line += "--program llama-server --program specrun "
            line += "".join(f"--spec-type {name} " for name in _LIKELY_TYPES)
        line += f"--questions {questions} -n {tokens} -r 1 "
        line += f"-t {threads} --temp {temperature} -o json"
        answers = questions * (len(CATEGORIES) + 1)  # chats have two turns
        each = tokens * _token_seconds(model, weights, padded, threads) + 0.5  # a prompt is read
        yield Piece(
            f"{weights} {threads} {temperature}",
            "measure",
            line,
            arms * (4 + answers * each),
            {"target": target, **files},
            {"weights": weights, "threads": threads},
        )


def _curves() -> Iterable[Planned]:
    pieces = []
    for model, padded, threads in itertools.product(_WEIGHTS, models.PADDED, (2, 1)):
        for weights in _WEIGHTS[model]:
            label = f"{model}{f' padded to {padded}' if padded else ''}, {weights}"
            line = f"tune -m {{target}} -t {threads} --seconds 8 --no-save --json"
            files = {"target": _file(model, weights, padded)}
            name = f"{label}, {threads}"
            pieces.append(
                Piece(name, "specrun", line, 12, files, {"file": label, "threads": threads})
            )
    yield Planned(
        "curves",
        "real",
        "curves",
        "T(n): the cost of n tokens in one evaluation, over that of one",
        "Medians; all padded files are named so.",
        tuple(pieces),
    )


def _cascades() -> Iterable[Planned]:
    line = (
        "bench cascade -m {target} -md {small} --texts {texts} --examples 6 -n 32 -r 2 -t 2 "
        "--spec-draft-n-max 3 --alpha 0.05,0.2,0.5 --temp {temperature} -o json"
    )
    files: dict[str, File] = {
        "target": _file(models.SMOLLM, "F16", "400M"),
        "small": (_cut, _CUT),
        "texts": _DOCS,
    }
    yield Planned(
        "cascades-real",
        "real",
        "cascade",
        "Rules that are not exact: quality against latency",
        "SmolLM2-135M padded to 400M, drafted for by 28 of its own 30 layers, on this project's "
        "own pages as real text.",
        tuple(
            Piece(temperature, "specrun", line.replace("{temperature}", temperature), 500, files)
            for temperature in ("1", "0.5")
        ),
    )

    answers = (
        "bench cascade -m {target} -md {small} --texts {texts} --examples 40 -n 16 -r 1 -t 2 "
        "--spec-draft-n-max 3 --temp 0 --alpha 0.05,0.2,0.5 -o json"
    )
    some = (
        " --accept cascade-opt --accept cascade-token-v3 --accept lossy --accept token-cascade"
        " --accept sequence-cascade"
    )
    smalls = {
        "28 of its layers": (answers, {"small": files["small"]}),
        "its 4-bit file": (answers + some, {"small": _file(models.SMOLLM, "Q4_1")}),
    }
    texts = (lambda: _CAPITALS, "capitals.jsonl")
    yield Planned(
        "cascades-references",
        "real",
        "cascade",
        "Rules that are not exact, on questions with answers",
        "SmolLM2-135M padded to 400M in F16; the small model is 28 of its own 30 layers, or the "
        "published file of 4 bits, neither padded. 40 questions for capitals with their answers "
        "(ours).",
        tuple(
            Piece(name, "specrun", line, 400, {**files, **own, "texts": texts}, {"small": name})
            for name, (line, own) in smalls.items()
        ),
    )


_CAPITALS = Path(__file__).with_name("capitals.jsonl")


_CUT = "smollm2-135m.without-14-17.gguf"


def _cut() -> Path:
    """Return SmolLM2 without two layers: those that change its favourite tokens least."""
    path = models.folder() / _CUT
    if not path.exists():
        kept = [layer for layer in range(30) if layer not in (14, 17)]
        layers = ",".join(map(str, kept))
        cut_layers(models.model_file(models.SMOLLM, "F16"), path, layers=layers)
    return path


# == Counted: no clock, so that any machine will do ================================================


def _counted() -> Iterable[Planned]:
    nodes = (1, 2, 4, 8, 16, 24, 32, 48)
    drafters = "".join(f' --drafter eagle3("{{head}}",depth={min(n, 5)},nodes={n})' for n in nodes)
    chains = "".join(f' --drafter eagle3("{{head}}",n={n})' for n in (1, 2, 3, 4, 5, 7))
    target = {"target": _file(models.SMOLLM, "F16"), "head": _HEAD}
    base = "bench drafters -m {target} --suite own --questions 1 -n 64 -r 1 -o json"
    yield Planned(
        "nodes",
        "counted",
        "counted",
        "Tokens a round against the nodes of a tree",
        "SmolLM2-135M in F16 with the shipped EAGLE-3 head, one question of each category of our "
        "suite (six answers of 64 tokens).",
        tuple(
            Piece(
                f"{shape} {temperature}",
                "specrun",
                f"{base}{arms} --temp {temperature}",
                900,
                target,
            )
            for temperature, (shape, arms) in itertools.product(
                ("0", "0.8"), {"trees": drafters, "chains": chains}.items()
            )
        ),
        counted=True,
    )
    foreign = {"target": _file(models.GEMMA, "Q4_K_M"), "small": _file(models.SMOLLM, "Q4_1")}
    arms = "".join(
        f' --drafter draft("{{small}}",n=4,vocabulary={way})' for way in ("tokens", "text")
    )
    yield Planned(
        "foreign",
        "counted",
        "counted",
        "A draft model of another family's vocabulary",
        "Gemma 3 270M (262,144 tokens) drafted for by SmolLM2-135M (49,152 tokens), one question "
        "of each category of our suite (six answers of 64 tokens); models nearly as large as each "
        "other, so this is counted and would gain no time.",
        tuple(
            Piece(temperature, "specrun", f"{base}{arms} --temp {temperature}", 600, foreign)
            for temperature in ("0", "0.8")
        ),
        counted=True,
    )
    long_arms = (
        " --drafter partial(sink=4,window=256,n=4) --drafter partial(sink=4,window=1024,n=4)"
        " --drafter cascade(partial(sink=4,window=256,n=6),prompt-lookup)"
        ' --drafter eagle3("{head}",n=4) --drafter eagle3("{head}",n=4,window=512)'
        " --drafter prompt-lookup(n=4,always=yes)"
    )
    yield Planned(
        "long",
        "counted",
        "counted",
        "Long contexts: a bounded cache, heads, and the text itself",
        "SmolLM2-135M (trained for 8,192 tokens) behind about 4,000 tokens of this project's own "
        "pages, which it is to summarize: one answer of 64 tokens.",
        (
            Piece(
                "4k",
                "specrun",
                "bench drafters -m {target} -f {texts} -c 8192 -n 64 -r 1 --temp 0 -o json"
                + long_arms,
                1500,
                {**target, "texts": (_long_prompt, "pages.txt")},
            ),
        ),
        counted=True,
    )


_LONG_CHARACTERS = 16_000


def _long_prompt() -> Path:
    path = models.folder() / "pages.txt"
    pages = ("engine", "exactness", "draft-length", "choosing")
    text = "\n".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in pages)
    asked = "\n\nSummarize the text above in five sentences."
    path.write_text(text[:_LONG_CHARACTERS] + asked, encoding="utf-8")
    return path


# == Rows that are missing: each a command =========================================================


def _missing() -> Iterable[Planned]:
    target = {"target": _file(models.SMOLLM, "F16", "400M"), "head": _HEAD}
    yield Planned(
        "batches",
        "missing",
        "load",
        "Heads for several conversations",
        "SmolLM2-135M padded to 400M in F16, questions of our suite, with 1 to 8 conversations.",
        (
            Piece(
                "heads",
                "measure",
                "load -m {target} --suite own --questions 1 -n 32 -r 2 --long 0 "
                '--parallel 1,2,4,8 --drafter eagle3("{head}",n=2) '
                '--drafter eagle3("{head}",nodes=auto) -o json',
                900,
                target,
            ),
        ),
    )
    yield Planned(
        "experts",
        "missing",
        "curves",
        "T(n) of a mixture of experts",
        "Random weights in the shape of eight experts of 1B, two of which are used.",
        tuple(
            Piece(
                f"8x1b {weights}",
                "specrun",
                "tune -m {target} -t 2 --seconds 12 --no-save --json",
                60,
                {"target": _random("8x1b", weights)},
                {"file": f"random 8x1b, {weights}", "threads": 2},
            )
            for weights in ("Q4_K_M", "Q8_0")
        ),
    )

    yield _offloaded()
    yield _hydra()
    yield _mtp()


def _offloaded() -> Planned:
    lines = {
        "loopback": "",
        "5 ms": "--delay-ms 2.5 --mbit 10000",
        "100 Mbit/s": "--delay-ms 2.5 --mbit 100",
    }
    return Planned(
        "offloaded",
        "missing",
        "drafters",
        "Half of the layers behind a slow line",
        "SmolLM2-135M in F16, 15 of 30 layers and the output matrix on a worker (one thread): on "
        "the same machine, behind 5 ms a round trip, and behind 5 ms at 100 Mbit/s.",
        tuple(
            Piece(
                name,
                "offloaded",
                f"--ngl 15 {line} -m {{target}} --suite own --questions 1 -n 48 -r 1 --temp 0 "
                '-t 1 --drafter eagle3("{head}",n=5) --drafter eagle3("{head}",nodes=16) '
                '--drafter eagle3("{head}",nodes=32) --drafter prompt-lookup -o json',
                300,
                {"target": _file(models.SMOLLM, "F16"), "head": _HEAD},
                {"line": name},
            )
            for name, line in lines.items()
        ),
    )


def _hydra() -> Planned:
    return Planned(
        "hydra",
        "counted",
        "counted",
        "Hydra heads beside Medusa's, on the embedded target",
        "Heads of 1,000 steps on the target's own answers to the demo's questions; 40 questions.",
        tuple(
            Piece(
                temperature,
                "specrun",
                "bench drafters -m {target} --prompts {questions} --questions 40 -n 24 -r 1 "
                f"--temp {temperature} -o json "
                '--drafter hydra("{hydra}",n=4) --drafter hydra("{hydra}",nodes=16) '
                '--drafter medusa("{medusa}",nodes=16)',
                300,
                {
                    "target": (demo_target, "target.gguf"),
                    "questions": _QUESTIONS,
                    "hydra": _small_head("hydra"),
                    "medusa": _demo_file("medusa"),
                },
            )
            for temperature in ("0", "1")
        ),
        counted=True,
    )


def _mtp() -> Planned:
    line = "bench drafters -m {target} --prompts {questions} --questions 40 -n 24 -r 1 -o json "
    block = {"target": (models.nextn_target, "embedded-nextn.gguf")}
    eagle = {"target": (demo_target, "target.gguf"), "eagle": _small_head("eagle")}
    shapes = ("n=3", "depth=4,topk=4,nodes=16")
    arms = {
        "block": (block, "".join(f" --drafter mtp({shape})" for shape in shapes)),
        "eagle": (eagle, "".join(f' --drafter eagle("{{eagle}}",{shape})' for shape in shapes)),
    }
    return Planned(
        "mtp",
        "counted",
        "counted",
        "A NextN block beside an EAGLE head, on the embedded target",
        "The target's layers as those of a GLM 4, with a block behind them; block and head have "
        "learnt the target's own answers to the demo's questions for 1,000 steps; 40 questions.",
        tuple(
            Piece(
                f"{name} {temperature}",
                "specrun",
                f"{line} --temp {temperature}{drafters}",
                300,
                {**files, "questions": _QUESTIONS},
            )
            for temperature, (name, (files, drafters)) in itertools.product(
                ("0", "1"), arms.items()
            )
        ),
        counted=True,
    )


def _small_head(kind: str) -> File:
    return functools.partial(models.small_head, kind), f"{kind}.gguf"


def _random(shape: str, weights: str) -> File:
    made = functools.partial(models.random_model, models.SHAPES[shape], weights)
    return made, models.file_name(f"random-{shape}", weights)


# == A GPU, in ten minutes =========================================================================


def _gpu(shape: str) -> Iterable[Planned]:
    """Plan the GPU's records; a small `shape` tries them on a CPU."""
    tried = shape != GPU_SHAPE
    where = f"a trial with the shape {shape}" if tried else "everything on the GPU"
    pad_to = "30M" if tried else "1B"
    target = {
        "target": _padded_demo(pad_to),
        "small": _demo_file("drafter"),
        "head": _demo_file("eagle3"),
    }
    all_options = "" if tried else "-ngl=99"
    yield _gpu_curves(shape, where)
    yield Planned(
        "gpu-overhead",
        "gpu",
        "overhead",
        "A GPU: Python's share of a round, and whether graphs are kept",
        f"Random models of almost no width; {where}.",
        tuple(
            Piece(
                vocabulary,
                "measure",
                f"overhead {'' if tried else '--gpu'} --vocab {vocabulary} --rounds 60 -o json",
                40,
            )
            for vocabulary in ("32000", "128000")
        ),
    )
    arms = (
        ' --drafter draft("{small}") --drafter draft("{small}",depth=7,topk=2,nodes=15)'
        ' --drafter eagle3("{head}") --drafter eagle3("{head}",n=5)'
        ' --drafter eagle3("{head}",nodes=24)'
        " --drafter prompt-lookup --drafter lookahead --drafter auto"
    )
    yield Planned(
        "gpu-drafters",
        "gpu",
        "drafters",
        f"A GPU: drafters of the embedded pair, padded to {pad_to}",
        f"Four of the demo's questions, up to 96 tokens, three repetitions, F16; {where}.",
        tuple(
            Piece(
                temperature,
                "specrun",
                "bench drafters -m {target} --prompts {questions} --questions 4 -n 96 -r 3 -ngl 99 "
                f"--temp {temperature}{arms} -o json",
                60,
                {**target, "questions": _QUESTIONS},
            )
            for temperature in ("0", "0.8")
        ),
    )
    yield Planned(
        "gpu-peers",
        "gpu",
        "arms",
        "A GPU: the same pair beside llama-server",
        f"`make peers CUDA=1` builds llama-server before; {where}.",
        tuple(
            Piece(
                temperature,
                "measure",
                "peers -m {target} -md {small} -md {head} --prompts {questions} --questions 4 "
                f"-n 96 -r 3 -c 2048 --all={all_options} --temp {temperature} -o json",
                80,
                {**target, "questions": _QUESTIONS},
            )
            for temperature in ("0", "0.8")
        ),
    )
    yield Planned(
        "gpu-tests",
        "gpu",
        "tests",
        "A GPU: the tests that hold on any device",
        f"`pytest -m gpu`; {where}.",
        (Piece("all", "pytest", "-x" if tried else "-n 8", 150),),
    )


def _gpu_curves(shape: str, where: str) -> Planned:
    return Planned(
        "gpu-8b",
        "gpu",
        "curves",
        "A GPU: T(n) of a model of 8 billion parameters",
        f"Random weights in the shape of a Llama ({shape}), SmolLM2's vocabulary; {where}.",
        tuple(
            Piece(
                weights,
                "specrun",
                "tune -m {target} -ngl 99 --seconds 8 --no-save --json",
                45,
                {"target": _random(shape, weights)},
                {"file": f"random {shape}, {weights}", "threads": 0},
            )
            for weights in ("Q4_K_M", "F16")
        ),
    )


def _padded_demo(pad_to: str) -> File:
    def made() -> Path:
        path = models.folder() / f"embedded.{pad_to}.F16.gguf"
        if not path.exists():
            pad_ffn(demo_target(), path, read_parameters(pad_to))
        return path

    return made, f"embedded.{pad_to}.F16.gguf"


def _demo_file(name: str) -> File:
    return (lambda: demo_target().with_name(f"{name}.gguf")), f"{name}.gguf"


_QUESTIONS = (demo_questions, "questions.jsonl")
