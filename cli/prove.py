"""`specrun prove`: shows of a pair, on this machine, that drafting does not change its text."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from specrun.bindings.errors import TemplateError
from specrun.cli.bench.command import OutputForm, format_options, measure_and_print
from specrun.cli.options.group import Section, SectionedCommand
from specrun.cli.options.model import (
    DraftSettings,
    LoadSettings,
    TemplateSettings,
    draft_options,
    load_options,
    template_options,
)
from specrun.cli.options.opening import open_models
from specrun.cli.options.output import terminal_options
from specrun.cli.options.sampling import SamplingGrid, grid_options
from specrun.cli.options.types import MAX_COUNT
from specrun.cli.terminal.terminal import INTERRUPTED, Terminal
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.engine import Engine

if TYPE_CHECKING:
    from specrun.bench.prove.prove import Proof, ProofOptions
    from specrun.bench.prove.tools import Post
    from specrun.bench.report import Table
    from specrun.runtime.engine.choices import DrafterMaker
    from specrun.runtime.round import Shape

_PROOF = Section("Proof")
_EPILOG = """\b
Examples:
  specrun prove --demo
  specrun prove -m target.gguf -md small.gguf
  specrun prove -m target.gguf --drafter prompt-lookup --shape fixed --json
  specrun prove -m target.gguf --tools                   tool calls of specrun serve

\b
The acceptance rule is enumerated in the compiled code that decodes, with the given sampling settings.
Texts of plain decoding are forced through trees and chains, and through several conversations: total
variation and flips of trees against chains, and of chains against plain decoding. Texts are compared
with plain decoding's, the distribution of short texts with the target's (chi-square), answers after faults
with a fresh session's. All checks use the given flags and threads. Each has a control, an error that it must
find. --tools sends requests for tool calls to a server, streamed by three APIs, with drafts and without:
required ones, named ones, strict schemas, reasoning before them, several answers at once,
log-probabilities. A check that is left out has its reason; -v shows all figures. Exit status 1 if a check
fails or none could be made, 130 if Ctrl-C came before the end.
"""  # noqa: E501 - as it is shown


sampling_options = grid_options("0.8", " that the rule is tried at")
_Measure = Callable[[Callable[[str], None]], list["Proof"]]


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@load_options
@draft_options
@_PROOF.flag(
    "--tools",
    "Check tool calls that a server streams with the drafts of `specrun serve`, byte by byte.",
)
@_PROOF.option(
    "--minutes",
    "Take at most about this long. Each check does its least in any case.",
    click.FloatRange(0.0, 60.0 * 24, min_open=True),
    default=0.5,
)
@_PROOF.option("--seed", "The seed of all random numbers.", click.IntRange(0, MAX_COUNT), default=0)
@sampling_options
@template_options
@format_options
@terminal_options
def prove(
    load: LoadSettings,
    draft: DraftSettings,
    tools: bool,
    minutes: float,
    seed: int,
    sampling: SamplingGrid,
    template: TemplateSettings,
    form: OutputForm,
    terminal: Terminal,
) -> None:
    """Check that this pair's text is the target's own, on this machine."""
    from specrun.bench.prove.prove import ProofOptions

    options = ProofOptions(60.0 * minutes, seed, sampling)
    checking = _tools if tools else _texts
    with checking(load, draft, template, options, terminal) as (measure, table):
        (proof,) = measure_and_print("prove", measure, table, form, terminal)
    for found in proof.checks:
        if found.status == "failed":
            terminal.error(f"{found.name}: {found.note}")
    if not proof.passed:
        click.get_current_context().exit(1)
    if proof.interrupted:
        click.get_current_context().exit(INTERRUPTED)


@contextmanager
def _texts(
    load: LoadSettings,
    draft: DraftSettings,
    template: TemplateSettings,
    options: ProofOptions,
    terminal: Terminal,
) -> Iterator[tuple[_Measure, Callable[..., Table]]]:
    """Yield the checks of texts, and the table of their results."""
    from specrun.bench.prove.prove import proof_table
    from specrun.bench.prove.prove import prove as check

    template = TemplateSettings(None, None, no_chat_template=True)
    if not (load.demo or draft.is_named):
        draft = dataclasses.replace(draft, drafter="none")
    with open_models(Runtime, load, draft, template, SamplingParams(), terminal) as runtime:
        table = functools.partial(proof_table, figures=terminal.verbosity > 0)
        yield lambda say: [check(runtime, options, progress=say)], table


@contextmanager
def _tools(
    load: LoadSettings,
    draft: DraftSettings,
    template: TemplateSettings,
    options: ProofOptions,
    terminal: Terminal,
) -> Iterator[tuple[_Measure, Callable[..., Table]]]:
    """Yield the checks of tool calls, and the table of their results."""
    from specrun.bench.prove.prove import proof_table
    from specrun.bench.prove.tools import ToolProof
    from specrun.cli.serve.settings import require_packages

    require_packages()
    from specrun.cli.serve.asking import asking

    say_once = functools.cache(terminal.note)

    @contextmanager
    def opening(
        shape: Shape, n_slots: int, others: Sequence[DrafterMaker]
    ) -> Iterator[tuple[Engine, Post]]:
        own = dataclasses.replace(draft, shape=shape)
        settings = (_for_slots(load, n_slots), own, template, SamplingParams(), terminal)
        with open_models(Engine, *settings, slots=n_slots, others=others) as engine:
            _require_template(engine, say_once)
            with asking(engine) as post:
                yield engine, post

    proof = ToolProof(opening, options, draft.shape)
    table = functools.partial(proof_table, words=proof.verdict, figures=terminal.verbosity > 0)
    yield (lambda say: [proof.run(say)]), table


def _for_slots(load: LoadSettings, n_slots: int) -> LoadSettings:
    """Return the settings with the given context for each slot of a recurrent model.

    Such a model divides it among its slots; others share it.
    """
    from specrun.runtime.memory.shape import ModelShape

    if load.model is None or not any(ModelShape.read(load.model).states):
        return load
    context = dataclasses.replace(load.context, n_ctx=n_slots * load.context.n_ctx)
    return dataclasses.replace(load, options=dataclasses.replace(load.options, context=context))


def _require_template(engine: Engine, note: Callable[[str], None]) -> None:
    """Raise `TemplateError` for a model that has no template; say if it shows no tools."""
    try:
        template = engine.tool_template
    except TemplateError:
        problem = f"{engine.model.path} has no chat template, so nothing shows it tools"
        raise TemplateError(f"{problem}: give one (--chat-template-file)") from None
    if "tools" not in template.names:
        note("the chat template shows no tools: the server describes them in words")
