"""The four divergences: closed forms, gradients by formula and by finite differences, what they
have in common."""

import math

import pytest
import torch

from specrun.train.distillation.learner import (
    DIVERGENCES,
    forward_kl,
    jensen_shannon,
    reverse_kl,
    total_variation,
)

P, Q = (0.7, 0.2, 0.1), (0.25, 0.25, 0.5)


def log_law(*probs):
    return torch.tensor(probs, dtype=torch.float64).log()


def random_logits(*shape, seed=0, scale=2.0):
    return scale * torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def test_forward_kl_by_hand():
    expected = 0.7 * math.log(0.7 / 0.25) + 0.2 * math.log(0.2 / 0.25) + 0.1 * math.log(0.1 / 0.5)
    assert float(forward_kl(log_law(*P), log_law(*Q))) == pytest.approx(expected, abs=1e-12)


def test_reverse_kl_by_hand():
    expected = 0.25 * math.log(0.25 / 0.7) + 0.25 * math.log(0.25 / 0.2) + 0.5 * math.log(0.5 / 0.1)
    assert float(reverse_kl(log_law(*P), log_law(*Q))) == pytest.approx(expected, abs=1e-12)


def test_jensen_shannon_by_hand():
    middle = [(p + q) / 2 for p, q in zip(P, Q, strict=True)]
    expected = (
        sum(p * math.log(p / m) + q * math.log(q / m) for p, q, m in zip(P, Q, middle, strict=True))
        / 2
    )
    assert float(jensen_shannon(log_law(*P), log_law(*Q))) == pytest.approx(expected, abs=1e-12)


def test_total_variation_by_hand():
    assert float(total_variation(log_law(*P), log_law(*Q))) == pytest.approx(
        (0.45 + 0.05 + 0.4) / 2, abs=1e-12
    )


def test_laws_without_a_token_in_common():
    first, other = log_law(1.0, 0.0), log_law(0.0, 1.0)
    assert float(total_variation(first, other)) == 1.0
    assert float(jensen_shannon(first, other)) == pytest.approx(math.log(2.0), abs=1e-12)
    assert float(forward_kl(first, other)) == float(reverse_kl(first, other)) == math.inf


def test_a_token_that_is_never_said_counts_nothing():
    first, other = log_law(0.5, 0.5, 0.0), log_law(0.25, 0.5, 0.25)
    assert float(forward_kl(first, other)) == pytest.approx(0.5 * math.log(2.0), abs=1e-12)
    assert float(jensen_shannon(first, other)) < math.log(2.0)


def gradient(name, target, logits):
    logits = logits.clone().requires_grad_()
    DIVERGENCES[name](target, logits.log_softmax(-1)).sum().backward()
    return logits.grad


@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradients_are_those_of_the_formulas(name):
    target, logits = random_logits(4, 6, seed=5).log_softmax(-1), random_logits(4, 6, seed=6)
    p, q = target.exp(), logits.softmax(-1)
    m = (p + q) / 2

    def centred(values):
        return q * (values - (q * values).sum(-1, keepdim=True))

    expected = {
        "forward-kl": q - p,
        "reverse-kl": centred((q / p).log()),
        "jensen-shannon": centred((q / m).log()) / 2,
        "total-variation": centred((q - p).sign()) / 2,
    }
    torch.testing.assert_close(gradient(name, target, logits), expected[name])


@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradients_are_those_of_finite_differences(name):
    target, logits = random_logits(3, 5, seed=7).log_softmax(-1), random_logits(3, 5, seed=8)
    assert torch.autograd.gradcheck(
        lambda changed: DIVERGENCES[name](target, changed.log_softmax(-1)),
        logits.clone().requires_grad_(),
    )


@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradients_stay_finite_where_probabilities_vanish(name):
    target = torch.tensor([[200.0, 0.0, -200.0]]).log_softmax(-1)
    found = gradient(name, target, torch.tensor([[-200.0, 0.0, 200.0]]))
    assert torch.isfinite(found).all()
