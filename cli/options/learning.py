"""Options of online speculative decoding: whether a draft model learns, how often, what is kept."""

from __future__ import annotations

from dataclasses import dataclass

import click

from specrun.cli.options.group import DRAFTING, option_group
from specrun.cli.options.types import MAX_COUNT
from specrun.runtime.online import KEEP, LearnFrom

_EVERY = 10


@dataclass(frozen=True, slots=True)
class LearnSettings:
    """Whether the draft model learns between answers; `keep`: what it learns is kept afterwards."""

    learn: bool
    learn_keep: bool
    learn_every: int
    learn_rate: float | None

    @property
    def wanted(self) -> bool:
        """Whether anything is noted at all."""
        return self.learn or self.learn_keep

    @property
    def place(self) -> LearnFrom:
        """Where what drafts got wrong is kept: `RuntimeOptions.learn`."""
        return KEEP if self.learn_keep else self.learn


NO_LEARNING = LearnSettings(learn=False, learn_keep=False, learn_every=_EVERY, learn_rate=None)


learn_options = option_group(
    "learning",
    LearnSettings,
    DRAFTING.flag(
        "--learn",
        "Let the draft model (-md) learn from its rejected drafts between answers; what it learns "
        "is forgotten at the end. The text keeps the target's distribution.",
    ),
    DRAFTING.flag(
        "--learn-keep",
        "The same, and keep rejected drafts and the drafter in the user's state folder for the "
        "next time with this option (specrun learn show, forget).",
    ),
    DRAFTING.option(
        "--learn-every N",
        "Answers between two updates; 0: only at a chat's /learn.",
        click.IntRange(0, MAX_COUNT),
        default=_EVERY,
    ),
    DRAFTING.option(
        "--learn-rate RATE",
        "The learning rate of an update.",
        click.FloatRange(0, 10, min_open=True),
        show_default="3e-5 times 4096 / width",
    ),
)
