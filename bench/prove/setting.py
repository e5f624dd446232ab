"""Setting of a proof: the pair under test, the objects that its checks share, and their reports."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts import ContextOptions
from specrun.runtime.acceptance import ExactRule, Rule, SequentialCascade
from specrun.runtime.engine import Runtime, Session
from specrun.runtime.engine.core import EngineCore
from specrun.runtime.laws import SamplingParams
from specrun.runtime.round import Drafter, DraftRequest, Shape
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder

if TYPE_CHECKING:
    from specrun.bench.prove.forced import ForcedText

Status = Literal["passed", "failed", "left out"]
Logits = npt.NDArray[np.float32]

_N_CTX = 512  # tokens of a proof's texts; its rounds come on top
ALPHA = 1e-4
"""Size of a test: the probability that a sound pair fails."""

# Nats by which a row may move, however rarely, if the last bit of a cached number is
# rounded otherwise; in float32 there are no such steps, and rounding stays far below.
_FLOORS = {"f32": 1e-4, "f16": 0.01}
_COARSE = 0.05
_CHAIN = 4  # drafts if the drafter under test has none
PROMPTS = (
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Write a function that returns the sum of a list of numbers.\n\ndef",
    "Once upon a time there was a king who had three daughters, and",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
)
"""Beginnings that some models go on with for sure and others do not."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `times` counts `tested`; `figure` is compared with `bound`.

    Both have the unit `unit`; None if nothing was found or nothing is required. `false_alarm`
    is the probability that a sound pair fails; `control`, the result of a wrong one;
    `note`, why a check failed or was left out.
    """

    name: str
    status: Status
    tested: str = ""
    times: int = 0
    figure: float | None = None
    bound: float | None = None
    unit: str = ""
    false_alarm: str = ""
    control: str = ""
    note: str = ""


def judged(sound: bool, control: bool) -> Status:
    """Return the result of a check that proves something only if its control was seen."""
    if not sound:
        return "failed"
    return "passed" if control else "left out"


class Setting:
    """A runtime or an engine under test. Contexts that checks open in addition evaluate as it does.

    `step` is how close two tokens are, in nats, if a step of the cache's type explains that one was
    taken for the other, `near` if the effect of widths explains it; 0 in a fixed shape. `rate` is
    how often, a token, texts of chains part from plain decoding's by rounding. The last two are
    known once the cache was checked. `forced` are texts of plain decoding, for several checks.
    `params` are the settings of sampling by which the rule is enumerated; `length` is how many
    tokens texts have at most.
    """

    def __init__(
        self,
        opened: EngineCore,
        seed: int,
        seconds: float,
        params: Sequence[SamplingParams] = (SamplingParams(),),
    ) -> None:
        self.opened, self.seed, self.seconds, self.params = opened, seed, seconds, params
        self.model = opened.model
        self.width = opened.session.target.width
        drafter = opened.session.drafter
        self.max_nodes = drafter.max_nodes or min(_CHAIN, (self.width or 1 + _CHAIN) - 1)
        self.max_leaves = drafter.max_leaves if self.model.can_branch else 1
        caches = (opened.options.context.cache_type_k, opened.options.context.cache_type_v)
        steps = max(_FLOORS.get(str(name), _COARSE) for name in caches)
        self.length = _N_CTX
        self.near = self.step = 0.0 if self.width else 2 * steps
        self.rate = 0.0
        self.forced: list[ForcedText] = []

    @property
    def runtime(self) -> Runtime:
        """The runtime under test, whose answers their readers step; raises for an engine."""
        assert isinstance(self.opened, Runtime)
        return self.opened

    @property
    def rule(self) -> Rule | SequentialCascade:
        """The acceptance rule under test."""
        return self.opened.session.rule

    @property
    def context(self) -> ContextOptions:
        """Options of contexts: as the runtime's, and shorter if evaluations vary anyway."""
        options = self.opened.options.context
        size = options.size_for(self.model)
        n_ctx = size if self.width else min(size, self.length + self.max_nodes)
        return dataclasses.replace(options, n_ctx=n_ctx)

    def prompts(self) -> list[list[int]]:
        """Return the prompts' tokens."""
        return [self.model.vocabulary.tokenize(text) for text in PROMPTS]

    def source(self, name: str) -> random.Random:
        """Return a check's own generator."""
        return random.Random(f"{self.seed}/{name}")

    def forking_drafter(self, name: str) -> ForkingDrafter:
        """Return a check's own drafter of random trees, no larger than those of the pair."""
        n_vocab = self.model.vocabulary.size
        return ForkingDrafter(self.max_nodes, self.max_leaves, n_vocab, self.source(name))

    def deadline(self, share: float) -> float:
        """Return when a check has to end that may take this share of the time."""
        return time.monotonic() + share * self.seconds

    def session(self, drafter: Drafter, context: ContextOptions | None = None) -> Session:
        """Open a session on the target, the caller's to close: with the rule if it is exact."""
        shape: Shape = self.width or self.opened.options.shape
        rule = self.rule if self.rule.exact else ExactRule()
        return Session.open(self.model, drafter, context or self.context, rule, (), shape)


# -- random trees ----------------------------------------------------------------------------------


class ForkingDrafter(Drafter):
    """Drafts random trees of point masses, with `text`, that is to come, on some of the branches.

    So any of the branches is accepted now and then, to any depth.
    """

    name = "random trees"

    def __init__(
        self, max_nodes: int, max_leaves: int, n_vocab: int, source: random.Random
    ) -> None:
        self.max_nodes, self.max_leaves, self.min_nodes = max_nodes, max_leaves, 0
        self.text: Sequence[int] = ()
        self.source, self.n_vocab = source, n_vocab

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a tree, as large as the round allows."""
        most = min(self.max_nodes, request.max_nodes)
        coming = self.text[len(request.tokens) :]
        return self.tree(most, request.max_depth, coming)

    def tree(self, max_nodes: int, max_depth: int, coming: Sequence[int] = ()) -> DraftTree:
        """Return a tree of at most so many nodes; `coming` are tokens that some nodes have."""
        builder, source = TreeBuilder(), self.source
        depths, right, children, n_leaves = {ROOT: 0}, {ROOT}, Counter[int](), 1
        for _ in range(source.randint(min(self.min_nodes, max_nodes), max_nodes)):
            # A second child is one more leaf; the first only lengthens a path.
            room = n_leaves < self.max_leaves
            open_nodes = [n for n in depths if depths[n] < max_depth and (room or not children[n])]
            if not open_nodes:
                break
            parent = source.choice(open_nodes)
            depth, known = depths[parent], parent in right and depths[parent] < len(coming)
            follows = known and source.random() < 0.6
            token = coming[depth] if follows else source.randrange(self.n_vocab)
            node = builder.add(parent, token)
            if node not in depths:
                n_leaves += children[parent] > 0
                children[parent] += 1
                depths[node] = depth + 1
                if known and token == coming[depth]:
                    right.add(node)
        return builder.build()
