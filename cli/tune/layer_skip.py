"""`specrun tune --layer-skip`: Draft & Verify's search for the layers a self-draft should skip."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from specrun.cli.options.model import LoadSettings
from specrun.cli.options.output import check_plot
from specrun.cli.options.prompt import named_target
from specrun.cli.options.sampling import SamplingGrid
from specrun.cli.terminal.screen import print_table, progress_bar
from specrun.cli.terminal.terminal import INTERRUPTED, Terminal
from specrun.cli.tune.options import LayerSkip, TuneOutput, TuneText, prompt_texts

if TYPE_CHECKING:
    from specrun.bench.layer_search import LayerSearchOptions, LayerSearchResult

_SHOWN = 5


def run_layer_skip(
    load: LoadSettings,
    text: TuneText,
    skip: LayerSkip,
    sampling: SamplingGrid,
    output: TuneOutput,
    terminal: Terminal,
) -> None:
    """Search, print the best sets of layers, draw the search and write the best cut."""
    from specrun.bench.layer_search import search_layers
    from specrun.bindings.files import check_target
    from specrun.runtime.chat import prompt_tokens

    options = _options(load, text, skip, sampling)
    check_plot(output.plot)
    if skip.output is not None:
        check_target(skip.output, force=skip.force)
    prompts = prompt_texts(text, demo=load.demo)
    with progress_bar(terminal, "loading the model") as progress:
        result = search_layers(
            options, lambda model: prompt_tokens(model, prompts, text.no_chat_template), progress
        )
    if result.interrupted:
        terminal.warn(
            f"interrupted after {len(result.trials)} of {options.evaluations} sets of layers"
        )
    _show(options, result, terminal)
    if output.plot is not None:
        from specrun.bench.plots import plot_layer_search

        plot_layer_search(result, output.plot, f"{options.target.name}: layers to skip")
        terminal.note(f"drew {output.plot}")
    if skip.output is not None:
        from specrun.convert import LayeredModel

        LayeredModel(options.target).write(skip.output, result.best.kept, force=skip.force)
        terminal.note(f"wrote {skip.output}")
    if result.interrupted:
        click.get_current_context().exit(INTERRUPTED)


def _options(
    load: LoadSettings, text: TuneText, skip: LayerSkip, sampling: SamplingGrid
) -> LayerSearchOptions:
    from specrun.bench.layer_search import LayerSearchOptions

    if text.model_draft is not None:
        raise click.UsageError(
            "--layer-skip makes the draft model of the target's own layers: leave out -md"
        )
    target = named_target(load, ask="give -m FILE, or --demo for the embedded model")
    chosen = click.get_current_context().get_parameter_source("temp") is not ParameterSource.DEFAULT
    if chosen and len(sampling) > 1:
        raise click.UsageError(
            f"--layer-skip searches for one temperature: give one of the {len(sampling)}"
        )
    return LayerSearchOptions(
        target=target,
        params=sampling[0],
        evaluations=skip.evaluations,
        n_tokens=text.predict,
        seconds=text.seconds,
        loading=load.options,
    )


def _show(options: LayerSearchOptions, result: LayerSearchResult, terminal: Terminal) -> None:
    from specrun.convert.cut import range_text

    temperature = options.params.temperature
    if terminal.as_json:
        content = {"target": str(options.target), "temperature": temperature, **result.to_dict()}
        terminal.answer_json(content, indent=2)
        return
    best_first = sorted(result.trials, key=lambda trial: -trial.predicted)
    rows = [
        (
            range_text(trial.skipped(result.n_layers)),
            str(len(trial.kept)),
            f"{trial.acceptance:.3f}",
            f"n={trial.n_draft}, sampling={trial.sampling}",
            f"{trial.predicted:.1f}",
            f"{trial.speed_up:.2f}",
        )
        for trial in best_first[:_SHOWN]
    ]
    head = ("skipped", "layers", "accepted", "drafts", "tokens/s", "speed-up")
    plain = f"plain decoding {result.plain_speed:.1f} tokens/s"
    print_table(terminal, f"Predicted at temperature {temperature:g}, {plain}", head, rows)
    best = result.best
    skipped = range_text(best.skipped(result.n_layers))
    if best.speed_up <= 1.0:
        terminal.answer_line(f"plain decoding should stay fastest; the best cut skips {skipped}")
        return
    terminal.answer_line(
        f"--skip-layers {skipped} with draft(CUT, n={best.n_draft}, sampling={best.sampling}) "
        f"should give {best.speed_up:.2f} times the speed of plain decoding"
    )
