"""Options about sampling and the end of an answer, with llama.cpp's names and defaults.

`answer_options` are those of commands that answer; `temperatures_option` and `TRUNCATION_OPTIONS`
those of commands that measure, at several temperatures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from specrun.cli.options.grammar import GRAMMAR_OPTIONS, chosen_grammar
from specrun.cli.options.group import SAMPLING, Decorator, option_group
from specrun.cli.options.samplers import SAMPLER_OPTIONS, sampler_settings
from specrun.cli.options.types import MAX_COUNT, SHARE, LogitBiasType, NumberListType
from specrun.runtime.laws import RANDOM_SEED, SamplingParams

_DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How tokens are drawn, and how many; `max_tokens` None: until the model ends."""

    params: SamplingParams
    max_tokens: int | None


def _build(
    temp: float,
    logit_bias: tuple[tuple[int, float], ...],
    seed: int,
    predict: int,
    reverse_prompt: tuple[str, ...],
    json_schema: str | None,
    grammar: str | None,
    regex: str | None,
    grammar_after: str | None,
    **others: Any,  # noqa: ANN401 - options with the names of SamplingParams
) -> AnswerSettings:
    params = SamplingParams(
        temperature=temp,
        logit_bias=dict(logit_bias),
        seed=None if seed == RANDOM_SEED else seed,
        stop=reverse_prompt,
        grammar=chosen_grammar(json_schema, grammar, regex, grammar_after),
        **sampler_settings(**others),
    )
    return AnswerSettings(params, None if predict < 0 else predict)


def _truncation_options(metavar: str = "") -> tuple[Decorator, ...]:
    """Return --top-k, --top-p and --min-p."""
    return (
        SAMPLING.option(
            f"--top-k{metavar}",
            "Keep the K most likely tokens; 0: all.",
            click.IntRange(0, MAX_COUNT),
            default=_DEFAULTS.top_k,
        ),
        SAMPLING.option(
            f"--top-p{metavar}",
            "Keep the most likely tokens with this much probability together; 1: all.",
            SHARE,
            default=_DEFAULTS.top_p,
        ),
        SAMPLING.option(
            f"--min-p{metavar}",
            "Keep tokens with this share of the most likely one's probability; 0: all.",
            SHARE,
            default=_DEFAULTS.min_p,
        ),
    )


TRUNCATION_OPTIONS = _truncation_options()

answer_options = option_group(
    "answer",
    _build,
    SAMPLING.option(
        "-n, --predict, --n-predict, --max-tokens N",
        "The most tokens of an answer; -1: until the model ends.",
        click.IntRange(-1, MAX_COUNT),
        default=-1,
    ),
    SAMPLING.option(
        "-r, --reverse-prompt, --stop TEXT",
        "A text that ends the answer and is left out; repeatable.",
        multiple=True,
    ),
    SAMPLING.option(
        "-s, --seed N",
        "Seed of the random numbers; -1: another one for every answer.",
        click.IntRange(-1, 2**64 - 1),
        default=RANDOM_SEED,
    ),
    SAMPLING.option(
        "--temp, --temperature N",
        "Temperature; 0: always the most likely token.",
        click.FloatRange(0),
        default=_DEFAULTS.temperature,
    ),
    *_truncation_options(" N"),
    SAMPLING.option(
        "--repeat-penalty N",
        "Divide the logits of recent tokens; 1: off.",
        click.FloatRange(0, min_open=True),
        default=_DEFAULTS.repeat_penalty,
    ),
    SAMPLING.option(
        "--repeat-last-n N",
        "How many recent tokens penalties look at; 0: none, -1: all.",
        click.IntRange(-1, MAX_COUNT),
        default=_DEFAULTS.repeat_last_n,
    ),
    SAMPLING.option(
        "--presence-penalty N",
        "Subtract from the logits of recent tokens.",
        click.FLOAT,
        default=_DEFAULTS.presence_penalty,
    ),
    SAMPLING.option(
        "--frequency-penalty N",
        "Subtract from the logits of recent tokens, once an occurrence.",
        click.FLOAT,
        default=_DEFAULTS.frequency_penalty,
    ),
    SAMPLING.option(
        "-l, --logit-bias",
        "Add to a token's logit, as in 15043+1 or 15043-inf; repeatable.",
        LogitBiasType(),
        multiple=True,
    ),
    *GRAMMAR_OPTIONS,
    *SAMPLER_OPTIONS,
)


def temperatures_option(default: str, purpose: str = "") -> Decorator:
    """Return --temp, which takes several temperatures: as a,b or repeated."""
    return SAMPLING.option(
        "--temp, --temperature",
        f"Temperatures{purpose}: a,b or repeated.",
        NumberListType(),
        multiple=True,
        default=(default,),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingGrid:
    """Sampling settings at one or several temperatures: the values of these options.

    `others` have the names of `SamplingParams`.
    """

    temp: Sequence[Sequence[float]]
    top_k: int
    top_p: float
    min_p: float
    seed: int | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def with_samplers(
        cls,
        *,
        temp: Sequence[Sequence[float]],
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        **others: Any,  # noqa: ANN401 - the values of SAMPLER_OPTIONS
    ) -> SamplingGrid:
        """Return the grid of a command that has all samplers' options."""
        settings = sampler_settings(**others)
        return cls(temp=temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, others=settings)

    def params(self) -> tuple[SamplingParams, ...]:
        """Return the settings of each temperature, in order, none twice."""
        return tuple(
            SamplingParams(
                temperature=temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                seed=self.seed,
                **self.others,
            )
            for temperature in dict.fromkeys(temp for several in self.temp for temp in several)
        )
