"""`python tools/measure replay`: drafters along known texts, costed by a curve instead of timed.

A drafter that proposes point masses drafts the same for the same text, so acceptance is counted
without sampling, and the figures are the same on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.bindings.files import check_target
from specrun.cli.bench.command import OutputForm, format_options, measure_and_print, predict_option
from specrun.cli.bench.drafters import (
    LONGEST_MESSAGES,
    PromptChoice,
    chosen_prompts,
    prompt_choice_options,
    with_documentation,
)
from specrun.cli.options.group import Section, SectionedCommand, option_group
from specrun.cli.options.model import LoadSettings, load_options
from specrun.cli.options.output import terminal_options
from specrun.cli.options.prompt import named_target, parallel_option
from specrun.cli.options.types import FILE, PATH
from specrun.cli.terminal.terminal import Terminal

if TYPE_CHECKING:
    from measure.replay.replay import ReplayResult, ReplayText

_REPLAY = Section("Replay")
_EPILOG = """\b
Examples:
  python tools/measure replay --demo --workload edited --drafter prompt-lookup --drafter "prompt-lookup(n=7)"
  python tools/measure replay --demo --workload repeated --context 1800 --keep texts.jsonl
  python tools/measure replay --demo --texts texts.jsonl --drafter lookahead --curve 1:1,2:1.38,4:1.98,8:2.5,16:4

\b
Plain decoding's answers at temperature 0 are recorded, or read from --texts. Along them every drafter that proposes
point masses accepts exactly what it would have accepted, so nothing is timed: a round of n drafted nodes costs T(1 + n)
by the curve. Drafters that read the target's rows (heads, a lookahead window, Ouroboros) cannot be replayed.
"""  # noqa: E501 - as it is shown
_DEFAULT_DRAFTERS = ("prompt-lookup", "lookahead")


@dataclass(frozen=True, slots=True)
class _Replaying:
    """What is replayed, and by which costs."""

    drafter: tuple[str, ...]
    texts: Path | None
    keep: Path | None
    force: bool
    predict: int
    curve: str
    draft_cost: float | None
    one_session: bool
    parallel: int


_replay_options = option_group(
    "replaying",
    _Replaying,
    _REPLAY.option(
        "--drafter EXPR",
        "A drafter; repeatable.",
        multiple=True,
        show_default="prompt-lookup and lookahead",
    ),
    _REPLAY.option("--texts", "Texts that --keep wrote, instead of new answers.", FILE),
    _REPLAY.option("--keep FILE", "Keep the recorded texts: JSON, one a line.", PATH),
    _REPLAY.flag("--force", "Overwrite the file of --keep."),
    predict_option(_REPLAY, "The most tokens of a recorded answer.", default=128),
    _REPLAY.option(
        "--curve CURVE",
        "What evaluations cost: known (measured by specrun tune, or typical), cpu, gpu, or points "
        "as 1:1,2:1.4.",
        default="known",
    ),
    _REPLAY.option(
        "--draft-cost X",
        "An evaluation of a draft model, as a share of the target's.",
        click.FloatRange(0.0, 1000.0),
        show_default="by parameters",
    ),
    _REPLAY.flag(
        "--one-session",
        "Let drafters go on from text to text, instead of starting each from nothing.",
    ),
    parallel_option(_REPLAY),
)


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@load_options
@_replay_options
@prompt_choice_options
@format_options
@terminal_options
def replay(
    load: LoadSettings,
    replaying: _Replaying,
    source: PromptChoice,
    form: OutputForm,
    terminal: Terminal,
) -> None:
    """Show what drafters would have gained along known texts."""
    from measure.replay.recorded_texts import read_texts, write_texts
    from measure.replay.replay_drafters import ReplayOptions, replay_drafters
    from measure.tables import replay_table
    from specrun.bench.drafters.pair_theory import curve_of
    from specrun.bindings.models.model import Model
    from specrun.runtime.memory import resolve_gpu_layers

    target, context = named_target(load), load.context
    _check(replaying, source)
    drafters = _with_demo_files(replaying.drafter or _DEFAULT_DRAFTERS, demo=load.demo)

    def measure(say: Callable[[str], None]) -> list[ReplayResult]:
        if replaying.texts is None:
            texts = _recorded(target, load, replaying, source, terminal)
            if replaying.keep is not None:
                write_texts(texts, replaying.keep, force=replaying.force)
        with (
            ExitStack() as stack,
            Model(target, n_gpu_layers=0, use_mmap=load.options.use_mmap) as model,
        ):
            filled, _ = with_documentation(drafters, target, source.docs_store, stack, say)
            known = tuple(texts if replaying.texts is None else read_texts(replaying.texts))
            lengths = (len(record.prompt) + len(record.answer) for record in known)
            longest = 1 + max(lengths, default=0)
            layers = resolve_gpu_layers(load.options.n_gpu_layers, target)
            options = ReplayOptions(
                drafters=filled,
                texts=known,
                curve=curve_of(replaying.curve, target, context, layers),
                context=replace(context, n_ctx=max(context.n_ctx, longest) if context.n_ctx else 0),
                draft_cost=replaying.draft_cost,
                keeps_state=replaying.one_session,
            )
            say("replaying")
            return list(replay_drafters(options, model))

    measure_and_print("replay", measure, replay_table, form, terminal)


def _check(replaying: _Replaying, source: PromptChoice) -> None:
    asked = source.prompt or source.file or source.prompts or source.workload or source.context
    if replaying.texts is not None and (asked or replaying.keep):
        raise click.UsageError(
            "--texts has its own prompts and answers: leave out prompts, --workload and --keep"
        )
    if replaying.keep is not None:
        check_target(replaying.keep, force=replaying.force)


def _with_demo_files(drafters: tuple[str, ...], *, demo: bool) -> tuple[str, ...]:
    from specrun.bench.drafters.comparison import with_files
    from specrun.runtime.demo import demo_drafters

    if not demo:
        return drafters  # as they were typed
    return tuple(with_files(expression, demo_drafters()) for expression in drafters)


def _recorded(
    target: Path,
    load: LoadSettings,
    replaying: _Replaying,
    source: PromptChoice,
    terminal: Terminal,
) -> list[ReplayText]:
    from measure.replay.recorded_texts import record_answers, record_together
    from specrun.runtime.engine import Engine, Runtime
    from specrun.runtime.laws import SamplingParams

    prompts, workload = chosen_prompts(source, target, load)
    about = f", context {source.context}" if source.context else ""
    longest = source.context + LONGEST_MESSAGES + replaying.predict
    n_ctx = max(load.context.n_ctx, longest) if load.context.n_ctx else 0
    params, options = SamplingParams(temperature=0.0), load.runtime_options()
    recording: dict[str, Any] = {
        "name": (workload.partition(",")[0].removeprefix("workload ") or "prompts") + about,
        "max_tokens": replaying.predict,
        "as_chat": False if source.no_chat_template else None,
        "progress": lambda done: terminal.passing(
            f"recording answer {done + 1} of {len(prompts)} ..."
        ),
    }
    n = replaying.parallel
    if n > 1:
        with Engine(target, "none", slots=n, **options, n_ctx=n * n_ctx) as engine:
            return record_together(engine, prompts, params, **recording)
    with Runtime(target, "none", **options, n_ctx=n_ctx) as runtime:
        return record_answers(runtime, prompts, params, **recording)
