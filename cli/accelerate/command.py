"""`specrun accelerate`: finds the fastest drafter for a GGUF file, and keeps it as a profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.cli.accelerate.report import print_report
from specrun.cli.options.group import Section, SectionedCommand, by_option, option_group
from specrun.cli.options.model import MODEL_DRAFT, LoadSettings, load_options
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.options.prompt import named_target
from specrun.cli.options.quiet_machine import measures_time
from specrun.cli.options.sampling import SamplingGrid, grid_options
from specrun.cli.options.types import FILE, MAX_COUNT, MODEL_FILE, SIZE
from specrun.cli.terminal.screen import progress_bar
from specrun.cli.terminal.terminal import INTERRUPTED, Terminal, one_line

if TYPE_CHECKING:
    from specrun.bench.accelerate import AccelerateOptions
    from specrun.bench.accelerate.search import Status

_SEARCH = Section("Search")
_LONGEST_BEST = 70

_EPILOG = """\b
Examples:
  specrun accelerate model.gguf                         a few minutes; from then on chat, generate and serve use it
  specrun accelerate model.gguf --prompts mine.txt      by your own prompts, one a line (or .jsonl)
  specrun accelerate model.gguf --hours 2               trains a head for it, too
  specrun accelerate model.gguf --memory 8G --temp 0,1
  specrun accelerate -hf OWNER/REPO -hfd OWNER/SMALL    tries a drafter of the hub, too

\b
Looks for NextN blocks, heads and smaller models (in the file, beside it and in the caches that specrun
models lists), measures the cost of evaluations, searches for layers that a self-draft could skip, and
compares all with plain decoding on prompts that nothing was fitted to. The fastest drafter for each
temperature and kind of prompt is kept for this file. If nothing pays, the reason is shown; -v shows all
figures. Ctrl-C keeps the results so far, and another call continues. Do not use the machine meanwhile.
"""  # noqa: E501 - as it is shown


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """The drafters and prompts to try, and the time for it."""

    hours: float | None = _SEARCH.setting(
        "--hours N", "Also train a head for the file, in about this many hours.", click.FLOAT
    )
    prompts: Path | None = _SEARCH.setting(
        "--prompts",
        "Compare on these prompts: one a line, or JSON lines. Without it, built-in ones are used.",
        FILE,
    )
    memory: int | None = _SEARCH.setting(
        "--memory SIZE",
        "The most memory for the model and its drafter together, such as 8G.",
        SIZE,
    )
    model_draft: tuple[Path, ...] = by_option(
        _SEARCH.model(MODEL_DRAFT, "Also try this drafter; repeatable.", multiple=True)
    )
    predict: int = _SEARCH.setting(
        "-n, --predict, --max-tokens N",
        "The most tokens in an answer.",
        click.IntRange(8, MAX_COUNT),
        default=64,
    )
    repetitions: int = _SEARCH.setting(
        "-r, --repetitions N",
        "Compare at most N times.",
        click.IntRange(1, 1000),
        default=50,
    )
    seconds: float = _SEARCH.setting(
        "--seconds",
        "Take about this long in all, without --hours.",
        click.FloatRange(0, min_open=True),
        default=150.0,
    )
    again: bool = _SEARCH.setting("--again", "Discard earlier results for this file.", is_flag=True)


sampling_options = grid_options("0,0.8", " to choose for")


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@click.argument("file", metavar="[MODEL]", required=False, type=MODEL_FILE)
@load_options
@option_group("search", SearchSettings)
@sampling_options
@json_option("Print all results as JSON.")
@terminal_options
@measures_time
def accelerate(
    file: Path | None,
    load: LoadSettings,
    search: SearchSettings,
    sampling: SamplingGrid,
    terminal: Terminal,
) -> None:
    """Find the fastest drafter for a model on this machine, and use it from then on."""
    from specrun.bench.accelerate import accelerate as find

    options = _options(_with_model(load, file), search, sampling)
    with _progress(terminal) as tell:
        result = find(options, tell, warn=terminal.warn)
    if terminal.as_json:
        terminal.answer_json(result.to_dict(), indent=2)
    else:
        print_report(result, terminal)
    if result.interrupted:
        click.get_current_context().exit(INTERRUPTED)


def _with_model(load: LoadSettings, file: Path | None) -> LoadSettings:
    if file is None:
        return load
    context = click.get_current_context()
    typed = context.get_parameter_source("model") is click.core.ParameterSource.COMMANDLINE
    if load.demo or typed:
        raise click.UsageError("the model is named twice: give MODEL, or -m, or --demo")
    return dataclasses.replace(load, model=file)


def _options(
    load: LoadSettings, search: SearchSettings, sampling: SamplingGrid
) -> AccelerateOptions:
    from specrun.bench.accelerate import AccelerateOptions
    from specrun.runtime.demo import demo_questions
    from specrun.runtime.engine import RuntimeOptions

    target = named_target(load, ask="give the model to accelerate: specrun accelerate MODEL.gguf")
    return AccelerateOptions(
        target=target,
        params=sampling,
        prompts=search.prompts or (demo_questions() if load.demo else None),
        hours=search.hours,
        memory=search.memory,
        drafts=search.model_draft,
        n_tokens=search.predict,
        repetitions=search.repetitions,
        seconds=search.seconds,
        again=search.again,
        anyway=bool(click.get_current_context().params.get("anyway")),
        runtime=RuntimeOptions(**load.runtime_options()),
    )


@contextmanager
def _progress(terminal: Terminal) -> Iterator[Callable[[Status], None]]:
    """Yield a function that shows the current step, the time left and the best drafter so far."""
    with progress_bar(terminal, "opening the model") as show:

        def tell(status: Status) -> None:
            best = f"\nbest so far: {one_line(status.best, _LONGEST_BEST)}" if status.best else ""
            show(f"{status.what}{best}", status.share, status.seconds_left)

        yield tell
