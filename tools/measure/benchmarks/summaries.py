"""Tables for the page, made of the results that a record holds, by its kind."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from measure.benchmarks.plan import CATEGORIES
from measure.benchmarks.records import Record, Result
from specrun.bench.report import Table

_BASE = ("llama-server", "plain")
_SHOWN_SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 48, 64)


def summary(record: Record) -> Table:
    """Return the table of a record's results."""
    return _TABLES[record.kind](record.results)


# == Peers =========================================================================================


def best_of(arms: Sequence[Result], program: str, plain: bool = True) -> Result | None:
    """Return a program's fastest arm, plain decoding among them or not."""
    own = [arm for arm in arms if arm["program"] == program]
    own = [arm for arm in own if plain or arm["drafting"] != "plain"]
    return max(own, key=_gain, default=None)


def arm_of(arms: Sequence[Result], program: str, drafting: str) -> Result | None:
    """Return one arm; None if it is not there."""
    wanted = (program, drafting)
    return next((arm for arm in arms if (arm["program"], arm["drafting"]) == wanted), None)


def grouped(results: Sequence[Result], *names: str) -> dict[tuple[Any, ...], list[Result]]:
    """Return results by the values of some of their fields, in the order of the first of each."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(tuple(result[name] for name in names), []).append(result)
    return groups


def over(arm: Result | None, base: Result | None) -> float | None:
    """Return how many times as fast an arm is as another; None if one is not there."""
    return None if arm is None or base is None else _gain(arm) / _gain(base)


def _gain(arm: Result) -> float:
    """Return the speed-up over the baseline: the median over questions, each asked of both."""
    return 1.0 if arm["speed_up"] is None else float(arm["speed_up"]["value"])


def _speed(arm: Result) -> float:
    return float(arm["tokens_per_second"]["median"])


def _peers(results: Sequence[Result]) -> Table:
    by_category = [result for result in results if result["category"]]
    groups = grouped(by_category, "weights", "threads", "temperature")
    rows = [_peer_row(key, arms) for key, arms in groups.items()]
    return Table.of(
        rows,
        "plain: llama-server's plain decoding, tokens a second by the client's clock (over the "
        "categories), and specrun's over it. Speed-ups are medians over the questions. Of each "
        "category: specrun as it chooses itself over that plain decoding; in brackets specrun's "
        "best arm over the best of llama.cpp's. mean: geometric. python: llama-cpp-python's best "
        "arm over llama-server's plain decoding. differ: of specrun's texts at temperature 0, the "
        "ones that llama-server's plain has not.",
    )


def _peer_row(key: tuple[Any, ...], arms: Sequence[Result]) -> dict[str, str]:
    weights, threads, temperature = key
    groups = {name: group for (name,), group in grouped(arms, "category").items()}
    bases = [arm_of(group, *_BASE) for group in groups.values()]
    row = {
        "weights": weights,
        "threads": str(threads),
        "temp": f"{temperature:g}",
        "plain tok/s": _mean([_speed(base) for base in bases if base is not None], "{:.1f}"),
        "specrun plain": _over_plain(groups, lambda arms: arm_of(arms, "specrun", "plain")),
    }
    chosen, best = [], []
    for category in CATEGORIES:
        found = groups.get(category, [])
        auto = over(arm_of(found, "specrun", "as it chooses"), arm_of(found, *_BASE))
        ours = over(best_of(found, "specrun"), best_of(found, "llama-server"))
        row[category] = "-" if auto is None else f"{auto:.2f}x ({_times(ours)})"
        chosen += [] if auto is None else [auto]
        best += [] if ours is None else [ours]
    row["mean"] = f"{_mean(chosen, '{:.2f}x')} ({_mean(best, '{:.2f}x')})"
    row["python"] = _over_plain(groups, lambda arms: best_of(arms, "llama-cpp-python"))
    row["differ"] = _differing(arms)
    return row


def _over_plain(
    groups: Mapping[str, Sequence[Result]], choose: Callable[[Sequence[Result]], Result | None]
) -> str:
    found = [over(choose(arms), arm_of(arms, *_BASE)) for arms in groups.values()]
    return _mean([value for value in found if value is not None], "{:.2f}x")


def _differing(arms: Sequence[Result]) -> str:
    compared = [arm for arm in arms if arm["program"] == "specrun" and arm["n_same"] is not None]
    answers = sum(arm["n_answers"] for arm in compared)
    return f"{answers - sum(arm['n_same'] for arm in compared)} of {answers}" if answers else "-"


def _mean(values: Sequence[float], form: str) -> str:
    return form.format(statistics.geometric_mean(values)) if values else "-"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


# == Curves, counts, cascades, loads, tests ========================================================


def _curves(results: Sequence[Result]) -> Table:
    sizes = [size for size in _SHOWN_SIZES if any(size in result["sizes"] for result in results)]
    return Table.of(
        (
            {
                "file": result["file"],
                "threads": str(result["threads"] or "GPU"),
                "ms for one": f"{1e3 * cost_at(result, 1):.2f}",
                **{str(size): _cost(result, size) for size in sizes if size > 1},
            }
            for result in results
        ),
        "Columns: tokens in one evaluation; times the cost of one.",
    )


def cost_at(curve: Result, size: int) -> float:
    """Return the seconds of an evaluation of a measured size."""
    return float(curve["reused"][curve["sizes"].index(size)])


def _cost(curve: Result, size: int) -> str:
    return f"{cost_at(curve, size) / cost_at(curve, 1):.2f}" if size in curve["sizes"] else "-"


def _counted(results: Sequence[Result]) -> Table:
    """One row for each drafter; tokens a round by temperature, of all texts together."""
    whole = [result for result in results if not result["category"] and result["drafter"] != "none"]
    temperatures = sorted({result["temperature"] for result in whole})
    rows = []
    for (drafter, rule), own in grouped(whole, "drafter", "rule").items():
        by_temperature = {result["temperature"]: result for result in own}
        row = {"drafter": f"`{drafter}`{'' if rule == 'exact' else f', {rule}'}"}
        for temperature in temperatures:
            found = by_temperature.get(temperature)
            row[f"tokens a round, {temperature:g}"] = (
                "-" if found is None else f"{found['mean_accepted_length']:.2f}"
            )
        rows.append(row)
    return Table.of(rows, "Columns: temperatures.")


def _drafters(results: Sequence[Result]) -> Table:
    """One row for each drafter, with its speed-up and tokens a round; plain decoding's speed."""
    labels = [name for name in ("line",) if any(name in result for result in results)]
    whole = [result for result in results if not result["category"]]
    return Table.of(
        {
            **{name: result[name] for name in labels},
            "drafter": f"`{result['drafter']}`",
            "temp": f"{result['temperature']:g}",
            "tok/s": _spread(result["tokens_per_second"], 1),
            "speed-up": "-" if result["speed_up"] is None else _ratio(result["speed_up"], "x"),
            "tokens a round": f"{result['mean_accepted_length']:.2f}",
            "us of Python a round": _spread(result["overhead_us_per_round"], 0),
        }
        for result in whole
    )


def _arms(results: Sequence[Result]) -> Table:
    """One row for each arm of each program."""
    return Table.of(
        {
            "program": result["program"],
            "drafting": result["drafting"],
            "temp": f"{result['temperature']:g}",
            "tok/s": _spread(result["tokens_per_second"], 1),
            "speed-up": "-" if result["speed_up"] is None else _ratio(result["speed_up"], "x"),
            "tokens a round": f"{result['tokens_per_round']:.2f}",
        }
        for result in results
        if not result["category"]
    )


def _cascade(results: Sequence[Result]) -> Table:
    """One row for each rule; quality by references if there are any, else along real text."""
    rows = [result for result in results if result["latency"] is not None]
    has_answers = any(result["exact_match"] is not None for result in rows)
    return Table.of(
        {
            **({"small model": result["small"]} if "small" in result else {}),
            "rule": f"`{result['rule']}`" if result["draft_length"] else result["method"],
            "temp": f"{result['temperature']:g}",
            "latency": _ratio(result["latency"], ""),
            **(_by_answers(result) if has_answers else _along_text(result)),
            "rejection": _share(result["rejection_rate"]),
            "deferral": _share(result["deferral_rate"]),
        }
        for result in rows
    )


def _by_answers(result: Result) -> dict[str, str]:
    names = {"exact match": "exact_match", "ROUGE-2": "rouge_2"}
    return {title: _share(result[name]["mean"]) for title, name in names.items()}


def _along_text(result: Result) -> dict[str, str]:
    return {
        "cross-entropy": _spread(result["cross_entropy"], 3),
        "accuracy": _share(result["expected_accuracy"]),
    }


def _load(results: Sequence[Result]) -> Table:
    counts = sorted({result["conversations"] for result in results})
    rows = []
    for (drafter,), own in grouped(results, "drafter").items():
        found = {result["conversations"]: result["tokens_per_second"] for result in own}
        cells = {f"{n} at once": _spread(found.get(n), 1) for n in counts}
        rows.append({"tokens a second": f"`{drafter}`", **cells})
    return Table.of(rows)


def _overhead(results: Sequence[Result]) -> Table:
    return Table.of(
        {
            "vocabulary": f"{result['vocab_size']:,}",
            "setting": result["setting"],
            "us of Python a round": _spread(result["overhead_us"], 0),
            "us of the drafter": _spread(result["drafter_native_us"], 0),
            "graphs reused": _share(_reused(result)),
        }
        for result in results
    )


def _reused(result: Result) -> float | None:
    """Return the share of evaluations that found their graph ready; None if it was not counted."""
    device: Result | None = next(iter(result["devices"].values()), None)
    return None if device is None else float(device["graphs_reused"])


def _tests(results: Sequence[Result]) -> Table:
    names = ("passed", "failed", "skipped")
    return Table.of({name: str(result[name]) for name in names} for result in results)


def _ratio(value: Mapping[str, float], unit: str) -> str:
    if value["low"] == value["high"]:  # of one repetition
        return f"{value['value']:.2f}{unit}"
    return f"{value['value']:.2f}{unit} ({value['low']:.2f}-{value['high']:.2f})"


def _spread(value: Mapping[str, float] | None, digits: int) -> str:
    if value is None:
        return "-"
    quartiles = (value["median"], value["lower_quartile"], value["upper_quartile"])
    median, low, high = (f"{each:,.{digits}f}" for each in quartiles)
    return f"{median} ({low}-{high})"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


_TABLES: Mapping[str, Callable[[Sequence[Result]], Table]] = {
    "peers": _peers,
    "curves": _curves,
    "counted": _counted,
    "drafters": _drafters,
    "arms": _arms,
    "cascade": _cascade,
    "load": _load,
    "overhead": _overhead,
    "tests": _tests,
}
