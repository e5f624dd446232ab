"""A method's side of drafting: rows of logits after the nodes of a growing tree.

A new method is a `Source`, and its builder; `growing` does all else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.embedding_inputs import EmbeddingInputs
from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.batching import Shared
from specrun.runtime.heads import NamedChildren, RankedTokens, TreePlan
from specrun.runtime.laws.law import Law
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.laws.transform import Logits, transformed_laws
from specrun.runtime.round.drafter import DraftRequest, RoundOutcome
from specrun.runtime.round.target import EvaluatedRows, TargetModel


@dataclass(slots=True)
class HighestLogits:
    """The tokens of the highest logits after n nodes, one more than top-k keeps: both [n, k + 1].

    Tokens ascend. As top-k leaves no others, the distributions are those of whole rows, if no two
    logits that top-k separates are equal.
    """

    tokens: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float32]

    def laws(self, params: SamplingParams) -> list[Law]:
        """Return the distributions that `params` make of the rows: no bias, no penalties."""
        # In the order of their ids, as in a whole row, so that ties within the top k fall alike.
        pairs = zip(
            transformed_laws([*self.logits], params), self.tokens.astype(np.intp), strict=True
        )
        return [Law(law.probs, own if law.ids is None else own[law.ids]) for law, own in pairs]


@dataclass(slots=True)
class NodeRows:
    """The result of an evaluation of n nodes, in one or several forms.

    `whole` are rows of logits [vocabulary or fewer], views that die with the next evaluation;
    `ranked` the best tokens of each row with their log-probabilities; `highest` its highest logits.
    `certainties` are chances that the next tokens are accepted, if the method itself estimates
    them: they take the place of the greatest probabilities. In no form: nothing could be evaluated.
    """

    whole: Sequence[Logits] | None = None
    ranked: RankedTokens | None = None
    highest: HighestLogits | None = None
    certainties: Sequence[float] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there are no rows, so that a draft ends."""
        return self.whole is None and self.ranked is None and self.highest is None


def whole_rows(rows: NodeRows) -> Sequence[Logits]:
    """Return whole rows; raises `OptionError` of a head that was not opened for them."""
    if rows.whole is None:
        raise OptionError("heads that are drawn from must be opened with whole rows")
    return rows.whole


Depth = tuple[Sequence[int], Sequence[int]]
"""Parents and tokens of the nodes to evaluate; without any, the root."""

Asked = Depth | TreePlan
"""An evaluation: a depth, or a whole tree that a source names."""


class Source:
    """A method in one conversation: rows of logits after the nodes of a growing tree.

    `root` evaluates the end of the text, `below` one depth of a tree. Nodes are numbered from 0 in
    the order of their evaluation, since `root`. It owns the native memory of the conversation.
    """

    needs_hidden_states = False
    needs_nextn_states = False
    layer_inputs: tuple[int, ...] = ()
    reads_logits = False
    embedding_inputs: EmbeddingInputs | None = None

    keeps_rows = True
    """Whether its rows are whole, for rules that read them."""
    rows_by_depth = False
    """Whether its rows depend on the depth of a node alone."""
    keeps_points = False
    """Whether rules read its rows although the drafted tokens would do: see `Keep`."""
    shared: Shared[Any, Any] | None = None
    """Its evaluations that are made with those of other conversations, if any may be."""
    most_highest = 0
    """How many highest logits `root` can return; 0: it returns none."""
    few_tokens = False
    """Whether its rows are of few tokens, the log-probabilities of a distribution."""
    names_trees = False
    """Whether it may name a whole tree of best tokens at once: `named`."""
    names_all_depths = False
    """Whether `named` costs the same at every depth."""
    n_params = 0
    """The parameters of the method's own models."""
    depth_params = 0.0
    """The parameters that a depth of a draft multiplies."""

    # -- the text ----------------------------------------------------------------------------------

    def take_target(self, target: TargetModel) -> None:
        """Take the target that evaluates the conversation: see `Drafter.take_target`."""

    def begin(self, tokens: Sequence[int]) -> None:
        """Start an answer to a prompt."""

    def take_over(self, other: Source, length: int) -> int:
        """Take over another conversation's states of a text: see `Drafter.take_over`."""
        return length

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Learn the target's states at prompt tokens: see `Drafter.learn_prompt`."""

    def read_along(self, tokens: Sequence[int], end: int) -> None:
        """Read a prompt that the target has read up to `end`."""

    def observe(self, outcome: RoundOutcome) -> None:
        """Keep the state of the accepted tokens, whoever drafted them, and drop the rest."""

    def rewind(self, length: int) -> None:
        """Forget the tokens from position `length` on."""

    # -- a draft -----------------------------------------------------------------------------------

    def room(self, tokens: Sequence[int]) -> int:
        """Return how many nodes can be evaluated below a text."""
        return sys.maxsize

    def expect(self, depth: int) -> None:
        """Note how deep the draft is going to be at most."""

    def root(self, request: DraftRequest, highest: int) -> NodeRows | None:
        """Evaluate the end of the text, with `highest` the row's highest logits alone.

        Return None if the method has no state of this text, or names whole trees alone.
        """
        return None

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> NodeRows | None:
        """Evaluate tokens below nodes (or ROOT) of one depth; None if nothing follows there."""
        return None

    def named(self, request: DraftRequest, plan: TreePlan) -> NamedChildren | None:
        """Name a plan's whole tree of best tokens; None if the method cannot, or has no state."""
        return None

    def depth_rows(self, request: DraftRequest) -> Sequence[Logits]:
        """Return the rows of all depths, from the root on, if `rows_by_depth`."""
        return ()

    # -- evaluations with other conversations ------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether other conversations draft now, so that evaluations are better shared."""
        return self.shared is not None and self.shared.waits

    def submit(self, request: DraftRequest, asked: Asked) -> bool:
        """Submit a shared evaluation; return False if the method has no state of this text."""
        raise NotImplementedError

    def result(self) -> NodeRows | NamedChildren | None:
        """Return the result of the requested evaluation; None before it was made."""
        raise NotImplementedError

    # -- costs -------------------------------------------------------------------------------------

    @property
    def native_seconds(self) -> float:
        """Time inside the evaluations of this conversation."""
        return 0.0

    def close(self) -> None:
        """Free the conversation's native memory; again does nothing."""
