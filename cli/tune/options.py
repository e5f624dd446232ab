"""Options of `specrun tune`: which texts are written, at which temperatures, and what is shown.

What the target continues while it is tuned.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from specrun.cli.options.group import option, option_group
from specrun.cli.options.prompt import no_template_option
from specrun.cli.options.sampling import TRUNCATION_OPTIONS, temperatures_option
from specrun.cli.options.types import ExistingFile
from specrun.cli.terminal.paths import read_text

_TEXTS, _LAYERS, _OUTPUT = "Texts", "Layers to skip", "Output"
_MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TuneText:
    """The draft model, and the prompts that the target continues."""

    model_draft: Path | None
    prompt: tuple[str, ...]
    file: Path | None
    no_chat_template: bool
    predict: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LayerSkip:
    """Whether layers to skip are searched for, instead of a tree for a draft model, and how."""

    wanted: bool
    evaluations: int
    output: Path | None
    force: bool


@dataclass(frozen=True, slots=True)
class TuneSampling:
    """The settings to plan for, one a temperature."""

    temp: tuple[tuple[float, ...], ...]
    top_k: int
    top_p: float
    min_p: float


@dataclass(frozen=True, slots=True)
class TuneOutput:
    """What becomes of the result."""

    as_json: bool
    plot: Path | None
    save: bool


tune_text_options = option_group(
    "text",
    TuneText,
    option(
        *("-md", "--model-draft", "--draft-model"),
        section="Model",
        type=ExistingFile(),
        help="The draft model: a GGUF file.",
    ),
    option(
        "-p",
        "--prompt",
        section=_TEXTS,
        multiple=True,
        metavar="TEXT",
        help="A prompt; repeatable.",
    ),
    option("-f", "--file", section=_TEXTS, type=ExistingFile(), help="A file that is one prompt."),
    no_template_option(_TEXTS),
    option(
        *("-n", "--predict", "--max-tokens"),
        section=_TEXTS,
        type=click.IntRange(8, _MAX_COUNT),
        default=128,
        show_default=True,
        metavar="N",
        help="Tokens written at each temperature, over all prompts together.",
    ),
    option(
        "--seconds",
        section=_TEXTS,
        type=click.FloatRange(0, min_open=True),
        default=12.0,
        show_default=True,
        help="Time for measuring what evaluations cost.",
    ),
)

layer_skip_options = option_group(
    "layer_skip",
    LayerSkip,
    option(
        "--layer-skip",
        "wanted",
        section=_LAYERS,
        is_flag=True,
        help="Search which layers a self-draft should skip; no draft model is needed.",
    ),
    option(
        "--evaluations",
        section=_LAYERS,
        type=click.IntRange(1, 100_000),
        default=32,
        show_default=True,
        metavar="N",
        help="The most sets of layers that are judged.",
    ),
    option(
        "--cut",
        "output",
        section=_LAYERS,
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="OUT",
        help="Write the best cut to this file.",
    ),
    option("--force", section=_LAYERS, is_flag=True, help="Overwrite OUT."),
)

tune_sampling_options = option_group(
    "sampling",
    TuneSampling,
    temperatures_option("0,0.8", " to plan for"),
    *TRUNCATION_OPTIONS,
)

tune_output_options = option_group(
    "output",
    TuneOutput,
    option(
        "--json",
        "as_json",
        section=_OUTPUT,
        is_flag=True,
        help="Print everything that was measured as JSON.",
    ),
    option(
        "--plot",
        section=_OUTPUT,
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Draw the cost curves and the plans' speeds: a .png, .svg or .pdf.",
    ),
    option(
        "--save/--no-save",
        section=_OUTPUT,
        default=True,
        show_default=True,
        help="Keep the plan, so that chat and generate use it for this pair.",
    ),
)


_QUESTIONS = 8
# Where no prompt is given: an explanation, a story, code and facts, as people ask for them.
_PROMPTS = (
    "Explain how a hash table works, and when it is the wrong choice.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Write a Python function that merges two sorted lists, with comments.",
    "List the planets of the solar system with one sentence about each.",
)


def prompt_texts(text: TuneText, *, demo: bool) -> tuple[str, ...]:
    """Return the prompts that were given, or a few for any model."""
    prompts = list(text.prompt)
    if text.file is not None:
        # As in generate, one newline at the end of a file is not part of its prompt.
        prompts.append(read_text(text.file).removesuffix("\n").removesuffix("\r"))
    if prompts:
        return tuple(prompts)
    if demo:
        from specrun.bench.drafters.prompts import demo_prompts

        return demo_prompts(_QUESTIONS)
    return _PROMPTS
