"""Alpha: against enumeration of what the exact rule does, and its standard error against repeated
samples."""

import math

import numpy as np
import pytest
import torch
from support.optimal_transport import acceptance_probability

from specrun.bindings.errors import OptionError
from specrun.train.distillation.acceptance import (
    TextAcceptance,
    acceptance_at,
    acceptance_gain,
    mean_acceptance,
)
from specrun.train.distillation.learner import total_variation


def logits(*shape, seed=0):
    return 2.0 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def enumerated(target, draft):
    """The probability that the exact rule keeps the drafted token, over every token it may be."""
    return sum(q * min(1.0, p / q) for p, q in zip(target, draft, strict=True) if q > 0.0)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_alpha_is_what_the_exact_rule_accepts(temperature):
    target, draft = logits(6, 9), logits(6, 9, seed=1)
    found = acceptance_at(target, draft, temperature)
    for row in range(6):
        laws = [
            torch.softmax(logits[row].double() / temperature, -1).numpy()
            for logits in (target, draft)
        ]
        assert float(found[row]) == pytest.approx(enumerated(*laws), abs=1e-12)
        assert float(found[row]) == pytest.approx(acceptance_probability(*laws), abs=1e-12)


def test_alpha_is_one_minus_the_total_variation():
    target, draft = logits(6, 9).double(), logits(6, 9, seed=1).double()
    lost = total_variation(target.log_softmax(-1), draft.log_softmax(-1))
    torch.testing.assert_close(acceptance_at(target, draft, 1.0), 1.0 - lost)


def test_at_temperature_zero_the_likeliest_tokens_must_be_equal():
    target = torch.tensor([[1.0, 2.0, 2.0], [3.0, 0.0, 1.0]])
    draft = torch.tensor([[0.0, 5.0, 1.0], [0.0, 1.0, 2.0]])
    assert acceptance_at(target, draft, 0.0).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(("ours", "theirs"), [(9, 7), (7, 9)])
def test_tokens_that_one_model_lacks_are_lost(ours, theirs):
    target, draft = logits(4, ours), logits(4, theirs, seed=1)
    found = acceptance_at(target, draft, 1.0)
    padded = [np.zeros((4, 9)), np.zeros((4, 9))]
    padded[0][:, :ours], padded[1][:, :theirs] = (
        target.double().softmax(-1),
        draft.double().softmax(-1),
    )
    for row in range(4):
        assert float(found[row]) == pytest.approx(
            acceptance_probability(padded[0][row], padded[1][row]), abs=1e-12
        )


def texts(source, count):
    """Texts that differ: of unequal length, and all positions of one are easy or hard together."""
    lengths = source.integers(1, 30, count)
    ease = source.beta(2.0, 2.0, count)
    accepted = [
        float(source.uniform(0, 2 * e, n).clip(0, 1).sum())
        for e, n in zip(ease, lengths, strict=True)
    ]
    return [TextAcceptance(a, int(n)) for a, n in zip(accepted, lengths, strict=True)]


def test_the_standard_error_is_that_of_repeated_samples():
    # The standard deviation of 600 estimates is known to 3 %, so 12 % is 4 standard errors: a false
    # alarm under 1e-4.
    source = np.random.default_rng(0)
    samples = [mean_acceptance(texts(source, 120)) for _ in range(600)]
    spread = float(np.std([sample.rate for sample in samples]))
    stated = float(np.mean([sample.error for sample in samples]))
    assert stated == pytest.approx(spread, rel=0.12)
    # Taking positions as independent, a known mistake, would state far too little.
    naive = float(
        np.mean(
            [math.sqrt(sample.rate * (1 - sample.rate) / sample.n_positions) for sample in samples]
        )
    )
    assert naive < 0.6 * spread


def test_a_gain_is_known_better_than_its_ends():
    before = texts(np.random.default_rng(1), 50)
    after = [
        TextAcceptance(text.accepted + 0.02 * text.n_positions, text.n_positions) for text in before
    ]
    gain = acceptance_gain(before, after)
    assert gain.gain == pytest.approx(0.02)
    assert gain.error < 1e-12 < gain.before.error
    assert gain.after.rate - gain.before.rate == gain.gain


def test_one_text_says_nothing_of_others():
    assert mean_acceptance([TextAcceptance(3.0, 4)]).error == math.inf


def test_nothing_to_measure_is_refused():
    with pytest.raises(OptionError, match="no position"):
        mean_acceptance([TextAcceptance(0.0, 0)])


def test_different_texts_are_not_compared():
    with pytest.raises(OptionError, match="different texts"):
        acceptance_gain([TextAcceptance(1.0, 2)], [TextAcceptance(1.0, 3)])
