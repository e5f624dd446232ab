"""Time of retrieving a draft, by the length of the context, without evaluating any model.

The text is made of passages that come back, some of them with a token changed, so that lookups find
something, and sometimes something wrong. The shipped drafters propose and observe; what they
proposed is compared with how the text goes on, as a target that writes it would.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from measure.replay.replay import written_path
from specrun.bench.timing import Spread, spread_of
from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.retrieval import (
    ContextIndex,
    PromptLookupDrafter,
    RestDrafter,
    open_mapped,
)
from specrun.runtime.laws import SamplingParams, SeededNoise
from specrun.runtime.round import Drafter, DraftRequest
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.round.target import EvaluatedRows

_VOCAB_SIZE = 32_000
_PASSAGE = 200
_AGAIN = 0.6  # share of passages that stood before
_CHANGED = 0.03  # share of tokens changed in them
_LONGEST = 16  # tokens of a round, the last one the target's
_STORE_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class LookupOptions:
    """`rounds` at each of `contexts`, with a datastore file (`store`) or a synthetic text."""

    contexts: tuple[int, ...] = (100, 4_000, 100_000)
    rounds: int = 500
    store: Path | None = None

    def __post_init__(self) -> None:
        if not self.contexts or min(self.contexts) < 1 or self.rounds < 1:
            raise OptionError("contexts and rounds are 1 or more")


@dataclass(frozen=True, slots=True)
class LookupResult:
    """One drafter at one context; `round_us` are microseconds of `propose` and `observe`.

    `prompt_us_per_token` is the time of `begin` over the tokens of the context; `n_stored` the
    tokens of the datastore, None for prompt lookup.
    """

    drafter: str
    context: int
    n_stored: int | None
    rounds: int
    round_us: Spread
    prompt_us_per_token: float
    drafted_per_round: float
    accepted_per_round: float


def measure_lookup(
    options: LookupOptions, *, progress: Callable[[str], None] = lambda _: None
) -> Iterator[LookupResult]:
    """Yield one result per drafter and context; raises as `open_mapped` for a bad datastore."""
    if options.store is not None:
        index = open_mapped(options.store)
    else:
        progress("ordering a synthetic store")
        index = ContextIndex.of_text(_text(_STORE_TOKENS, seed=1), _VOCAB_SIZE)
    stored = _excerpts(index, max(options.contexts) + options.rounds * _LONGEST)
    for context in options.contexts:
        text = _text(context + options.rounds * _LONGEST, seed=0)
        progress(f"prompt lookup, {context:,} tokens")
        yield _measure(PromptLookupDrafter(), text, context, None, options.rounds)
        progress(f"rest, {context:,} tokens")
        yield _measure(RestDrafter(index), stored, context, len(index), options.rounds)


def _excerpts(index: ContextIndex, length: int) -> list[int]:
    """Return a text like the store's: passages of it in random order, with tokens changed."""
    rng = random.Random(2)
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += _changed(index.excerpt(rng.random(), _PASSAGE), rng, index.vocab_size)
    return tokens[:length]


def _text(length: int, seed: int) -> list[int]:
    """Return tokens of which many passages stood before.

    New tokens follow Zipf's law, as words do: token i is drawn with a probability near 1 / i.
    """
    rng = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < length:
        if len(tokens) > _PASSAGE and rng.random() < _AGAIN:
            start = rng.randrange(len(tokens) - _PASSAGE)
            tokens += _changed(tokens[start : start + _PASSAGE], rng, _VOCAB_SIZE)
        else:
            tokens += (int(_VOCAB_SIZE ** rng.random()) - 1 for _ in range(_PASSAGE))
    return tokens[:length]


def _changed(tokens: Sequence[int], rng: random.Random, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) if rng.random() < _CHANGED else token for token in tokens]


def _measure(
    drafter: Drafter, text: list[int], context: int, n_stored: int | None, rounds: int
) -> LookupResult:
    tokens = text[:context]
    started = time.perf_counter()
    drafter.begin(tokens)
    prompt_s = time.perf_counter() - started
    params, noise = SamplingParams(temperature=0.0), SeededNoise(0)
    seconds, drafted, accepted = [], 0, 0
    for _ in range(rounds):
        started = time.perf_counter()
        tree = drafter.propose(DraftRequest(tokens, params, noise, _LONGEST - 1, _LONGEST))
        proposed = time.perf_counter()
        path = written_path(tree, text, len(tokens))
        new = text[len(tokens) : len(tokens) + len(path) + 1]
        tokens += new
        observed = time.perf_counter()
        # Retrieval reads no rows: there is no target here.
        drafter.observe(RoundOutcome(tokens, tree, path, new[-1], cast(EvaluatedRows, None)))
        seconds.append(proposed - started + time.perf_counter() - observed)
        drafted += len(tree)
        accepted += len(path)
    return LookupResult(
        drafter=drafter.name,
        context=context,
        n_stored=n_stored,
        rounds=rounds,
        round_us=spread_of([1e6 * elapsed for elapsed in seconds]),
        prompt_us_per_token=1e6 * prompt_s / context,
        drafted_per_round=drafted / rounds,
        accepted_per_round=accepted / rounds,
    )
