"""`specrun bench drafters`: drafters against plain decoding of one target, in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import click

from specrun.bindings.errors import OptionError
from specrun.bindings.files import check_target
from specrun.cli.bench.command import (
    AnswerCount,
    OutputForm,
    first_seed_option,
    format_options,
    measure_and_print,
    padding_option,
    predict_option,
    repetitions_option,
    timed_target,
)
from specrun.cli.options.drafting import draft_kind, measured_drafters
from specrun.cli.options.group import Section, SectionedCommand, by_option, option_group
from specrun.cli.options.model import MODEL_DRAFT, LoadSettings, load_options, shape_option
from specrun.cli.options.output import check_plot, plot_option, terminal_options
from specrun.cli.options.prompt import (
    named_target,
    no_template_option,
    prompt_file_option,
    prompts_option,
    read_prompt_file,
)
from specrun.cli.options.quiet_machine import measures_time
from specrun.cli.options.sampling import SAMPLER_OPTIONS, SamplingGrid, grid_options
from specrun.cli.options.types import COUNTS, FILE, PATH
from specrun.cli.terminal.terminal import Terminal
from specrun.runtime.language import Expression, parse_expression, quoted
from specrun.runtime.round import Shape

if TYPE_CHECKING:
    from specrun.bench.drafters.comparison import DrafterBench, DrafterResult
    from specrun.bench.drafters.corpus import DocumentationKind
    from specrun.bench.drafters.prompts import Conversation, Prompt, Workload
    from specrun.bindings.contexts.context_options import RopeScaling


# == Options: which drafters, which prompts, how measured ==========================================


_DRAFTERS, _PROMPTS, _MEASURING = map(Section, ("Drafters", "Prompts", "Measurement"))
_OWN_SUITE = "40 questions of specrun's own in five categories"
_DEMO_QUESTIONS = 8


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """The drafters to compare, as they were typed."""

    model_draft: tuple[Path, ...] = by_option(
        _DRAFTERS.model(
            MODEL_DRAFT,
            'A draft model or heads: short for --drafter KIND("FILE"); repeatable.',
            multiple=True,
        )
    )
    drafter: tuple[str, ...] = _DRAFTERS.setting(
        "--drafter EXPR",
        'A drafter to compare, such as "draft(small.gguf, n=8)"; repeatable.',
        multiple=True,
        show_default="draft, if there is a draft model, and prompt-lookup",
    )
    spec_draft_n_max: tuple[tuple[int, ...], ...] = _DRAFTERS.setting(
        "--spec-draft-n-max",
        "Tokens that -md and --demo's draft model draft a round: a,b or repeated.",
        COUNTS,
        multiple=True,
        show_default="5",
    )
    planned: bool = _DRAFTERS.setting(
        "--planned",
        "Compare all plans of `specrun tune` for the target and -md: the best chain and trees "
        "of each scheme.",
        is_flag=True,
    )
    accept: tuple[str, ...] = _DRAFTERS.setting(
        "--accept RULE",
        "The acceptance rule of the drafters; repeatable, to compare rules.",
        multiple=True,
        show_default="exact",
    )


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """The source of the prompts."""

    prompt: tuple[str, ...] = by_option(prompts_option(_PROMPTS))
    file: Path | None = by_option(prompt_file_option(_PROMPTS))
    prompts: Path | None = _PROMPTS.setting(
        "--prompts", 'Prompts, one a line; .jsonl: the "prompt" or "question" of each line.', FILE
    )
    suite: tuple[str, ...] = _PROMPTS.setting(
        "--suite FILE",
        "Questions by category, in the form of Spec-Bench, MT-bench, EAGLE, SPEED-Bench, Alpaca, "
        f"GSM8K, HumanEval or MBPP; own: {_OWN_SUITE}; repeatable.",
        multiple=True,
    )
    questions: int | None = _PROMPTS.setting(
        "--questions",
        "How many questions are asked: of the demo's, if no prompt is given, or of each category "
        "of a suite.",
        click.IntRange(1, 10**6),
        show_default=f"{_DEMO_QUESTIONS} of the demo's, all of a suite",
    )
    workload: str | None = _PROMPTS.setting(
        "--workload",
        "questions: the demo's own; repeated: answered before; edited: an answer nearly like an "
        "earlier one; quoted: a text to repeat (too hard for the demo).",
        click.Choice(["questions", "repeated", "edited", "quoted"]),
        show_default="questions, with --demo",
    )
    context: int = _PROMPTS.setting(
        "--context N",
        "Lengthen the conversations of a workload to about N tokens by earlier questions and "
        "answers.",
        click.IntRange(0, 2**20),
        default=0,
    )
    docs_store: Literal["all", "disjoint"] = _PROMPTS.setting(
        "--docs-store",
        "The text for a `rest` without a file: all documentation behind the questions, which "
        "has the answers, or only the rest of it.",
        click.Choice(["all", "disjoint"]),
        default="disjoint",
    )
    no_chat_template: bool = by_option(no_template_option(_PROMPTS))


prompt_choice_options = option_group("source", PromptChoice)


@dataclass(frozen=True, slots=True)
class Measuring:
    """The amount of measuring, the cost of the target, and the picture."""

    shape: Shape | None = by_option(shape_option)
    predict: int = by_option(predict_option(_MEASURING, default=128))
    repetitions: int = by_option(
        repetitions_option(_MEASURING, "Let every drafter answer all prompts N times.", 5)
    )
    pad_to: int | None = by_option(padding_option(_MEASURING))
    keep: Path | None = _MEASURING.setting(
        "--keep FILE",
        "Keep the padded target in this file. Otherwise it is deleted at the end.",
        PATH,
    )
    alpha: bool = _MEASURING.setting(
        "--alpha",
        "Report alpha, the mean of sum min(p, q), of drafters that have a distribution. "
        "Prompts are answered once more.",
        is_flag=True,
    )
    run_code: bool = _MEASURING.setting(
        "--run-code",
        "Run the programs in answers to HumanEval and MBPP, to report pass@1. A model wrote them: "
        "time and memory are limited, but they have all your rights to files.",
        is_flag=True,
    )
    plot: Path | None = by_option(plot_option("speed-ups and acceptance by position"))


sampling_grid_options = grid_options("0", "", *SAMPLER_OPTIONS, first_seed_option)


# == Prompts, and the datastores of `rest` =========================================================


LONGEST_MESSAGES = 256
"""Tokens by which the last messages of a workload may exceed the requested context."""

_ROOM_FOR_ANSWERS = 128


def chosen_prompts(
    source: PromptChoice, target: Path, load: LoadSettings
) -> tuple[tuple[Prompt, ...], str]:
    """Return the prompts and their description; without any choice, the demo's questions.

    If positions are stretched, a workload may be longer than the target was trained for.
    """
    from specrun.bench.drafters.prompts import demo_prompts, read_prompts
    from specrun.bench.drafters.suites import read_suite

    prompts: list[Prompt] = [*source.prompt]
    if source.file is not None:
        prompts.append(read_prompt_file(source.file))
    if source.prompts is not None:
        prompts += read_prompts(source.prompts)
    for name in source.suite:
        prompts += read_suite(name, source.questions)
    if prompts and (source.workload or source.context):
        raise click.UsageError(
            "--workload and --context make their own prompts: leave out -p, -f, --prompts and "
            "--suite"
        )
    if prompts:
        return tuple(prompts), ", ".join(f"suite {Path(name).name}" for name in source.suite)
    if not load.demo and source.workload is None:
        raise click.UsageError(
            "no prompt is given: use -p TEXT, -f FILE, --prompts FILE, --suite or --workload"
        )
    if source.workload is None and not source.context:
        return demo_prompts(source.questions or _DEMO_QUESTIONS), ""
    return _workload(source, target, load.context.rope)


def with_documentation(
    drafters: tuple[str, ...],
    target: Path,
    kind: DocumentationKind,
    stack: ExitStack,
    say: Callable[[str], None],
) -> tuple[tuple[str, ...], str]:
    """Return the drafters, each `rest` without a store with ours, and that store's description."""
    from specrun.bench.drafters.comparison import with_files
    from specrun.bench.drafters.corpus import documentation_store, store_description

    if not any(_lacks_store(parse_expression(text)) for text in drafters):
        return drafters, ""
    store = stack.enter_context(documentation_store(target, kind, progress=say))
    filled = tuple(with_files(text, {"rest": store}) for text in drafters)
    return filled, store_description(kind)


def _lacks_store(expression: Expression) -> bool:
    if expression.atom == "rest":
        return not expression.arguments
    return any(map(_lacks_store, expression.arguments))


def _workload(
    source: PromptChoice, target: Path, rope: RopeScaling
) -> tuple[tuple[Prompt, ...], str]:
    from specrun.bench.drafters.prompts import as_text, demo_workload
    from specrun.bindings.models.model import Model

    workload = cast("Workload", source.workload or "questions")
    with Model(target, vocab_only=True) as model:
        # llama.cpp reports no context length if only the vocabulary was loaded.
        trained = model.header.metadata.get(f"{model.architecture}.context_length", 0)
        trained = trained if isinstance(trained, int) else 0
        most = trained - _ROOM_FOR_ANSWERS
        if source.context > most and not rope.stretches:
            raise OptionError(
                f"a context of {source.context:,} tokens does not fit: the target was trained for "
                f"{trained:,}, which leaves {most:,} beside the answer. For longer ones stretch "
                "its positions (--rope-scaling yarn --rope-scale 2), or take another target"
            )

        def count_tokens(conversation: Conversation) -> int:
            tokens = model.vocabulary.tokenize(as_text(conversation), add_special=False)
            # Two control tokens around every message, as most templates have.
            return len(tokens) + 2 * len(conversation)

        count = source.questions or _DEMO_QUESTIONS
        prompts = demo_workload(workload, count, source.context, count_tokens)
    about = f"workload {workload}"
    if source.context > most:
        about += (
            f", beyond the {trained:,} tokens of context that the target was trained for ({rope})"
        )
    return prompts, about


# == The command ===================================================================================


_EPILOG = """\b
Examples:
  specrun bench drafters --demo --pad-to 400M
  specrun bench drafters --demo --pad-to 400M --workload repeated --context 1500 --drafter prompt-lookup
  specrun bench drafters --demo --pad-to 400M --drafter rest --docs-store all
  specrun bench drafters -m target.gguf -md small.gguf -f prompt.txt --temp 0,0.8 --plot speed.png
  specrun bench drafters -m target.gguf --suite own --questions 4 -r 2
  specrun bench drafters -m target.gguf -md small.gguf --suite HumanEval.jsonl --run-code -n 256
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
@option_group("chosen", DrafterChoice)
@prompt_choice_options
@sampling_grid_options
@option_group("measuring", Measuring)
@format_options
@terminal_options
@measures_time
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
    from specrun.bench.drafters.suites import has_programs
    from specrun.bench.report import drafters_table

    target = named_target(load)
    _check_options(chosen, measuring)

    def measure(say: Callable[[str], None]) -> list[DrafterResult]:
        with ExitStack() as stack:
            filled, about_store = with_documentation(
                chosen.drafter, target, source.docs_store, stack, say
            )
            drafting = dataclasses.replace(chosen, drafter=filled)
            bench = _settings(target, load, drafting, source, sampling, measuring)
            path = stack.enter_context(
                timed_target(target, measuring.pad_to, keep=measuring.keep, progress=say)
            )
            workload = "; ".join(filter(None, (bench.workload, about_store)))
            bench = dataclasses.replace(bench, target=path, workload=workload)
            if has_programs(bench.prompts) and not bench.run_code:
                terminal.note("pass@1 is left out: give --run-code to run the model's programs")
            return measure_drafters(bench, progress=AnswerCount(terminal))

    results = measure_and_print("drafters", measure, drafters_table, form, terminal)
    if measuring.plot is not None:
        from specrun.bench.plots import plot_drafters

        plot_drafters(results, measuring.plot)
        terminal.note(f"drew {measuring.plot}")


def _check_options(chosen: DrafterChoice, measuring: Measuring) -> None:
    """Raise the errors of wrong options before time is spent on measuring."""
    if chosen.planned and measuring.pad_to is not None:
        raise click.UsageError(
            "--planned and --pad-to exclude each other: plans belong to a file; pad it first "
            "(--pad-to N --keep FILE), then tune and measure FILE"
        )
    if measuring.keep is not None:
        if measuring.pad_to is None:
            raise click.UsageError("--keep names the file of the padded target: give --pad-to too")
        check_target(measuring.keep)
    check_plot(measuring.plot)


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
    prompts, workload = chosen_prompts(source, target, load)
    n_ctx = load.context.n_ctx
    if n_ctx and source.context:  # more than -c if --context needs it, up to the target's own
        n_ctx = max(n_ctx, source.context + LONGEST_MESSAGES + measuring.predict)
    shape = measuring.shape or "free"
    planned = _planned(target, load, chosen, sampling) if chosen.planned else []
    return DrafterBench(
        target=target,
        drafters=(*expressions, *planned),
        prompts=prompts,
        workload=workload,
        params=sampling,
        rules=chosen.accept or ("exact",),
        max_tokens=measuring.predict,
        repetitions=measuring.repetitions,
        alpha=measuring.alpha,
        run_code=measuring.run_code,
        as_chat=False if source.no_chat_template else None,
        options={**load.runtime_options(), "n_ctx": n_ctx, "shape": shape},
    )


def _expressions(chosen: DrafterChoice, *, demo: bool) -> tuple[str, ...]:
    """Return the drafters to compare; without any choice, those that need nothing else."""
    files = [(draft_kind(path), quoted(str(path))) for path in chosen.model_draft]
    lengths = [f"n={n}" for counts in chosen.spec_draft_n_max for n in counts] or [""]
    if not files and demo and not chosen.drafter:
        files = [("draft", "")]
    if not files and chosen.spec_draft_n_max:
        raise click.UsageError(
            "--spec-draft-n-max needs a draft model: -md FILE (or put n into the --drafter)"
        )
    if chosen.planned and not chosen.spec_draft_n_max:
        files = []  # the plans name the drafters
    names = [
        f"{kind}({', '.join(filter(None, (file, length)))})"
        for kind, file in files
        for length in lengths
    ]
    names += chosen.drafter
    if not chosen.drafter and not chosen.planned:
        names.append("prompt-lookup")
    return measured_drafters(names, demo=demo)


def _planned(
    target: Path, load: LoadSettings, chosen: DrafterChoice, sampling: SamplingGrid
) -> list[str]:
    """Return the planned drafters for each temperature and draft model."""
    from specrun.runtime.demo import demo_drafters
    from specrun.runtime.planning import describe_settings, load_plans

    drafts = chosen.model_draft or (demo_drafters()["draft"],) if load.demo else chosen.model_draft
    if not drafts:
        raise click.UsageError("--planned needs a draft model: -md FILE")
    settings = describe_settings(load.options)
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
        for params in sampling:
            nearest = min(plans, key=lambda plan: abs(plan.temperature - params.temperature))
            names += nearest.every_expression(draft)
    return list(dict.fromkeys(names))
