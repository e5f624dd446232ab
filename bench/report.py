"""What the measurements say, as tables for readers: columns, units, notes.

What the literature reports for the methods, to stand beside what is measured.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from typing import Any

from specrun.bench.drafters.comparison import DrafterResult, TextComparison
from specrun.bench.heads.measure import HeadResult
from specrun.bench.lookup import LookupResult
from specrun.bench.overhead.overhead import OverheadResult
from specrun.bench.replay.replay import FIRST, ReplayResult
from specrun.bench.table import Table
from specrun.bench.timing import Ratio, Spread
from specrun.runtime.language import Expression, parse_expression

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


def literature_note(drafters: Iterable[str]) -> str | None:
    """Return a sentence with the published mean accepted lengths of the drafters' methods; None if
    there are none."""
    names = dict.fromkeys(
        name
        for expression in drafters
        for name in _names(parse_expression(expression))
        if name in _SPEC_BENCH
    )
    if not names:
        return None
    known = ", ".join(
        f"{method} {length:.2f}" for method, length in map(_SPEC_BENCH.__getitem__, names)
    )
    return (
        "tok/round in the literature (Spec-Bench, Vicuna-7B, temperature 0, other texts than "
        f"these): {known}."
    )


def _names(expression: Expression) -> list[str]:
    return [
        expression.atom,
        *(name for argument in expression.arguments for name in _names(argument)),
    ]


_ALPHAS = 8

CONSTANT_COLUMNS = ("model", "size", "params", "backend", "ngl", "temp", "vocab", "ctx")
"""Columns that are often the same in every row, and then stand above the table on a screen."""


def drafters_table(results: Sequence[DrafterResult]) -> Table:
    """Return the table of `specrun bench drafters`."""
    columns = (
        *("model", "size", "params", "backend", "ngl", "drafter", "temp", "tok/s", "speed-up"),
        *("accept %", "tok/round", "TTFT ms", "overhead us/round", "text"),
    )
    rows = tuple(_drafter_row(result) for result in results)
    return Table(columns, rows, tuple(_drafter_notes(results)))


def overhead_table(results: Sequence[OverheadResult]) -> Table:
    """Return the table of `specrun bench overhead`: microseconds per round."""
    parts = tuple(results[0].parts_us) if results else ()
    columns = (
        "vocab",
        "ctx",
        "setting",
        *parts,
        "overhead",
        "budget",
        "target",
        "drafter",
        "accepted",
    )
    rows = tuple(_overhead_row(result, parts) for result in results)
    notes = (
        "Microseconds per round: medians over "
        f"{max((result.rounds for result in results), default=0)} rounds, the overhead "
        "with its quartiles. The overhead is all time outside native evaluation; its parts: "
        "draft (propose, observe), "
        "batch, law (logits to laws), acceptance, commit, text (events, the loop).",
        "target, drafter: time in their native evaluation. accepted: of the drafted tokens of a "
        "round. "
        "Random models of almost no width: native times say nothing about real models.",
    )
    return Table(columns, rows, notes)


def lookup_table(results: Sequence[LookupResult]) -> Table:
    """Return the table of `specrun bench lookup`: microseconds per round."""
    columns = (
        "drafter",
        "stored tokens",
        "context",
        "us/round",
        "prompt us/token",
        "drafted",
        "accepted",
    )
    rows = tuple(
        (
            result.drafter,
            "-" if result.n_stored is None else f"{result.n_stored:,}",
            f"{result.context:,}",
            (
                f"{result.round_us.median:,.0f} "
                f"({result.round_us.lower_quartile:,.0f}-{result.round_us.upper_quartile:,.0f})"
            ),
            f"{result.prompt_us_per_token:.2f}",
            f"{result.drafted_per_round:.1f}",
            f"{result.accepted_per_round:.2f}",
        )
        for result in results
    )
    note = (
        "us/round: propose and observe, median over the rounds (quartiles), without any "
        "evaluation. prompt us/token: "
        "indexing the context once. The texts are synthetic or excerpts: what is accepted says "
        "nothing about real ones."
    )
    return Table(columns, rows, (note,))


def replay_table(results: Sequence[ReplayResult]) -> Table:
    """Return the table of `specrun bench replay`: what drafting would have gained along known
    texts."""
    columns = (
        "texts",
        "drafter",
        "tokens",
        "rounds",
        "drafted",
        "accepted",
        "tok/round",
        "speed-up",
        "late",
        "worst",
    )
    rows = tuple(
        (
            f"{result.name} ({result.n_texts})",
            result.drafter,
            f"{result.tokens:,}",
            f"{result.rounds:,}",
            f"{result.drafted:,}",
            f"{result.accepted:,}",
            f"{result.mean_accepted_length:.2f}",
            f"{result.speed_up:.3f}x",
            "-" if result.late_speed_up is None else f"{result.late_speed_up:.3f}x",
            f"{result.worst_speed_up:.3f}x",
        )
        for result in results
    )
    note = (
        "speed-up: over plain decoding by the cost curve alone, nothing was timed; late: after "
        "the first "
        f"{FIRST} tokens of answers; worst: of the text on which the drafter did worst."
    )
    return Table(columns, rows, (note,))


def heads_table(results: Sequence[HeadResult]) -> Table:
    """Return the table of `specrun bench heads`: microseconds per evaluation beside those of
    copying the bytes."""
    columns = (
        "head",
        "hidden",
        "vocabulary",
        "type",
        "width",
        "MB read",
        "copy GB/s",
        "floor us",
        "us",
        "over floor",
    )
    rows = tuple(
        (
            *(
                result.head,
                f"{result.hidden:,}",
                f"{result.words:,}",
                result.type_name,
                str(result.width),
            ),
            f"{result.n_bytes / 1e6:,.1f}",
            f"{result.copy_bytes_per_s.median / 1e9:.2f}",
            f"{result.floor_us:,.0f}",
            (
                f"{result.time_us.median:,.0f} "
                f"({result.time_us.lower_quartile:,.0f}-{result.time_us.upper_quartile:,.0f})"
            ),
            _ratio(result.over_floor),
        )
        for result in results
    )
    repetitions, threads = (results[0].time_us.n, results[0].n_threads) if results else (0, 0)
    notes = (
        f"us: one evaluation, median over {repetitions} (quartiles), called from Python, on the "
        f"CPU with {threads} "
        "threads, the weights in no cache: memory was copied just before. width: hidden states "
        "(Medusa, one head of "
        "one block), paths (Hydra's first head, of one block), positions (Hydra++'s prefix "
        "layer) or pairs (EAGLE) in "
        "the evaluation, 64 positions or pairs being cached.",
        "MB read: each weight once, the output matrix included, and keys and values of layers. "
        "copy GB/s: bytes that "
        "numpy copies per second with as many threads, each byte counted once though it is read "
        "and written. floor: MB "
        "read at that rate. over floor: ratio of the medians (least to most within one "
        "repetition).",
    )
    return Table(columns, rows, notes)


def machine_facts() -> dict[str, Any]:
    """Return what figures depend on: the processor, cores, versions, devices."""
    from importlib.metadata import version

    from specrun.bindings.devices import available_cores, devices

    return {
        "specrun": version("specrun"),
        "llama_cpp_python": version("llama-cpp-python"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": available_cores(),
        "devices": [f"{device.name}: {device.description}" for device in devices()],
    }


def _drafter_row(result: DrafterResult) -> tuple[str, ...]:
    target = result.target
    return (
        target.model,
        _size(target.n_bytes),
        f"{target.n_params / 1e6:,.2f} M",
        target.backend,
        "all" if target.n_gpu_layers < 0 else str(target.n_gpu_layers),
        "none (plain)" if result.speed_up is None else result.label,
        f"{result.temperature:g}",
        _spread(result.tokens_per_second, 1),
        "-" if result.speed_up is None else _ratio(result.speed_up),
        "-" if result.acceptance_rate is None else f"{100 * result.acceptance_rate:.1f}",
        f"{result.mean_accepted_length:.2f}",
        f"{1e3 * result.time_to_first_token_s.median:,.1f}",
        f"{result.overhead_us_per_round.median:,.0f}",
        _text(result.text),
    )


def _drafter_notes(results: Sequence[DrafterResult]) -> list[str]:
    if not results:
        return []
    first = results[0]
    notes = [
        f"Prompts: {first.n_prompts} of {first.prompt_tokens:,.0f} tokens on average"
        f"{f' ({first.workload})' if first.workload else ''}, answered with up to "
        f"{first.max_tokens} tokens; "
        f"interleaved repetitions: {first.repetitions}. "
        "tok/s: median (least to most); with sampling and verification, without the prompt. "
        "speed-up: ratio of the medians (least to most within one repetition)."
    ]
    notes += _chain_notes(results)
    lossy = dict.fromkeys(result.rule for result in results if not result.exact)
    if lossy:
        notes.append(
            f"NOT exact: {', '.join(lossy)}. Its text does not have the target's distribution, "
            "so its speed is that of "
            "other text."
        )
    published = literature_note(result.drafter for result in results)
    if published:
        notes.append(published)
    padded = first.target.padded_parameters
    if padded:
        notes.append(
            f"The target was padded: {padded / 1e6:,.0f} M of its "
            f"{first.target.n_params / 1e6:,.0f} M parameters "
            "have no effect. Padding scales the target's cost to that of a larger model without "
            "changing its outputs."
        )
    if any(
        result.text is not None and result.text.n_same < result.text.n_prompts for result in results
    ):
        notes.append(
            "Texts that differ at temperature 0: batches of different sizes round differently, "
            "so where two tokens "
            "are almost equally likely, the other one may win."
        )
    return [*notes, *(f"Advice: {result.advice}." for result in results if result.advice)]


def _chain_notes(results: Sequence[DrafterResult]) -> list[str]:
    """Return EAGLE's n-alpha of every chain: how acceptance falls with what the drafter itself
    predicted."""
    chains = [result for result in results if result.is_chain and result.acceptance_given_prefix]
    if not chains:
        return []
    lines = [
        f"\n- {chain.label} at temperature {chain.temperature:g}: "
        + " ".join(f"{share:.2f}" for share in chain.acceptance_given_prefix[:_ALPHAS])
        for chain in chains
    ]
    return [
        "n-alpha of chains (acceptance where the n drafts before were accepted), n = 0, 1, ...:"
        + "".join(lines)
    ]


def _overhead_row(result: OverheadResult, parts: Sequence[str]) -> tuple[str, ...]:
    within = result.within_budget
    return (
        f"{result.vocab_size:,}",
        str(result.n_ctx),
        result.setting,
        *(f"{result.parts_us[name].median:.0f}" for name in parts),
        (
            f"{result.overhead_us.median:.0f} "
            f"({result.overhead_us.lower_quartile:.0f}-{result.overhead_us.upper_quartile:.0f})"
        ),
        "-"
        if result.budget_us is None
        else f"{result.budget_us:.0f} {'within' if within else 'over'}",
        f"{result.target_native_us.median:,.0f}",
        f"{result.drafter_native_us.median:,.0f}",
        f"{result.accepted_per_round:.2f}/{result.drafted_per_round:.1f}"
        if result.drafted_per_round
        else "-",
    )


def _size(n_bytes: int) -> str:
    gib = n_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 1 else f"{n_bytes / 2**20:.2f} MiB"


def _spread(spread: Spread, digits: int) -> str:
    if spread.n == 1:
        return f"{spread.median:,.{digits}f}"
    return f"{spread.median:,.{digits}f} ({spread.low:,.{digits}f}-{spread.high:,.{digits}f})"


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"


def _text(text: TextComparison | None) -> str:
    if text is None:
        return "-"
    if text.n_same == text.n_prompts:
        return "same"
    differing = text.n_prompts - text.n_same
    return f"{differing} of {text.n_prompts} differ, first after {text.first_difference} tokens"
