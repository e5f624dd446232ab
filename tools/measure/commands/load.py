"""`python tools/measure load`: throughput by the number of conversations, plain and drafted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.cli.bench.command import (
    OutputForm,
    first_seed_option,
    format_options,
    measure_and_print,
    padding_option,
    predict_option,
    print_table,
    repetitions_option,
)
from specrun.cli.bench.drafters import PromptChoice, chosen_prompts, prompt_choice_options
from specrun.cli.options.drafting import require_draft_files
from specrun.cli.options.group import SAMPLING, Section, SectionedCommand, option_group
from specrun.cli.options.model import LoadSettings, load_options
from specrun.cli.options.output import check_plot, plot_option, terminal_options
from specrun.cli.options.prompt import named_target
from specrun.cli.options.types import COUNTS, MAX_COUNT, NEW_FILE
from specrun.cli.terminal.terminal import Terminal
from specrun.runtime.language import parse_expression
from specrun.runtime.laws import SamplingParams

if TYPE_CHECKING:
    from measure.load.throughput import LoadBench, LoadResult

_LOAD = Section("Load")
_DEMO_DRAFTERS = (
    "draft(n=auto)",
    "draft(nodes=auto)",
    "auto(draft(n=auto), prompt-lookup)",
)
_EPILOG = """\b
Examples:
  python tools/measure load --demo --pad-to 400M --plot load.png
  python tools/measure load -m target.gguf --drafter "draft(small.gguf, n=4)" --drafter prompt-lookup --parallel 1,4
  python tools/measure load --demo --parallel 1,2 -n 16 -r 2 --long 0

\b
Every drafter has an engine with a slot for each of the most conversations; all prompts are answered at every
load, so many at a time, in interleaved repetitions. t/s counts the tokens of all conversations over the wall
time. T(n) is measured first: "allowed" is what it allows over one conversation after the other. Then a short
prompt is asked while a long one is being read. Do not use the machine meanwhile.
"""  # noqa: E501 - as it is shown


@dataclass(frozen=True, slots=True)
class _Loading:
    """What is measured, how often, and what is drawn."""

    drafter: tuple[str, ...]
    parallel: tuple[int, ...]
    predict: int
    repetitions: int
    long: int
    curve_seconds: float
    pad_to: int | None
    keep: Path | None
    temp: float
    seed: int
    plot: Path | None


_loading_options = option_group(
    "loading",
    _Loading,
    _LOAD.option(
        "--drafter EXPR",
        "A drafter to measure beside plain decoding; repeatable.",
        multiple=True,
        show_default=f"with --demo {', '.join(_DEMO_DRAFTERS)}",
    ),
    _LOAD.option("--parallel", "How many conversations at a time: a,b.", COUNTS, default="1,2,4,8"),
    predict_option(_LOAD, default=64),
    repetitions_option(_LOAD, "How often everything is answered.", 5),
    _LOAD.option(
        "--long",
        "Tokens of a prompt that is read while a short one waits; 0: leave that out.",
        click.IntRange(0, MAX_COUNT),
        default=4000,
    ),
    _LOAD.option(
        "--curve-seconds",
        "For how long the target's costs are measured.",
        click.FloatRange(0.1, 3600.0),
        default=6.0,
    ),
    padding_option(_LOAD),
    _LOAD.option("--keep FILE", "Keep the padded target.", NEW_FILE),
    SAMPLING.option(
        "--temp, --temperature", "Temperature.", click.FloatRange(0.0, 100.0), default=0.0
    ),
    first_seed_option,
    plot_option("throughput against load"),
)


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@load_options
@_loading_options
@prompt_choice_options
@format_options
@terminal_options
def load(
    load: LoadSettings,
    loading: _Loading,
    source: PromptChoice,
    form: OutputForm,
    terminal: Terminal,
) -> None:
    """Measure throughput by how many conversations go on, and waiting behind a long prompt."""
    from measure.load.tables import first_token_table, load_table
    from measure.load.throughput import measure_load
    from specrun.convert.cut.pad import padded_target

    target = named_target(load)
    check_plot(loading.plot)
    if loading.keep is not None and loading.pad_to is None:
        raise click.UsageError("--keep says where the padded target goes: give --pad-to too")

    def measure(say: Callable[[str], None]) -> list[LoadResult]:
        settings = _settings(target, load, loading, source)
        with ExitStack() as stack:
            path = stack.enter_context(
                padded_target(target, loading.pad_to, keep=loading.keep, progress=say)
            )
            return measure_load(settings(path), progress=say)

    results = measure_and_print("load", measure, load_table, form, terminal)
    if form in ("table", "md") and loading.long:
        print_table(first_token_table(results), form, terminal)
    if loading.plot is not None:
        from measure.load.plot import plot_load

        plot_load(results, loading.plot)
        terminal.note(f"drew {loading.plot}")


def _settings(
    target: Path, load: LoadSettings, loading: _Loading, source: PromptChoice
) -> Callable[[Path], LoadBench]:
    """Return what makes the measurement of what is timed; before that all options are checked."""
    from measure.load.throughput import LoadBench
    from specrun.bench.drafters.comparison import with_files
    from specrun.runtime.demo import demo_drafters

    names = loading.drafter or (_DEMO_DRAFTERS if load.demo else ())
    if not names:
        raise click.UsageError("there is no drafter to measure: give --drafter EXPR")
    defaults = demo_drafters() if load.demo else {}
    drafters = tuple(with_files(name, defaults) for name in names)
    for expression in drafters:
        require_draft_files(parse_expression(expression))
    prompts, _ = chosen_prompts(source, target, load.context.rope, demo=load.demo)
    # Fewer prompts than conversations are asked again.
    times = -(-max(loading.parallel) // len(prompts))
    params = SamplingParams(temperature=loading.temp, seed=loading.seed)

    def bench(timed: Path) -> LoadBench:
        return LoadBench(
            target=timed,
            drafters=drafters,
            conversations=loading.parallel,
            prompts=prompts * times,
            params=params,
            max_tokens=loading.predict,
            repetitions=loading.repetitions,
            long_prompt=loading.long,
            curve_s=loading.curve_seconds,
            as_chat=False if source.no_chat_template else None,
            options=load.runtime_options(),
        )

    return bench
