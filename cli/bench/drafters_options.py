"""Options of `specrun bench drafters`: drafters, prompts, sampling, and how it is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from specrun.cli.options.group import option, option_group
from specrun.cli.options.prompt import no_template_option
from specrun.cli.options.sampling import TRUNCATION_OPTIONS, temperatures_option
from specrun.cli.options.types import CountListType, ExistingFile, ParametersType

_DRAFTERS, _PROMPTS, _SAMPLING, _MEASURING = "Drafters", "Prompts", "Sampling", "Measurement"
_MAX_COUNT = 2**31 - 1


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
class SamplingGrid:
    """How tokens are drawn, at one or several temperatures."""

    temp: tuple[tuple[float, ...], ...]
    top_k: int
    top_p: float
    min_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class Measuring:
    """How much is measured, on how costly a target, and what is drawn."""

    predict: int
    repetitions: int
    pad_to: int | None
    keep: Path | None
    plot: Path | None


drafter_choice_options = option_group(
    "chosen",
    DrafterChoice,
    option(
        *("-md", "--model-draft", "--draft-model"),
        section=_DRAFTERS,
        type=ExistingFile(),
        multiple=True,
        help='A draft model or heads: short for --drafter KIND("FILE"); repeatable.',
    ),
    option(
        "--drafter",
        section=_DRAFTERS,
        multiple=True,
        metavar="EXPR",
        show_default="draft, where there is a draft model, and prompt-lookup",
        help='A drafter to compare, such as "draft(small.gguf, n=8)"; repeatable.',
    ),
    option(
        "--spec-draft-n-max",
        section=_DRAFTERS,
        type=CountListType(),
        multiple=True,
        show_default="5",
        help="Tokens that -md and --demo's draft model draft a round: a,b or repeated.",
    ),
    option(
        "--planned",
        section=_DRAFTERS,
        is_flag=True,
        help=(
            "All that `specrun tune` planned for the target and -md: the best chain and trees "
            "of each scheme."
        ),
    ),
    option(
        "--accept",
        section=_DRAFTERS,
        multiple=True,
        metavar="RULE",
        show_default="exact",
        help="The acceptance rule of the drafters; repeatable, to compare rules.",
    ),
)

prompt_choice_options = option_group(
    "source",
    PromptChoice,
    option(
        "-p",
        "--prompt",
        section=_PROMPTS,
        multiple=True,
        metavar="TEXT",
        help="A prompt; repeatable.",
    ),
    option(
        "-f", "--file", section=_PROMPTS, type=ExistingFile(), help="A file that is one prompt."
    ),
    option(
        "--prompts",
        section=_PROMPTS,
        type=ExistingFile(),
        help='Prompts, one a line; .jsonl: the "prompt" or "question" of each line.',
    ),
    option(
        "--questions",
        section=_PROMPTS,
        type=click.IntRange(1, 10**6),
        default=8,
        show_default=True,
        help="How many of the demo's questions are asked, where no prompt is given.",
    ),
    option(
        "--workload",
        section=_PROMPTS,
        type=click.Choice(["questions", "repeated", "edited", "quoted"]),
        show_default="questions, with --demo",
        help="Ask the demo's questions; repeated: answered before; edited: an answer nearly like "
        "an earlier one; "
        "quoted: a text to repeat (too hard for the demo).",
    ),
    option(
        "--context",
        section=_PROMPTS,
        type=click.IntRange(0, 2**20),
        default=0,
        show_default=True,
        metavar="N",
        help=(
            "Lengthen the conversations of a workload to about N tokens by earlier questions "
            "and answers."
        ),
    ),
    option(
        "--docs-store",
        section=_PROMPTS,
        type=click.Choice(["all", "disjoint"]),
        default="disjoint",
        show_default=True,
        help="What a `rest` without a file retrieves from: the documentation the questions are "
        "about (it holds the "
        "answers), or only that without the answers.",
    ),
    no_template_option(_PROMPTS),
)

sampling_grid_options = option_group(
    "sampling",
    SamplingGrid,
    temperatures_option("0", ""),
    *TRUNCATION_OPTIONS,
    option(
        *("-s", "--seed"),
        section=_SAMPLING,
        type=click.IntRange(0, 2**63),
        default=0,
        show_default=True,
        help="Seed of the first repetition; the others count on.",
    ),
)

measuring_options = option_group(
    "measuring",
    Measuring,
    option(
        *("-n", "--predict", "--max-tokens"),
        section=_MEASURING,
        type=click.IntRange(1, _MAX_COUNT),
        default=128,
        show_default=True,
        help="The most tokens of an answer.",
    ),
    option(
        *("-r", "--repetitions"),
        section=_MEASURING,
        type=click.IntRange(1, 10**6),
        default=5,
        show_default=True,
        help="How often every drafter answers all prompts.",
    ),
    option(
        "--pad-to",
        section=_MEASURING,
        type=ParametersType(),
        metavar="N",
        help=(
            "Let the target cost as much as one of N parameters (400M, 1B), with the same outputs."
        ),
    ),
    option(
        "--keep",
        section=_MEASURING,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Keep the padded target; otherwise it goes into a temporary folder and away again.",
    ),
    option(
        "--plot",
        section="Output",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Draw speed-ups and acceptance by position: a .png, .svg or .pdf.",
    ),
)
