"""`specrun tune`: measures a pair of models on this machine, plans what to draft, and keeps the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.cli.model_options import LoadSettings, load_options
from specrun.cli.named_target import named_target
from specrun.cli.option_group import SectionedCommand
from specrun.cli.output_options import terminal_options
from specrun.cli.paths import require_file
from specrun.cli.progress import progress_bar
from specrun.cli.temperature_grid import sampling_grid
from specrun.cli.terminal import Terminal
from specrun.cli.tune_options import (
    LayerSkip,
    TuneOutput,
    TuneSampling,
    TuneText,
    layer_skip_options,
    tune_output_options,
    tune_sampling_options,
    tune_text_options,
)
from specrun.cli.tune_prompts import prompt_texts

if TYPE_CHECKING:
    from specrun.runtime.planning.tune_result import TuneOptions, TuneResult

__all__ = ["tune"]

_EPILOG = """\b
Examples:
  specrun tune -m target.gguf -md small.gguf
  specrun tune -m target.gguf
  specrun tune -m target.gguf -md small.gguf -f prompt.txt --temp 0,0.6,1 --plot plan.png
  specrun tune --layer-skip -m target.gguf -f prompt.txt --cut skip.gguf --plot search.png

\b
Measures how long the target and the draft model take for 1 to 64 tokens, and how often drafted tokens
are accepted, rank by rank, in texts that the target writes; then picks the tree of drafts that should
give the most tokens a second, or none where plain decoding is faster. chat and generate use the plan
for this pair, -m and -md, on this machine (not with --demo). Do not use the machine meanwhile.

\b
Without a draft model only the target's times are measured: prompt-lookup, lookahead and rest draft as
much as pays with them.

\b
--layer-skip needs no draft model: it searches which layers of the target a draft made of the others
should skip (Draft & Verify), for the most predicted tokens a second. Ctrl-C keeps the best so far.
"""


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@load_options
@tune_text_options
@layer_skip_options
@tune_sampling_options
@tune_output_options
@terminal_options
def tune(
    load: LoadSettings,
    text: TuneText,
    layer_skip: LayerSkip,
    sampling: TuneSampling,
    output: TuneOutput,
    terminal: Terminal,
) -> None:
    """Measure a target and a draft model, and plan what to draft."""
    if layer_skip.wanted:
        from specrun.cli.layer_skip import run_layer_skip

        run_layer_skip(load, text, layer_skip, sampling, output, terminal)
        return
    if layer_skip.output is not None:
        raise click.UsageError("--cut writes what --layer-skip finds: give both")
    if text.model_draft is None and load.model is not None and not load.demo:
        from specrun.cli.target_costs import run_target_costs

        run_target_costs(load, load.model, text, output, terminal)
        return
    from specrun.runtime.asked_prompts import prompt_tokens
    from specrun.runtime.planning import tuning
    from specrun.runtime.planning.offload import resolve_gpu_layers
    from specrun.runtime.planning.stored_curves import save_curve
    from specrun.runtime.planning.tuned import save_plans

    options = _options(load, text, sampling)
    if output.plot is not None:
        from specrun.bench.plot import check_plot_file

        check_plot_file(output.plot)
    prompts = prompt_texts(text, demo=load.demo)
    with progress_bar(terminal, "loading the models") as progress:
        result = tuning.tune(options, lambda model: prompt_tokens(model, prompts, text.no_chat_template), progress)
    _show(options, result, output, terminal)
    if output.save:
        terminal.note(f"kept in {save_plans(options, result)}")
        layers = resolve_gpu_layers(options.n_gpu_layers, options.target)
        save_curve(result.target, options.target, options.context, layers)  # drafters without a model plan with it
    if output.plot is not None:
        from specrun.bench.tune_plot import plot_tuning

        plot_tuning(result, output.plot, f"{options.target.name} with {options.draft.name}")
        terminal.note(f"drew {output.plot}")


def _options(load: LoadSettings, text: TuneText, sampling: TuneSampling) -> TuneOptions:
    from specrun.runtime.planning.tune_result import TuneOptions

    target, draft = _files(load, text)
    return TuneOptions(
        target=target,
        draft=draft,
        params=sampling_grid(sampling.temp, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p),
        n_tokens=text.predict,
        seconds=text.seconds,
        context=load.context,
        n_gpu_layers=load.gpu_layers,
        n_gpu_layers_draft=load.gpu_layers_draft,
        use_mmap=load.mmap,
    )


def _files(load: LoadSettings, text: TuneText) -> tuple[Path, Path]:
    from specrun.runtime.demo import demo_drafters

    target = named_target(load, ask="give -m FILE (and -md FILE), or --demo for the embedded models")
    draft = text.model_draft or (demo_drafters().get("draft") if load.demo else None)
    if draft is None:
        raise click.UsageError("the embedded draft model is missing: name one with -md FILE")
    _refuse_heads(require_file(draft))
    return target, require_file(draft)


def _refuse_heads(draft: Path) -> None:
    from specrun.bindings.gguf_header import read_header
    from specrun.runtime.methods import method_of_head

    kind = read_header(draft).architecture
    if method_of_head(kind) is not None:
        raise click.UsageError(f"{draft.name} holds {kind} heads, not a model: specrun calibrate measures those")


def _show(options: TuneOptions, result: TuneResult, output: TuneOutput, terminal: Terminal) -> None:
    if output.as_json:
        content = {"target": str(options.target), "draft": str(options.draft), **_measured(result)}
        terminal.answer(json.dumps(content, indent=2) + "\n")
        return
    from specrun.cli.tune_report import print_tuning

    print_tuning(options.draft, result, terminal)


def _measured(result: TuneResult) -> dict[str, object]:
    values = result.to_dict()
    return {"target_costs": values.pop("target"), "draft_costs": values.pop("draft"), **values}
