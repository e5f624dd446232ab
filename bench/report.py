"""The results of measurements as tables for readers: columns, units, notes.

Beside measured tokens a round stands what the literature reports for the drafters' methods.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from specrun.bench.drafters.comparison import DrafterResult, TextComparison
from specrun.bench.lookup import LookupResult
from specrun.bench.overhead.overhead import DeviceResult, OverheadResult
from specrun.bench.replay.replay import FIRST, ReplayResult
from specrun.bench.table import Table
from specrun.bench.timing import Spread
from specrun.runtime.language import Expression, parse_expression

if TYPE_CHECKING:  # at run time they would need the packages that convert
    from specrun.bench.convert.measurement import ConvertResult
    from specrun.bench.heads.measure import HeadResult
    from specrun.bench.soak.resources import Growth
    from specrun.bench.soak.soak import SoakResult

# Spec-Bench's leaderboard, RTX 3090, Vicuna-7B, F16, greedy: mean tokens a target evaluation over
# all six tasks.
_SPEC_BENCH = {
    "prompt-lookup": ("prompt lookup", 1.73),
    "rest": ("REST", 1.63),
    "draft": ("a 68M draft model", 2.28),
    "lookahead": ("lookahead", 1.64),
    "medusa": ("Medusa", 2.32),
    "hydra": ("Hydra", 3.26),
}

_MOST_ALPHAS = 8

CONSTANT_COLUMNS = ("model", "size", "params", "backend", "ngl", "temp", "vocab", "ctx")
"""Columns that are often the same in every row, and then stand above the table on a screen."""


def machine_facts() -> dict[str, Any]:
    """Return what figures depend on: the processor, cores, versions, devices."""
    from importlib.metadata import version

    from specrun.bindings.machine.devices import devices
    from specrun.bindings.threads import available_cores

    return {
        "specrun": version("specrun"),
        "llama_cpp_python": version("llama-cpp-python"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": available_cores(),
        "devices": [f"{device.name}: {device.description}" for device in devices()],
    }


# -- drafters ------------------------------------------------------------------------------------


def drafters_table(results: Sequence[DrafterResult]) -> Table:
    """Return the table of `specrun bench drafters`."""
    rows = list(map(_drafter_row, results))
    if any(result.alpha is not None for result in results):
        for row, result in zip(rows, results, strict=True):
            row["alpha"] = "-" if result.alpha is None else f"{result.alpha:.3f}"
    return Table.of(rows, *(_drafter_notes(results) if results else ()))


def _drafter_row(result: DrafterResult) -> dict[str, str]:
    target, speed_up, accepted = result.target, result.speed_up, result.acceptance_rate
    return {
        "model": target.model,
        "size": _size(target.n_bytes),
        "params": f"{target.n_params / 1e6:,.2f} M",
        "backend": target.backend,
        "ngl": "all" if target.n_gpu_layers < 0 else str(target.n_gpu_layers),
        "drafter": "none (plain)" if speed_up is None else result.label,
        "temp": f"{result.temperature:g}",
        "tok/s": _extremes(result.tokens_per_second, 1),
        "speed-up": "-" if speed_up is None else f"{speed_up.value:.2f}x {speed_up.extent}",
        "accept %": "-" if accepted is None else f"{100 * accepted:.1f}",
        "tok/round": f"{result.mean_accepted_length:.2f}",
        "TTFT ms": f"{1e3 * result.time_to_first_token_s.median:,.1f}",
        "overhead us/round": f"{result.overhead_us_per_round.median:,.0f}",
        "text": _text(result.text),
    }


def _text(text: TextComparison | None) -> str:
    if text is None:
        return "-"
    if text.n_same == text.n_prompts:
        return "same"
    differing = text.n_prompts - text.n_same
    return f"{differing} of {text.n_prompts} differ, first after {text.first_difference} tokens"


def _drafter_notes(results: Sequence[DrafterResult]) -> list[str]:
    first = results[0]
    notes = [
        f"Prompts: {first.n_prompts} of {first.prompt_tokens:,.0f} tokens on average"
        f"{f' ({first.workload})' if first.workload else ''}, answered with up to "
        f"{first.max_tokens} tokens; interleaved repetitions: {first.repetitions}. "
        "tok/s: median (least to most); with sampling and verification, without the prompt. "
        "speed-up: ratio of the medians (least to most within one repetition)."
    ]
    if any(result.alpha is not None for result in results):
        notes.append(
            "alpha: the mean over positions of sum min(p, q), the chance that a draw from the "
            "drafter's law is accepted (Leviathan et al. 2023, corollary 3.6); counted, not timed."
        )
    # EAGLE's n-alpha: how acceptance falls the more of the draft's own tokens it builds on.
    chains = [result for result in results if result.is_chain and result.acceptance_given_prefix]
    if chains:
        notes.append(
            "n-alpha of chains (acceptance where the n drafts before were accepted), n = 0, 1, ...:"
            + "".join(map(_alphas, chains))
        )
    lossy = [result for result in results if not result.exact]
    if lossy:
        rules = ", ".join(dict.fromkeys(result.rule for result in lossy))
        notes.append(
            f"not exact: {rules}. Its text does not have the target's distribution, so "
            "its speed is that of other text." + "".join(map(_departure, lossy))
        )
    published = literature_note(result.drafter for result in results)
    if published:
        notes.append(published)
    padded = first.target.padded_parameters / 1e6
    if padded:
        notes.append(
            f"The target was padded: {padded:,.0f} M of its {first.target.n_params / 1e6:,.0f} M "
            "parameters have no effect. Padding scales the target's cost to that of a larger model "
            "without changing its outputs."
        )
    texts = [result.text for result in results if result.text is not None]
    if any(text.n_same < text.n_prompts for text in texts):
        notes.append(
            "Texts that differ at temperature 0: batches of different sizes round differently, so "
            "where two tokens are almost equally likely, the other one may win."
        )
    return [*notes, *(f"Advice: {result.advice}." for result in results if result.advice)]


def _departure(result: DrafterResult) -> str:
    """Return how far a rule that is not exact led from the target's law, as a line of a note."""
    if result.total_variation is None or result.changed_share is None:
        return ""
    where = f"\n- {result.label} at temperature {result.temperature:g}"
    changed = f"{result.changed_share:.1%} of tokens changed"
    return f"{where}: TV {result.total_variation:.3f} from the target's law, {changed}"


def _alphas(chain: DrafterResult) -> str:
    shares = [f"{share:.2f}" for share in chain.acceptance_given_prefix[:_MOST_ALPHAS]]
    return f"\n- {chain.label} at temperature {chain.temperature:g}: {' '.join(shares)}"


def literature_note(drafters: Iterable[str]) -> str | None:
    """Return the published mean accepted lengths of the drafters' methods; None if unknown."""
    names = dict.fromkeys(
        name for drafter in drafters for name in _names(parse_expression(drafter))
    )
    known = [_SPEC_BENCH[name] for name in names if name in _SPEC_BENCH]
    if not known:
        return None
    return (
        "tok/round in the literature (Spec-Bench, Vicuna-7B, temperature 0, other texts than "
        f"these): {', '.join(f'{method} {length:.2f}' for method, length in known)}."
    )


def _names(expression: Expression) -> list[str]:
    inner = (name for argument in expression.arguments for name in _names(argument))
    return [expression.atom, *inner]


# -- overhead, lookup, replay --------------------------------------------------------------------


def overhead_table(results: Sequence[OverheadResult]) -> Table:
    """Return the table of `specrun bench overhead`: microseconds per round."""
    return Table.of(
        map(_overhead_row, results),
        f"Microseconds per round: medians over {max((row.rounds for row in results), default=0)} "
        "rounds, the overhead with its quartiles. The overhead is all time outside native "
        "evaluation; its parts: draft (propose, observe), batch, law (logits to laws), acceptance, "
        "commit, text (events, the loop).",
        "target, drafter: time in their native evaluation. accepted: of the drafted tokens of a "
        "round. Random models of almost no width: native times say nothing about real models.",
        "ours at 3 ms, ...: the share of a round in which a simulated device, which takes that "
        "long, waits for us; the drafter's evaluations are left out. copied: bytes of a round that "
        "reach the host, of the target and of the drafter. reused: the share of the target's "
        "evaluations that found their graph ready.",
    )


def _overhead_row(result: OverheadResult) -> dict[str, str]:
    accepted, drafted = result.accepted_per_round, result.drafted_per_round
    device = next(iter(result.devices.values()), None)
    copied = "-"
    if device is not None:
        copied = " + ".join(map(_kilobytes, (device.target_bytes, device.drafter_bytes)))
    return {
        "vocab": f"{result.vocab_size:,}",
        "ctx": str(result.n_ctx),
        "setting": result.setting,
        **{name: f"{part.median:.0f}" for name, part in result.parts_us.items()},
        "overhead": _quartiles(result.overhead_us, ""),
        "target": f"{result.target_native_us.median:,.0f}",
        "drafter": f"{result.drafter_native_us.median:,.0f}",
        "accepted": f"{accepted:.2f}/{drafted:.1f}" if drafted else "-",
        **{f"ours at {name}": _share(found) for name, found in result.devices.items()},
        "copied": copied,
        "reused": "-" if device is None else f"{device.graphs_reused:.0%}",
    }


def _share(device: DeviceResult) -> str:
    share = f"{device.share.median:.1%}"
    if device.most is None:
        return share
    return f"{share} {'within' if device.share.median <= device.most else 'over'}"


def _kilobytes(n_bytes: float) -> str:
    return f"{n_bytes / 1e3:,.1f} kB"


def lookup_table(results: Sequence[LookupResult]) -> Table:
    """Return the table of `specrun bench lookup`: microseconds per round."""
    rows = (
        {
            "drafter": result.drafter,
            "stored tokens": "-" if result.n_stored is None else f"{result.n_stored:,}",
            "context": f"{result.context:,}",
            "us/round": _quartiles(result.round_us),
            "prompt us/token": f"{result.prompt_us_per_token:.2f}",
            "drafted": f"{result.drafted_per_round:.1f}",
            "accepted": f"{result.accepted_per_round:.2f}",
        }
        for result in results
    )
    return Table.of(
        rows,
        "us/round: propose and observe, median over the rounds (quartiles), without any "
        "evaluation. prompt us/token: indexing the context once. The texts are synthetic or "
        "excerpts: what is accepted says nothing about real ones.",
    )


def replay_table(results: Sequence[ReplayResult]) -> Table:
    """Return the table of `specrun bench replay`: the gain of drafting along known texts."""
    rows = (
        {
            "texts": f"{result.name} ({result.n_texts})",
            "drafter": result.drafter,
            "tokens": f"{result.tokens:,}",
            "rounds": f"{result.rounds:,}",
            "drafted": f"{result.drafted:,}",
            "accepted": f"{result.accepted:,}",
            "tok/round": f"{result.mean_accepted_length:.2f}",
            "speed-up": f"{result.speed_up:.3f}x",
            "late": "-" if result.late_speed_up is None else f"{result.late_speed_up:.3f}x",
            "worst": f"{result.worst_speed_up:.3f}x",
        }
        for result in results
    )
    return Table.of(
        rows,
        "speed-up: over plain decoding by the cost curve alone, nothing was timed; late: after the "
        f"first {FIRST} tokens of answers; worst: of the text on which the drafter did worst.",
    )


def soak_table(results: Sequence[SoakResult]) -> Table:
    """Return the table of `specrun bench soak`: what was done, and what the process held."""
    rows = (
        {
            "minutes": f"{result.seconds / 60:.1f}",
            "sessions": f"{result.sessions:,}",
            "answers": f"{result.answers:,}",
            "cut short": f"{result.cut:,}",
            "tokens": f"{result.tokens:,}",
            "failures": f"{len(result.failures):,}",
            **{growth.name: _growth(growth) for growth in result.growth},
        }
        for result in results
    )
    notes = ["Every answer, as far as it got, was compared with that of a runtime without a past."]
    for result in results:
        notes.append(
            "memory (MB), handles, threads: median of the second quarter of the sessions to that "
            "of the last."
            if result.growth
            else "Too short to tell whether the process grows: that takes 100 sessions."
        )
        for what, counts in (("Faults", result.faults), ("Drafters", result.drafters)):
            ordered = sorted(counts.items(), key=lambda item: -item[1])
            notes.append(f"{what}: {', '.join(f'{name} {count:,}' for name, count in ordered)}.")
        notes.append(f"Seed {result.seed}; {result.refused:,} setups cannot be combined.")
    return Table.of(rows, *notes)


def _growth(growth: Growth) -> str:
    unit = 1e6 if growth.name == "memory" else 1.0
    change = f"{growth.before / unit:,.0f} to {growth.after / unit:,.0f}"
    return change if growth.is_flat else f"{change}: over"


# -- heads, conversion ---------------------------------------------------------------------------


def heads_table(results: Sequence[HeadResult]) -> Table:
    """Return the table of `specrun bench heads`: microseconds beside those of copying the bytes."""
    rows = (
        {
            "head": result.head,
            "hidden": f"{result.hidden:,}",
            "vocabulary": f"{result.words:,}",
            "type": result.type_name,
            "width": str(result.width),
            "MB read": f"{result.n_bytes / 1e6:,.1f}",
            "copy GB/s": f"{result.copy_bytes_per_s.median / 1e9:.2f}",
            "floor us": f"{result.floor_us:,.0f}",
            "us": _quartiles(result.time_us),
            "over floor": f"{result.over_floor.value:.2f}x {result.over_floor.extent}",
        }
        for result in results
    )
    repetitions, threads = (results[0].time_us.n, results[0].n_threads) if results else (0, 0)
    return Table.of(
        rows,
        f"us: one evaluation, median over {repetitions} (quartiles), called from Python, on the "
        f"CPU with {threads} threads, the weights in no cache: memory was copied just before. "
        "width: hidden states (Medusa, one head of one block), paths (Hydra's first head, of one "
        "block), positions (Hydra++'s prefix layer) or pairs (EAGLE) in the evaluation, 64 "
        "positions or pairs being cached.",
        "MB read: each weight once, the output matrix included, and keys and values of layers. "
        "copy GB/s: bytes that numpy copies per second with as many threads, each byte counted "
        "once though it is read and written. floor: MB read at that rate. over floor: ratio of the "
        "medians (least to most within one repetition).",
    )


def convert_table(results: Sequence[ConvertResult]) -> Table:
    """Return the table of `specrun bench convert`."""
    return Table.of(
        map(_convert_row, results),
        f"Medians of {max((result.seconds.n for result in results), default=0)} interleaved "
        "repetitions (least to most). Every time ends when the data is on the disk; sources are in "
        "the page cache where there is room. Memory: the largest resident set of a process that "
        "does nothing else, Python included.",
        *(f"{result.name}: {result.note}" for result in results if result.note),
    )


def _convert_row(result: ConvertResult) -> dict[str, str]:
    ratio, peak, budgets = result.of_baseline, result.peak_bytes, []
    if result.budget is not None:
        budgets.append(f"{result.budget:g} of {result.baseline}")
    if result.peak_budget is not None:
        budgets.append(_megabytes(result.peak_budget))
    kept = "within" if result.within_budget else "over"
    return {
        "what": result.name,
        "read": _megabytes(result.n_bytes_in),
        "written": _megabytes(result.n_bytes_out),
        "seconds": _extremes(result.seconds, 2),
        "MB/s read": _extremes(result.bandwidth, 0, unit=1e6),
        "of baseline": f"{ratio.value:.2f} {ratio.extent} of {result.baseline}" if ratio else "-",
        "peak memory": "-" if peak is None else _megabytes(peak),
        "budget": "-" if result.within_budget is None else f"{', '.join(budgets)}: {kept}",
    }


# -- numbers -------------------------------------------------------------------------------------


def _extremes(spread: Spread, digits: int, *, unit: float = 1.0) -> str:
    """Return the median, with the least and the most of several measurements."""
    median, low, high = (
        f"{value / unit:,.{digits}f}" for value in (spread.median, spread.low, spread.high)
    )
    return median if spread.n == 1 else f"{median} ({low}-{high})"


def _quartiles(spread: Spread, comma: str = ",") -> str:
    values = (spread.median, spread.lower_quartile, spread.upper_quartile)
    median, lower, upper = (format(value, f"{comma}.0f") for value in values)
    return f"{median} ({lower}-{upper})"


def _size(n_bytes: int) -> str:
    gib = n_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 1 else f"{n_bytes / 2**20:.2f} MiB"


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB" if n_bytes < 1e8 else f"{n_bytes / 1e6:,.0f} MB"
