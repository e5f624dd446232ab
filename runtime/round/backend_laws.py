"""Distributions from backend sampling: the device sends only the k best logits of a row.

If the distribution is cut to the top k anyway, and nothing before that cut changes the order of
logits, the k best and a few more suffice: `transformed_law` of them is that of the whole
row, to the bit. The few more are for ties, of which the lower ids stay: if those that are equal may
go on beyond the sent ones, the rows are evaluated again and given whole.

Nobody can read a whole row then, so it is not for answers whose log-probabilities were requested,
nor for drafters and rules that read more than distributions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.rows import Candidates
from specrun.bindings.errors import OptionError
from specrun.runtime.laws.law import Law
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.laws.transform import transformed_law
from specrun.runtime.round.target import CachedText, EvaluatedRows, Target, TargetModel
from specrun.runtime.trees.tree import DraftTree

if TYPE_CHECKING:
    from specrun.bindings.models.model import Model

BackendSampling = Literal["auto", "on", "off"]
"""auto: on if the target's rows lie in a GPU's memory; in the CPU's there is no copy to save."""

SPARE = 8
"""How many more logits are sent than are kept: fewer equal ones need no second evaluation."""

STEADY = 3
"""How often a shape has to come again before rows are cut."""


def is_wanted(choice: BackendSampling, model: Model) -> bool:
    """Return whether a target is to sample on its device; raises `OptionError` for no choice."""
    if choice not in ("auto", "on", "off"):
        raise OptionError(f"backend_sampling is {choice!r}: give auto, on or off")
    # The output matrix goes to the GPU last, one layer more than the model has.
    all_layers = model.n_gpu_layers < 0 or model.n_gpu_layers > model.n_layer
    return choice == "on" or (choice == "auto" and all_layers)


def candidates_needed(params: SamplingParams, vocab_size: int) -> int | None:
    """Return the number of best logits that a row's distribution needs; None for the whole row."""
    k = 1 if params.is_greedy else params.top_k
    if params.logit_bias or params.has_penalties or not params.is_plain:
        return None
    return k + SPARE if 0 < k < vocab_size - SPARE else None


def law_of_candidates(candidates: Candidates, params: SamplingParams) -> Law | None:
    """Return the distribution of a row from its best logits; None if a tie needs the others.

    `params` are plain, have neither bias nor penalties, and keep fewer tokens than there are
    candidates.
    """
    if params.is_greedy:
        return _greedy_law(candidates)
    tokens, logits = candidates
    # Every logit above the lowest that was sent was sent. (NaN is above nothing.)
    if np.count_nonzero(logits > logits.min()) < params.top_k:
        return None
    # A row that has no other tokens, in the order of their ids: equal logits stand in that order.
    order = tokens.argsort()
    law = transformed_law(logits[order], params)
    places = order if law.ids is None else order[law.ids]
    return Law(law.probs, tokens[places].astype(np.intp))


def _greedy_law(candidates: Candidates) -> Law | None:
    """Return the distribution at temperature 0: the lowest id of equals, if all were sent."""
    tokens, logits = candidates
    highest = logits[logits.argmax()]  # a NaN, if there is one
    if not math.isfinite(highest):
        return None
    equal = (logits == highest).nonzero()[0]
    if len(equal) == 1:
        return Law.point(int(tokens[equal[0]]))
    return Law.point(int(tokens[equal].min())) if len(equal) < len(tokens) else None


def _are_best(candidates: Candidates | None, logits: npt.NDArray[np.float32]) -> bool:
    """Whether these are the best of a whole row, to the bit."""
    if candidates is None:
        return False
    tokens, values = candidates
    if len(set(tokens.tolist())) < len(tokens) or (logits[tokens] != values).any():
        return False
    lowest = values.min()
    return bool(np.count_nonzero(logits > lowest) == np.count_nonzero(values > lowest))


class SampledRows(EvaluatedRows, Protocol):
    """The rows of an evaluation, or the parts of them that reached the host."""

    def candidates(self, row: int) -> Candidates | None:
        """Return the best logits of one row; None if it is whole."""


class CutRows:
    """Rows of which the best logits reached the host; `evaluate_again` gives them whole.

    That happens if a distribution needs it, or somebody reads logits. The same kernels compute
    the same numbers, so the distributions that were made before stay true.
    """

    __slots__ = ("_evaluate_again", "_rows")

    def __init__(self, rows: SampledRows, evaluate_again: Callable[[], EvaluatedRows]) -> None:
        self._rows: EvaluatedRows | SampledRows = rows
        self._evaluate_again: Callable[[], EvaluatedRows] | None = evaluate_again

    def law(self, row: int, params: SamplingParams) -> Law:
        """Return the distribution that `params` make of one row."""
        if self._evaluate_again is not None:
            candidates = cast("SampledRows", self._rows).candidates(row)
            law = None if candidates is None else law_of_candidates(candidates, params)
            if law is not None:
                return law
        return transformed_law(self.logits(row), params)

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of one row, [n_vocab]: all rows are evaluated again, once."""
        if self._evaluate_again is not None:
            self._rows = self._evaluate_again()
            self._evaluate_again = None
        return self._rows.logits(row)

    def hidden_states(self, wanted: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return a copy of the final hidden states of these rows, [n, n_embd]."""
        return self._rows.hidden_states(wanted)

    def layer_input(self, row: int, layer: int) -> npt.NDArray[np.float32]:
        """Return the input of one of the target's layers at one row, [n_embd]."""
        return self._rows.layer_input(row, layer)

    def nextn_state(self, row: int) -> npt.NDArray[np.float32]:
        """Return the state that NextN blocks read of one row, [n_embd_out]."""
        return self._rows.nextn_state(row)


class BackendSamplingTarget:
    """A target that sends the `k` best logits of its rows, for one answer.

    llama.cpp does so for evaluations of one shape (`Context.cut_rows`), and changing to and fro
    makes it plan its memory again: so it begins when a shape has come some times in a row. The
    round that begins is evaluated both ways, because the sampling of devices is young: if that
    differs in a bit, the answer goes on with whole rows.
    """

    def __init__(self, target: TargetModel, k: int) -> None:
        self._target, self._k = target, k
        self._shape: tuple[int, ...] = ()
        self._times = 0
        self._is_trusted = True

    def evaluate(self, text: CachedText, tree: DraftTree) -> EvaluatedRows:
        """Evaluate as the target does."""
        self._times = self._times + 1 if tree.parents == self._shape else 0
        self._shape = tree.parents
        rows = cast("SampledRows", self._target.evaluate(text, tree))
        if self._times == STEADY and self._is_trusted:
            rows = self._begin(rows, text, tree)
        if rows.candidates(0) is None:
            return rows
        return CutRows(rows, functools.partial(self._evaluate_again, text, tree))

    def commit(self, text: CachedText, tree: DraftTree, path: Sequence[int]) -> None:
        """Keep the accepted path."""
        self._target.commit(text, tree, path)

    def _begin(self, rows: SampledRows, text: CachedText, tree: DraftTree) -> SampledRows:
        """Evaluate again for the best logits, and keep to that if they are those of whole rows."""
        whole = [rows.logits(row).copy() for row in range(len(tree) + 1)]
        self._target.context.memory.truncate(text.n_cached)
        self._target.context.cut_rows(self._k)
        cut = cast("SampledRows", self._target.evaluate(text, tree))
        self._is_trusted = all(
            _are_best(cut.candidates(row), logits) for row, logits in enumerate(whole)
        )
        return cut if self._is_trusted else cast("SampledRows", self._evaluate_again(text, tree))

    def _evaluate_again(self, text: CachedText, tree: DraftTree) -> EvaluatedRows:
        """Repeat an evaluation, for whole rows."""
        self._times = 0
        self._target.context.memory.truncate(text.n_cached)
        self._target.context.cut_rows(None)
        return self._target.evaluate(text, tree)


def sampled_on_device(target: TargetModel, k: int | None) -> Target:
    """Return the sampler that gives the `k` best logits of each row, or whole rows for None.

    Recurrent memories cannot take back an evaluation that has to be made again.
    """
    target.context.cut_rows(None)
    if k is None or not target.context.model.can_branch:
        return target
    return BackendSamplingTarget(target, k)
