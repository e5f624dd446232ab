"""The default drafter of a model file: its profile's choice, else `auto`, which limits its losses.

Whatever opens a model for a user (chat, generate, a server) takes it from here. Under a rule that
is not exact nothing is chosen: a default must not change a text's distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specrun.runtime.acceptance import build_rule
from specrun.runtime.language import parse_expression, short_label
from specrun.runtime.memory.fit import LoadOptions
from specrun.runtime.planning.profile import ANY, Choice, describe_settings, load_profile

PLAIN, AUTO = "none", "auto"
QUESTIONS, EDITED = "questions", "edited"
"""Workloads of profiles: answers to short prompts, and such that repeat or edit a long one."""

_LONG_PROMPT = 400  # characters from which a prompt holds a text that the answer is about


@dataclass(frozen=True, slots=True)
class ChosenDrafter:
    """A drafter expression, and a line about its source ("": none is needed)."""

    expression: str
    note: str = ""


def drafter_for(
    target: Path,
    temperature: float,
    workload: str = ANY,
    *,
    options: LoadOptions,
    accept: str = "exact",
    use_profile: bool = True,
    warn: Callable[[str], None] = lambda _: None,
) -> ChosenDrafter:
    """Return how to draft for a model file if no drafter is named.

    `workload` is one of a profile (`workload_of`), "any" if it is not known. `use_profile` False
    leaves the profile out. `warn` receives a sentence if a profile does not apply; files that
    cannot be read are left to whoever opens them.
    """
    if not build_rule(accept).exact:
        return ChosenDrafter(PLAIN)
    if use_profile:
        profile = load_profile(target, describe_settings(options), warn=warn)
        choice = None if profile is None else profile.choice(temperature, workload)
        if choice is not None:
            return ChosenDrafter(choice.drafter, _note(choice))
    return ChosenDrafter(AUTO)


def workload_of(prompt: str) -> str:
    """Return the workload of one prompt: a long one holds a text to summarise or edit."""
    return EDITED if len(prompt) >= _LONG_PROMPT else QUESTIONS


def _note(choice: Choice) -> str:
    off = "(--no-profile: without it)"
    if choice.drafter == PLAIN:
        why = f", {choice.reason}" if choice.reason else ""
        return f"profile: decoding plainly, as specrun accelerate found nothing faster{why} {off}"
    drafter = short_label(parse_expression(choice.drafter))
    speed = f"{choice.speed_up:.2f} times plain decoding{choice.extent}"
    return f"profile: {drafter}, {speed} when measured {off}"
