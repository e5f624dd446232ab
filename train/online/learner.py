"""A drafter that learns the target's laws where its drafts were rejected (Liu et al. 2023).

Of a law only the most likely tokens are known by name, and the mass of all others together. So both
laws are compared as laws over these K + 1 outcomes, by the divergences of distillation: none of
them is larger there than between the whole laws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specrun.bindings.errors import OptionError
from specrun.runtime.online import RejectedAnswer
from specrun.train.data.target_tokens import TokenSequence
from specrun.train.data.token_corpus import TokenBatch, TokenCorpus
from specrun.train.distillation.acceptance import (
    MeasuredAcceptance,
    TextAcceptance,
    mean_acceptance,
)
from specrun.train.distillation.learner import DIVERGENCES
from specrun.train.target.hf_model import HFModel
from specrun.train.trainer.learner import Learner, LossPart
from specrun.train.trainer.memory import MemoryNeed, trained_bytes

_NOTHING = -30.0  # the log-probability of a token that the drafter lacks
_PAPER_RATE, _PAPER_WIDTH = 3e-5, 4096
_ROWS_PER_PLACE = 6  # of whole laws: logits, logarithms, what others have, and gradients
_HELD_OUT = 10  # one text in so many is measured on


@dataclass(frozen=True, slots=True)
class AnswerPlaces:
    """The places of one text that are learnt, within the piece of it that is read."""

    positions: Tensor
    ids: Tensor
    log_probs: Tensor


def usual_rate(config: Mapping[str, Any]) -> float:
    """Return 3e-5 for drafters of 4096 numbers a state, and more for narrower ones."""
    return _PAPER_RATE * max(1.0, _PAPER_WIDTH / int(config["hidden_size"]))


def coarse_log_probs(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Return log-probabilities [n, K + 1] of the tokens `ids` [n, K] and of all others together.

    `log_probs` [n, V] are whole laws. Where K is V there are no others: [n, K].
    """
    missing = int(ids.max()) + 1 - log_probs.shape[-1] if ids.numel() else 0
    if missing > 0:  # of vocabularies rounded up to different sizes
        log_probs = F.pad(log_probs, (0, missing), value=_NOTHING)
    named = log_probs.gather(-1, ids)
    if ids.shape[-1] == log_probs.shape[-1]:
        return named
    others = log_probs.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat((named, others), -1)


def online_corpus(
    answers: Sequence[RejectedAnswer], *, max_length: int
) -> tuple[TokenCorpus, list[AnswerPlaces]]:
    """Return the buffer's texts to learn from, and their places and laws, by the texts' numbers.

    Of a text longer than `max_length` the end is read. One text in ten, chosen by a hash of it, is
    measured on and never learnt, in this update or a later one. Raises OptionError for a buffer
    without a text.
    """
    if not answers:
        raise OptionError(
            "no draft was rejected yet: there is nothing to learn from; answer something first"
        )
    texts, places = [], []
    for answer in answers:
        start = max(0, len(answer.tokens) - max_length)
        kept = answer.positions >= start
        positions = torch.from_numpy((answer.positions[kept] - start).astype(np.int64))
        marks = np.zeros(len(answer.tokens) - start, np.bool_)
        marks[positions.numpy()] = True
        texts.append(TokenSequence(np.array(answer.tokens[start:], np.int32), marks))
        laws = answer.laws
        ids = torch.from_numpy(laws.ids[kept].astype(np.int64))
        logs = torch.from_numpy(laws.log_probs[kept].astype(np.float32))
        if float(logs[:, -1].max()) < -25 and ids.shape[1] == int(ids.max()) + 1:
            logs = logs[:, :-1]  # a vocabulary so small that all of it is named
        places.append(AnswerPlaces(positions, ids, torch.log_softmax(logs, -1)))
    held_out = [n for n, answer in enumerate(answers) if answer.digest[0] % _HELD_OUT == 0]
    training = [n for n in range(len(answers)) if n not in set(held_out)]
    if not held_out or not training:
        everything = tuple(range(len(answers)))
        return TokenCorpus(tuple(texts), everything, everything, True), places
    return TokenCorpus(tuple(texts), tuple(training), tuple(held_out), False), places


def online_memory(
    learner: OnlineLearner, places: Sequence[AnswerPlaces], tokens_per_batch: int
) -> MemoryNeed:
    """Return what an update needs at its widest step."""
    draft, config = learner.draft, learner.draft.config
    hidden, layers = (int(config[name]) for name in ("hidden_size", "num_hidden_layers"))
    inner = int(config.get("intermediate_size") or 4 * hidden)
    most = max(len(each.positions) for each in places)
    rows = max(most, min(tokens_per_batch, sum(len(each.positions) for each in places)))
    return MemoryNeed(
        {
            "drafter and optimizer": trained_bytes(learner.module),
            "laws": 4 * _ROWS_PER_PLACE * rows * draft.output.shape[0],
            "activations": 4 * tokens_per_batch * layers * (16 * hidden + 4 * inner),
        }
    )


class OnlineLearner(Learner):
    """`draft` learns by `divergence` from the places of texts, known by their numbers."""

    def __init__(self, draft: HFModel, places: Sequence[AnswerPlaces], divergence: str) -> None:
        if divergence not in DIVERGENCES:
            known = ", ".join(DIVERGENCES)
            raise OptionError(f"the divergence is {divergence!r}: use one of {known}")
        self.module = draft.module.requires_grad_()
        self.device = draft.device
        self.draft, self._places, self._divergence = draft, places, divergence

    def learning(self, on: bool) -> None:
        """Leave the drafter in evaluation mode: its own dropout would not resume exactly."""
        self.module.eval()

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield the mean divergence of the drafter's laws from the kept ones."""
        target, draft, _ = self._laws(batch)
        mean = DIVERGENCES[self._divergence](target, draft).mean()
        yield LossPart(self._divergence, mean, float(mean.detach()))

    def _laws(self, batch: TokenBatch) -> tuple[Tensor, Tensor, list[int]]:
        """Return the kept laws and the drafter's [n, K + 1], and how many places each text has."""
        hidden, _ = self.draft.hidden_states(batch.ids)
        chosen = [self._places[number] for number in batch.numbers]
        counts = [len(places.positions) for places in chosen]
        rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        positions = torch.cat([places.positions for places in chosen])
        ids = torch.cat([places.ids for places in chosen]).to(self.device)
        target = torch.cat([places.log_probs for places in chosen]).to(self.device)
        logits = self.draft.logits(hidden[rows.to(self.device), positions.to(self.device)])
        return target, coarse_log_probs(torch.log_softmax(logits, -1), ids), counts

    def measure(self, batches: Sequence[TokenBatch]) -> dict[str, float]:
        """Return alpha where drafts had been rejected, on texts that are not learnt."""
        return {"alpha": self.acceptance(batches).rate}

    def acceptance(self, batches: Sequence[TokenBatch]) -> MeasuredAcceptance:
        """Return the mean of sum min(P, Q) over the places of these texts.

        Tokens that are kept together count as accepted together, so it is a little too high.
        """
        return mean_acceptance(self.compare(batches))

    @torch.no_grad()
    def compare(self, batches: Sequence[TokenBatch]) -> list[TextAcceptance]:
        """Return the sum of acceptance probabilities over the places of each text."""
        texts: list[TextAcceptance] = []
        for batch in batches:
            target, draft, counts = self._laws(batch)
            found = torch.minimum(target.exp(), draft.exp()).sum(-1).double()
            for part, count in zip(torch.split(found, counts), counts, strict=True):
                texts.append(TextAcceptance(float(part.sum()), count))
        return texts
