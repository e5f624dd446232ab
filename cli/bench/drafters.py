"""`specrun bench drafters`: drafters against plain decoding of one target, in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.bindings.errors import OptionError
from specrun.bindings.files import check_target
from specrun.cli.bench.drafters_options import (
    DrafterChoice,
    Measuring,
    PromptChoice,
    drafter_choice_options,
    measuring_options,
    prompt_choice_options,
    sampling_grid_options,
)
from specrun.cli.bench.drafters_prompts import LONGEST_MESSAGES, chosen_prompts, with_documentation
from specrun.cli.bench.output import OutputForm, format_options, measure_and_print
from specrun.cli.options.drafter_choice import draft_kind, require_draft_files
from specrun.cli.options.group import SectionedCommand
from specrun.cli.options.model import LoadSettings, load_options
from specrun.cli.options.output import check_plot, terminal_options
from specrun.cli.options.prompt import named_target
from specrun.cli.options.sampling import SamplingGrid
from specrun.cli.terminal.terminal import Terminal

if TYPE_CHECKING:
    from specrun.bench.drafters.comparison import DrafterBench, DrafterResult

_EPILOG = """\b
Examples:
  specrun bench drafters --demo --pad-to 400M
  specrun bench drafters --demo --pad-to 400M --workload repeated --context 1500 --drafter prompt-lookup
  specrun bench drafters --demo --pad-to 400M --drafter rest --docs-store all
  specrun bench drafters -m target.gguf -md small.gguf -f prompt.txt --temp 0,0.8 --plot speed.png
  specrun bench drafters -m target.gguf --drafter prompt-lookup --drafter "draft(small.gguf, n=8)" -p "Once"

\b
Plain decoding is always measured too, with the same settings in the same process. The drafters take
turns prompt by prompt, forwards and backwards, and each answer starts from an empty cache. A speed-up
is the median of those of the repetitions, with the least and the greatest. tok/s
counts generated tokens over the time after the prompt. Unlike llama-bench's figures it includes
sampling, verification and text, because drafting is not free of them. Do not use the machine meanwhile.
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@load_options
@drafter_choice_options
@prompt_choice_options
@sampling_grid_options
@measuring_options
@format_options
@terminal_options
def drafters(
    load: LoadSettings,
    chosen: DrafterChoice,
    source: PromptChoice,
    sampling: SamplingGrid,
    measuring: Measuring,
    form: OutputForm,
    terminal: Terminal,
) -> None:
    """Compare drafters with plain decoding: speed, acceptance, text."""
    from specrun.bench.drafters.comparison import measure_drafters
    from specrun.bench.report import drafters_table
    from specrun.convert.cut.pad import padded_target

    target = named_target(load)
    _check_options(chosen, measuring)

    def show(done: int, total: int, what: str) -> None:
        terminal.passing(f"{done} of {total} answers: {what} ...")

    def measure(say: Callable[[str], None]) -> list[DrafterResult]:
        with ExitStack() as stack:
            drafting, about_store = with_documentation(
                chosen, target, source.docs_store, stack, say
            )
            settings = _settings(target, load, drafting, source, sampling, measuring)
            workload = "; ".join(filter(None, (settings.workload, about_store)))
            path = stack.enter_context(
                padded_target(target, measuring.pad_to, keep=measuring.keep, progress=say)
            )
            bench = dataclasses.replace(settings, target=path, workload=workload)
            return measure_drafters(bench, progress=show)

    results = measure_and_print("drafters", measure, drafters_table, form, terminal)
    if measuring.plot is not None:
        from specrun.bench.plots import plot_drafters

        plot_drafters(results, measuring.plot)
        terminal.note(f"drew {measuring.plot}")


def _settings(
    target: Path,
    load: LoadSettings,
    chosen: DrafterChoice,
    source: PromptChoice,
    sampling: SamplingGrid,
    measuring: Measuring,
) -> DrafterBench:
    from specrun.bench.drafters.comparison import DrafterBench

    expressions = _expressions(chosen, demo=load.demo)
    prompts, workload = chosen_prompts(source, target, load.context.rope, demo=load.demo)
    return DrafterBench(
        target=target,
        drafters=(*expressions, *_planned(target, load, chosen, sampling)),
        prompts=prompts,
        workload=workload,
        params=sampling.params(),
        rules=chosen.accept or ("exact",),
        max_tokens=measuring.predict,
        repetitions=measuring.repetitions,
        alpha=measuring.alpha,
        as_chat=False if source.no_chat_template else None,
        options={
            **load.runtime_options(),
            "n_ctx": _n_ctx(load, source, measuring),
            "shape": measuring.shape or "free",
        },
    )


def _n_ctx(load: LoadSettings, source: PromptChoice, measuring: Measuring) -> int:
    """Return -c, or more where --context needs it; the target's own length still limits it."""
    n_ctx = load.context.n_ctx
    if n_ctx == 0 or not source.context:
        return n_ctx
    return max(n_ctx, source.context + LONGEST_MESSAGES + measuring.predict)


def _expressions(chosen: DrafterChoice, *, demo: bool) -> tuple[str, ...]:
    """Return the drafters to compare; without any choice, those that need nothing else."""
    from specrun.bench.drafters.comparison import with_files
    from specrun.runtime.demo import demo_drafters
    from specrun.runtime.language import parse_expression, quoted

    files = [(draft_kind(path), quoted(str(path))) for path in chosen.model_draft]
    lengths = [f"n={n}" for counts in chosen.spec_draft_n_max for n in counts] or [""]
    if not files and demo and not chosen.drafter:
        files = [("draft", "")]
    if not files and chosen.spec_draft_n_max:
        raise click.UsageError(
            "--spec-draft-n-max needs a draft model: -md FILE (or put n into the --drafter)"
        )
    if chosen.planned and not chosen.spec_draft_n_max:
        files = []  # the plans say what to draft
    names = [
        f"{kind}({', '.join(filter(None, (file, length)))})"
        for kind, file in files
        for length in lengths
    ]
    names += chosen.drafter
    if not chosen.drafter and not chosen.planned:
        names.append("prompt-lookup")
    defaults = demo_drafters() if demo else {}
    expressions = tuple(with_files(name, defaults) for name in names)
    for expression in expressions:
        require_draft_files(parse_expression(expression))
    return expressions


def _planned(
    target: Path, load: LoadSettings, chosen: DrafterChoice, sampling: SamplingGrid
) -> list[str]:
    """Return what was planned for each temperature and draft model."""
    if not chosen.planned:
        return []
    from specrun.runtime.demo import demo_drafters
    from specrun.runtime.planning import describe_settings, load_plans

    drafts = chosen.model_draft or (demo_drafters()["draft"],) if load.demo else chosen.model_draft
    if not drafts:
        raise click.UsageError("--planned needs a draft model: -md FILE")
    settings = describe_settings(load.context, load.gpu_layers, load.gpu_layers_draft)
    names: list[str] = []
    for draft in drafts:
        reasons: list[str] = []
        plans = load_plans(target, draft, settings, warn=reasons.append)
        if not plans:
            why = f" ({reasons[0]})" if reasons else ""
            raise OptionError(
                f"nothing is planned for {target.name} with {draft.name}{why}: run specrun tune "
                "first"
            )
        for params in sampling.params():
            nearest = min(plans, key=lambda plan: abs(plan.temperature - params.temperature))
            names += nearest.every_expression(draft)
    return list(dict.fromkeys(names))


def _check_options(chosen: DrafterChoice, measuring: Measuring) -> None:
    """Refuse what could not be done before time is spent on measuring."""
    if chosen.planned and measuring.pad_to is not None:
        raise click.UsageError(
            "--planned and --pad-to exclude each other: plans belong to a file; pad it first "
            "(--pad-to N --keep FILE), then tune and measure FILE"
        )
    if measuring.keep is not None:
        if measuring.pad_to is None:
            raise click.UsageError("--keep says where the padded target goes: give --pad-to too")
        check_target(measuring.keep)
    check_plot(measuring.plot)
