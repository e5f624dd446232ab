"""Options of `specrun bench drafters`: drafters, prompts, sampling, and how it is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from specrun.cli.bench.measuring import (
    first_seed_option,
    padding_option,
    predict_option,
    repetitions_option,
)
from specrun.cli.options.group import OUTPUT, Section, option_group
from specrun.cli.options.model import MODEL_DRAFT, shape_option
from specrun.cli.options.prompt import no_template_option, prompts_option
from specrun.cli.options.samplers import SAMPLER_OPTIONS
from specrun.cli.options.sampling import TRUNCATION_OPTIONS, SamplingGrid, temperatures_option
from specrun.cli.options.types import FILE, NEW_FILE, PATH, CountListType
from specrun.runtime.round import Shape

_DRAFTERS, _PROMPTS, _MEASURING = map(Section, ("Drafters", "Prompts", "Measurement"))


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """The drafters to compare, as they were typed."""

    model_draft: tuple[Path, ...]
    drafter: tuple[str, ...]
    spec_draft_n_max: tuple[tuple[int, ...], ...]
    planned: bool
    accept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """Where the prompts come from."""

    prompt: tuple[str, ...]
    file: Path | None
    prompts: Path | None
    questions: int
    workload: str | None
    context: int
    docs_store: Literal["all", "disjoint"]
    no_chat_template: bool


@dataclass(frozen=True, slots=True)
class Measuring:
    """How much is measured, on how costly a target, and what is drawn."""

    predict: int
    repetitions: int
    pad_to: int | None
    keep: Path | None
    plot: Path | None
    shape: Shape | None
    alpha: bool


drafter_choice_options = option_group(
    "chosen",
    DrafterChoice,
    _DRAFTERS.model(
        MODEL_DRAFT,
        'A draft model or heads: short for --drafter KIND("FILE"); repeatable.',
        multiple=True,
    ),
    _DRAFTERS.option(
        "--drafter EXPR",
        'A drafter to compare, such as "draft(small.gguf, n=8)"; repeatable.',
        multiple=True,
        show_default="draft, where there is a draft model, and prompt-lookup",
    ),
    _DRAFTERS.option(
        "--spec-draft-n-max",
        "Tokens that -md and --demo's draft model draft a round: a,b or repeated.",
        CountListType(),
        multiple=True,
        show_default="5",
    ),
    _DRAFTERS.flag(
        "--planned",
        "All that `specrun tune` planned for the target and -md: the best chain and trees of each "
        "scheme.",
    ),
    _DRAFTERS.option(
        "--accept RULE",
        "The acceptance rule of the drafters; repeatable, to compare rules.",
        multiple=True,
        show_default="exact",
    ),
)

prompt_choice_options = option_group(
    "source",
    PromptChoice,
    prompts_option(_PROMPTS),
    _PROMPTS.option("-f, --file", "A file that is one prompt.", FILE),
    _PROMPTS.option(
        "--prompts", 'Prompts, one a line; .jsonl: the "prompt" or "question" of each line.', FILE
    ),
    _PROMPTS.option(
        "--questions",
        "How many of the demo's questions are asked, where no prompt is given.",
        click.IntRange(1, 10**6),
        default=8,
    ),
    _PROMPTS.option(
        "--workload",
        "Ask the demo's questions; repeated: answered before; edited: an answer nearly like an "
        "earlier one; quoted: a text to repeat (too hard for the demo).",
        click.Choice(["questions", "repeated", "edited", "quoted"]),
        show_default="questions, with --demo",
    ),
    _PROMPTS.option(
        "--context N",
        "Lengthen the conversations of a workload to about N tokens by earlier questions and "
        "answers.",
        click.IntRange(0, 2**20),
        default=0,
    ),
    _PROMPTS.option(
        "--docs-store",
        "What a `rest` without a file retrieves from: the documentation the questions are about "
        "(it holds the answers), or only that without the answers.",
        click.Choice(["all", "disjoint"]),
        default="disjoint",
    ),
    no_template_option(_PROMPTS),
)

sampling_grid_options = option_group(
    "sampling",
    SamplingGrid.with_samplers,
    temperatures_option("0"),
    *TRUNCATION_OPTIONS,
    *SAMPLER_OPTIONS,
    first_seed_option,
)

measuring_options = option_group(
    "measuring",
    Measuring,
    shape_option,
    predict_option(_MEASURING, default=128),
    repetitions_option(_MEASURING, "How often every drafter answers all prompts.", 5),
    padding_option(_MEASURING),
    _MEASURING.option(
        "--keep FILE",
        "Keep the padded target; otherwise it goes into a temporary folder and away again.",
        PATH,
    ),
    _MEASURING.flag(
        "--alpha",
        "Report alpha of drafters that have a law, the mean of sum min(p, q): prompts are answered "
        "once more.",
    ),
    OUTPUT.option(
        "--plot FILE", "Draw speed-ups and acceptance by position: a .png, .svg or .pdf.", NEW_FILE
    ),
)
