"""A drafter that learns its target's distributions: divergences, the loss of a batch, and measures.

The four divergences of a drafter's distribution Q from the target's distribution P are
DistillSpec's (Zhou et al. 2023, section 3). Each takes the log-probabilities of P and of Q, [...,
vocab], and gives nats (the total variation: a share), [...]. Gradients flow into Q; in logits z of
Q they are stated below, q = softmax(z). Only the total variation is the loss of speed: alpha is 1 -
TV(P, Q) (Leviathan et al. 2023, corollary 3.6), and by Pinsker's inequality TV <= sqrt(KL / 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, logaddexp

from specrun.bindings.errors import OptionError
from specrun.train.data.corpus import TokenBatch
from specrun.train.distillation.acceptance import (
    MeasuredAcceptance,
    TextAcceptance,
    acceptance_at,
    mean_acceptance,
)
from specrun.train.distillation.answers import SampledAnswers, answer_anew, texts_of
from specrun.train.distillation.coverage import ExistingDrafters, TopTokens, covered_positions
from specrun.train.target.hf_model import HFModel
from specrun.train.trainer.learner import Learner, LossPart

Divergence = Callable[[Tensor, Tensor], Tensor]
"""Log-probabilities of target and drafter, [..., vocab] each, to divergences, [...]."""


def forward_kl(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """Return KL(P || Q) = sum P log(P / Q): Q must cover all of P. Gradient in z: q - p."""
    return _mean_difference(target_log_probs, target_log_probs, draft_log_probs)


def reverse_kl(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """Return KL(Q || P) = sum Q log(Q / P): Q must stay inside P. d/dz: q (log(q / p) - KL)."""
    return _mean_difference(draft_log_probs, draft_log_probs, target_log_probs)


def jensen_shannon(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """Return (KL(P || M) + KL(Q || M)) / 2 with M = (P + Q) / 2: always at most log 2.

    Gradient in z: q (log(q / m) - KL(Q || M)) / 2.
    """
    # log M from logarithms: M itself would underflow if both distributions are small.
    middle = logaddexp(target_log_probs, draft_log_probs) - math.log(2.0)
    from_target = _mean_difference(target_log_probs, target_log_probs, middle)
    from_draft = _mean_difference(draft_log_probs, draft_log_probs, middle)
    return (from_target + from_draft) / 2


def total_variation(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """Return sum |P - Q| / 2 = 1 - sum min(P, Q): the share of drafted tokens that are rejected.

    Gradient in z: q (s - sum s q) / 2 with s = sign(q - p): a token of probability near 0 in Q
    hardly moves.
    """
    return (target_log_probs.exp() - draft_log_probs.exp()).abs().sum(-1) / 2


def _mean_difference(weights: Tensor, part: Tensor, other: Tensor) -> Tensor:
    """Return the mean of `part` - `other` under the distribution exp(`weights`); 0 log 0 is 0."""
    # If a probability underflows, the difference may be infinite: 0 times infinity would be NaN,
    # in the gradient too.
    probs = weights.exp()
    return (probs * (part - other).masked_fill(probs == 0.0, 0.0)).sum(-1)


DIVERGENCES: Mapping[str, Divergence] = MappingProxyType(
    {
        "forward-kl": forward_kl,
        "reverse-kl": reverse_kl,
        "jensen-shannon": jensen_shannon,
        "total-variation": total_variation,
    }
)
"""The divergences by the names users give them."""


def check_divergence(name: str) -> None:
    """Raise OptionError for a divergence that is not known."""
    if name not in DIVERGENCES:
        known = ", ".join(DIVERGENCES)
        raise OptionError(f"the divergence is {name!r}: use one of {known}")


# Positions whose distributions are compared at once when measuring: 1 GB of float64 with 128k
# tokens.
_ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class DistillationLoss:
    """The loss: `divergence` of distributions at `temperature`, a mean over answers' tokens.

    A share `on_policy` of the answers, drawn text by text, is written anew by the drafter.
    Positions that an existing drafter gets right count `covered_weight`.
    """

    divergence: str = "forward-kl"
    temperature: float = 1.0
    on_policy: float = 0.0
    covered_weight: float = 0.0

    def __post_init__(self) -> None:
        check_divergence(self.divergence)
        if not 0.0 < self.temperature <= 100.0:
            raise OptionError(
                f"the distributions' temperature is {self.temperature:g}: give a number above 0 "
                "(at 0 there is nothing to learn but the likeliest token, and no gradient to it)"
            )
        for name in ("on_policy", "covered_weight"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise OptionError(f"{name} is {getattr(self, name):g}: it is a share, 0 to 1")


class DistillationLearner(Learner):
    """`draft` learns from `target`.

    `n_shared` are the tokens both have, `answers` holds the settings of the drafter's texts,
    `drafters` are those whose right guesses need not be learnt again, `measured_at` the temperature
    of the acceptance rate that `measure` gives. The corpus that batches come from must not change:
    texts are known by their numbers.
    """

    def __init__(
        self,
        target: HFModel,
        draft: HFModel,
        loss: DistillationLoss,
        answers: SampledAnswers,
        *,
        n_shared: int,
        measured_at: float = 1.0,
        drafters: ExistingDrafters | None = None,
    ) -> None:
        self.module = draft.module.requires_grad_()
        self.device = draft.device
        self.target, self.draft = target, draft
        self.loss = loss
        self._answers = answers
        self._n_shared = n_shared
        self._measured_at = measured_at
        self._drafters = drafters
        # Tokens of other drafters along texts that do not change, by the texts' numbers.
        self._tops: dict[int, TopTokens] = {}

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield the divergence of the drafter's distributions from the target's over answers."""
        batch, fresh = self._with_own_answers(batch, noise)
        wanted = _answer_positions(batch)
        with torch.no_grad():
            target_logits = _logits(self.target, batch, wanted)
        draft_logits = _logits(self.draft, batch, wanted)
        log_laws = (
            # Cut before the softmax, unlike in `acceptance_at`: both distributions must sum to 1
            # for a divergence.
            torch.log_softmax(logits[:, : self._n_shared].float() / self.loss.temperature, -1)
            for logits in (target_logits, draft_logits)
        )
        divergences = DIVERGENCES[self.loss.divergence](*log_laws)
        weights = torch.ones_like(divergences)
        if self._drafters is not None:
            covered = self._covered(batch, wanted, target_logits, fresh)
            weights = torch.where(covered, self.loss.covered_weight, 1.0).to(divergences)
        # A batch that other drafters cover wholly teaches nothing: no division by 0.
        mean = (weights * divergences).sum() / weights.sum().clamp(min=1.0)
        yield LossPart(self.loss.divergence, mean, float(mean.detach()))

    @torch.no_grad()
    def _with_own_answers(
        self, batch: TokenBatch, noise: torch.Generator
    ) -> tuple[TokenBatch, tuple[bool, ...]]:
        """Let the drafter write a share of the answers; also return which are now its own."""
        if self.loss.on_policy == 0.0:
            return batch, (False,) * len(batch.numbers)
        # By column: whether the drafter answers, which answer, its tokens. Drawn for every row, so
        # that a row's noise does not depend on the others' choice.
        shape = (len(batch.numbers), 2 + self._answers.n_longest)
        drawn = torch.rand(shape, generator=noise, device=noise.device, dtype=torch.float64).cpu()
        own = (drawn[:, 0] < self.loss.on_policy).nonzero()[:, 0].tolist()
        texts = texts_of(batch)
        # Weights cast for mixed precision are kept: not these, which were cast without gradients,
        # where torch would use them again in the step that needs gradients (2.13 does not, to be
        # seen; others are allowed too).
        kind = self.device.type
        dtype, casting = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        asked = [texts[row] for row in own]
        with torch.autocast(kind, dtype, enabled=casting, cache_enabled=False):
            written = answer_anew(self.draft, asked, drawn[own, 1:], self._answers)
        for row, text in zip(own, written, strict=True):
            texts[row] = text
        fresh = tuple(row in own for row in range(len(texts)))
        return TokenBatch.of(batch.numbers, texts).to(self.device), fresh

    # -- coverage by other drafters ----------------------------------------------------------------

    def _covered(
        self, batch: TokenBatch, wanted: Tensor, target_logits: Tensor, fresh: Sequence[bool]
    ) -> Tensor:
        """Return for each wanted position whether an existing drafter finds the target's token."""
        target_top = target_logits.argmax(-1)
        found = torch.zeros_like(target_top, dtype=torch.bool)
        start = 0
        for row, number in enumerate(batch.numbers):
            tops = None if fresh[row] else self._tops.get(number)
            if tops is None:
                assert self._drafters is not None
                tops = self._drafters.top_tokens(batch.ids[row][batch.valid[row]].tolist())
                if not fresh[row]:
                    self._tops[number] = tops
            places = wanted[row].nonzero()[:, 0].cpu().numpy()
            rows = slice(start, start + len(places))
            found[rows] = covered_positions(target_top[rows], tops[:, places])
            start += len(places)
        return found

    # -- measuring ---------------------------------------------------------------------------------

    def measure(self, batches: Sequence[TokenBatch]) -> dict[str, float]:
        """Return alpha at the measured temperature, its error, and the share of equal first tokens.

        With existing drafters also the share of the target's likeliest tokens that they cover, and
        that they cover together with this one.
        """
        found = self.compare(batches)
        values = {
            "alpha": found.alpha.rate,
            "alpha error": found.alpha.error,
            "same first token": found.same_top,
        }
        if self._drafters is not None:
            values["covered by others"] = found.covered
            values["covered together"] = found.covered_together
        return values

    @torch.no_grad()
    def compare(self, batches: Sequence[TokenBatch]) -> Comparison:
        """Compare drafter and target on every answer of held-out batches."""
        was_training = self.module.training
        self.module.eval()
        texts: list[TextAcceptance] = []
        same = covered = together = n_positions = 0
        try:
            for batch in batches:
                wanted = _answer_positions(batch)
                models = (self.target, self.draft)
                target, draft = (_logits(model, batch, wanted) for model in models)
                rows = (torch.split(logits, _ROWS_AT_ONCE) for logits in (target, draft))
                pieces = zip(*rows, strict=True)
                measured = self._measured_at
                accepted = torch.cat([acceptance_at(p, q, measured) for p, q in pieces])
                counts = wanted.sum(1).tolist()
                # Positions come text by text: errors are over texts, whose sums are kept apart.
                for part, count in zip(torch.split(accepted, counts), counts, strict=True):
                    texts.append(TextAcceptance(float(part.sum()), count))
                agrees = target.argmax(-1) == draft.argmax(-1)
                same, n_positions = same + int(agrees.sum()), n_positions + len(agrees)
                if self._drafters is not None:
                    known = self._covered(batch, wanted, target, [False] * len(counts))
                    covered += int(known.sum())
                    together += int((known | agrees).sum())
        finally:
            self.module.train(was_training)
        share = max(1, n_positions)
        return Comparison(texts, same / share, covered / share, together / share)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Held-out texts: acceptance of each, and shares of positions with equal first tokens."""

    texts: list[TextAcceptance]
    same_top: float
    covered: float
    covered_together: float

    @property
    def alpha(self) -> MeasuredAcceptance:
        """The acceptance rate over all texts."""
        return mean_acceptance(self.texts)

    def __str__(self) -> str:
        return f"alpha {self.alpha}, same first token {self.same_top:.4f}"


def _answer_positions(batch: TokenBatch) -> Tensor:
    """Return [B, T]: whether the next token is an answer's, so that its distribution matters."""
    wanted = torch.zeros_like(batch.learnt)
    wanted[:, :-1] = (batch.learnt & batch.valid)[:, 1:]
    return wanted


def _logits(model: HFModel, batch: TokenBatch, wanted: Tensor) -> Tensor:
    """Return the logits at the wanted positions, [n_wanted, vocab]."""
    hidden, _ = model.hidden_states(batch.ids)
    return model.logits(hidden[wanted])
