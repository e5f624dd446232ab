"""Options that benchmarks of answers share: how long, how often, on how costly a target."""

from __future__ import annotations

import click

from specrun.cli.options.group import SAMPLING, Decorator, Section
from specrun.cli.options.types import MAX_COUNT, ParametersType

first_seed_option = SAMPLING.option(
    "-s, --seed",
    "Seed of the first repetition; the others count on.",
    click.IntRange(0, 2**63),
    default=0,
)


def predict_option(
    section: Section, help: str = "The most tokens of an answer.", *, default: int
) -> Decorator:
    """Return `-n`, the tokens of an answer."""
    kind = click.IntRange(1, MAX_COUNT)
    return section.option("-n, --predict, --max-tokens", help, kind, default=default)


def repetitions_option(section: Section, help: str, default: int) -> Decorator:
    """Return `-r`, how often everything is answered."""
    return section.option("-r, --repetitions", help, click.IntRange(1, 10**6), default=default)


def padding_option(section: Section) -> Decorator:
    """Return `--pad-to`, the parameters of the target that is timed."""
    help = "Let the target cost as much as one of N parameters (400M, 1B), with the same outputs."
    return section.option("--pad-to N", help, ParametersType())
