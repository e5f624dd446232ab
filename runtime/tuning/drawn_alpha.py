"""Leviathan's alpha of any drafter that tells its laws, measured while it drafts.

Leviathan et al. (2023), theorem 3.5 and corollary 3.6: alpha is the mean over positions of
sum_v min(p(v), q(v)), the chance that a draw from q is accepted. The walk down a draft tree visits
every position of the text once: an accepted token's parent in the round that drafted it, the last
one where it is rejected or the tree ends. So a rule that emits the target's law at all of them, and
reads the drafter's there, meets the positions of a text that the target itself wrote. Of heads, q
is the law at the depth where the position came up: what lay between was predicted, not seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.runtime.acceptance import Acceptance, PairRule
from specrun.runtime.acceptance.law_pair import LawPair, PairAt
from specrun.runtime.costs.memory_traffic import MemoryTraffic, multiplications
from specrun.runtime.drafter import Drafter
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.law import Law
from specrun.runtime.noise import NoiseSource
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.session import Session
from specrun.runtime.tree import DraftTree
from specrun.runtime.tuning.law_acceptance import shared_mass


@dataclass(frozen=True, slots=True)
class DrawnAlpha:
    """A drafter's alpha over `n_places` positions, and what drafting took.

    `n_silent` more positions had no law of the drafter's (the first round of heads that have seen
    nothing, a context that ended). `step_seconds` is native time of the drafter for each depth that
    it drafted, 0 where the target's own evaluation drafts; `n_params` are the parameters that it
    multiplies for a token, those of the target's matrices that it reads among them.
    """

    drafter: str
    alpha: float
    n_places: int
    n_silent: int
    step_seconds: float
    n_params: float


@dataclass(frozen=True, slots=True)
class DraftingShares:
    """c-hat, a drafter's operations for a token over the target's, and what it reads for one."""

    operation_ratio: float
    traffic: MemoryTraffic


class AlphaRule(PairRule):
    """Emits the target's law whatever is drafted, and adds up sum min(p, q) where it looks."""

    name = "alpha"
    exact = True
    reads_raw_draft = False

    def __init__(self) -> None:
        self.total, self.n_places, self.n_silent, self.n_depths = 0.0, 0, 0, 0

    def law(self, pair: LawPair) -> Law:
        """Return the target's law, and count what a draw from the drafter's shares with it."""
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
    own. Raises `OptionError` for a drafter that has no law: its drafts are point masses, of which
    none is drawn; and as building a drafter does.
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


def drafting_shares(found: DrawnAlpha, target: MemoryTraffic, model: Model) -> DraftingShares:
    """Return c-hat of a drafter, and what it reads for a token, by the parameters that it uses.

    Each parameter is multiplied once, and has as many bytes as one that the target multiplies; keys
    and values of its own are left out. A drafter that the target's own evaluation drafts for uses
    none.
    """
    operations = found.n_params / multiplications(model)
    return DraftingShares(operations, MemoryTraffic(operations * target.weights(1), 0.0))


def require_law(environment: DraftEnvironment, drafter: str) -> None:
    """Raise as `measure_alpha` for a drafter that has no law, without measuring."""
    with _with_laws(environment, drafter) as own:
        own.close()


@contextmanager
def _with_laws(environment: DraftEnvironment, drafter: str) -> Iterator[Drafter]:
    """Yield a drafter that tells its laws, for whoever closes it; its weights go afterwards."""
    environment = dataclasses.replace(environment, keeps_rows=True)
    with closing(build_drafter(drafter, environment)) as weights:
        own = weights.start()
        if not own.keeps_rows:
            own.close()
            raise OptionError(f"{drafter} has no law of which alpha is the mean")
        yield own
