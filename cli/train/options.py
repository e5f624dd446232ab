"""Options of the trainers: data, steps, device and result; for heads also the target's states.

`train_command` makes a command that has those of all trainers and hands them on as one `TrainJob`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from specrun.cli.options.drafting import require_training
from specrun.cli.options.group import (
    OUTPUT,
    CommandFunction,
    Decorator,
    Section,
    SectionedCommand,
    declare,
    option_group,
)
from specrun.cli.options.model import trust_option
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.options.prompt import parallel_option
from specrun.cli.options.types import (
    FILE,
    MAX_COUNT,
    MODEL_OR_FOLDER,
    NEW_FILE,
    PATH,
    SHARE_BELOW_ONE,
)
from specrun.cli.terminal.terminal import Terminal

DATA = Section("Target and data")
_RUN, _DEVICE = Section("Training"), Section("Device and memory")
_STATES, _ANSWERS = Section("Target's states"), Section("Self-distillation")
_COUNT = click.IntRange(1, MAX_COUNT)
WHOSE_ANSWERS = click.Choice(["given", "target"])
DIVERGENCE = click.Choice(["forward-kl", "reverse-kl", "jensen-shannon", "total-variation"])
OptionValue = Any  # as click passes it
_FIELDS = {
    **{"batch_tokens": "tokens_per_batch", "save_every": "save_seconds", "threads": "n_threads"},
    **{"own_prompts": "n_own_prompts", "positions": "count", "read_layers": "layers"},
    **{"unroll": "steps", "unroll_late": "late_steps"},
}
"""Fields of runs and recipes by the option that gives them, if the names differ."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Options of the output: the folder, GGUF, picture, and --json."""

    output: Path
    gguf: Path | None
    outtype: str
    plot: Path | None
    force: bool


@dataclass(frozen=True, slots=True)
class TrainJob:
    """Values of the options of all trainers; `settings` are the fields of a `TrainingRun`."""

    settings: dict[str, Any]
    result: TrainResult
    terminal: Terminal


def _source(target: Path | None, **others: Any) -> dict[str, Any]:  # noqa: ANN401 - as click passes them
    return {"target": None if target is None else target.expanduser(), **others}


def named_fields(**values: Any) -> dict[str, Any]:  # noqa: ANN401 - as click passes them
    """Return the values of options, as far as they are given, by the fields of runs and recipes."""
    return {_FIELDS.get(name, name): value for name, value in values.items() if value is not None}


def _source_options(target: str, *, needs_target: bool, needs_data: bool) -> Decorator:
    """Return the options of target and data; some commands check themselves which they need."""
    help = "The target: a GGUF file, a name of `specrun models`, or a Hugging Face folder."
    target_option = DATA.model("--target MODEL", help, MODEL_OR_FOLDER, required=needs_target)
    if target == "DIR":
        help = "The target: a Hugging Face folder (config.json, safetensors, tokenizer.json)."
        target_option = DATA.option("--target DIR", help, PATH, required=needs_target)
    return option_group(
        "source",
        _source,
        target_option,
        DATA.option(
            "--data",
            "The training data: a text, or JSON Lines or an array of texts, prompts with "
            "answers, or chats; repeatable.",
            FILE,
            multiple=True,
            required=needs_data,
        ),
        DATA.option(
            "--max-length N",
            "The most tokens of a sequence. Texts are cut into pieces; the rest of a longer "
            "chat is left out.",
            click.IntRange(4, 2**20),
            default=2048,
        ),
        DATA.option(
            "--held-out SHARE",
            "The share of the sequences that is kept out of training, to measure on.",
            SHARE_BELOW_ONE,
            default=0.05,
        ),
    )


_run_options = option_group(
    "run",
    named_fields,
    _RUN.option("--epochs N", "Read all texts N times.", _COUNT, default=2),
    _RUN.option("--steps N", "Stop after N steps, also before --epochs are over.", _COUNT),
    _RUN.option(
        "--batch-tokens N", "The most tokens in a step, padding included.", _COUNT, default=4096
    ),
    _RUN.option(
        "-lr, --learning-rate RATE",
        "The highest learning rate. It then falls as a cosine.",
        click.FloatRange(0, 10, min_open=True),
        show_default="as published",
    ),
    _RUN.option(
        "--warmup SHARE",
        "The share of the steps during which the rate rises.",
        SHARE_BELOW_ONE,
        default=0.03,
    ),
    _RUN.option(
        "--measures N", "Measure the held-out texts N times.", click.IntRange(0, 10_000), default=10
    ),
    _RUN.option(
        "-s, --seed N",
        "The seed of the order of texts, of noise, and of the choice of held-out texts.",
        click.IntRange(0, MAX_COUNT),
        default=0,
    ),
    _RUN.flag("--resume", "Continue exactly from the checkpoint in the folder."),
    _RUN.option(
        "--save-every SECONDS",
        "The seconds between checkpoints.",
        click.FloatRange(0),
        default=180.0,
    ),
    _DEVICE.option(
        "--device NAME", "The device to train on: auto, cpu, cuda, cuda:1.", default="auto"
    ),
    _DEVICE.option(
        "--precision",
        "The precision of matrix products. auto takes bfloat16 if a trial finds that it works "
        "and is faster.",
        click.Choice(["auto", "float32", "bfloat16"]),
        default="auto",
    ),
    _DEVICE.threads("The number of CPU threads."),
)

_result_options = option_group(
    "result",
    TrainResult,
    OUTPUT.option(
        "-o, --output DIR",
        "The folder to write, in the layout of the authors' own tools.",
        PATH,
        required=True,
    ),
    OUTPUT.option("--gguf FILE", "Also convert the result to GGUF.", NEW_FILE),
    OUTPUT.option("--outtype TYPE", "The tensor type of --gguf.", default="q8_0"),
    OUTPUT.option(
        "--plot FILE",
        "Draw the curves into this file (.png, .svg or .pdf).",
        NEW_FILE,
        show_default="DIR/training/curves.png",
    ),
    OUTPUT.flag("--force", "Overwrite the files of an earlier run."),
    json_option(),
)

states_options = option_group(
    "states",
    named_fields,
    _STATES.option(
        "--teacher",
        "The target of --target as GGUF. llama.cpp then computes its states, so it may be "
        "quantized.",
        FILE,
    ),
    trust_option,
    _STATES.option(
        "--cache",
        "Keep states on disk, in float16. auto does so if they are read more than once and "
        "there is room.",
        click.Choice(["auto", "yes", "no"]),
        default="auto",
    ),
    _STATES.option(
        "--features DIR",
        "Keep the states in this folder, for other heads too. Otherwise they are deleted at "
        "the end.",
        click.Path(file_okay=False, path_type=Path),
    ),
    _ANSWERS.option(
        "--answers",
        "The answers to learn from: those in the data, or the target's to the same prompts.",
        WHOSE_ANSWERS,
        show_default="given; without --data target",
    ),
    _ANSWERS.option(
        "--prompts FILE",
        "Prompts for the target to answer instead of --data: one a line, or JSON Lines. "
        "Without either, built-in prompts are used.",
        FILE,
    ),
    _ANSWERS.option("--n-prompts N", "The number of built-in prompts.", _COUNT, default=1000),
    _ANSWERS.option(
        "--own-prompts N",
        "Add prompts that the target writes itself, as its users would, in N tries.",
        click.IntRange(0, MAX_COUNT),
        default=0,
    ),
    _ANSWERS.option(
        "--answer-temp T",
        "The temperature at which the target answers.",
        click.FloatRange(0),
        default=0.0,
    ),
    _ANSWERS.option(
        "--answer-length N",
        "The most tokens of the target's answers.",
        click.IntRange(1),
        default=512,
    ),
    parallel_option(_ANSWERS, default=4),
)


def train_command(
    epilog: str,
    *own: Decorator,
    target: str = "DIR",
    needs_target: bool = True,
    needs_data: bool = True,
) -> Callable[[CommandFunction], click.Command]:
    """Return a decorator for a function that takes a `job` and the values of its `own` options.

    `target` is the value of --target, DIR or MODEL. The function checks options not needed here.
    """
    source = _source_options(target, needs_target=needs_target, needs_data=needs_data)
    options = declare(source, *own, _run_options, _result_options, terminal_options)

    def decorate(function: CommandFunction) -> click.Command:
        @functools.wraps(function)
        def train(
            source: dict[str, Any],
            run: dict[str, Any],
            result: TrainResult,
            terminal: Terminal,
            **values: Any,  # noqa: ANN401 - the function's own
        ) -> None:
            require_training("training")
            place = {"output": result.output.expanduser(), "force": result.force}
            function(TrainJob({**source, **run, **place}, result, terminal), **values)

        return click.command(cls=SectionedCommand, epilog=epilog)(options(train))

    return decorate
