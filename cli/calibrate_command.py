"""`specrun calibrate`: how often the guesses of heads are right, kept where their trees are made from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from specrun.cli.calibrate_options import (
    CalibrationOutput,
    CalibrationSource,
    calibration_output_options,
    calibration_source_options,
)
from specrun.cli.calibrate_report import print_calibration
from specrun.cli.model_options import LoadSettings, load_options
from specrun.cli.named_target import named_target
from specrun.cli.option_group import SectionedCommand
from specrun.cli.output_options import terminal_options
from specrun.cli.paths import read_text
from specrun.cli.progress import progress_bar
from specrun.cli.terminal import Terminal

if TYPE_CHECKING:
    from specrun.bindings.model import Model
    from specrun.runtime.planning.calibration import CalibrationText
    from specrun.runtime.planning.head_calibration import HeadCalibration, HeadCalibrationOptions

__all__ = ["calibrate"]

_DEMO_ANSWER = 12  # tokens of a short answer of the embedded model
_EPILOG = """\b
Examples:
  specrun calibrate -m target.gguf -md heads.gguf
  specrun calibrate -m target.gguf -md heads.gguf -f answers.txt -o accuracy.csv
  specrun chat -m target.gguf --drafter "medusa(heads.gguf, accuracy=accuracy.csv)"

\b
The target writes answers to the prompts (or -f names a text, best one that it wrote), and every head
is asked along them: how often is its first, second, ... guess the word that came, where the guesses
before it were right? The tree of guesses is made from these shares, and sized by what evaluations cost
on this machine, which is measured too. They are written into the heads' own file, which is replaced
whole or not at all, or with -o into a CSV beside it. EAGLE's heads read them as eagle(FILE, tree=sequoia)
alone. Do not use the machine meanwhile.
"""


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@load_options
@calibration_source_options
@calibration_output_options
@terminal_options
def calibrate(load: LoadSettings, source: CalibrationSource, output: CalibrationOutput, terminal: Terminal) -> None:
    """Measure how often heads guess right, and plan their tree."""
    from specrun.runtime.atomic import check_target, require_writable
    from specrun.runtime.planning.head_calibration import calibrate_heads

    options = _options(load, source)
    _check_text(source, output)
    if output.output is not None:
        check_target(output.output, force=output.force)
    elif output.save:
        require_writable(options.heads)  # before the work, not after it
    text = None if source.file is None else read_text(source.file)
    with progress_bar(terminal, "loading the models") as progress:
        result = calibrate_heads(options, lambda model: _texts(model, source, options, text, load.demo), progress)
    print_calibration(options, result, as_json=output.as_json, terminal=terminal)
    if output.save:
        _keep(options, result, output, terminal)


def _options(load: LoadSettings, source: CalibrationSource) -> HeadCalibrationOptions:
    from specrun.runtime.planning.head_calibration import HeadCalibrationOptions
    from specrun.runtime.sampling import SamplingParams

    target = named_target(load, ask="give -m FILE and -md FILE")
    if source.model_draft is None:
        raise click.UsageError("no heads are given: -md FILE names what is to be calibrated")
    return HeadCalibrationOptions(
        target=target,
        heads=source.model_draft,
        n_tokens=source.predict,
        ranks=source.ranks,
        seconds=source.seconds,
        params=SamplingParams(temperature=source.temp),
        context=load.context,
        n_gpu_layers=load.gpu_layers,
        use_mmap=load.mmap,
    )


def _check_text(source: CalibrationSource, output: CalibrationOutput) -> None:
    if source.file is not None and source.prompt:
        raise click.UsageError("-f is a text to read and -p one to answer: give one of them")
    if source.file is not None and source.temp:
        raise click.UsageError("--temp is about texts that the target writes: leave it out with -f")
    if output.output is not None and not output.save:
        raise click.UsageError("-o says where the result is kept, and --no-save that it is not: give one of them")


def _texts(
    model: Model, source: CalibrationSource, options: HeadCalibrationOptions, text: str | None, demo: bool
) -> Sequence[CalibrationText]:
    """Return the text of the file in pieces that fit the context, or the prompts."""
    from specrun.bench.prompts import demo_prompts
    from specrun.cli.tune_options import TuneText
    from specrun.cli.tune_prompts import prompt_texts
    from specrun.runtime.asked_prompts import prompt_tokens
    from specrun.runtime.planning.calibration import CalibrationText

    if text is not None:
        tokens = model.vocabulary.tokenize(text)
        size = options.context.size_for(model)
        return [CalibrationText(tuple(tokens[i : i + size]), 0) for i in range(0, len(tokens), size)]
    asked = TuneText(None, source.prompt, None, source.no_chat_template, options.n_tokens, options.seconds)
    wanted = demo_prompts(-(-options.n_tokens // _DEMO_ANSWER)) if demo and not source.prompt else None
    prompts = prompt_tokens(model, wanted or prompt_texts(asked, demo=False), source.no_chat_template)
    return [CalibrationText(tuple(prompt), len(prompt)) for prompt in prompts]


def _keep(
    options: HeadCalibrationOptions, result: HeadCalibration, output: CalibrationOutput, terminal: Terminal
) -> None:
    from specrun.convert.head_accuracy import store_accuracy, write_accuracy_csv
    from specrun.runtime.planning.offload import resolve_gpu_layers
    from specrun.runtime.planning.stored_curves import save_curve

    if options.seconds > 0.0:  # whatever the heads are worth
        layers = resolve_gpu_layers(options.n_gpu_layers, options.target)
        save_curve(result.curve, options.target, options.context, layers)
    if result.plan is None:
        terminal.note("nothing is kept")
        return
    if output.output is not None:
        write_accuracy_csv(output.output, result.accuracy, result.alone, force=output.force)
        terminal.note(f"kept in {output.output}")
        return
    store_accuracy(options.heads, result.accuracy, n_positions=result.n_positions)
    terminal.note(f"kept in {options.heads}")
