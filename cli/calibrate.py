"""`specrun calibrate`: the accuracy of heads by depth and rank, from which their trees are made.

Top to bottom: the options, the tables and the verdict, and the command.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.cli.options.group import (
    MODEL,
    OUTPUT,
    Section,
    SectionedCommand,
    by_option,
    option_group,
)
from specrun.cli.options.model import MODEL_DRAFT, LoadSettings, load_options
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.options.prompt import (
    measured_prompts,
    named_target,
    no_template_option,
    prompts_option,
)
from specrun.cli.options.types import FILE, MAX_COUNT, NEW_FILE
from specrun.cli.terminal.screen import print_table, progress_bar
from specrun.cli.terminal.terminal import Terminal, read_text

if TYPE_CHECKING:
    from specrun.bindings.models.model import Model
    from specrun.runtime.tuning import CalibrationText, HeadCalibration, HeadCalibrationOptions

_TEXTS = Section("Texts")


@dataclass(frozen=True, slots=True)
class CalibrationSource:
    """The heads, and the text along which they guess."""

    model_draft: Path | None = by_option(
        MODEL.model(
            MODEL_DRAFT, "The heads: a GGUF file of Medusa, Hydra, any EAGLE, or a block drafter."
        )
    )
    file: Path | None = _TEXTS.setting(
        "-f, --file", "Measure along this text. Without one, the target writes a text.", FILE
    )
    prompt: tuple[str, ...] = by_option(prompts_option(_TEXTS, "A prompt to answer; repeatable."))
    no_chat_template: bool = by_option(no_template_option(_TEXTS))
    predict: int = _TEXTS.setting(
        "-n, --predict, --max-tokens N",
        "Tokens that are guessed, over all texts together.",
        click.IntRange(16, MAX_COUNT),
        default=1024,
    )
    temp: float = _TEXTS.setting(
        "--temp, --temperature",
        "The temperature that the target writes at: the one that the heads will be used at.",
        click.FloatRange(0),
        default=0.0,
    )
    ranks: int = _TEXTS.setting(
        "--ranks N",
        "The number of guesses of each head to count.",
        click.IntRange(1, 32),
        default=10,
    )
    seconds: float = _TEXTS.setting(
        "--seconds",
        "The time to measure the cost of the target's evaluations; 0: plan with known costs.",
        click.FloatRange(0),
        default=12.0,
    )
    draft_tokens: int | None = _TEXTS.setting(
        "--draft-tokens N",
        "Write a head (-o) that drafts only the N most frequent tokens of three of "
        "four texts, and measure both along the others.",
        click.IntRange(1),
    )


@dataclass(frozen=True, slots=True)
class CalibrationOutput:
    """The use of the result."""

    output: Path | None = OUTPUT.setting(
        "-o, --output FILE",
        "Write a CSV, and leave the heads' file as it is; with --draft-tokens a head's file.",
        NEW_FILE,
    )
    force: bool = OUTPUT.setting("--force", "Overwrite FILE.", is_flag=True)
    save: bool = OUTPUT.setting(
        "--save/--no-save", "Keep the result, or only show it.", default=True
    )


_FEW = 200  # places, after which a share is known to about three hundredths


def print_calibration(
    options: HeadCalibrationOptions, result: HeadCalibration, terminal: Terminal
) -> None:
    """Print all that was measured: tables and a verdict, or one JSON object."""
    if terminal.as_json:
        terminal.answer_json(_facts(options, result), indent=2)
        return
    counts = result.counts
    ranks = max(map(len, counts.alone), default=0)
    head = ("depth", "positions", *(f"{rank + 1}." for rank in range(ranks)))
    for title, rows, counted in (
        ("Right, if the guesses before were right", counts.accuracy, counts.n_reached),
        ("Right, at all positions", counts.alone, counts.n_asked),
    ):
        cells = [
            (str(depth + 1), str(count), *(f"{share:.3f}" for share in row))
            for depth, (count, row) in enumerate(zip(counted, rows, strict=False))
        ]
        print_table(terminal, title, head, cells)
    terminal.answer(_verdict(result) + "\n")
    if counts.n_positions < _FEW:
        terminal.note(
            f"{counts.n_positions} places are few: more prompts, or a longer text (-f), give "
            "steadier shares"
        )


def _verdict(result: HeadCalibration) -> str:
    if result.plan is None:
        return "no guess was ever right: these heads are of no use for this target"
    costs = result.curve.source
    plan = result.plan
    text = (
        f"tree of {len(plan.topology)} nodes for the {costs} costs: {plan.expected_tokens:.2f} "
        f"tokens a round, {plan.speed_up:.2f} times the speed of plain decoding expected\n"
        f"{plan.topology}"
    )
    slow = "" if plan.speed_up > 1.0 else "plain decoding is faster here; the least slow is a "
    return slow + text


def _facts(options: HeadCalibrationOptions, result: HeadCalibration) -> dict[str, Any]:
    plan, counts = result.plan, result.counts
    return {
        "target": str(options.target),
        "heads": str(options.heads),
        "positions": counts.n_positions,
        "positions_by_depth": counts.n_reached,
        "accuracy": counts.accuracy,
        "accuracy_alone": counts.alone,
        "costs": result.curve.source,
        "plan": None
        if plan is None
        else {
            "tree": str(plan.topology),
            "nodes": len(plan.topology),
            "expected_tokens": plan.expected_tokens,
            "speed_up": plan.speed_up,
        },
    }


_DEMO_ANSWER = 12  # tokens of a short answer of the embedded model
_EPILOG = """\b
Examples:
  specrun calibrate -m target.gguf -md heads.gguf
  specrun calibrate -m target.gguf -md heads.gguf -f answers.txt -o accuracy.csv
  specrun chat -m target.gguf --drafter "medusa(heads.gguf, accuracy=accuracy.csv)"
  specrun calibrate -m target.gguf -md head.gguf -n 20000 --draft-tokens 8192 -o small.gguf

\b
The target writes answers to the prompts (or -f names a text, preferably one that it wrote). Along them
every head is measured: how often is its first, second, ... guess the next token, if the guesses before it
were right? The tree of guesses is made from these shares, and sized by the measured cost of evaluations on
this machine. The shares are written into the heads' own file, which is replaced whole or not at all, or with
-o into a CSV file. EAGLE's heads read them only as eagle(FILE, tree=sequoia). Do not use the machine
meanwhile.

\b
--draft-tokens counts the tokens of the target's texts. A head of EAGLE or a block drafter without a vocabulary
of its own then multiplies fewer rows. Other tokens are never drafted, which changes no text.
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@load_options
@option_group("source", CalibrationSource)
@option_group("output", CalibrationOutput)
@json_option("Print all results as JSON.")
@terminal_options
def calibrate(
    load: LoadSettings, source: CalibrationSource, output: CalibrationOutput, terminal: Terminal
) -> None:
    """Measure how often heads guess right, and plan their tree."""
    from specrun.bindings.files import check_target, require_writable
    from specrun.runtime.tuning import calibrate_heads

    options = _options(load, source)
    _check_text(source, output)
    if output.output is not None:
        check_target(output.output, force=output.force)
    elif output.save:
        require_writable(options.heads)  # before the work, not after it
    text = None if source.file is None else read_text(source.file)
    if source.draft_tokens is not None:
        _limit(options, source, output, terminal, text, load.demo)
        return
    with progress_bar(terminal, "loading the models") as progress:
        result = calibrate_heads(
            options, lambda model: _texts(model, source, options, text, load.demo), progress
        )
    print_calibration(options, result, terminal)
    if output.save:
        _keep(options, result, output, terminal)


_MEASURED = 4  # of so many texts one is measured on


def _limit(
    options: HeadCalibrationOptions,
    source: CalibrationSource,
    output: CalibrationOutput,
    terminal: Terminal,
    text: str | None,
    demo: bool,
) -> None:
    """Write a head of few tokens; print the guesses of both along texts that were not counted."""
    from specrun.bindings.models.model import Model
    from specrun.convert.heads.draft_vocabulary import DraftVocabulary, limit_vocabulary
    from specrun.runtime.tuning import calibrate_heads, written_texts

    assert output.output is not None
    assert source.draft_tokens is not None
    with progress_bar(terminal, "loading the models") as progress:
        texts = written_texts(
            options, lambda model: _texts(model, source, options, text, demo), progress
        )
        measured = texts[::-_MEASURED]
        counted = [each for each in texts if each not in measured]
        if not counted:
            raise click.UsageError("one text cannot be counted and measured on: give more of them")
        with Model(options.target, vocab_only=True) as known:
            ends, size = sorted(known.vocabulary.end_of_generation), known.vocabulary.size
        answers = [each.tokens[each.n_prompt :] for each in counted]
        vocabulary = DraftVocabulary.counted(answers, size, source.draft_tokens, ends)
        files = options.target, vocabulary, output.output
        limit_vocabulary(options.heads, *files, force=output.force)
        small = dataclasses.replace(options, heads=output.output)
        found = [calibrate_heads(each, lambda _: measured, progress) for each in (options, small)]
    covered = vocabulary.coverage([each.tokens[each.n_prompt :] for each in measured])
    n_tokens = source.draft_tokens
    if terminal.as_json:
        facts = {"draft_tokens": n_tokens, "covered": covered, "output": str(output.output)}
        before, after = (_facts(options, each) for each in found)
        after["heads"] = str(output.output)
        terminal.answer_json({**facts, "before": before, "after": after}, indent=2)
        return
    cells = [
        (title, *(f"{row[0]:.3f}" for row in each.counts.accuracy), f"{_chain(each):.2f}")
        for title, each in zip(("all tokens", f"{n_tokens:,} tokens"), found, strict=True)
    ]
    depths = (f"depth {depth + 1}" for depth in range(len(found[0].counts.accuracy)))
    head = ("drafts", *depths, "a chain's tokens a round")
    print_table(terminal, "Right, if the guesses before were right", head, cells)
    places = f"{found[0].counts.n_positions:,} places"
    terminal.answer(f"{100 * covered:.1f} % of the tokens at {places} can be drafted\n")
    terminal.note(f"written to {output.output}")


def _chain(result: HeadCalibration) -> float:
    """Return the tokens of a round by a chain of all depths, the target's own too."""
    chances: Iterator[float] = accumulate((row[0] for row in result.counts.accuracy), operator.mul)
    return 1.0 + sum(chances)


def _options(load: LoadSettings, source: CalibrationSource) -> HeadCalibrationOptions:
    from specrun.runtime.laws import SamplingParams
    from specrun.runtime.tuning import HeadCalibrationOptions

    target = named_target(load, ask="give -m FILE and -md FILE")
    if source.model_draft is None:
        raise click.UsageError("no heads are given: -md FILE names those to calibrate")
    return HeadCalibrationOptions(
        target=target,
        heads=source.model_draft,
        n_tokens=source.predict,
        ranks=source.ranks,
        seconds=source.seconds,
        params=SamplingParams(temperature=source.temp),
        loading=load.options,
    )


def _check_text(source: CalibrationSource, output: CalibrationOutput) -> None:
    if source.file is not None and source.prompt:
        raise click.UsageError("-f is a text to read and -p one to answer: give one of them")
    if source.file is not None and source.temp:
        raise click.UsageError("--temp is about texts that the target writes: leave it out with -f")
    if output.output is not None and not output.save:
        raise click.UsageError(
            "-o names the file for the result, and --no-save keeps none: give one of them"
        )
    if source.draft_tokens is not None and output.output is None:
        raise click.UsageError("--draft-tokens makes another head: name its file with -o FILE")


def _texts(
    model: Model,
    source: CalibrationSource,
    options: HeadCalibrationOptions,
    text: str | None,
    demo: bool,
) -> Sequence[CalibrationText]:
    """Return the text of the file in pieces that fit the context, or the prompts."""
    from specrun.runtime.chat import prompt_tokens
    from specrun.runtime.tuning import CalibrationText

    if text is not None:
        tokens = model.vocabulary.tokenize(text)
        size = options.loading.context.size_for(model)
        return [
            CalibrationText(tuple(tokens[i : i + size]), 0) for i in range(0, len(tokens), size)
        ]
    n_demo = -(-options.n_tokens // _DEMO_ANSWER) if demo else 0
    asked = measured_prompts(source.prompt, n_demo=n_demo)
    prompts = prompt_tokens(model, asked, source.no_chat_template)
    return [CalibrationText(tuple(prompt), len(prompt)) for prompt in prompts]


def _keep(
    options: HeadCalibrationOptions,
    result: HeadCalibration,
    output: CalibrationOutput,
    terminal: Terminal,
) -> None:
    from specrun.convert.heads.head_conversion import store_accuracy, write_accuracy_csv
    from specrun.runtime.planning import save_curve
    from specrun.runtime.tuning import calibrated_layers

    if options.seconds > 0.0:  # whatever the heads are worth
        layers = calibrated_layers(options)
        save_curve(result.curve, options.target, options.loading.context, layers)
    counts = result.counts
    if result.plan is None:
        terminal.note("nothing is kept")
        return
    if output.output is not None:
        write_accuracy_csv(output.output, counts.accuracy, counts.alone, force=output.force)
        terminal.note(f"kept in {output.output}")
        return
    store_accuracy(options.heads, counts.accuracy, n_positions=counts.n_positions)
    terminal.note(f"kept in {options.heads}")
