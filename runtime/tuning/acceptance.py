"""Acceptance measured on texts: by rank, by distribution, of dynamic trees, and while drafting."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.errors import ContextFullError, OptionError
from specrun.bindings.models.model import Model
from specrun.runtime.acceptance import Acceptance, PairRule
from specrun.runtime.acceptance.law_pair import LawPair, PairAt
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.draft_model import DraftModelSource
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.growing.draft import RANKED_TOKENS, ranking_params, without_penalties
from specrun.runtime.drafters.growing.drafter import GrowingDrafter
from specrun.runtime.drafters.ngram import GrowingCounts, NgramLaw, row_of
from specrun.runtime.engine.session import Session
from specrun.runtime.laws.law import FloatArray, Law
from specrun.runtime.laws.noise import NoiseSource, SeededNoise
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.laws.transform import Logits, transformed_law
from specrun.runtime.planning import CostCurve, RoundCosts, chain_theory
from specrun.runtime.planning.theory import MemoryTraffic, bytes_ratio, multiplications
from specrun.runtime.round.drafter import Drafter, DraftRequest
from specrun.runtime.trees import (
    DynamicShape,
    GrownTree,
    TreeSampling,
    most_likely,
    proposal_scheme,
)
from specrun.runtime.trees.growth import TreeBuilder
from specrun.runtime.trees.tree import ROOT, DraftTree
from specrun.runtime.tuning.results import DrafterAlpha

# == Acceptance by rank ============================================================================
#
# At every position of a text the target's distribution P and the draft distribution Q are known.
# For a proposal scheme, siblings are proposed as a drafter would, and tested by the exact rule
# (`acceptance.exact`): sibling r is reached if the earlier ones were rejected, and accepted with
# min(1, R(x)/Q_r(x)). Summing the probabilities of acceptance, not their outcomes, leaves only the
# noise of the draws themselves. The first draw has none, it is accepted with the sum of min(P, Q),
# nor have point masses: rank r is accepted with P(x_r).
#
# This is Sequoia's acceptance vector (Chen et al. 2024, section 3.1): shares of all visits to a
# node, so that the ranks add up to the chance that any child is accepted.


_REPEATS = 4  # of a proposal that is drawn
_RANKED = 40  # tokens that the draft model ranks
ROWS_AT_ONCE = 64
"""The most rows of logits that are looked at together: 32 MB with a vocabulary of 128k tokens."""


@dataclass(frozen=True, slots=True)
class RankedPair:
    """Distributions of one position: the target's, the drafter's, and the one that ranks tokens."""

    target: Law
    draft: Law
    ranking: Law


def acceptance_by_rank(
    pairs: Iterable[RankedPair], sampling: TreeSampling, ranks: int, *, seed: int = 0
) -> FloatArray:
    """Return the share of positions at which each sibling rank is accepted, [ranks]."""
    noise = SeededNoise(seed).for_drafting(0)
    total = np.zeros(ranks)
    count = 0
    for position, pair in enumerate(pairs):
        # Draws depend on the position, not on how many were drawn before: schemes meet the same
        # noise.
        noise.seek(position)
        count += 1
        # Of point masses the chance to be reached and the residual's probability multiply to P(x_r)
        # again: no draw is needed.
        if sampling == "argmax" or len(pair.draft.probs) == 1:
            for rank, (token, _) in enumerate(most_likely(pair.ranking, ranks)):
                total[rank] += pair.target.probability(token)
            continue
        trials = [_accepted(pair, sampling, ranks, noise) for _ in range(_REPEATS)]
        shares: FloatArray = np.mean(trials, axis=0)
        # The first rank needs no draws: 1 - TV(P, Q). The others share its rest.
        first = float(np.minimum(pair.target.probs, pair.draft.aligned_to(pair.target)).sum())
        if shares[0] < 1.0:
            shares[1:] *= (1.0 - first) / (1.0 - shares[0])
        shares[0] = first
        total += shares
    return total / max(1, count)


def _accepted(
    pair: RankedPair, sampling: TreeSampling, ranks: int, noise: SeededNoise
) -> FloatArray:
    """Propose siblings once; return the probability that each is accepted, duplicates added."""
    builder = TreeBuilder()
    proposal_scheme(sampling)(builder, ROOT, pair.draft, ranks, noise)
    tree = builder.build()
    accepted = np.zeros(ranks)
    reached, remaining = 1.0, pair.target
    for draw in tree.draws[ROOT]:
        if draw.law is None:
            continue
        token = tree.tokens[draw.node]
        share = min(1.0, remaining.probability(token) / draw.law.probability(token))
        # With replacement a token may be drawn twice: equal draws share a node, and their chances
        # add up.
        accepted[draw.node] += reached * share
        reached *= 1.0 - share
        if reached <= 0.0:
            break
        # norm((R - Q)+), against which the exact rule tests the next sibling.
        remaining = remaining.residual(draw.law)
    return accepted


# -- both models' distributions along texts --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """A text the target wrote: `tokens`, of which the first `n_prompt` were given."""

    tokens: tuple[int, ...]
    n_prompt: int


def checked_prompts(
    prompts: Sequence[Sequence[int]], n_tokens: int, n_ctx: int, *, needs: str
) -> list[list[int]]:
    """Return the prompts, each of which must leave room for `n_tokens` in the context."""
    if not prompts or not all(prompts):
        raise OptionError(f"the prompt is empty: {needs} needs a text to continue")
    longest = max(map(len, prompts))
    if longest + n_tokens > n_ctx:
        raise ContextFullError(
            f"a prompt of {longest} tokens and {n_tokens} more do not fit a context of {n_ctx}: "
            "shorten the prompt or raise the context size (-c)"
        )
    return [list(prompt) for prompt in prompts]


def law_pairs(
    target: Context, draft: Context, text: CalibrationText, params: SamplingParams
) -> tuple[list[RankedPair], float]:
    """Return the distributions of all tokens that the target wrote, and the seconds of making one.

    Penalties are left out: they depend on the path, and move both distributions alike. The contexts
    are left empty.
    """
    ranking = ranking_params(params, _RANKED)
    shared = min(target.model.vocabulary.size, draft.model.vocabulary.size)
    pairs: list[RankedPair] = []
    spent = 0.0
    for ours, theirs in zip(_rows(target, text), _rows(draft, text), strict=True):
        before = time.perf_counter()
        law = transformed_law(ours, params)
        spent += time.perf_counter() - before
        # A drafter never proposes ids that the target lacks.
        row = theirs[:shared]
        pairs.append(RankedPair(law, transformed_law(row, params), transformed_law(row, ranking)))
    return pairs, spent / max(1, len(pairs))


def laws_along(
    context: Context, text: CalibrationText, settings: Sequence[SamplingParams]
) -> list[tuple[Law, ...]]:
    """Return a model's distributions of each token that the target wrote, one for each setting."""
    rows = _rows(context, text)
    return [tuple(transformed_law(row, params) for params in settings) for row in rows]


def scored_logits(
    context: Context, tokens: Sequence[int], first: int, width: int = ROWS_AT_ONCE
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the logits after tokens `first` to the last but one, shape [rows, vocab].

    An evaluation has `width` rows at most, or as many as the context has outputs. Tokens before
    `first` are read in whole batches. The context is left empty.
    """
    size = context.model.vocabulary.size
    # A token that this model lacks still takes its position; any id will do for it.
    known = [token if token < size else 0 for token in tokens]
    batch, last = Batch(context.n_batch, 1), len(tokens) - 1
    context.memory.clear()
    for start in range(0, first, context.n_batch):
        batch.fill_chain(known[start : min(start + context.n_batch, first)], start, [0], 0)
        context.decode(batch)
    step = min(width, context.n_batch, context.n_outputs)
    for start in range(first, last, step):
        part = known[start : min(start + step, last)]
        batch.fill_chain(part, start, [0], len(part))
        rows = context.decode(batch)
        yield np.stack([rows.logits(row) for row in range(len(part))])
    context.memory.clear()


def _rows(context: Context, text: CalibrationText) -> Iterator[Logits]:
    """Yield the logits that each token was chosen by that the target wrote."""
    for block in scored_logits(context, text.tokens, text.n_prompt - 1):
        yield from block


# == Leviathan's alpha of drafters that have a distribution: the mean of sum min(p, q) =============
#
# Leviathan et al. (2023), theorem 3.5 and corollary 3.6: a draw from q is accepted with probability
# beta = sum_v min(p(v), q(v)), and alpha is the mean of beta. It is a property of the two
# distributions alone, whatever a drafter makes of its own: favourites that are taken as point
# masses are accepted with p(x), which is reported by rank (see above).


NGRAM_ORDERS = (2, 3)
"""The n-gram distributions that stand beside a draft model's: they cost next to nothing."""


def shared_mass(target: Law, draft: Law) -> float:
    """Return sum min(p, q), the chance that a draw from `draft` is accepted."""
    return min(1.0, float(draft.aligned_to(target).clip(max=target.probs).sum()))


def mean_alpha(pairs: Iterable[tuple[Law, Law]]) -> float:
    """Return alpha: the mean of sum min(p, q) over positions; 0 without any."""
    found = [shared_mass(target, draft) for target, draft in pairs]
    return sum(found) / len(found) if found else 0.0


def ngram_alpha(
    texts: Sequence[CalibrationText], targets: Sequence[Law], order: int, params: SamplingParams
) -> tuple[float, float]:
    """Return the alpha of an n-gram distribution along texts, and the seconds of making one.

    `targets` are the target's distributions for every token of the answers, text by text. Counts
    are those of the prompt and the answer so far. If nothing was counted yet, nothing is
    accepted.
    """
    plain = without_penalties(params)
    if plain.is_greedy:
        plain = ranking_params(plain, RANKED_TOKENS)
    total, spent, place = 0.0, 0.0, 0
    for text in texts:
        counts = GrowingCounts(order)
        counts.begin(text.tokens[: text.n_prompt])
        law = NgramLaw([counts])
        for end in range(text.n_prompt, len(text.tokens)):
            before = time.perf_counter()
            found = law.after(text.tokens[max(0, end + 1 - order) : end] if order > 1 else ())
            found = None if found is None else row_of(found).laws(plain)[0]
            spent += time.perf_counter() - before
            if found is not None:
                if params.is_greedy:
                    found = Law.point(found.most_likely[0])
                total += shared_mass(targets[place], found)
            counts.extend([text.tokens[end]])
            place += 1
    return total / max(1, place), spent / max(1, place)


@dataclass(frozen=True, slots=True)
class PairCosts:
    """The numbers that decide the worth of a drafter's chain, for one sampling setting."""

    costs: RoundCosts
    target: MemoryTraffic
    n_context: float

    def row(
        self,
        drafter: str,
        alpha: float,
        operations: float,
        draft: MemoryTraffic,
        step: float | None = None,
    ) -> DrafterAlpha:
        """Return the results of a drafter's alpha, operations and reads.

        `step` are the seconds of a drafted token, None: those of the draft model.
        """
        costs = self.costs
        if step is not None:
            costs = replace(costs, draft=CostCurve.flat((max(step, 1e-9),)), per_law=0.0)
        theory = chain_theory(alpha, costs, operations)
        read = bytes_ratio(self.target, draft, alpha, theory.length, n_context=self.n_context)
        return DrafterAlpha(drafter, operations, read, theory)

    def ngram_rows(
        self, texts: Sequence[CalibrationText], targets: Sequence[Law], params: SamplingParams
    ) -> Iterator[DrafterAlpha]:
        """Yield the results of n-gram distributions along texts; see `ngram_alpha`."""
        for order in NGRAM_ORDERS:
            alpha, seconds = ngram_alpha(texts, targets, order, params)
            yield self.row(f"ngram(order={order})", alpha, 0.0, MemoryTraffic(0.0, 0.0), seconds)


# == Acceptance of EAGLE-2's dynamic trees, measured along texts ===================================
#
# A dynamic tree depends on the draft model's own tokens, so no acceptance by rank describes it. But
# its nodes are point masses, and for those the exact rule draws the target's token and descends
# where a child has it (`acceptance.exact`). So in a text that the target wrote, a round that starts
# at a position keeps exactly the nodes that spell the text's next tokens: growing the tree there,
# without the target, replays the round.
#
# One expansion serves all shapes of the same `topk`: a smaller depth is a part of it, and fewer
# nodes are those of highest value (`trees.eagle2`).


@dataclass(frozen=True, slots=True)
class DynamicAcceptance:
    """The mean number of accepted tokens of dynamic trees with children of `topk` ranks.

    `accepted[d, n]` is that of depth d with the best n nodes, [max_depth + 1, max_nodes + 1];
    without the target's own token. It is 0 for depths at which no text was long enough.
    """

    topk: int
    accepted: FloatArray

    @property
    def max_depth(self) -> int:
        """The deepest tree that was tried."""
        return len(self.accepted) - 1

    @property
    def max_nodes(self) -> int:
        """The most nodes that were kept."""
        return len(self.accepted[0]) - 1


def kept_nodes(grown: GrownTree, text: Sequence[int], max_depth: int, max_nodes: int) -> FloatArray:
    """Return how many tokens of `text` each shape keeps: [max_depth + 1, max_nodes + 1]."""
    path = _path_along(grown, text)
    depths = np.array(grown.depths, np.intp)
    order = np.array(grown.by_value(), np.intp)
    kept = np.zeros((max_depth + 1, max_nodes + 1))
    for depth in range(1, max_depth + 1):
        shallow = order[depths[order] <= depth]
        # Of the nodes of depth d at most, a shape keeps the n best: a node from n = its place + 1
        # on.
        places = np.empty(len(depths), np.intp)
        places[shallow] = np.arange(len(shallow))
        # Values fall along a path, so a shape keeps a beginning of it: kept nodes are accepted
        # tokens.
        for node in path[:depth]:
            kept[depth, places[node] + 1 :] += 1.0
    return kept


def measure_dynamic_acceptance(
    context: Context,
    texts: Sequence[CalibrationText],
    params: SamplingParams,
    *,
    topk: int,
    max_depth: int,
    max_nodes: int,
    target_vocab_size: int,
    seconds: float,
) -> DynamicAcceptance:
    """Grow trees along texts in about so many seconds, and return their accepted tokens.

    The context is the draft model's, sized by `draft_size` for this depth and `topk`; it is left
    empty. If time is short every second, third, ... position is taken.
    """
    shape = DynamicShape(max_depth, topk, max(max_nodes, max_depth))
    source = DraftModelSource(context, shape, target_vocab_size=target_vocab_size)
    drafter = GrowingDrafter(source, shape)
    noise = SeededNoise(0).for_drafting(0)  # point masses draw nothing
    total = np.zeros((max_depth + 1, max_nodes + 1))
    counts = np.zeros(max_depth + 1)
    stride = 1
    for text in texts:
        drafter.begin(())
        start = text.n_prompt
        while start < len(text.tokens):
            before = time.perf_counter()
            request = DraftRequest(text.tokens[:start], params, noise, max_depth, shape.nodes)
            grown = drafter.expanded(request, max_depth, topk)
            # Deeper trees could keep more than is known here.
            known = min(max_depth, len(text.tokens) - start)
            total[: known + 1] += kept_nodes(grown, text.tokens[start:], known, max_nodes)
            counts[: known + 1] += 1.0
            if counts[0] == 2:  # the first tree's time is mostly the prompt's
                positions = sum(len(text.tokens) - text.n_prompt for text in texts)
                stride = max(1, math.ceil(positions * (time.perf_counter() - before) / seconds))
            start += stride
    context.memory.clear()
    # By depth: positions near the end of a text count for shallow trees alone.
    return DynamicAcceptance(topk, total / np.maximum(counts, 1.0)[:, None])


def _path_along(grown: GrownTree, text: Sequence[int]) -> list[int]:
    """Return the nodes that spell the beginning of `text`."""
    # Siblings have different tokens, so that a text follows one path at most.
    children = {key: node for node, key in enumerate(zip(grown.parents, grown.tokens, strict=True))}
    path: list[int] = []
    node = ROOT
    for token in text:
        child = children.get((node, token))
        if child is None:
            break
        path.append(child)
        node = child
    return path


# == Leviathan's alpha of any drafter that returns its distributions, measured while it drafts =====
#
# Leviathan et al. (2023), theorem 3.5 and corollary 3.6: alpha is the mean over positions of sum_v
# min(p(v), q(v)), the chance that a draw from q is accepted. The walk down a draft tree visits
# every position of the text once: an accepted token's parent in the round that drafted it, the last
# one where it is rejected or the tree ends. So a rule that emits the target's distribution at all
# of them, and reads the drafter's there, meets the positions of a text that the target itself
# wrote. Of heads, q is the distribution at the depth where the position came up: the tokens between
# were predicted, not seen.


@dataclass(frozen=True, slots=True)
class DrawnAlpha:
    """A drafter's alpha over `n_places` positions, and the time of drafting.

    `n_silent` more positions had no distribution of the drafter's (the first round of heads that
    have seen nothing, a context that ended). `step_seconds` is native time of the drafter for each
    depth that it drafted, 0 if the target's own evaluation drafts; `n_params` are the parameters
    that it multiplies for a token, those of the target's matrices that it reads among them.
    """

    drafter: str
    alpha: float
    n_places: int
    n_silent: int
    step_seconds: float
    n_params: float


class AlphaRule(PairRule):
    """Emits the target's distribution whatever is drafted; adds up sum min(p, q) on its path."""

    name = "alpha"
    exact = True
    reads_raw_draft = False

    def __init__(self) -> None:
        self.total, self.n_places, self.n_silent, self.n_depths = 0.0, 0, 0, 0

    def law(self, pair: LawPair) -> Law:
        """Return the target's distribution, and count its common mass with the drafter's."""
        self.total += shared_mass(pair.target, pair.draft)
        self.n_places += 1
        return pair.target

    def accept(
        self, tree: DraftTree, pair_at: PairAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        """Walk down the tree as the exact rule does."""
        before = self.n_places
        accepted = super().accept(tree, pair_at, noise, position)
        self.n_silent += len(accepted.path) + 1 - (self.n_places - before)
        self.n_depths += tree.candidate_depth
        return Acceptance(accepted.path, accepted.next_token, accepted.rejected)

    @property
    def alpha(self) -> float:
        """The mean of sum min(p, q); 0 without any position."""
        return self.total / self.n_places if self.n_places else 0.0


def measure_alpha(
    environment: DraftEnvironment,
    drafter: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    max_tokens: int,
) -> DrawnAlpha:
    """Let the target answer `prompts`, drafted for by an expression; return alpha over its answers.

    Up to `max_tokens` of each are answered, with the seed of `params` or 0, in a context of its
    own. Raises `OptionError` for a drafter that has no distribution: its drafts are point masses,
    of which none is drawn; and as building a drafter does.
    """
    rule, spent = AlphaRule(), 0.0
    with _with_laws(environment, drafter) as own:
        n_params = own.depth_params
        with Session.open(environment.target, own, environment.context, rule) as session:
            for prompt in prompts:
                seed = params.seed or 0
                stream = session.stream(
                    prompt, params, seed=seed, max_tokens=max_tokens, logprobs=False
                )
                spent += stream.drain().stats.drafter_s
    return DrawnAlpha(
        drafter=drafter,
        alpha=rule.alpha,
        n_places=rule.n_places,
        n_silent=rule.n_silent,
        step_seconds=spent / max(1, rule.n_depths),
        n_params=n_params,
    )


def drafting_shares(
    found: DrawnAlpha, target: MemoryTraffic, model: Model
) -> tuple[float, MemoryTraffic]:
    """Return c-hat of a drafter, and its bytes for a token, by the parameters that it uses.

    c-hat are its operations for a token over the target's. Each parameter is multiplied once, and
    has as many bytes as one that the target multiplies; keys and values of its own are left out. A
    drafter that the target's own evaluation drafts for uses none.
    """
    operations = found.n_params / multiplications(model)
    return operations, MemoryTraffic(operations * target.weights(1), 0.0)


def require_law(environment: DraftEnvironment, drafter: str) -> None:
    """Raise as `measure_alpha` for a drafter that has no distribution, without measuring."""
    with _with_laws(environment, drafter) as own:
        own.close()


@contextmanager
def _with_laws(environment: DraftEnvironment, drafter: str) -> Iterator[Drafter]:
    """Yield a drafter that keeps its distributions; its weights are closed afterwards."""
    environment = replace(environment, keeps_rows=True)
    with closing(build_drafter(drafter, environment)) as weights:
        own = weights.start()
        if not own.keeps_rows:
            own.close()
            raise OptionError(f"{drafter} has no distribution of which alpha is the mean")
        yield own
