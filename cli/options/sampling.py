"""Options about sampling and the end of an answer, with llama.cpp's names and defaults.

Sampling options of commands that measure at several temperatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click

from specrun.cli.options.group import Decorator, option, option_group
from specrun.cli.options.types import LogitBiasType, NumberListType
from specrun.runtime.sampling import SamplingParams

RANDOM_SEED = -1
_SECTION = "Sampling"
_MAX_COUNT = 2**31 - 1
_DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How tokens are drawn, and how many; `max_tokens` None: until the model ends."""

    params: SamplingParams
    max_tokens: int | None


def _build(
    temp: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repeat_penalty: float,
    repeat_last_n: int,
    presence_penalty: float,
    frequency_penalty: float,
    logit_bias: tuple[tuple[int, float], ...],
    seed: int,
    predict: int,
    reverse_prompt: tuple[str, ...],
) -> AnswerSettings:
    params = SamplingParams(
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        repeat_last_n=repeat_last_n,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=dict(logit_bias),
        seed=None if seed == RANDOM_SEED else seed,
        stop=reverse_prompt,
    )
    return AnswerSettings(params, None if predict < 0 else predict)


answer_options = option_group(
    "answer",
    _build,
    option(
        "-n",
        "--predict",
        "--n-predict",
        "--max-tokens",
        section=_SECTION,
        type=click.IntRange(-1, _MAX_COUNT),
        metavar="N",
        default=-1,
        show_default=True,
        help="The most tokens of an answer; -1: until the model ends.",
    ),
    option(
        "-r",
        "--reverse-prompt",
        "--stop",
        section=_SECTION,
        multiple=True,
        metavar="TEXT",
        help="A text that ends the answer and is left out; repeatable.",
    ),
    option(
        "-s",
        "--seed",
        section=_SECTION,
        type=click.IntRange(-1, 2**64 - 1),
        default=RANDOM_SEED,
        show_default=True,
        metavar="N",
        help="Seed of the random numbers; -1: another one for every answer.",
    ),
    option(
        "--temp",
        "--temperature",
        section=_SECTION,
        type=click.FloatRange(0),
        metavar="N",
        default=_DEFAULTS.temperature,
        show_default=True,
        help="Temperature; 0: always the most likely token.",
    ),
    option(
        "--top-k",
        section=_SECTION,
        type=click.IntRange(0, _MAX_COUNT),
        metavar="N",
        default=_DEFAULTS.top_k,
        show_default=True,
        help="Keep the K most likely tokens; 0: all.",
    ),
    option(
        "--top-p",
        section=_SECTION,
        type=click.FloatRange(0, 1),
        metavar="N",
        default=_DEFAULTS.top_p,
        show_default=True,
        help="Keep the most likely tokens with this much probability together; 1: all.",
    ),
    option(
        "--min-p",
        section=_SECTION,
        type=click.FloatRange(0, 1),
        metavar="N",
        default=_DEFAULTS.min_p,
        show_default=True,
        help="Keep tokens with this share of the most likely one's probability; 0: all.",
    ),
    option(
        "--repeat-penalty",
        section=_SECTION,
        type=click.FloatRange(0, min_open=True),
        metavar="N",
        default=_DEFAULTS.repeat_penalty,
        show_default=True,
        help="Divide the logits of recent tokens; 1: off.",
    ),
    option(
        "--repeat-last-n",
        section=_SECTION,
        type=click.IntRange(-1, _MAX_COUNT),
        metavar="N",
        default=_DEFAULTS.repeat_last_n,
        show_default=True,
        help="How many recent tokens penalties look at; 0: none, -1: all.",
    ),
    option(
        "--presence-penalty",
        section=_SECTION,
        type=float,
        metavar="N",
        default=_DEFAULTS.presence_penalty,
        show_default=True,
        help="Subtract from the logits of recent tokens.",
    ),
    option(
        "--frequency-penalty",
        section=_SECTION,
        type=float,
        metavar="N",
        default=_DEFAULTS.frequency_penalty,
        show_default=True,
        help="Subtract from the logits of recent tokens, once an occurrence.",
    ),
    option(
        "-l",
        "--logit-bias",
        section=_SECTION,
        type=LogitBiasType(),
        multiple=True,
        help="Add to a token's logit, as in 15043+1 or 15043-inf; repeatable.",
    ),
)


TRUNCATION_OPTIONS = (
    option(
        "--top-k",
        section=_SECTION,
        type=click.IntRange(0, 2**31 - 1),
        default=40,
        show_default=True,
        help="Keep the K most likely tokens; 0: all.",
    ),
    option(
        "--top-p",
        section=_SECTION,
        type=click.FloatRange(0, 1),
        default=0.95,
        show_default=True,
        help="Keep the most likely tokens with this much probability together; 1: all.",
    ),
    option(
        "--min-p",
        section=_SECTION,
        type=click.FloatRange(0, 1),
        default=0.05,
        show_default=True,
        help="Keep tokens with this share of the most likely one's probability; 0: all.",
    ),
)
"""--top-k, --top-p and --min-p, with llama.cpp's defaults."""


def temperatures_option(default: str, purpose: str) -> Decorator:
    """Return --temp, which takes several temperatures: as a,b or repeated."""
    return option(
        *("--temp", "--temperature"),
        section=_SECTION,
        type=NumberListType(),
        multiple=True,
        default=(default,),
        show_default=True,
        help=f"Temperatures{purpose}: a,b or repeated.",
    )


def sampling_grid(
    temperatures: Sequence[Sequence[float]],
    *,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None = None,
) -> tuple[SamplingParams, ...]:
    """Return the settings of each temperature, in order, none twice."""
    from specrun.runtime.sampling import SamplingParams

    flat = dict.fromkeys(temperature for several in temperatures for temperature in several)
    return tuple(
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        for temperature in flat
    )
