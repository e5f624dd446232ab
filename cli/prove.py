"""`specrun prove`: shows of a pair, on this machine, that drafting does not change its text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import click

from specrun.cli.bench.command import OutputForm, format_options, measure_and_print
from specrun.cli.options.group import Section, SectionedCommand
from specrun.cli.options.model import (
    DraftSettings,
    LoadSettings,
    TemplateSettings,
    draft_options,
    load_options,
)
from specrun.cli.options.opening import open_runtime
from specrun.cli.options.output import terminal_options
from specrun.cli.options.sampling import SamplingGrid, grid_options
from specrun.cli.options.types import MAX_COUNT
from specrun.cli.terminal.terminal import INTERRUPTED, Terminal
from specrun.runtime import SamplingParams

_PROOF = Section("Proof")
_EPILOG = """\b
Examples:
  specrun prove --demo
  specrun prove -m target.gguf -md small.gguf
  specrun prove -m target.gguf --drafter prompt-lookup --shape fixed --json

\b
The acceptance rule is enumerated, in the compiled code that walks for it by the settings of sampling.
Texts of plain decoding are forced through trees and chains, and through several conversations: total
variation and flips of trees against chains, and of chains against plain decoding. Texts are compared
with plain decoding's, the law of short texts with the target's (chi-square), answers after faults with a
fresh session's. All use the flags and threads that are given. Each check has a control that it has to see.
What is left out says why. Exit status 1 if a check fails, 130 if Ctrl-C came before the end.
"""  # noqa: E501 - as it is shown


sampling_options = grid_options("0.8", " that the rule is tried at")


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@load_options
@draft_options
@_PROOF.option(
    "--minutes",
    "About how long at most; each check does its least in any case.",
    click.FloatRange(0.0, 60.0 * 24, min_open=True),
    default=0.5,
)
@_PROOF.option("--seed", "Seed of all random numbers.", click.IntRange(0, MAX_COUNT), default=0)
@sampling_options
@format_options
@terminal_options
def prove(
    load: LoadSettings,
    draft: DraftSettings,
    minutes: float,
    seed: int,
    sampling: SamplingGrid,
    form: OutputForm,
    terminal: Terminal,
) -> None:
    """Check that this pair's text is the target's own, on this machine."""
    from specrun.bench.prove.prove import Proof, ProofOptions, proof_table
    from specrun.bench.prove.prove import prove as check

    template = TemplateSettings(None, None, no_chat_template=True)
    if not (load.demo or draft.is_named):
        draft = dataclasses.replace(draft, drafter="none")
    with open_runtime(load, draft, template, SamplingParams(), terminal) as runtime:

        def measure(say: Callable[[str], None]) -> list[Proof]:
            options = ProofOptions(60.0 * minutes, seed, sampling)
            return [check(runtime, options, progress=say)]

        (proof,) = measure_and_print("prove", measure, proof_table, form, terminal)
    for found in proof.checks:
        if found.status == "failed":
            terminal.error(f"{found.name}: {found.note}")
    if not proof.passed:
        click.get_current_context().exit(1)
    if proof.interrupted:
        click.get_current_context().exit(INTERRUPTED)
