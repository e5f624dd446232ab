"""Tables of the measurements: columns, units, and what a reader has to know about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from measure.lookup import LookupResult
from measure.mixture.measurement import MixtureResult, rows_of
from measure.overhead.overhead import DeviceResult, OverheadResult
from measure.replay.replay import FIRST, ReplayResult
from specrun.bench.report import Table, extremes
from specrun.bench.timing import Spread

if TYPE_CHECKING:  # at run time they would need the packages that convert
    from measure.convert.measurement import ConvertResult
    from measure.heads.measure import HeadResult
    from measure.soak.resources import Growth
    from measure.soak.soak import SoakResult

# -- overhead, lookup, replay --------------------------------------------------------------------


def overhead_table(results: Sequence[OverheadResult]) -> Table:
    """Return the table of `measure overhead`: microseconds per round."""
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
    """Return the table of `measure lookup`: microseconds per round."""
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
    """Return the table of `measure replay`: the gain of drafting along known texts."""
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
    """Return the table of `measure soak`: what was done, and what the process held."""
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


def mixture_table(results: Sequence[MixtureResult]) -> Table:
    """Return the table of `measure mixture`: predictions beside the clock."""
    n_bytes = results[0].n_bytes if results else 0
    return Table.of(
        rows_of(results),
        f"A random mixture of {n_bytes / 1e9:.2f} GB. ms: a round that evaluates so many tokens, "
        "least of the repetitions; of auto, a token. times plain: over plain decoding in the same "
        "repetition.",
        "curve: what the product plans with, measured when it loaded the file. by bytes: weights "
        "that are read for so many tokens, each of which chooses its experts by chance, over those "
        "for one.",
    )


def heads_table(results: Sequence[HeadResult]) -> Table:
    """Return the table of `measure heads`: microseconds beside those of copying the bytes."""
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
    """Return the table of `measure convert`."""
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
        "seconds": extremes(result.seconds, 2),
        "MB/s read": extremes(result.bandwidth, 0, unit=1e6),
        "of baseline": f"{ratio.value:.2f} {ratio.extent} of {result.baseline}" if ratio else "-",
        "peak memory": "-" if peak is None else _megabytes(peak),
        "budget": "-" if result.within_budget is None else f"{', '.join(budgets)}: {kept}",
    }


# -- numbers -------------------------------------------------------------------------------------


def _quartiles(spread: Spread, comma: str = ",") -> str:
    values = (spread.median, spread.lower_quartile, spread.upper_quartile)
    median, lower, upper = (format(value, f"{comma}.0f") for value in values)
    return f"{median} ({lower}-{upper})"


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB" if n_bytes < 1e8 else f"{n_bytes / 1e6:,.0f} MB"
