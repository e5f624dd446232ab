"""The loss of a batch, token by token by hand; whose answers it is of; what is measured."""

import math

import numpy as np
import pytest
import torch
from support.optimal_transport import acceptance_probability

from specrun.bindings.errors import OptionError
from specrun.train.distillation import DistillationLoss
from specrun.train.distillation.answers import SampledAnswers
from specrun.train.distillation.learner import DIVERGENCES, DistillationLearner

ANSWERS = SampledAnswers(temperature=1.0, n_longest=10, max_length=64, end_ids=(0,), vocab_size=300)


class ScriptedDrafters:
    """Existing drafters that always say the same token, and count how often they are asked."""

    def __init__(self, *tokens):
        self.tokens, self.asked = tokens, 0

    def top_tokens(self, text):
        self.asked += 1
        return np.repeat(np.array(self.tokens)[:, None], len(text), axis=1)


def learner(target, draft, loss=None, **options):
    return DistillationLearner(
        target, draft, loss or DistillationLoss(), ANSWERS, n_shared=300, **options
    )


def noise(seed=0):
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def rows_by_hand(target, draft, batch, temperature=1.0):
    """Log-laws of both models at every answer's token, one text at a time, without padding."""
    found = []
    for row in range(len(batch.numbers)):
        length = int(batch.valid[row].sum())
        ids = batch.ids[row : row + 1, :length]
        laws = [
            torch.log_softmax(model.module(input_ids=ids).logits[0].double() / temperature, -1)
            for model in (target, draft)
        ]
        found += [
            [law[place] for law in laws]
            for place in range(length - 1)
            if batch.learnt[row, place + 1]
        ]
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_loss_is_the_mean_divergence_over_answers(target, draft, batch, name, temperature):
    rows = rows_by_hand(target, draft, batch, temperature)
    expected = sum(float(DIVERGENCES[name](*laws)) for laws in rows) / len(rows)
    loss = DistillationLoss(divergence=name, temperature=temperature)
    (part,) = learner(target, draft, loss).losses(batch, noise(), 0)
    assert float(part.value.detach()) == pytest.approx(expected, rel=1e-5)
    assert part.plain == pytest.approx(expected, rel=1e-5)
    assert part.name == name


def test_positions_that_others_know_count_less(target, draft, batch):
    rows = rows_by_hand(target, draft, batch)
    known = int(rows[0][0].argmax())
    divergences = [float(DIVERGENCES["forward-kl"](*laws)) for laws in rows]
    covered = [int(laws[0].argmax()) == known for laws in rows]
    assert 0 < sum(covered) < len(rows)
    for weight in (0.0, 0.3):
        weights = [weight if is_known else 1.0 for is_known in covered]
        expected = sum(w * d for w, d in zip(weights, divergences, strict=True)) / sum(weights)
        loss = DistillationLoss(covered_weight=weight)
        trained = learner(target, draft, loss, drafters=ScriptedDrafters(7, known))
        (part,) = trained.losses(batch, noise(), 0)
        assert float(part.value.detach()) == pytest.approx(expected, rel=1e-5)


def test_a_batch_that_others_know_throughout_teaches_nothing(target, draft, batch):
    class AllKnowing:
        def top_tokens(self, text):
            with torch.no_grad():
                return (
                    target.module(input_ids=torch.tensor([text])).logits[0].argmax(-1).numpy()[None]
                )

    (part,) = learner(target, draft, drafters=AllKnowing()).losses(batch, noise(), 0)
    part.value.backward()
    assert float(part.value.detach()) == 0.0
    assert not any(bool(parameter.grad.any()) for parameter in draft.module.parameters())


def test_texts_that_do_not_change_are_shown_to_other_drafters_once(target, draft, batch):
    scripted = ScriptedDrafters(5)
    trained = learner(target, draft, drafters=scripted)
    for _ in range(3):
        list(trained.losses(batch, noise(), 0))
    assert scripted.asked == len(batch.numbers)
    own = learner(target, draft, DistillationLoss(on_policy=1.0), drafters=scripted)
    for step in range(3):
        list(own.losses(batch, noise(step), step))
    assert scripted.asked == 4 * len(batch.numbers)


def drafters_answers(trained, batch, seed=0):
    found, own = trained._with_own_answers(batch, noise(seed))
    return found, own


def test_on_policy_answers_are_the_drafters_own(target, draft, batch):
    """Their tokens have the likelihood of tokens drawn from the drafter: Var of -log q is bounded,
    so is the mean's.

    Hypothesis: tokens are drawn from Q. The statistic is mean(-log q(token)) - mean entropy of Q
    over about 80 tokens, whose standard deviation is under 2 nats a token here: 1 nat is over 4
    standard errors, a false alarm under 1e-4. Tokens of the target's answers are nats less likely
    than that.
    """
    trained = learner(target, draft, DistillationLoss(on_policy=1.0))
    found, own = drafters_answers(trained, batch)
    assert own == (True,) * len(batch.numbers)
    excess = excess_surprise(draft, found)
    assert abs(excess) < 1.0
    assert excess_surprise(target, found) > 3.0


def excess_surprise(model, batch):
    """Mean of -log q(token) over answers, less the mean entropy of q."""
    total, n_tokens = 0.0, 0
    with torch.no_grad():
        for row in range(len(batch.numbers)):
            length = int(batch.valid[row].sum())
            laws = torch.log_softmax(
                model.module(input_ids=batch.ids[row : row + 1, :length]).logits[0].double(), -1
            )
            for place in range(length - 1):
                if batch.learnt[row, place + 1]:
                    law = laws[place]
                    total += float(-law[batch.ids[row, place + 1]] + (law.exp() * law).sum())
                    n_tokens += 1
    assert n_tokens > 40
    return total / n_tokens


def test_prompts_stay_and_answers_are_new(target, draft, batch):
    found, _ = drafters_answers(learner(target, draft, DistillationLoss(on_policy=1.0)), batch)
    for row in range(len(batch.numbers)):
        start = int(batch.learnt[row].float().argmax())
        assert torch.equal(found.ids[row, :start], batch.ids[row, :start])
        assert not bool(found.learnt[row, :start].any())
        assert bool(found.learnt[row, start])


def test_a_share_of_the_answers_is_on_policy(target, draft, batch):
    trained = learner(target, draft, DistillationLoss(on_policy=0.3))
    drawn = [drafters_answers(trained, batch, seed) for seed in range(20)]
    own = [flag for _, flags in drawn for flag in flags]
    # Independent draws with probability 0.3: 4.5 standard deviations, a false alarm under 1e-5.
    assert abs(sum(own) / len(own) - 0.3) < 4.5 * math.sqrt(0.3 * 0.7 / len(own))
    found, flags = next((found, flags) for found, flags in drawn if len(set(flags)) == 2)
    for row, is_own in enumerate(flags):
        length = int(batch.valid[row].sum())
        kept = torch.equal(found.ids[row, :length], batch.ids[row, :length])
        assert kept != is_own


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_alpha_is_the_mean_acceptance_of_the_answers_tokens(target, draft, corpus, temperature):
    batches = [corpus.batch([number]) for number in corpus.held_out]
    trained = learner(target, draft, measured_at=temperature)
    accepted, agree = [], []
    for batch in batches:
        for laws in rows_by_hand(target, draft, batch):
            same = bool(laws[0].argmax() == laws[1].argmax())
            agree.append(same)
            accepted.append(
                float(same)
                if temperature == 0.0
                else acceptance_probability(*(law.exp().numpy() for law in laws))
            )
    found = trained.measure(batches)
    assert found["alpha"] == pytest.approx(np.mean(accepted), rel=1e-5)
    assert found["same first token"] == pytest.approx(np.mean(agree))
    assert set(found) == {"alpha", "alpha error", "same first token"}
    assert learner(target, target).measure(batches)["alpha"] == pytest.approx(1.0)


def test_coverage_is_measured_beside_other_drafters(target, draft, corpus):
    batches = [corpus.batch(corpus.held_out)]
    rows = rows_by_hand(target, draft, batches[0])
    known = int(rows[0][0].argmax())
    by_others = [int(laws[0].argmax()) == known for laws in rows]
    together = [
        other or bool(laws[0].argmax() == laws[1].argmax())
        for other, laws in zip(by_others, rows, strict=True)
    ]
    found = learner(target, draft, drafters=ScriptedDrafters(known)).measure(batches)
    assert found["covered by others"] == pytest.approx(np.mean(by_others))
    assert found["covered together"] == pytest.approx(np.mean(together))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"divergence": "hellinger"},
            "use one of forward-kl, reverse-kl, jensen-shannon, total-variation",
        ),
        ({"temperature": 0.0}, "give a number above 0"),
        ({"on_policy": 1.5}, "on_policy is 1.5: it is a share"),
        ({"covered_weight": -0.1}, "covered_weight is -0.1: it is a share"),
    ],
)
def test_what_cannot_be_learnt_is_refused(changes, message):
    with pytest.raises(OptionError, match=message):
        DistillationLoss(**changes)
