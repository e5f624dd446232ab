"""Laws along known texts: against sums made from fresh evaluations of the same tokens."""

from __future__ import annotations

import numpy as np
import pytest
from support.tiny_models import fresh_logits

from specrun.bench.cascade.teacher import Teacher, draft_law, stated_law, target_law
from specrun.bindings.errors import OptionError
from specrun.bindings.models import Model
from specrun.runtime.acceptance import build_rule
from specrun.runtime.laws import SamplingParams

WARM = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
GREEDY = WARM.replace(temperature=0.0)
N_PROMPT = 4
TEXTS = [list(b"the quick brown fox"), list(b"jumps over the lazy dog again")]


@pytest.fixture(scope="module")
def teacher(tiny_model, tiny_flat_twin):
    return Teacher(tiny_model, tiny_flat_twin, [(text, N_PROMPT) for text in TEXTS], n_threads=1)


@pytest.fixture(scope="module")
def laws(tiny_model, tiny_flat_twin):
    """The raw laws (q, p) before every scored token of each text, from other evaluations."""
    found = []
    for path in (tiny_flat_twin, tiny_model):
        with Model(path, n_gpu_layers=0) as model:
            rows = [fresh_logits(model, text)[N_PROMPT - 1 : -1] for text in TEXTS]
        exps = [np.exp(logits.astype(float) - logits.max(1, keepdims=True)) for logits in rows]
        found.append([each / each.sum(1, keepdims=True) for each in exps])
    return found


def surprise(laws, shift: int = 0) -> list[float]:
    """The mean -log of the tokens that came, text by text; `shift` takes wrong tokens."""
    came = [np.array(text[N_PROMPT:]) for text in TEXTS]
    return [
        float(-np.log(law[np.arange(len(tokens)), np.roll(tokens, shift)]).mean())
        for law, tokens in zip(laws, came, strict=True)
    ]


def test_plain_models_have_their_own_cross_entropy(teacher, laws):
    draft, target = teacher.force([draft_law, target_law], WARM)
    for forced, own in ((draft, laws[0]), (target, laws[1])):
        wanted = surprise(own)
        assert forced.cross_entropy.mean == pytest.approx(np.mean(wanted), abs=1e-4)
        assert forced.cross_entropy.n == len(TEXTS)
        assert forced.n_tokens == sum(len(text) - N_PROMPT for text in TEXTS)
        # The control: tokens moved by one place.
        assert abs(forced.cross_entropy.mean - np.mean(surprise(own, shift=1))) > 1e-2
    gaps = np.subtract(surprise(laws[1]), surprise(laws[0]))
    assert target.excess.mean == pytest.approx(gaps.mean(), abs=1e-4)
    assert draft.excess.mean == 0.0


def test_deferral_and_rejection_lie_between_those_of_the_models(teacher, laws):
    rules = ["exact", "cascade-chow(alpha=0.6)", "token-cascade(alpha=0.6)"]
    forced = teacher.force([draft_law, *(stated_law(build_rule(rule)) for rule in rules)], WARM)
    draft, exact, chow, sequential = forced
    apart = np.concatenate([np.maximum(p - q, 0.0).sum(1) for q, p in zip(*laws, strict=True)])
    assert (draft.deferral_rate, draft.rejection_rate) == (0.0, 0.0)
    assert exact.deferral_rate == pytest.approx(1.0)
    assert exact.rejection_rate == pytest.approx(apart.mean(), abs=1e-4)
    unsure = np.concatenate([q.max(1) < 0.4 for q in laws[0]])
    assert 0 < unsure.mean() < 1
    assert chow.deferral_rate == pytest.approx(unsure.mean())
    assert chow.rejection_rate == pytest.approx((unsure * apart).mean(), abs=1e-4)  # lemma 3
    # One and the same law, verified or not.
    assert sequential == chow


def test_at_temperature_0_the_share_of_foretold_tokens_is_told(teacher, laws):
    _, target = teacher.force([draft_law, target_law], GREEDY)
    came = np.concatenate([text[N_PROMPT:] for text in TEXTS])
    best = np.concatenate([law.argmax(1) for law in laws[1]])
    assert target.expected_accuracy == pytest.approx((best == came).mean())
    assert target.cross_entropy is None  # some token had no chance
    assert target.excess is None


def test_rules_without_a_law_for_a_place_have_none(teacher):
    assert stated_law(build_rule("sequence-cascade")) is None
    assert stated_law(build_rule("typical")) is None
    assert teacher.force([target_law, None], WARM)[1] is None


def test_bild_leaves_unsure_places_to_the_target(teacher):
    always = stated_law(build_rule("bild(fallback=1, rollback=50)"))
    never = stated_law(build_rule("bild(fallback=0, rollback=50)"))
    target, draft, first, second = teacher.force([target_law, draft_law, always, never], WARM)
    assert first == target
    assert second == draft


def test_a_text_longer_than_a_model_reads_is_refused(tiny_model, tiny_flat_twin):
    with pytest.raises(OptionError, match=r"2000 tokens, and .* reads 1024: give shorter ones"):
        Teacher(tiny_model, tiny_flat_twin, [([1] * 2000, 4)])
