"""Learners of heads over a frozen target: their losses, and their agreement with the target."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specrun.train.data.corpus import TokenBatch, draft_marks
from specrun.train.heads.earlier_head import EarlierHead
from specrun.train.target.hf_model import HFModel, TargetMatrices
from specrun.train.target.states import Features, FeatureSource
from specrun.train.trainer.learner import Learner, ParameterGroup

# == Losses over rows [n, vocab] or [n, width]: each is the mean over rows =========================


def token_cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean of -log q(token)."""
    return F.cross_entropy(logits.float(), tokens)


def law_cross_entropy(logits: Tensor, law: Tensor) -> Tensor:
    """Return the mean of -sum p log q, for distributions p [n, vocab]."""
    found: Tensor = -(law * logits.float().log_softmax(-1)).sum(-1).mean()
    return found


def divergence_from_law(logits: Tensor, law: Tensor) -> Tensor:
    """Return the mean Kullback-Leibler divergence of q from p, sum p log(p / q); 0 log 0 is 0."""
    # KL = H(p, q) - H(p): the gradient is the cross-entropy's, but the value is 0 if q = p.
    entropy: Tensor = torch.special.entr(law).sum(-1).mean()
    return law_cross_entropy(logits, law) - entropy


# == Learners and their measures ===================================================================
#
# Heads are measured by depth, among their first 1 and 5 tokens, and in chains: the target is taken
# to choose greedily at every position of a held-out text.


_RANKS = 5


def best_tokens(logits: Tensor) -> Tensor:
    """Return the first five tokens [P, 5] of logits [P, vocab], the most likely first."""
    return logits.topk(min(_RANKS, logits.shape[-1]), -1).indices


def shifted(rows: Tensor, by: int, length: int) -> Tensor:
    """Return `rows` [B, T, ...] from position `by` on, cut or filled with zeros to `length`."""
    moved = rows[:, by : by + length]
    more = rows.new_zeros(rows.shape[0], length - moved.shape[1], *rows.shape[2:])
    return torch.cat((moved, more), 1)


def rows_at(rows: Tensor, marks: Tensor, ahead: int = 0) -> Tensor:
    """Return the rows [P, ...] of `rows` [B, T, ...] that lie `ahead` of the P marks [B, n]."""
    return rows[:, ahead : ahead + marks.shape[1]][marks]


@dataclass(frozen=True, slots=True)
class Lesson:
    """The labels of a batch's positions: the text's tokens, or a model's own distribution.

    The distribution is the one that `matrices` make of `states` [B, T, h]; without states it is the
    tokens.
    """

    batch: TokenBatch
    states: Tensor | None = None
    matrices: TargetMatrices | None = None

    def loss(self, logits: Tensor, marks: Tensor, ahead: int) -> Tensor:
        """Return the mean loss of `logits` [P, vocab] at marks t for tokens at t + 1 + ahead."""
        rows, places = marks.nonzero(as_tuple=True)
        return self.loss_at(logits, rows, places + ahead)

    def loss_at(self, logits: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """Return the mean loss of `logits` [P, vocab] for the tokens after places [P] of rows."""
        if self.states is None or self.matrices is None:
            return token_cross_entropy(logits, self.batch.ids[rows, places + 1])
        # A token's distribution is made of the state one before it.
        return divergence_from_law(logits, self.matrices.law(self.states[rows, places]))


@dataclass(frozen=True, slots=True)
class FormerModel:
    """A model as it was before its training: its states, and the matrices of its distributions."""

    source: FeatureSource
    matrices: TargetMatrices

    def lesson(self, batch: TokenBatch) -> Lesson:
        """Return the distributions that the model had along a batch."""
        return Lesson(batch, self.source.features(batch).final, self.matrices)


def text_loss(model: HFModel, batches: Sequence[TokenBatch]) -> float:
    """Return the mean cross-entropy of a model's own tokens, over all that are learnt."""
    losses, count = 0.0, 0
    for batch in batches:
        # The state at t predicts the token at t + 1.
        marks = batch.learnt[:, 1:]
        number = int(marks.sum())
        if number:
            states, _ = model.hidden_states(batch.ids)
            logits = model.logits(rows_at(states, marks))
            losses += number * token_cross_entropy(logits, rows_at(batch.ids, marks, 1)).item()
            count += number
    return losses / max(1, count)


_RATE_BESIDE_MUON = 0.5


def muon_groups(module: nn.Module, between: Callable[[str], bool]) -> list[ParameterGroup]:
    """Return the matrices `between` states, by their names, and the rest.

    Muon trains the former, AdamW the rest, at half of the rate.
    """
    hidden: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weights in module.named_parameters():
        (hidden if weights.ndim == 2 and between(name) else others).append(weights)
    rest = ParameterGroup(others, rate=_RATE_BESIDE_MUON)
    return [ParameterGroup(hidden, hidden_matrices=True), rest]


class HeadLearner(Learner):
    """Trains a head on given states; embedding and output matrix are the target's and stay.

    It is measured down to `depth` tokens; measures call a depth `label`.
    """

    label = "head"

    def __init__(
        self, module: nn.Module, target: TargetMatrices, source: FeatureSource, depth: int
    ) -> None:
        self.device = target.output.device
        self.module = module.to(self.device)
        self.depth = depth
        self._target, self._source = target, source

    def go_on_from(self, head: EarlierHead) -> None:
        """Begin as this head; its draft tokens become the learner's.

        Raises PairError if its sizes are not the target's.
        """
        raise NotImplementedError  # recipes of such heads raise before a run begins

    @abstractmethod
    def drafts(self, batch: TokenBatch, found: Features, start: Tensor) -> Iterable[Tensor]:
        """Yield the best tokens [P, 5] at each depth, of drafts made at the P marks `start`."""

    def measure(self, batches: Sequence[TokenBatch]) -> dict[str, float]:
        """Return how often drafts agree with the target's choice, by depth.

        Of chains that is n-alpha: at depth n + 1, n of the states they read were predicted.
        """
        agreement = Agreement(self.depth, self.label)
        for batch in batches:
            start = draft_marks(batch.learnt, 0)
            places = start.shape[1]
            if not places:
                continue
            found = self._source.features(batch)
            drafted, chosen, counted = [], [], []
            for depth, tokens in enumerate(self.drafts(batch, found, start)):
                drafted.append(tokens)
                # The target chooses from the state after the drafted tokens' predecessor.
                ahead = shifted(found.final, depth + 1, places)[start]
                chosen.append(self._target.logits(ahead).argmax(-1))
                counted.append(shifted(draft_marks(batch.learnt, depth), 0, places)[start])
            agreement.add(drafted, chosen, counted, start)
        return agreement.measures()


class Agreement:
    """Counts agreement with the target's own first choice, for drafts of up to `depth` tokens.

    Each call to `add` brings the chains of one batch: the target's choice at every depth, and
    how a draft ranks it.
    """

    def __init__(self, depth: int, label: str) -> None:
        self._label = label
        self._first, self._five, self._count = [0] * depth, [0] * depth, [0] * depth
        self._rounds = self._tokens = 0

    def add(
        self, drafted: list[Tensor], chosen: list[Tensor], counted: list[Tensor], start: Tensor
    ) -> None:
        """Add P drafts: of each depth their best tokens [P, 5], the target's token [P], marks [P].

        `start` [B, T] marks the P positions that drafts are made at, in reading order. A chain goes
        on while its first tokens are right.
        """
        right, lengths = torch.ones_like(counted[0]), torch.zeros_like(chosen[0])
        for depth, (tokens, token, marks) in enumerate(zip(drafted, chosen, counted, strict=True)):
            best = tokens == token[:, None]
            self._count[depth] += int(marks.sum())
            self._first[depth] += int((best[:, 0] & marks).sum())
            self._five[depth] += int((best.any(-1) & marks).sum())
            # A chain ends at its first wrong token: later ones would not be accepted.
            right = right & best[:, 0] & marks
            lengths = lengths + right
        every = iter(lengths.tolist())
        for row in start.tolist():
            self._decode([next(every) if marked else None for marked in row])

    def _decode(self, lengths: Sequence[int | None]) -> None:
        """Count the rounds that a text takes; each begins at the end of the one before.

        `lengths` are of each position how many tokens of its chain are right, None if none is
        made. The mean over all positions would be more: easy texts take few rounds.
        """
        place = 0
        while place < len(lengths):
            length = lengths[place]
            if length is None:
                place += 1
                continue
            self._rounds += 1
            self._tokens += length + 1
            place += length + 1

    def measures(self) -> dict[str, float]:
        """Return the shares by name; `tokens a round` are a chain's right ones and the target's."""
        found: dict[str, float] = {}
        for depth, count in enumerate(self._count):
            if count:
                found[f"{self._label} {depth + 1} top-1"] = self._first[depth] / count
                found[f"{self._label} {depth + 1} top-5"] = self._five[depth] / count
        if self._rounds:
            found["tokens a round"] = self._tokens / self._rounds
        return found
