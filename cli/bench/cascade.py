"""`specrun bench cascade`: rules of two models, their quality and their latency."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.cli.bench.command import (
    AnswerCount,
    OutputForm,
    first_seed_option,
    format_options,
    measure_and_print,
    padding_option,
    predict_option,
    print_table,
    repetitions_option,
    timed_target,
)
from specrun.cli.options.drafting import draft_kind
from specrun.cli.options.group import (
    OUTPUT,
    SAMPLING,
    Section,
    SectionedCommand,
    by_option,
    option_group,
)
from specrun.cli.options.model import MODEL_DRAFT, LoadSettings, load_options
from specrun.cli.options.output import check_plot, plot_option, terminal_options
from specrun.cli.options.prompt import named_target
from specrun.cli.options.quiet_machine import measures_time
from specrun.cli.options.sampling import temperatures_option
from specrun.cli.options.types import COUNTS, FILE, NUMBERS, each_once
from specrun.cli.terminal.terminal import INTERRUPTED, Terminal
from specrun.runtime.laws import SamplingParams

if TYPE_CHECKING:
    from specrun.bench.cascade.comparison import CascadeBench, CascadePoint, Metric

_MODELS, _TEXTS, _MEASURING = map(Section, ("Models and rules", "Texts", "Measurement"))
_RULES = (
    *("cascade-chow", "cascade-diff", "cascade-opt", "cascade-token-v3", "lossy"),
    *("token-cascade", "sequence-cascade", "bild-star"),
)
_EPILOG = """\b
Examples:
  specrun bench cascade --demo --pad-to 400M --temp 0,1 --plot cascades.png
  specrun bench cascade --demo --accept cascade-opt --accept "lossy(alpha=0.2, beta=solve)" --alpha 0.1,0.3
  specrun bench cascade -m target.gguf -md small.gguf --texts held-out.txt --temp 1 -o csv
  specrun bench cascade -m target.gguf -md small.gguf --texts questions.jsonl --top-p 1,0.8 --spec-draft-n-max 3,5

\b
A rule without options runs with every --alpha, one with options as it is. Exact speculation, the plain
target and the plain draft model are always measured too. There is no top-k and no min-p: all of both
distributions counts. Ctrl-C shows the results so far. Do not use the machine meanwhile.
"""  # noqa: E501 - as it is shown


@dataclass(frozen=True, slots=True)
class _CascadeSettings:
    """The small model, the rules and their grid, the texts, and how they are measured."""

    model_draft: Path | None = by_option(
        _MODELS.model(MODEL_DRAFT, "The small model; --demo has its own.")
    )
    accept: tuple[str, ...] = _MODELS.setting(
        "--accept RULE",
        "A rule to measure, as generate takes it; repeatable.",
        multiple=True,
        show_default=", ".join(_RULES),
    )
    alpha: tuple[float, ...] = _MODELS.setting(
        "--alpha",
        "How much is given away: a,b or repeated. bild and bild-star take the distance of a token "
        "of probability 1 - alpha.",
        NUMBERS,
        multiple=True,
        default=("0,0.05,0.1,0.2,0.4,0.7",),
        callback=each_once,
    )
    spec_draft_n_max: tuple[int, ...] = _MODELS.setting(
        "--spec-draft-n-max",
        "Tokens drafted in a round: a,b or repeated.",
        COUNTS,
        multiple=True,
        default=("5",),
        callback=each_once,
    )
    temp: tuple[float, ...] = by_option(temperatures_option("1"))
    top_p: tuple[float, ...] = SAMPLING.setting(
        "--top-p",
        "Keep the most likely tokens with this much probability together: a,b or repeated.",
        NUMBERS,
        multiple=True,
        default=("1",),
        callback=each_once,
    )
    seed: int = by_option(first_seed_option)
    texts: Path | None = _TEXTS.setting(
        "--texts",
        "Real text, whose pieces are continued; .jsonl: a question and an answer a line.  "
        "[default: the demo's questions]",
        FILE,
    )
    examples: int = _TEXTS.setting(
        "--examples",
        "The number of questions, or of pieces of the text.",
        click.IntRange(1, 10**6),
        default=40,
    )
    predict: int = by_option(predict_option(_MEASURING, default=64))
    repetitions: int = by_option(
        repetitions_option(
            _MEASURING, "Let every rule answer everything N times, each time with another seed.", 3
        )
    )
    pad_to: int | None = by_option(padding_option(_MEASURING))
    quality: Metric | None = OUTPUT.setting(
        "--quality",
        "The measure of quality for the best rules and the picture.",
        click.Choice(["rouge_2", "bleu", "exact_match", "cross_entropy", "expected_accuracy"]),
        show_default="rouge_2 if there are answers, else cross_entropy",
    )
    plot: Path | None = by_option(plot_option("quality against latency, rejection and deferral"))


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@load_options
@option_group("settings", _CascadeSettings)
@format_options
@terminal_options
@measures_time
def cascade(
    load: LoadSettings, settings: _CascadeSettings, form: OutputForm, terminal: Terminal
) -> None:
    """Compare cascades with plain and exact decoding: quality, latency, rejection."""
    from specrun.bench.cascade.comparison import CascadeResults, best_points, measure_cascades
    from specrun.bench.cascade.report import best_table, cascades_table, plot_cascades

    target = named_target(load)
    check_plot(settings.plot)
    measured = CascadeResults([])

    def measure(say: Callable[[str], None]) -> list[CascadePoint]:
        nonlocal measured
        comparison = _comparison(target, load, settings)
        with timed_target(target, settings.pad_to, progress=say) as timed:
            measured = measure_cascades(
                dataclasses.replace(comparison, target=timed), progress=AnswerCount(terminal)
            )
        return measured.points

    points = measure_and_print("cascade", measure, cascades_table, form, terminal)
    if form in ("table", "md") and points:
        print_table(best_table(best_points(points, settings.quality)), form, terminal)
    if settings.plot is not None and points:
        plot_cascades(points, settings.plot, settings.quality)
        terminal.note(f"drew {settings.plot}")
    if measured.interrupted:
        terminal.note("interrupted: the results of whole repetitions are above", "yellow")
        click.get_current_context().exit(INTERRUPTED)


def _comparison(target: Path, load: LoadSettings, settings: _CascadeSettings) -> CascadeBench:
    """Check all options; return the comparison, each temperature with each top-p."""
    from specrun.bench.cascade.comparison import CascadeBench, with_alphas
    from specrun.bench.cascade.examples import demo_examples, read_examples
    from specrun.runtime.demo import demo_drafters

    small = settings.model_draft or (demo_drafters()["draft"] if load.demo else None)
    if small is None:
        raise click.UsageError("a cascade needs a small model: name one with -md FILE")
    kind = draft_kind(small)
    if kind != "draft":
        advice = "a cascade's small model also generates by itself: give a draft model"
        raise click.UsageError(f"-md {small.name} is for --drafter {kind}: {advice}")
    if settings.texts is not None:
        examples = read_examples(settings.texts, settings.examples)
    elif load.demo:
        examples = demo_examples(settings.examples)
    else:
        raise click.UsageError("there is nothing to answer: give --texts FILE")
    continues = not all(example.is_answer for example in examples)
    return CascadeBench(
        target=target,
        teacher=target,
        small=small,
        examples=examples,
        rules=with_alphas(settings.accept or _RULES, settings.alpha),
        params=tuple(
            SamplingParams(temperature=temp, top_k=0, top_p=top_p, min_p=0.0, seed=settings.seed)
            for temp in settings.temp
            for top_p in settings.top_p
        ),
        lengths=settings.spec_draft_n_max,
        max_tokens=settings.predict,
        repetitions=settings.repetitions,
        as_chat=False if continues else None,
        options=load.runtime_options(),
    )
