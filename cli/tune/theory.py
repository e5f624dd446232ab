"""`specrun theory`: the formulas of speculative decoding, applied to a pair or to numbers.

Top to bottom: options, the facts of a drafter (given or measured), the tables, the command.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.cli.options.drafting import draft_kind, measured_drafters
from specrun.cli.options.group import MODEL, Section, SectionedCommand, option_group
from specrun.cli.options.model import MODEL_DRAFT, LoadSettings, load_options
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.options.prompt import measured_prompts, named_target, prompts_option
from specrun.cli.options.sampling import SamplingGrid, grid_options
from specrun.cli.options.types import MAX_COUNT
from specrun.cli.terminal.screen import print_table, progress_bar
from specrun.cli.terminal.terminal import Terminal

if TYPE_CHECKING:
    from specrun.runtime.planning import BestLengths, ChainInputs, ChainRow, CostCurve

_NUMBERS, _MEASURED = Section("Numbers"), Section("Measurement")
_MORE, _LONGEST = 3, 16  # rows below the best chain, and of all
_QUESTIONS = 8
_ALPHA = click.FloatRange(0.0, 1.0)
_COST = click.FloatRange(0.0, 1e6)


@dataclass(frozen=True, slots=True)
class TheoryNumbers:
    """The facts known without measuring; None: to be measured, or not known."""

    alpha: float | None
    cost_ratio: float | None
    operation_ratio: float | None
    length: int | None
    curve: str | None
    cached: int
    bandwidth: float | None


@dataclass(frozen=True, slots=True)
class TheoryPair:
    """The measurements: drafters, and the answers that they draft for."""

    model_draft: Path | None
    drafter: tuple[str, ...]
    prompt: tuple[str, ...]
    predict: int
    seconds: float


numbers_options = option_group(
    "numbers",
    TheoryNumbers,
    _NUMBERS.option(
        "--alpha A", "The chance that a drafted token is accepted.", _ALPHA, show_default="measured"
    ),
    _NUMBERS.option(
        "--cost-ratio C",
        "c: the time of a drafted token over that of a plain token.",
        _COST,
        show_default="measured",
    ),
    _NUMBERS.option(
        "--operation-ratio C",
        "c-hat: the drafter's operations for a token over the target's.",
        _COST,
        show_default="--cost-ratio, or that of the files",
    ),
    _NUMBERS.option(
        "--length N",
        "Show chains of 1 to N drafts.",
        click.IntRange(1, 64),
        show_default="the lengths that pay",
    ),
    _NUMBERS.option(
        "--curve POINTS",
        "T(n), the time of an evaluation of n tokens: known, cpu, gpu, or points such as "
        "1:1,2:1.38,4:1.98.",
        show_default="measured of a pair",
    ),
    _NUMBERS.option(
        "--cached N",
        "The number of tokens of text whose keys and values are read.",
        click.IntRange(0, MAX_COUNT),
        default=512,
    ),
    _NUMBERS.option(
        "--bandwidth GB",
        "The memory bandwidth in 10^9 bytes a second. Tokens a second are then shown, too.",
        click.FloatRange(0.0, 1e6, min_open=True),
    ),
)

sampling_options = grid_options("1")

pair_options = option_group(
    "pair",
    TheoryPair,
    MODEL.model(MODEL_DRAFT, "A draft model or heads to measure: a GGUF file."),
    MODEL.option(
        "--drafter EXPR",
        'A drafter to measure, such as "eagle(head.gguf)"; repeatable.',
        multiple=True,
    ),
    prompts_option(_MEASURED),
    _MEASURED.option(
        "-n, --predict N",
        "The number of tokens in each answer.",
        click.IntRange(8, MAX_COUNT),
        default=48,
    ),
    _MEASURED.option(
        "--seconds",
        "Measure T(n) for about this long.",
        click.FloatRange(0, min_open=True),
        default=6.0,
    ),
)


_FORMULAS = (
    ("tokens/round", "(1 - a^(n+1)) / (1 - a)", "Leviathan et al. 2023, equation 1"),
    ("speed-up", "tokens / (n c + 1)", "theorem 3.8; more tokens cost the target nothing"),
    ("by T(n)", "tokens T(1) / (T(n+1) + n c T(1))", "theorem 3.8 with the measured T(n)"),
    ("operations", "(n c-hat + n + 1) / tokens", "theorem 3.11"),
    ("bytes", "(target(n+1) + n draft(1)) / tokens", "section 3.4: weights, keys and values"),
)


@dataclass(frozen=True, slots=True)
class _Chains:
    """One table: whose chains, and the inputs of the formulas."""

    title: str
    inputs: ChainInputs


def _given(numbers: TheoryNumbers, load: LoadSettings) -> _Chains:
    """Return the given numbers, with the facts of the target's file, if there is one."""
    from specrun.bindings.models.model import Model
    from specrun.runtime.planning import ChainInputs, MemoryTraffic, memory_traffic

    wanted = (("--alpha", numbers.alpha), ("--cost-ratio", numbers.cost_ratio))
    missing = [name for name, value in wanted if value is None]
    if numbers.alpha is None or numbers.cost_ratio is None:
        raise click.UsageError(
            f"give {' and '.join(missing)}, or a pair to measure: -m FILE with -md FILE or "
            "--drafter EXPR, or --demo"
        )
    curve = _given_curve(numbers, load)
    operations = numbers.operation_ratio
    operations = numbers.cost_ratio if operations is None else operations
    inputs = ChainInputs(numbers.alpha, numbers.cost_ratio, operations, curve)
    if load.model is not None or load.demo:
        with Model(named_target(load), n_gpu_layers=0) as model:
            target = memory_traffic(model, load.context)
        # The drafter reads that part of the target which its operations are.
        read = target, MemoryTraffic(operations * target.dense, 0.0)
        inputs = dataclasses.replace(inputs, traffic=read, n_context=float(numbers.cached))
    return _Chains("Chains, by the numbers that were given", inputs)


def _given_curve(numbers: TheoryNumbers, load: LoadSettings) -> CostCurve | None:
    from specrun.bench.drafters.pair_theory import curve_of

    if numbers.curve is None:
        return None
    if numbers.curve == "known" and load.model is None and not load.demo:
        raise click.UsageError("--curve known is that of a target: give -m FILE too")
    path = named_target(load) if numbers.curve == "known" else Path()
    return curve_of(numbers.curve, path, load.context, 0)


def _measured(
    numbers: TheoryNumbers,
    pair: TheoryPair,
    load: LoadSettings,
    sampling: SamplingGrid,
    terminal: Terminal,
) -> list[_Chains]:
    """Return the measurements of each drafter at each temperature."""
    from specrun.bench.drafters.pair_theory import TheoryMeasurement, measure_theory

    for name in ("alpha", "cost_ratio", "operation_ratio"):
        if getattr(numbers, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} is measured of a drafter: give one of the two")
    measurement = TheoryMeasurement(
        target=named_target(load),
        drafters=_expressions(pair, demo=load.demo),
        prompts=measured_prompts(pair.prompt, n_demo=_QUESTIONS if load.demo else 0),
        params=sampling,
        options=load.runtime_options(),
        max_tokens=pair.predict,
        seconds=pair.seconds,
        cached=numbers.cached,
        curve=_given_curve(numbers, load),
    )
    with progress_bar(terminal, "loading the models") as progress:
        chains = measure_theory(measurement, progress)
    return [
        _Chains(
            f"Chains of {chain.drafter}, temperature {chain.temperature:g}, "
            f"{chain.found.n_places} positions",
            chain.inputs,
        )
        for chain in chains
    ]


def _expressions(pair: TheoryPair, *, demo: bool) -> tuple[str, ...]:
    """Return the drafters to measure, each with its file."""
    from specrun.runtime.language import quoted

    names = list(pair.drafter)
    if pair.model_draft is not None:
        names.insert(0, f"{draft_kind(pair.model_draft)}({quoted(str(pair.model_draft))})")
    return measured_drafters(names or ["draft"], demo=demo)


# -- output ----------------------------------------------------------------------------------------


def _shown(chains: _Chains, numbers: TheoryNumbers) -> tuple[BestLengths, list[ChainRow]]:
    from specrun.runtime.planning import best_lengths, chain_row

    best = best_lengths(chains.inputs)
    longest = numbers.length or min(max(best.measured or best.flat, 1) + _MORE, _LONGEST)
    return best, [chain_row(chains.inputs, n) for n in range(1, longest + 1)]


def _print(chains: _Chains, numbers: TheoryNumbers, terminal: Terminal) -> None:
    inputs = chains.inputs
    best, rows = _shown(chains, numbers)
    cells = [
        (
            str(row.n_draft),
            f"{row.tokens:.3f}",
            f"{row.improvement:.3f}",
            _or_dash(row.measured),
            f"{row.operations:.3f}",
            _or_dash(row.bytes),
        )
        for row in rows
    ]
    title = (
        f"{chains.title}: alpha {inputs.acceptance:.3f}, c {inputs.cost_ratio:.3f}, "
        f"c-hat {inputs.operation_cost_ratio:.3f}"
    )
    print_table(terminal, title, ("n", *(name for name, _, _ in _FORMULAS)), cells)
    for line in _verdicts(inputs, best, numbers.bandwidth):
        terminal.answer(f"{line}\n")


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _verdicts(inputs: ChainInputs, best: BestLengths, bandwidth: float | None) -> Iterator[str]:
    from specrun.runtime.planning import chain_row

    alpha, cost = inputs.acceptance, inputs.cost_ratio
    lengths = [f"{best.flat} if more tokens cost nothing (section 3.5)"]
    if best.measured is not None:
        lengths.append(f"{best.measured} with T(n)")
    if best.by_bytes is not None:
        lengths.append(f"{best.by_bytes} if memory is the limit")
    yield f"best n: {', '.join(lengths)}"
    if alpha > cost:
        least = (1.0 + alpha) / (1.0 + cost)
        yield f"alpha > c: drafting can gain, at least {least:.2f} times (corollary 3.9)"
    else:
        yield "alpha <= c: no chain pays (corollary 3.9)"
    if bandwidth is not None and inputs.traffic is not None:
        # If memory alone decides, a token takes as long as its bytes (section 3.4).
        read = inputs.traffic[0].evaluation(1, inputs.n_context)
        plain = 1e9 * bandwidth / read
        row = chain_row(inputs, best.by_bytes or 0)
        assert row.bytes is not None
        yield (
            f"at {bandwidth:g} GB/s: {plain:.1f} tokens/s plain ({read / 1e6:.1f} MB a token), "
            f"{plain / row.bytes:.1f} with n={best.by_bytes}"
        )


def _as_json(chains: _Chains, numbers: TheoryNumbers) -> dict[str, object]:
    best, rows = _shown(chains, numbers)
    inputs = chains.inputs
    return {
        "chains": chains.title,
        "alpha": inputs.acceptance,
        "cost_ratio": inputs.cost_ratio,
        "operation_ratio": inputs.operation_cost_ratio,
        "best": dataclasses.asdict(best),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


# -- the command -----------------------------------------------------------------------------------

_EPILOG = """\b
Examples:
  specrun theory --alpha 0.8 --cost-ratio 0.05
  specrun theory --alpha 0.8 --cost-ratio 0.05 --curve 1:1,2:1.38,4:1.98 --length 6
  specrun theory -m target.gguf --alpha 0.8 --cost-ratio 0.1 --bandwidth 40
  specrun theory -m target.gguf -md small.gguf --temp 0,1
  specrun theory --demo --drafter eagle --drafter "partial(window=64, n=4)"

\b
alpha is the mean over positions of sum min(p, q), the chance that a draw from the drafter's
distribution is accepted. c is the time of a drafted token over that of a plain one, c-hat its
operations over the target's. For a pair they are measured, with T(n): do not use the machine
meanwhile. Drafters without a distribution (prompt-lookup, rest, lookahead, jacobi) have no alpha.
Formulas follow the tables.
"""


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@load_options
@numbers_options
@pair_options
@sampling_options
@json_option("Print everything as JSON.")
@terminal_options
def theory(
    load: LoadSettings,
    numbers: TheoryNumbers,
    pair: TheoryPair,
    sampling: SamplingGrid,
    terminal: Terminal,
) -> None:
    """Show the theory of drafting: tokens a round, speed-up, operations, bytes."""
    drafts = pair.model_draft is not None or bool(pair.drafter)
    is_given = not drafts and (not load.demo or numbers.alpha is not None)
    if numbers.bandwidth is not None and math.isnan(numbers.bandwidth):
        raise click.UsageError("--bandwidth is no number: give more than 0")
    if drafts and load.model is None and not load.demo:
        raise click.UsageError("a drafter is measured with a target: give -m FILE, or --demo")
    found = (
        [_given(numbers, load)] if is_given else _measured(numbers, pair, load, sampling, terminal)
    )
    if numbers.bandwidth is not None and found[0].inputs.traffic is None:
        raise click.UsageError("--bandwidth needs the files of the models: give -m FILE, or --demo")
    if terminal.as_json:
        terminal.answer_json([_as_json(each, numbers) for each in found], indent=2)
        return
    for each in found:
        _print(each, numbers, terminal)
    print_table(terminal, "Formulas, a = alpha", ("", "", ""), _FORMULAS)
