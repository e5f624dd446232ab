"""Options that all trainers share: what to train on, for how long, where, and what becomes of it.

Options of heads: where the target's hidden states come from, and whose answers they belong to.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from specrun.cli.options.group import option, option_group
from specrun.cli.options.types import ExistingFile

_DATA, _RUN, _DEVICE, _OUTPUT = "Target and data", "Training", "Device and memory", "Output"
_COUNT = click.IntRange(1, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class TrainSource:
    """What is trained on."""

    target: Path
    data: tuple[Path, ...]
    max_length: int
    held_out: float


@dataclass(frozen=True, slots=True)
class TrainRun:
    """For how long and how fast, and on what device."""

    epochs: int
    steps: int | None
    batch_tokens: int
    learning_rate: float | None
    warmup: float
    measures: int
    seed: int
    device: str
    precision: str
    threads: int
    save_every: float
    resume: bool


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What becomes of it."""

    output: Path
    gguf: Path | None
    outtype: str
    plot: Path | None
    force: bool
    as_json: bool


Cache = Literal["auto", "yes", "no"]

train_source_options = option_group(
    "source",
    TrainSource,
    option(
        "--target",
        section=_DATA,
        type=click.Path(path_type=Path),
        required=True,
        metavar="DIR",
        help="The target: a Hugging Face folder (config.json, safetensors, tokenizer.json).",
    ),
    option(
        "--data",
        section=_DATA,
        type=ExistingFile(),
        multiple=True,
        required=True,
        help=(
            "A text, or JSON Lines or an array of texts, prompts with answers, or chats; "
            "repeatable."
        ),
    ),
    option(
        "--max-length",
        section=_DATA,
        type=click.IntRange(4, 2**20),
        default=2048,
        show_default=True,
        metavar="N",
        help=(
            "Tokens of a sequence: texts are cut into pieces, of chats what is beyond is left out."
        ),
    ),
    option(
        "--held-out",
        section=_DATA,
        type=click.FloatRange(0, 1, max_open=True),
        default=0.05,
        show_default=True,
        metavar="SHARE",
        help="The share of the sequences that is measured on and not learnt.",
    ),
)

train_run_options = option_group(
    "run",
    TrainRun,
    option(
        "--epochs", section=_RUN, type=_COUNT, default=2, show_default=True, metavar="N",
        help="How often to read all."
    ),
    option("--steps", section=_RUN, type=_COUNT, metavar="N", help=("Stop after so many steps, "
                                                                   "whatever --epochs says.")),
    option(
        "--batch-tokens",
        section=_RUN,
        type=_COUNT,
        default=4096,
        show_default=True,
        metavar="N",
        help="The most tokens of a step, padding included.",
    ),
    option(
        *("-lr", "--learning-rate"),
        section=_RUN,
        type=click.FloatRange(0, 10, min_open=True),
        show_default="as published",
        metavar="RATE",
        help="The peak of the learning rate, which then falls as a cosine.",
    ),
    option(
        "--warmup",
        section=_RUN,
        type=click.FloatRange(0, 1, max_open=True),
        default=0.03,
        show_default=True,
        metavar="SHARE",
        help="The share of the steps in which the rate rises.",
    ),
    option(
        "--measures",
        section=_RUN,
        type=click.IntRange(0, 10_000),
        default=10,
        show_default=True,
        metavar="N",
        help="How often the held-out texts are measured.",
    ),
    option("-s", "--seed", section=_RUN, type=click.IntRange(0, 2**31 - 1), default=0,
    show_default=True, metavar="N",
           help="Of the order of texts, of noise, and of what is held out."),
    option("--resume", section=_RUN, is_flag=True, help=("Go on from the folder's checkpoint, "
                                                        "exactly.")),
    option(
        "--save-every",
        section=_RUN,
        type=click.FloatRange(0),
        default=180.0,
        show_default=True,
        metavar="SECONDS",
        help="Time between checkpoints.",
    ),
    option(
        "--device", section=_DEVICE, default="auto", show_default=True, metavar="NAME",
        help="auto, cpu, cuda, cuda:1."
    ),
    option(
        "--precision",
        section=_DEVICE,
        type=click.Choice(["auto", "float32", "bfloat16"]),
        default="auto",
        show_default=True,
        help="Of products; auto: bfloat16 where a trial shows that it works and is faster.",
    ),
    option(
        *("-t", "--threads"),
        section=_DEVICE,
        type=click.IntRange(0, 512),
        default=0,
        show_default="one a core",
        metavar="N",
        help="Threads on the CPU.",
    ),
)  # fmt: skip

train_result_options = option_group(
    "result",
    TrainResult,
    option(
        *("-o", "--output"),
        section=_OUTPUT,
        type=click.Path(path_type=Path),
        required=True,
        metavar="DIR",
        help="The folder to write, in the layout that the authors' own tools read.",
    ),
    option(
        "--gguf",
        section=_OUTPUT,
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Also convert what was trained to GGUF.",
    ),
    option(
        "--outtype",
        section=_OUTPUT,
        default="q8_0",
        show_default=True,
        metavar="TYPE",
        help="The type of --gguf.",
    ),
    option(
        "--plot",
        section=_OUTPUT,
        type=click.Path(dir_okay=False, path_type=Path),
        show_default="DIR/training/curves.png",
        metavar="FILE",
        help="The picture of the curves (.png, .svg or .pdf).",
    ),
    option("--force", section=_OUTPUT, is_flag=True, help="Overwrite what an earlier run left."),
    option("--json", "as_json", section=_OUTPUT, is_flag=True, help="Print one JSON object."),
)


def run_settings(source: TrainSource, run: TrainRun, result: TrainResult) -> dict[str, Any]:
    """Return what these options say of a `train.training_run.TrainingRun`, by its names."""
    return {
        "target": source.target.expanduser(),
        "data": source.data,
        "output": result.output.expanduser(),
        "epochs": run.epochs,
        "steps": run.steps,
        "tokens_per_batch": run.batch_tokens,
        "max_length": source.max_length,
        "held_out": source.held_out,
        "learning_rate": run.learning_rate,
        "warmup": run.warmup,
        "measures": run.measures,
        "seed": run.seed,
        "device": run.device,
        "precision": run.precision,
        "save_seconds": run.save_every,
        "n_threads": run.threads,
        "resume": run.resume,
        "force": result.force,
    }


_SECTION, _ANSWERS = "Target's states", "Self-distillation"


@dataclasses.dataclass(frozen=True, slots=True)
class TrainFeatures:
    """Where the target's hidden states come from, where they are kept, and whose answers they
    belong to."""

    teacher: Path | None
    cache: Cache
    features: Path | None
    answers: str
    answer_temp: float
    answer_length: int


train_features_options = option_group(
    "states",
    TrainFeatures,
    option(
        "--teacher",
        section=_SECTION,
        type=ExistingFile(),
        help=(
            "The target as GGUF: llama.cpp computes its states, so that a large one may be "
            "quantized."
        ),
    ),
    option(
        "--cache",
        section=_SECTION,
        type=click.Choice(["auto", "yes", "no"]),
        default="auto",
        show_default=True,
        help="Keep states on disk; auto: where they are read more than once and there is room.",
    ),
    option(
        "--features",
        section=_SECTION,
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Keep them in this folder, for other heads too; otherwise they go when the run ends.",
    ),
    option(
        "--answers",
        section=_ANSWERS,
        type=click.Choice(["given", "target"]),
        default="given",
        show_default=True,
        help="Whose answers are learnt: the data's, or those the target gives to the same prompts.",
    ),
    option(
        "--answer-temp",
        section=_ANSWERS,
        type=click.FloatRange(0),
        default=0.0,
        show_default=True,
        metavar="T",
        help="The temperature at which the target answers.",
    ),
    option(
        "--answer-length",
        section=_ANSWERS,
        type=click.IntRange(1),
        default=512,
        show_default=True,
        metavar="N",
        help="The most tokens of its answers.",
    ),
)
