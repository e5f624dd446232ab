"""`specrun tune`: measures a pair of models on this machine, and plans and keeps the drafts.

First how the result is printed (cost curves, acceptance by rank, plans), then the command.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.bench.timing import Ratio, speed_verdict
from specrun.cli.options.group import SectionedCommand
from specrun.cli.options.model import LoadSettings, load_options
from specrun.cli.options.output import check_plot, terminal_options
from specrun.cli.options.prompt import named_target
from specrun.cli.options.quiet_machine import measures_time
from specrun.cli.options.sampling import SamplingGrid
from specrun.cli.terminal.screen import print_table, progress_bar
from specrun.cli.terminal.terminal import Terminal, require_file
from specrun.cli.tune.options import (
    LayerSkip,
    TuneOutput,
    TuneText,
    layer_skip_options,
    prompt_texts,
    tune_output_options,
    tune_sampling_options,
    tune_text_options,
)
from specrun.cli.tune.target_costs import warn_of_experts

if TYPE_CHECKING:
    from specrun.runtime.tuning import Candidate, ShapeTrial, TunedSetting, TuneOptions, TuneResult

_SCHEMES = {
    "argmax": "most likely tokens",
    "without": "drawn without replacement",
    "with": "drawn with replacement",
}


def print_tuning(draft: Path, result: TuneResult, terminal: Terminal) -> None:
    """Print the verdict for each temperature, costs and plans; with -v, all tables."""
    several = len(result.settings) > 1
    for setting in result.settings:
        for line in _verdict(setting, draft, several=several):
            terminal.answer_line(line)
    _print_curves(result, terminal)
    for setting in result.settings:
        if terminal.verbosity:
            _print_acceptance(setting, terminal)
            _print_alphas(setting, terminal)
        _print_plans(setting, terminal)
    if terminal.verbosity:
        _print_theory(result, terminal)


def _print_curves(result: TuneResult, terminal: Terminal) -> None:
    rows = []
    for size in sorted({*result.target.sizes, *result.draft.sizes}):
        cells = [str(size)]
        for curve in (result.target, result.draft):
            if size not in curve.sizes:
                cells += ["", ""]
                continue
            seconds = curve.seconds(size)
            cells += [f"{1e3 * seconds:.2f}", f"{seconds / curve.seconds(1):.2f}"]
        rows.append(cells)
    head = ("tokens", "target ms", "times one", "draft ms", "times one")
    print_table(terminal, "What an evaluation costs", head, rows)


def _print_acceptance(setting: TunedSetting, terminal: Terminal) -> None:
    ranks = max(map(len, setting.acceptance.values()), default=0)
    rows = [
        (_SCHEMES[name], *(f"{share:.3f}" for share in shares))
        for name, shares in setting.acceptance.items()
    ]
    head = ("drafts", *(f"{rank + 1}." for rank in range(ranks)))
    title = f"Accepted by rank, temperature {setting.params.temperature:g}"
    print_table(terminal, title, head, rows)


def _print_alphas(setting: TunedSetting, terminal: Terminal) -> None:
    rows = [
        (
            row.drafter,
            f"{row.alpha:.3f}",
            f"{row.theory.cost_ratio:.3f}",
            f"{row.operation_ratio:.3f}",
            str(row.theory.length),
            f"{row.theory.expected_tokens:.2f}",
            f"{row.theory.improvement:.2f}",
            f"{row.theory.operations:.2f}",
            f"{row.bytes:.2f}",
        )
        for row in setting.alphas
    ]
    theory = ("n", "tokens/round", "speed-up", "operations", "bytes")
    title = (
        "Drawn drafts, alpha = mean sum min(p, q) (Leviathan et al. 2023), "
        f"temperature {setting.params.temperature:g}"
    )
    print_table(terminal, title, ("drafter", "alpha", "c", "c-hat", *theory), rows)


def _print_plans(setting: TunedSetting, terminal: Terminal) -> None:
    rows = [
        (
            candidate.options or "no drafting",
            str(candidate.n_nodes),
            f"{candidate.expected_tokens:.2f}",
            _measured_text(candidate.mean_accepted_length, ".2f"),
            f"{candidate.predicted:.1f}",
            _measured_text(candidate.measured, ".1f"),
            _gain(candidate, setting),
        )
        for candidate in setting.candidates
    ]
    head = ("plan", "nodes", "tokens/round", "measured", "tokens/s", "measured", "speed-up")
    print_table(terminal, f"Plans, temperature {setting.params.temperature:g}", head, rows)


def _measured_text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _print_theory(result: TuneResult, terminal: Terminal) -> None:
    rows = []
    for setting in result.settings:
        theory = setting.theory
        chains = [run for run in setting.candidates if run.kind == "chain" and run.measured]
        fastest = max(chains, key=lambda run: run.speed, default=None)
        gain = None if fastest is None else fastest.speed / setting.plain.speed
        rows.append(
            (
                f"{setting.params.temperature:g}",
                f"{theory.acceptance:.3f}",
                f"{theory.cost_ratio:.3f}",
                f"{theory.flat_improvement:.2f} (n={theory.flat_length})",
                f"{theory.improvement:.2f} (n={theory.length})",
                f"{theory.expected_tokens:.2f}",
                f"{theory.operations:.2f}",
                _measured_text(gain, ".2f"),
                _measured_text(_operations(setting, fastest), ".2f"),
            )
        )
    models = ("free width", "measured T(n)", "tokens/round", "operations")
    title = "Theory of chains (Leviathan et al. 2023): times the speed of plain decoding"
    print_table(
        terminal, title, ("temp", "1st accepted", "c", *models, "measured", "operations"), rows
    )


def _operations(setting: TunedSetting, chain: Candidate | None) -> float | None:
    """Return the operations of a chain's tokens over plain decoding's, by the rounds that ran."""
    if chain is None or not chain.mean_accepted_length or not setting.alphas:
        return None
    ratio = setting.alphas[0].operation_ratio
    return (chain.depth * ratio + chain.depth + 1.0) / chain.mean_accepted_length


def _gain(candidate: Candidate, setting: TunedSetting) -> str:
    if candidate.measured is None:
        return f"{candidate.predicted / setting.plain.predicted:.2f} predicted"
    return f"{candidate.measured / setting.plain.speed:.2f}"


def _verdict(setting: TunedSetting, draft: Path, *, several: bool) -> list[str]:
    """Return the gain of drafting by the best plan, and by a fixed shape."""
    texts = f"answers at temperature {setting.params.temperature:g}" if several else "answers"
    best = setting.best
    if not best.options:
        return [f"Drafting with {draft.name} does not make {texts} faster: use --drafter none."]
    ratio = best.speed / setting.plain.speed
    drafter = f"draft({draft.name}, {best.options})"
    verdict = speed_verdict(drafter, texts, Ratio(ratio, ratio, ratio))
    return [verdict, f"  {_of_shape(setting.shape)}."]


def _of_shape(trial: ShapeTrial) -> str:
    """Return the cost of a fixed shape, in which the text does not depend on the drafts."""
    if trial.left_out:
        return f"There is no fixed shape ({trial.left_out})"
    ratio = f"{trial.fixed / trial.free:.2f} of that speed" if trial.free else "no speed"
    use = "chat and generate use it" if trial.chosen else f"--shape {trial.width} uses it"
    return f"A fixed shape of {trial.width} tokens gives {ratio}; {use}"


_EPILOG = """\b
Examples:
  specrun tune -m target.gguf -md small.gguf
  specrun tune -m target.gguf
  specrun tune -m target.gguf -md small.gguf -f prompt.txt --temp 0,0.6,1 --plot plan.png
  specrun tune --demo --drafter eagle --drafter "partial(window=64)"
  specrun tune --layer-skip -m target.gguf -f prompt.txt --cut skip.gguf --plot search.png

\b
Measures how long the target and the draft model take for 1 to 64 tokens, and how often drafted tokens
are accepted, rank by rank, in texts that the target writes. Then picks the tree of drafts that should
give the most tokens a second, or none if plain decoding is faster. chat and generate use the plan for
this pair, -m and -md, on this machine (not with --demo). -v shows all tables. Do not use the machine
meanwhile.

\b
Without a draft model only the target's times are measured: prompt-lookup, lookahead and rest draft as
much as pays with them.

\b
--layer-skip needs no draft model. It searches for the layers of the target that a self-draft should skip
(Draft & Verify), for the most predicted tokens a second. Ctrl-C keeps the best so far.
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@load_options
@tune_text_options
@layer_skip_options
@tune_sampling_options
@tune_output_options
@terminal_options
@measures_time
def tune(
    load: LoadSettings,
    text: TuneText,
    layer_skip: LayerSkip,
    sampling: SamplingGrid,
    output: TuneOutput,
    terminal: Terminal,
) -> None:
    """Measure a target and a draft model, and plan the drafts."""
    if layer_skip.wanted:
        from specrun.cli.tune.layer_skip import run_layer_skip

        run_layer_skip(load, text, layer_skip, sampling, output, terminal)
        return
    if layer_skip.output is not None:
        raise click.UsageError("--cut writes the result of --layer-skip: give both")
    if text.model_draft is None and load.model is not None and not load.demo:
        if text.drafter:
            raise click.UsageError(
                "--drafter needs a draft model: give -md FILE too, or use specrun theory"
            )
        from specrun.cli.tune.target_costs import run_target_costs

        run_target_costs(load, load.model, text, output, terminal)
        return
    from specrun.runtime.chat import prompt_tokens
    from specrun.runtime.planning import save_curve
    from specrun.runtime.tuning import keep_plans, tuning

    options = _options(load, text, sampling)
    check_plot(output.plot)
    prompts = prompt_texts(text, demo=load.demo)
    with progress_bar(terminal, "loading the models") as progress:
        result = tuning.tune(
            options, lambda model: prompt_tokens(model, prompts, text.no_chat_template), progress
        )
    _show(options, result, terminal)
    if output.save:
        terminal.note(f"kept in {keep_plans(options, result)}")
        layers, _ = tuning.tuned_layers(options)
        # Drafters without a model plan with the target's curve.
        save_curve(result.target, options.target, options.loading.context, layers)
    if output.plot is not None:
        from specrun.bench.plots import plot_tuning

        plot_tuning(result, output.plot, f"{options.target.name} with {options.draft.name}")
        terminal.note(f"drew {output.plot}")


def _options(load: LoadSettings, text: TuneText, sampling: SamplingGrid) -> TuneOptions:
    from specrun.cli.options.drafting import measured_drafters
    from specrun.runtime.tuning import TuneOptions

    target, draft = _files(load, text)
    return TuneOptions(
        target=target,
        draft=draft,
        params=sampling,
        n_tokens=text.predict,
        seconds=text.seconds,
        loading=load.options,
        others=measured_drafters(text.drafter, demo=load.demo),
    )


def _files(load: LoadSettings, text: TuneText) -> tuple[Path, Path]:
    from specrun.runtime.demo import demo_drafters

    ask = "give -m FILE (and -md FILE), or --demo for the embedded models"
    target = named_target(load, ask=ask)
    draft = text.model_draft or (demo_drafters().get("draft") if load.demo else None)
    if draft is None:
        raise click.UsageError("the embedded draft model is missing: name one with -md FILE")
    _refuse_heads(require_file(draft))
    return target, require_file(draft)


def _refuse_heads(draft: Path) -> None:
    from specrun.bindings.gguf import read_header
    from specrun.runtime.language import method_of_head

    kind = read_header(draft).architecture
    method = method_of_head(kind)
    if method is None:
        return
    has = f"{draft.name} holds {kind} heads, not a model"
    raise click.UsageError(f"{has}: specrun calibrate measures those")


def _show(options: TuneOptions, result: TuneResult, terminal: Terminal) -> None:
    if terminal.as_json:
        content = {"target": str(options.target), "draft": str(options.draft), **result.to_dict()}
        terminal.answer_json(content, indent=2)
        return
    print_tuning(options.draft, result, terminal)
    warn_of_experts(options.target, result.target, terminal)
