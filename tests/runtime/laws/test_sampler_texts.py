"""Samplers in whole answers: point masses keep plain decoding's text, all drafters run with them.

F32 weights and cache, as in `test_same_text`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.tiny_models import F32

from specrun.bindings.errors import OptionError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.language import quoted
from specrun.runtime.round.backend_laws import candidates_needed

FEW = dict.fromkeys(range(40, 46), 30.0)
"""Texts of six tokens repeat themselves, so that prompt lookup's drafts are kept, and DRY acts."""

OPEN = SamplingParams(temperature=0.9, top_k=0, top_p=1.0, min_p=0.0, seed=3, logit_bias=FEW)
SETTINGS = {
    "typical": OPEN.replace(typical_p=0.7),
    "top-n-sigma": OPEN.replace(top_n_sigma=0.5, samplers="top_n_sigma;temperature"),
    "XTC": OPEN.replace(xtc_probability=0.5, xtc_threshold=0.15),
    "DRY": OPEN.replace(dry_multiplier=1.5, dry_allowed_length=1, repeat_penalty=1.1),
    "mirostat": OPEN.replace(mirostat=2, mirostat_ent=1.5, mirostat_lr=0.3),
    "mirostat 1": OPEN.replace(mirostat=1, mirostat_ent=1.0, mirostat_lr=0.3),
    "dynamic": OPEN.replace(dynatemp_range=0.6),
    "penalties after the temperature": OPEN.replace(
        repeat_penalty=1.6, samplers="temperature;penalties"
    ),
    "DRY, greedy": OPEN.replace(dry_multiplier=1.5, dry_allowed_length=1, temperature=0.0),
}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]
POINTS = [
    "draft(FILE, n=4, sampling=argmax)",
    "prompt-lookup(n=6, min_ngram=1)",
    "cascade(draft(FILE, n=5, sampling=argmax), prompt-lookup(min_ngram=1))",
]
DRAWN = ["draft(FILE, n=4)", "draft(FILE, tree=2x2)", "draft(FILE, depth=3, topk=2, nodes=5)"]


@pytest.fixture(scope="module")
def runtimes(tiny_model: Path, tiny_flat_twin: Path) -> Iterator[dict[str, Runtime]]:
    """A runtime for each drafter."""
    opened: dict[str, Runtime] = {}
    try:
        for drafter in ("none", *POINTS, *DRAWN):
            expression = drafter.replace("FILE", quoted(str(tiny_flat_twin)))
            opened[drafter] = Runtime(tiny_model, drafter=expression, **F32)
        yield opened
    finally:
        for runtime in opened.values():
            runtime.close()


@pytest.mark.parametrize("name", SETTINGS)
def test_point_masses_keep_the_text(runtimes: dict[str, Runtime], name: str) -> None:
    answers = {
        drafter: runtimes[drafter].generate(PROMPT, SETTINGS[name], max_tokens=40)
        for drafter in ("none", *POINTS)
    }
    texts = [answer.token_ids for answer in answers.values()]
    assert texts[1:] == texts[:1] * len(POINTS)
    plainly = OPEN.replace(temperature=SETTINGS[name].temperature)
    without = runtimes["none"].generate(PROMPT, plainly, max_tokens=40)
    assert texts[0] != without.token_ids  # it does something
    assert sum(answer.stats.accepted for answer in answers.values()) > 0


@pytest.mark.parametrize("drafter", DRAWN)
@pytest.mark.parametrize("name", SETTINGS)
def test_drawn_drafts_are_kept_too(runtimes: dict[str, Runtime], drafter: str, name: str) -> None:
    answer = runtimes[drafter].generate(PROMPT, SETTINGS[name], max_tokens=24)
    assert answer.stats.exact
    assert answer.stats.accepted > 0


@pytest.mark.parametrize("drafter", ["none", *POINTS])
def test_penalties_after_temperature_0_leave_the_text(
    runtimes: dict[str, Runtime], drafter: str
) -> None:
    greedy = OPEN.replace(temperature=0.0)
    penalised = greedy.replace(repeat_penalty=1.9, presence_penalty=2.0)
    plain, before, after = (
        runtimes[drafter].generate(PROMPT, params, max_tokens=24).token_ids
        for params in (greedy, penalised, penalised.replace(samplers="temperature;penalties"))
    )
    assert after == plain != before


def test_the_same_answer_again_starts_afresh(runtimes: dict[str, Runtime]) -> None:
    """Mirostat's mu and DRY's window are the answer's, not the session's."""
    for name in ("mirostat", "DRY"):
        again = [
            runtimes["none"].generate(PROMPT, SETTINGS[name], max_tokens=20).token_ids
            for _ in range(2)
        ]
        assert again[0] == again[1]


def test_mirostat_needs_an_exact_rule(tiny_model: Path) -> None:
    drafter = "prompt-lookup(min_ngram=1)"
    with Runtime(tiny_model, drafter=drafter, accept="typical", **F32) as runtime:
        with pytest.raises(OptionError, match=r"^mirostat needs .* typical.* is not exact"):
            runtime.generate(PROMPT, SETTINGS["mirostat"], max_tokens=4)
        greedy = SETTINGS["mirostat"].replace(temperature=0.0)
        assert runtime.generate(PROMPT, greedy, max_tokens=4).token_ids


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_are_whole_where_the_best_logits_do_not_say_the_law(name: str) -> None:
    """The quick ways are off where they would not be the law, and on again where they are."""
    params = SETTINGS[name].replace(logit_bias={}, top_k=20)
    assert candidates_needed(params, 320) is None
    assert not params.is_plain
    usual = params.replace(samplers="top_k;top_p;temperature", mirostat=0, dynatemp_range=0.0)
    assert usual.effective().is_plain
    assert candidates_needed(usual.effective(), 320) is not None
