"""EAGLE's and EAGLE-3's heads unrolled: chains below every position, and their distributions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specrun.bindings.errors import OptionError
from specrun.convert.heads.target_facts import target_facts
from specrun.train.data.corpus import TokenBatch, choice_numbers, draft_marks
from specrun.train.heads.earlier_head import EarlierHead, read_earlier_head
from specrun.train.heads.layers import KeysValues
from specrun.train.heads.learner import HeadLearner, rows_at
from specrun.train.heads.run import HeadRecipe
from specrun.train.target.shape import ModelShape
from specrun.train.target.states import Features
from specrun.train.trainer.learner import LossPart
from specrun.train.trainer.settings import TrainingDefaults

# == Chains ========================================================================================
#
# At depth 0 a head reads the target's states, later its own; the tokens are the text's. The loss is
# that of each depth, over the chains that count there, discounted and added up.


MEASURED_DEPTH = 4
_PAPER_WIDTH = 4096
_LATE = 0.6
"""The share of the training after which chains may be longer: as early as their later steps can
still be learnt, as the learning rate falls."""


@dataclass(frozen=True, slots=True)
class ChainRecipe(HeadRecipe):
    """Chains of `steps` steps are trained; each step weighs `step_decay` times the one before.

    In the last two fifths of the training there are `late_steps` of them (0: as many as before):
    later steps read states that the head predicts, which are better then, and take longer.
    """

    steps: int = 1
    step_decay: float = 1.0
    late_steps: int = 0

    paper_rate: ClassVar[float]
    """The learning rate of the paper, for states of 4096 numbers; narrower ones learn faster."""

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 16:
            raise OptionError(f"{self.steps} steps: give 1 to 16")
        if self.late_steps and not self.steps <= self.late_steps <= 16:
            problem = f"{self.late_steps} steps late in the training, {self.steps} before"
            raise OptionError(f"{problem}: give as many or more, at most 16")
        if not 0 < self.step_decay <= 1:
            raise OptionError(
                f"a step decay of {self.step_decay:g}: give a number above 0, at most 1"
            )

    def defaults(self, shape: ModelShape) -> TrainingDefaults:
        """Return the paper's settings, with its rate scaled to the states' width."""
        return TrainingDefaults(self.paper_rate * max(1.0, _PAPER_WIDTH / shape.hidden))

    def learning_on(
        self, path: Path, shape: ModelShape, source: Path
    ) -> tuple[HeadRecipe, EarlierHead]:
        """Return the head in a file to learn on from, and the recipe that follows from it."""
        head = read_earlier_head(path, self.kind, shape, target_facts(source))
        return self.going_on(head), head

    @abstractmethod
    def going_on(self, head: EarlierHead) -> ChainRecipe:
        """Return the recipe for learning on from `head`, with the settings that follow.

        Raises OptionError for settings that the head contradicts.
        """

    def chain_numbers(
        self, shape: ModelShape, n_laws: int, longest: int, *, recompute: bool
    ) -> int:
        """Return the numbers that chains keep for each token; a distribution has `n_laws` of them.

        A step keeps logits and their derived distributions, a layer's states, and from the second
        step on its scores for the text.
        """
        most = max(self.steps, self.late_steps)
        attention = 3 * shape.n_heads * longest if most > 1 else 0
        step = 4 * n_laws + shape.layer_numbers + attention
        # Computed again, one step's insides are there at a time; of the others inputs and outputs.
        return step + most * 5 * shape.hidden if recompute else most * step


class ChainHead(Protocol):
    """A head that goes on from its own states; EAGLE's and EAGLE-3's are."""

    def __call__(
        self,
        embeddings: Tensor,
        states: Tensor,
        earlier: Sequence[KeysValues] = (),
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Return the states [B, T, h] after pairs of a state and the next token's embedding.

        `earlier` are the keys of the steps before, if `states` are the head's own predictions;
        the keys of this step are returned too. With `wanted` [B, T], states are whole only there.
        """


class ChainLearner(HeadLearner):
    """Trains a head that drafts in chains."""

    label = "depth"
    head: ChainHead
    recipe: ChainRecipe

    @abstractmethod
    def first_states(self, found: Features) -> Tensor:
        """Return the input of the first step, [B, T-1, h]."""

    @abstractmethod
    def best(self, states: Tensor) -> Tensor:
        """Return the best tokens [P, 5] after predicted states [P, h]."""

    def drafts(self, batch: TokenBatch, found: Features, start: Tensor) -> Iterator[Tensor]:
        """Yield the best tokens of chains of MEASURED_DEPTH."""
        states = self.first_states(found)
        for predicted in chain_states(
            self.head, self._target.embedding, batch.ids, states, self.depth
        ):
            yield self.best(rows_at(predicted, start))

    def chain_losses(
        self,
        batch: TokenBatch,
        states: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor],
        update: int,
    ) -> Iterator[LossPart]:
        """Yield the sum of decay^s loss_s over all depths s, if any counts.

        It is one part, as later steps depend on the states of earlier ones. `states` [B, T-1, h]
        are the input of the first. `loss` takes the states [n, h] that chains predict and the
        numbers [n] of the positions they stand for, among those `choosing` a token that counts, in
        reading order. With `recompute` its insides are computed again for gradients: distributions
        of all depths would fill the memory.
        """
        recipe, learnt = self.recipe, batch.learnt
        is_late = recipe.late_steps and update >= _LATE * self.n_updates
        chains = chain_states(
            *(self.head, self._target.embedding, batch.ids, states),
            recipe.late_steps if is_late else recipe.steps,
            learnt=learnt,
            recompute=self.recompute,
        )
        order = choice_numbers(learnt)
        total, first = torch.zeros((), device=learnt.device), 0.0
        for step, predicted in enumerate(chains):
            marks = draft_marks(learnt, step)
            if not marks.any():
                break
            # Chain p's state at depth s lies at index p and stands for position p + s + 1.
            given = rows_at(predicted, marks), rows_at(order, marks, step + 1)
            if self.recompute:
                found = checkpoint(loss, *given, use_reentrant=False)
            else:
                found = loss(*given)
            total = total + recipe.step_decay**step * found
            first = first if step else float(found.detach())
        if total.requires_grad:
            yield LossPart("step 1", total, first)


def chain_states(
    head: ChainHead,
    embedding: Tensor,
    ids: Tensor,
    states: Tensor,
    depth: int,
    *,
    learnt: Tensor | None = None,
    recompute: bool = True,
) -> Iterator[Tensor]:
    """Yield the head's states [B, T-1, h] at depths 0 to depth-1 of the chains below each position.

    `ids` are [B, T], `embedding` [vocab, h], `states` [B, T-1, h] the input of the first step at
    positions 0 to T-2, each paired with the next token. The state that chain p yields at depth s is
    that of position p + s + 1, and means nothing from p + s + 1 = T on. With `learnt` [B, T],
    states are whole only where `draft_marks` counts them: half of a chat is questions.

    With `recompute`, while gradients are taken over several steps, each step is computed again for
    its own: the attention of all steps together would be the largest part of the memory.
    """
    earlier: list[KeysValues] = []
    for step in range(min(depth, ids.shape[1] - 1)):
        # Chain p reads the text's token p + step + 1; tokens beyond the end mean nothing.
        tokens = F.pad(ids[:, step + 1 :], (0, step + 1))[:, : ids.shape[1] - 1]
        embeddings = embedding[tokens].to(states.dtype)
        wanted = None if learnt is None else F.pad(draft_marks(learnt, step), (0, step + 1))
        given = (embeddings, states, tuple(earlier), wanted)
        if recompute and depth > 1 and torch.is_grad_enabled():
            states, own = checkpoint(head, *given, use_reentrant=False)
        else:
            states, own = head(*given)
        earlier.append(own)
        yield states
