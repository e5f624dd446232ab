"""Options of `specrun tune`: texts, layers to skip, temperatures and output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from specrun.cli.options.group import MODEL, OUTPUT, Section, by_option, declare, option_group
from specrun.cli.options.model import MODEL_DRAFT
from specrun.cli.options.output import json_option, plot_option
from specrun.cli.options.prompt import (
    measured_prompts,
    no_template_option,
    prompt_file_option,
    prompts_option,
)
from specrun.cli.options.sampling import grid_options
from specrun.cli.options.types import MAX_COUNT, NEW_FILE

_TEXTS, _LAYERS = Section("Texts"), Section("Layers to skip")


@dataclass(frozen=True, slots=True)
class TuneText:
    """The draft model, and the prompts that the target continues."""

    model_draft: Path | None = by_option(MODEL.model(MODEL_DRAFT, "The draft model, a GGUF file."))
    prompt: tuple[str, ...] = by_option(prompts_option(_TEXTS))
    file: Path | None = by_option(prompt_file_option(_TEXTS))
    no_chat_template: bool = by_option(no_template_option(_TEXTS))
    predict: int = _TEXTS.setting(
        "-n, --predict, --max-tokens N",
        "The number of tokens to write at each temperature, over all prompts.",
        click.IntRange(8, MAX_COUNT),
        default=128,
    )
    seconds: float = _TEXTS.setting(
        "--seconds",
        "Measure the cost of evaluations for about this long.",
        click.FloatRange(0, min_open=True),
        default=12.0,
    )
    drafter: tuple[str, ...] = MODEL.setting(
        "--drafter EXPR",
        "Also report alpha of this drafter; repeatable.",
        multiple=True,
    )


@dataclass(frozen=True, slots=True)
class LayerSkip:
    """Whether layers to skip are searched for, instead of a tree for a draft model, and how."""

    wanted: bool = _LAYERS.setting(
        "--layer-skip",
        "Search which layers a self-draft should skip; no draft model is needed.",
        dest="wanted",
        is_flag=True,
    )
    evaluations: int = _LAYERS.setting(
        "--evaluations N",
        "The most sets of layers to evaluate.",
        click.IntRange(1, 100_000),
        default=32,
    )
    output: Path | None = _LAYERS.setting(
        "--cut OUT", "Write the best cut to this file.", NEW_FILE, dest="output"
    )
    force: bool = _LAYERS.setting("--force", "Overwrite OUT.", is_flag=True)


@dataclass(frozen=True, slots=True)
class TuneOutput:
    """The use of the result."""

    plot: Path | None = by_option(plot_option("the cost curves and the plans' speeds"))
    save: bool = OUTPUT.setting(
        "--save/--no-save",
        "Keep the plan, so that chat and generate use it for this pair.",
        default=True,
    )


tune_text_options = option_group("text", TuneText)
layer_skip_options = option_group("layer_skip", LayerSkip)
tune_sampling_options = grid_options("0,0.8", " to plan for")
tune_output_options = declare(
    json_option("Print everything that was measured as JSON."),
    option_group("output", TuneOutput),
)


_QUESTIONS = 8


def prompt_texts(text: TuneText, *, demo: bool) -> tuple[str, ...]:
    """Return the prompts that were given, or a few for any model."""
    return measured_prompts(text.prompt, text.file, n_demo=_QUESTIONS if demo else 0)
