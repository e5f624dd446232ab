"""Peers compared: the same questions to all servers in turn, with figures by category."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from measure.peers.servers import Peer, Reply, ask, started
from specrun.bench.drafters.prompts import Prompt, Question
from specrun.bench.report import Table
from specrun.bench.timing import Ratio, Spread, interleaved, ratio_of, require_given, spread_of
from specrun.bindings.errors import SpecrunError
from specrun.runtime.laws import SamplingParams

_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class PeerBench:
    """What is asked: `prompts` of each of the `peers`, for all `params`; the first is the baseline.

    Every repetition asks all prompts with the seed of `params` plus its number. Without `as_chat`
    prompts are continued as text, for models without a chat template.
    """

    peers: tuple[Peer, ...]
    prompts: tuple[Prompt, ...]
    params: tuple[SamplingParams, ...]
    max_tokens: int = 128
    repetitions: int = 5
    wait_s: float = 600.0
    as_chat: bool = True

    def __post_init__(self) -> None:
        require_given(self, ("peers", "prompts", "params"))


@dataclass(frozen=True, slots=True)
class PeerResult:
    """One peer at one temperature, for all prompts (category "") or those of a category.

    Spreads are over prompts and repetitions. `tokens_per_second` is by the client's clock, from
    the first piece of text on; `speed_up` compares it with the baseline's. `tokens_per_round`
    counts a round for every token that was no accepted draft. `n_same` of `n_answers` have the
    text of the baseline, at temperature 0 only.
    """

    program: str
    drafting: str
    category: str
    temperature: float
    n_prompts: int
    repetitions: int
    tokens: int
    tokens_per_second: Spread
    speed_up: Ratio | None
    first_piece_s: Spread
    answer_s: Spread
    tokens_per_round: float
    n_answers: int
    n_same: int | None


_Run = dict[int, list[Reply]]
"""The replies of a repetition: those to each turn, by the prompt's number."""


def measure_peers(
    bench: PeerBench,
    progress: Callable[[str], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
) -> list[PeerResult]:
    """Start all servers, ask them in turn, prompt by prompt, and end them.

    A server that does not start, or refuses the first prompt, is left out with a warning; the
    first one must start.
    """
    results: list[PeerResult] = []
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specrun-peers-")))
        ports: list[int] = []
        there: list[Peer] = []
        for number, peer in enumerate(bench.peers):
            progress(f"starting {peer.label}")
            try:
                port = stack.enter_context(started(peer, logs / f"{number}.log", bench.wait_s))
                _answer(port, bench, 0, bench.params[0], 0, _WARM_UP_TOKENS)
            except SpecrunError as error:
                if not there:
                    raise
                warn(f"{peer.label} is left out: {error}")
                continue
            ports.append(port)
            there.append(peer)
        bench = replace(bench, peers=tuple(there))
        for params in bench.params:
            results += _results(bench, params, _measure(bench, params, ports, progress))
    return results


def _measure(
    bench: PeerBench,
    params: SamplingParams,
    ports: Sequence[int],
    progress: Callable[[str], None],
) -> list[list[_Run]]:
    """Return each peer's repetitions."""
    runs: list[list[_Run]] = [[{} for _ in range(bench.repetitions)] for _ in bench.peers]
    n_prompts = len(bench.prompts)
    for turn, index in interleaved(len(bench.peers), bench.repetitions * n_prompts):
        repetition, number = divmod(turn, n_prompts)
        progress(
            f"question {turn + 1} of {bench.repetitions * n_prompts}: {bench.peers[index].label}"
        )
        seed = (params.seed or 0) + repetition
        said = _answer(ports[index], bench, number, params, seed, bench.max_tokens)
        runs[index][repetition][number] = said
    return runs


def _answer(
    port: int, bench: PeerBench, number: int, params: SamplingParams, seed: int, max_tokens: int
) -> list[Reply]:
    """Have all turns of a prompt answered, each after this server's answers to those before."""
    settings: dict[str, Any] = {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "seed": seed,
        "max_tokens": max_tokens,
    }
    prompt = bench.prompts[number]
    turns = prompt.turns if isinstance(prompt, Question) else (prompt,)
    if isinstance(prompt, Question) and prompt.continued and not bench.as_chat:
        turns = (prompt.continued, *turns[1:])
    messages: list[Mapping[str, str]] = []
    replies: list[Reply] = []
    for turn in turns:
        if replies:
            messages.append({"role": "assistant", "content": replies[-1].text})
        messages += [{"role": "user", "content": turn}] if isinstance(turn, str) else turn
        text = "\n".join(message["content"] for message in messages)
        asked: Mapping[str, Any] = {"messages": messages} if bench.as_chat else {"prompt": text}
        replies.append(ask(port, {**asked, **settings}))
    return replies


def _results(
    bench: PeerBench, params: SamplingParams, runs: Sequence[Sequence[_Run]]
) -> list[PeerResult]:
    groups: dict[str, list[int]] = {"": list(range(len(bench.prompts)))}
    for number, prompt in enumerate(bench.prompts):
        if isinstance(prompt, Question):
            groups.setdefault(prompt.category, []).append(number)
    results = []
    for (category, numbers), index in itertools.product(groups.items(), range(len(bench.peers))):
        own, base = (_of(runs[each], numbers) for each in (index, 0))
        base = base if index else own
        if any(all(map(_rate, pair)) for pair in zip(own, base, strict=True)):
            peer = bench.peers[index]
            results.append(_result(peer, params, category, len(numbers), own, base))
    return results


def _of(runs: Sequence[_Run], numbers: Sequence[int]) -> list[list[Reply]]:
    """Return the replies to some prompts: those to the turns of a prompt, in each repetition."""
    return [run[number] for run in runs for number in numbers]


def _result(
    peer: Peer,
    params: SamplingParams,
    category: str,
    n_prompts: int,
    own: Sequence[Sequence[Reply]],
    base: Sequence[Sequence[Reply]],
) -> PeerResult:
    # An answer that ends at once has no speed; its question is left out of the comparison.
    rates = [(_rate(ours), _rate(theirs)) for ours, theirs in zip(own, base, strict=True)]
    speeds, base_speeds = zip(*filter(all, rates), strict=True)
    replies = [reply for run in own for reply in run]
    tokens = sum(reply.tokens for reply in replies)
    rounds = tokens - sum(reply.accepted for reply in replies)
    first = [*zip(own[:n_prompts], base[:n_prompts], strict=True)]
    same = [ours.text == theirs.text for pair in first for ours, theirs in zip(*pair, strict=True)]
    return PeerResult(
        program=peer.program,
        drafting=peer.drafting,
        category=category,
        temperature=params.temperature,
        n_prompts=n_prompts,
        repetitions=len(own) // n_prompts,
        tokens=tokens,
        tokens_per_second=spread_of(speeds),
        speed_up=None if own is base else ratio_of(speeds, base_speeds),
        first_piece_s=spread_of([fmean(reply.first_s for reply in run) for run in own]),
        answer_s=spread_of([fmean(reply.whole_s for reply in run) for run in own]),
        tokens_per_round=tokens / max(1, rounds),
        n_answers=len(same),
        n_same=sum(same) if params.is_greedy and own is not base else None,
    )


def _rate(replies: Sequence[Reply]) -> float:
    """Return tokens a second behind the first piece of each reply; 0 if there were none."""
    timed = [reply for reply in replies if reply.tokens > 1 and reply.first_s]
    seconds = sum(reply.whole_s - reply.first_s for reply in timed)
    return sum(reply.tokens - 1 for reply in timed) / seconds if seconds else 0.0


# == The table =====================================================================================


def peers_table(results: Sequence[PeerResult]) -> Table:
    """Return the table of `measure peers`."""
    if not results:
        return Table.of([], "No answer was long enough to be timed.")
    by_category = any(result.category for result in results)
    return Table.of((_row(result, by_category) for result in results), *_notes(results))


def _row(result: PeerResult, by_category: bool) -> dict[str, str]:
    speed, ratio, same = result.tokens_per_second, result.speed_up, result.n_same
    row = {"category": f"{result.category or 'all'} ({result.n_prompts})"} if by_category else {}
    return row | {
        "program": result.program,
        "drafting": result.drafting,
        "temp": f"{result.temperature:g}",
        "tok/s": f"{speed.median:,.1f}",
        "quartiles": f"{speed.lower_quartile:,.1f}-{speed.upper_quartile:,.1f}",
        "speed-up": "-" if ratio is None else f"{ratio.value:.2f}x {ratio.extent}",
        "tok/round": f"{result.tokens_per_round:.2f}",
        "first ms": f"{1e3 * result.first_piece_s.median:,.0f}",
        "answer ms": f"{1e3 * result.answer_s.median:,.0f}",
        "text": "-" if same is None else _text(same, result.n_answers),
    }


def _text(same: int, of: int) -> str:
    return "same" if same == of else f"{of - same} of {of} differ"


def _notes(results: Sequence[PeerResult]) -> list[str]:
    first = results[0]
    notes = [
        f"Baseline: {first.program} {first.drafting}. The same client asks all servers in turn, "
        f"prompt by prompt; interleaved repetitions: {first.repetitions}. tok/s: by the client's "
        "clock, behind the first piece of text; median and quartiles over prompts and repetitions. "
        "speed-up: ratio to the baseline (median, least and most of a prompt). tok/round: tokens "
        "over those that were no accepted drafts."
    ]
    if any(result.drafting in ("ngram-mod", "ngram-cache") for result in results):
        notes.append(
            "ngram-mod and ngram-cache keep what earlier answers said: from the second repetition "
            "on they have met the same answers at temperature 0. See -r 1 for the first time."
        )
    return notes
