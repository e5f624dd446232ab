"""What retrieving a draft costs a round, by the length of the context: no model is evaluated.

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

from specrun.bench.replay.replay import written_path
from specrun.bench.timing import Spread, spread_of
from specrun.bindings.errors import OptionError
from specrun.runtime.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.drafters.retrieval import PromptLookupDrafter, RestDrafter
from specrun.runtime.drafters.retrieval.datastore import ContextIndex
from specrun.runtime.noise import SeededNoise
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.target import EvaluatedRows

_VOCAB_SIZE = 32_000
_PASSAGE = 200
_AGAIN = 0.6  # of the passages, so many come back
_CHANGED = 0.03  # of the tokens that come back, so many are others
_LONGEST = 16  # tokens of a round
_STORE_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class LookupOptions:
    """What to measure: `rounds` at each of `contexts`; `store` is a datastore file, None: a
    synthetic text."""

    contexts: tuple[int, ...] = (100, 4_000, 100_000)
    rounds: int = 500
    store: Path | None = None

    def __post_init__(self) -> None:
        if not self.contexts or min(self.contexts) < 1 or self.rounds < 1:
            raise OptionError("contexts and rounds are 1 or more")


@dataclass(frozen=True, slots=True)
class LookupResult:
    """One drafter at one context: microseconds of a round's `propose` and `observe`, and of
    indexing a prompt.

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
    """Yield one result for each drafter and context. Raises as `open_mapped` for a file that is no
    datastore."""
    stores = _stores(options, progress)
    for context in options.contexts:
        text = _text(context + options.rounds * _LONGEST, seed=0)
        progress(f"prompt lookup, {context:,} tokens")
        yield _measure(PromptLookupDrafter(), text, context, None, options.rounds)
        for index, stored in stores:
            progress(f"rest, {context:,} tokens")
            yield _measure(RestDrafter(index), stored, context, len(index), options.rounds)


def _stores(
    options: LookupOptions, progress: Callable[[str], None]
) -> list[tuple[ContextIndex, list[int]]]:
    """Return the datastore, and a text that is like it without being it."""
    longest = max(options.contexts) + options.rounds * _LONGEST
    if options.store is not None:
        from specrun.runtime.drafters.retrieval.datastore import open_mapped

        index = open_mapped(options.store)
        return [(index, _excerpts(index, longest))]
    progress("ordering a synthetic store")
    stored = _text(_STORE_TOKENS, seed=1)
    index = ContextIndex.of_text(stored, _VOCAB_SIZE)
    return [(index, _excerpts(index, longest))]


def _excerpts(index: ContextIndex, length: int) -> list[int]:
    """Return passages of a store in drawn order, with tokens changed."""
    rng = random.Random(2)
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += _changed(index.excerpt(rng.random(), _PASSAGE), rng, index.vocab_size)
    return tokens[:length]


def _text(length: int, seed: int) -> list[int]:
    """Return tokens of which many passages stood before; single tokens are as unevenly frequent as
    words are."""
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
