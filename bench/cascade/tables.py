"""Cascades as tables for readers: every rule and setting, and the best of each method."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.bench.cascade.best import BestPoints
from specrun.bench.cascade.comparison import CascadePoint
from specrun.bench.table import Table
from specrun.bench.timing import Spread


def cascades_table(points: Sequence[CascadePoint]) -> Table:
    """Return the table of `specrun bench cascade`: a row for each rule and setting."""
    notes = [
        "latency: seconds a token with prompts, relative to the plain target's (least to most of a "
        "repetition). reject: of the tested drafts. defer: of the places where both laws differ, "
        "how many are left to the target, along the references. CE: cross-entropy of the "
        "references under the rule's law, nats a token; accuracy: that law's mean probability of "
        "their tokens; - where no law is stated for a place, or it gives a real token no chance. "
        "TV, changed: how far the law of a token lay from the target's, and the share of tokens "
        "that the target alone would not have drawn.",
    ]
    if points:
        first = points[0]
        notes.append(
            f"Examples: {first.n_examples}; interleaved repetitions: {first.repetitions}. All "
            "rules but exact give another law than the target's: NOT exact."
        )
    return Table.of(map(_cascade_row, points), *notes)


def _cascade_row(point: CascadePoint) -> dict[str, str]:
    latency = point.latency
    return {
        "rule": point.method if point.draft_length is None and latency else point.rule,
        "temp": f"{point.temperature:g}",
        "top-p": f"{point.top_p:g}",
        "n": "-" if point.draft_length is None else str(point.draft_length),
        "latency": "-" if latency is None else f"{latency.value:.2f} {latency.extent}",
        "speed-up": "-" if point.speed_up is None else f"{point.speed_up:.2f}x",
        "match": _mean_share(point.exact_match),
        "ROUGE-2": _mean_of(point.rouge_2, 3),
        "BLEU": _mean_of(point.bleu, 1),
        "CE": _mean_of(point.cross_entropy, 3),
        "accuracy": _optional(point.expected_accuracy),
        "reject": _optional(point.rejection_rate),
        "defer": _optional(point.deferral_rate),
        "TV": _optional(point.total_variation),
        "changed": _optional(point.changed_share),
    }


def best_table(found: Sequence[BestPoints]) -> Table:
    """Return the fastest rules at the target's quality, and the best at its latency."""
    return Table.of(
        map(_best_row, found),
        "at the target's quality: the fastest of the method's points whose quality is the plain "
        "target's, within two standard errors; over exact: against exact speculation. at the "
        "target's latency: the best of those that are no slower than the plain target.",
    )


def _best_row(found: BestPoints) -> dict[str, str]:
    fastest, best = found.fastest, found.best
    quality = None if best is None else best.quality(found.metric)
    return {
        "method": found.method,
        "temp": f"{found.temperature:g}",
        "top-p": f"{found.top_p:g}",
        "n": str(found.draft_length),
        "quality": found.metric.replace("_", "-"),
        "target's": f"{found.target_quality:.3f}",
        "speed-up at it": "none" if fastest is None else f"{fastest.speed_up:.2f}x",
        "over exact": "-" if found.over_exact is None else f"{found.over_exact:.2f}x",
        "by": "-" if fastest is None else fastest.rule,
        "best at its latency": "none" if quality is None else f"{quality:.3f}",
        "with": "-" if best is None else best.rule,
    }


def _mean_of(spread: Spread | None, digits: int) -> str:
    return "-" if spread is None else f"{spread.mean:.{digits}f}"


def _mean_share(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.mean:.1%}"


def _optional(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
