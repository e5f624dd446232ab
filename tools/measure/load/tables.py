"""Tables of loads: throughput by conversations, and the wait for a first token."""

from __future__ import annotations

from collections.abc import Sequence

from measure.load.throughput import LoadResult
from specrun.bench.report import Table
from specrun.bench.timing import Ratio, Spread


def load_table(results: Sequence[LoadResult]) -> Table:
    """Return the throughput of every drafter at every load."""
    return Table.of(map(_row, results), *_notes(results))


def first_token_table(results: Sequence[LoadResult]) -> Table:
    """Return how long a short prompt waits beside a long one, by drafter."""
    rows = []
    for result in results:
        found = result.first_token
        if found is None or result.conversations != 1:
            continue
        rows.append(
            {
                "drafter": result.drafter,
                "short": f"{found.short_prompt}",
                "long": f"{found.long_prompt:,}",
                "alone, ms": _milliseconds(found.alone_s),
                "beside, ms": _milliseconds(found.beside_s),
                "ratio": _ratio(found.ratio),
                "still read": f"{found.was_read} of {found.beside_s.n}",
            }
        )
    note = "time to the first token of a short prompt, alone and while a long one is being read"
    return Table.of(rows, note)


def _row(result: LoadResult) -> dict[str, str]:
    speed = result.tokens_per_second
    reached = result.over_alone.value / result.allowed
    return {
        "drafter": result.drafter,
        "at once": f"{result.conversations}",
        "t/s": f"{speed.median:.1f} ({speed.low:.1f} to {speed.high:.1f})",
        "x plain": _ratio(result.over_plain),
        "x plain alone": _ratio(result.over_plain_alone),
        "x alone": _ratio(result.over_alone),
        "allowed": f"{result.allowed:.2f}",
        "of allowed": f"{100 * reached:.0f} %",
        "width": f"{result.width:.1f}",
        "texts": f"{result.texts_per_evaluation:.2f}",
        "same text": "-" if result.n_same is None else f"{result.n_same} of {result.n_prompts}",
    }


def _notes(results: Sequence[LoadResult]) -> list[str]:
    if not results:
        return []
    first = results[0]
    target = first.target
    padded = f", {target.padded_parameters / 1e6:,.0f} M of them padding"
    about = f"{target.model}: {target.n_params / 1e6:,.1f} M parameters"
    about += padded if target.padded_parameters else ""
    return [
        f"{about}, {target.backend}; {first.n_prompts} answers of up to {first.max_tokens} tokens "
        f"at temperature {first.temperature:g}, all prompts at every load; median (range) of "
        f"{first.repetitions} interleaved repetitions",
        "x plain: over plain decoding of as many at once; x plain alone: over plain decoding one "
        "after the other; x alone: over the same drafter one after the other, of which the "
        "target's measured T(n) allows as much as stands beside it",
        "width: tokens of a conversation in an evaluation; texts: conversations in an evaluation",
    ]


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def _milliseconds(spread: Spread) -> str:
    low, high = 1000 * spread.low, 1000 * spread.high
    return f"{1000 * spread.median:.0f} ({low:.0f} to {high:.0f})"
