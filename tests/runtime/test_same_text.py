"""Invariant 3: plain decoding's own text, at temperature 0 for every drafter, and at any
temperature for drafters of point masses. F32 weights and cache, where batches round like single
tokens to 1e-5; the models' logit margins are far larger.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.every_drafter import DRAFTERS, named
from support.tiny_models import F32, fresh_logits

from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import DraftTree

LENGTH = 40
PENALTIES = {"repeat_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
GREEDY = SamplingParams(temperature=0.0)
FEW = dict.fromkeys(range(40, 46), 30.0)
"""Texts of six tokens repeat themselves, so that retrieved drafts are kept, and prove something."""
WHOLE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
SETTINGS = {
    "greedy": GREEDY,
    "greedy, penalties": GREEDY.replace(**PENALTIES),
    "few": WHOLE.replace(temperature=1.5, logit_bias=FEW, **PENALTIES),
    "whole": WHOLE,
    "usual": SamplingParams(seed=7),
}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5, 9, 2, 6, 8, 7]
LONG = [number % 300 for number in range(230)]

POINTS = [
    "draft(FILE:twin, n=4, sampling=argmax)",
    "draft(FILE:twin, tree=4x2x2, sampling=argmax)",
    "draft(FILE:twin, tree=sequoia, nodes=12, sampling=argmax)",
    "partial(sink=2, window=6, chunks=2, chunk=3, n=4, sampling=argmax)",
    "prompt-lookup",
    "prompt-lookup(n=8, min_ngram=1, nodes=8)",
    "ngram(order=3, n=3, file=FILE:text, sampling=argmax)",
    "ngram(n=2, sampling=argmax, p_min=0.3)",
    "lookahead",
    "lookahead(window=7, ngram=3, guesses=7, text=no)",
    "lookahead(window=1, ngram=2, guesses=1)",
    "lookahead(window=0, guesses=4)",
    "lookahead(window=4)",
    "jacobi(n=8)",
    "ensemble(draft(FILE:twin, tree=2x2, sampling=argmax), prompt-lookup)",
    "ensemble(lookahead(window=3, ngram=3, guesses=3), prompt-lookup)",
    "ensemble(rest(FILE:store, min_match=1), prompt-lookup(min_ngram=1))",
    "cascade(draft(FILE:twin, n=5, sampling=argmax), jacobi(n=3))",
    "cascade(draft(FILE:twin, n=6, sampling=argmax, p_min=0.1), draft(FILE:small, tree=2x2))",
    "cascade(draft(FILE:twin, sampling=argmax), cascade(draft(FILE:small, n=3), prompt-lookup))",
    "cascade(partial(sink=3, window=9, n=6, sampling=argmax), draft(FILE:twin, tree=2x1))",
    "ouroboros(draft(FILE:twin, n=3, sampling=argmax), phrases=4, length=3)",
    "relay(draft(FILE:twin, n=2, sampling=argmax), lookahead(window=3, ngram=3, guesses=2))",
    "relay(ouroboros(draft(FILE:twin, n=2, sampling=argmax)), prompt-lookup(min_ngram=1)@2)",
    "relay(prompt-lookup(min_ngram=1)@2, draft(FILE:twin, sampling=argmax)@3)",
    "relay(partial(sink=2, window=6, sampling=argmax)@2, prompt-lookup(min_ngram=1)@2)",
    "relay(draft(FILE:twin, depth=3, topk=3, nodes=8), draft(FILE:small, sampling=argmax)@2)",
]
"""More drafters of point masses than those of `DRAFTERS`, in many combinations."""
DRAWN = [
    "draft(FILE:twin, n=5, p_min=0.3)",
    "draft(FILE:twin, n=6, p_min=adaptive(start=0.4, step=0.5))",
    "draft(FILE:twin, tree=3x1x1, sampling=with)",
    'draft(FILE:twin, tree="0 1 00 01 000")',
    "partial(sink=0, window=9, tree=2x2)",
    "cascade(draft(FILE:twin, n=8, p_min=0.2), prompt-lookup(min_ngram=1), rounds=3)",
    "cascade(draft(FILE:twin, n=5), lookahead(window=3, ngram=3, guesses=2))",
    "cascade(partial(sink=2, window=6, n=4), draft(FILE:twin, n=2))",
    "relay(draft(FILE:twin, tree=2x2), prompt-lookup(min_ngram=1))",
    "ensemble(cascade(draft(FILE:twin), draft(FILE:small)), relay(draft(FILE:twin)@1, jacobi))",
]
"""More of those that draw."""
ALL = [*DRAFTERS, *(("shallow", drafter) for drafter in (*POINTS, *DRAWN))]

Texts = dict[str, list[int]]


@pytest.fixture(scope="module")
def plain(files: dict[str, Path]) -> Callable[[str], Texts]:
    """Plain decoding's texts, by target and settings."""

    @functools.cache
    def of(target: str) -> Texts:
        return texts(files, target, "none")[0]

    return of


def texts(files: dict[str, Path], target: str, drafter: str) -> tuple[Texts, int]:
    """The texts of a drafter after an abandoned one, without those in which it drew; and how many
    drafts were accepted. The target's cache is then that of a fresh evaluation."""
    found, accepted, drew = Texts(), 0, [False]
    with Runtime(files[target], named(drafter, files), **F32) as runtime:
        propose = runtime.session.drafter.propose

        def noted(request: DraftRequest) -> DraftTree:
            tree = propose(request)
            draws = (draw for below in (tree.draws or {}).values() for draw in below)
            drew[0] |= any(draw.law is not None for draw in draws)
            return tree

        runtime.session.drafter.propose = noted  # type: ignore[method-assign]
        stream = runtime.stream(PROMPT[:7], GREEDY, max_tokens=30)
        for _, _ in zip(stream, range(7), strict=False):
            pass
        stream.close()
        for name, params in SETTINGS.items():
            drew[0] = False
            result = runtime.generate(PROMPT, params, max_tokens=LENGTH)
            assert len(result.token_ids) == LENGTH or result.finish_reason == "stop"
            accepted += result.stats.accepted
            if params.is_greedy or not drew[0]:
                found[name] = result.token_ids
        session, text = runtime.session, runtime.session.conversation
        text.tokens += [7] * (text.n_cached == len(text.tokens))  # an end token was the last
        row = session.target.evaluate(text, DraftTree()).logits(0)
        wanted = fresh_logits(runtime.model, text.tokens)[-1]
        np.testing.assert_allclose(row, wanted, atol=1e-4)
        last = runtime.generate(LONG, GREEDY)
        assert last.finish_reason in ("length", "stop")
        found["to the end of the context"] = last.token_ids
    return found, accepted


@pytest.mark.parametrize(("target", "drafter"), ALL)
def test_the_text_is_plain_decodings(
    files: dict[str, Path], plain: Callable[[str], Texts], target: str, drafter: str
) -> None:
    """Greedily for all; as drawn for all that draft point masses, with penalties that look at a
    draft's own path."""
    found, accepted = texts(files, target, drafter)
    assert found == {name: plain(target)[name] for name in found}
    if drafter in POINTS:
        assert len(found) == len(SETTINGS) + 1
    if drafter in POINTS or ("twin" in drafter and "auto" not in drafter):
        assert accepted  # drafts that are never kept would prove nothing


def test_sampled_drafts_do_not_keep_the_text(files: dict[str, Path]) -> None:
    """Negative control: the equality above is a property of point masses, not of this model."""
    params = WHOLE.replace(temperature=1.5)
    found = []
    for drafter in ("none", "draft(FILE:twin, n=5)"):
        with Runtime(files["shallow"], named(drafter, files), **F32) as runtime:
            found.append(runtime.generate(PROMPT, params, max_tokens=LENGTH).token_ids)
    assert found[0] != found[1]


def test_the_same_seed_gives_the_same_text_and_another_seed_another(
    files: dict[str, Path],
) -> None:
    params, found = SamplingParams(temperature=1.0, seed=11), []
    for seed in (11, 11, 12):
        with Runtime(files["shallow"], named("draft(FILE:twin, n=5)", files), **F32) as runtime:
            result = runtime.generate(PROMPT, params.replace(seed=seed), max_tokens=LENGTH)
            found.append(result.token_ids)
    assert found[0] == found[1] != found[2]


def test_a_confidence_stop_shortens_greedy_drafts_too(files: dict[str, Path]) -> None:
    """At temperature 0 the law is a point mass: the confidence must be read from the law before
    it."""
    drafted = []
    for p_min in (0.0, 0.5, 1.0):
        expression = named(f"draft(FILE:twin, n=5, p_min={p_min})", files)
        with Runtime(files["shallow"], expression, **F32) as runtime:
            drafted.append(runtime.generate([3, 1, 4], GREEDY, max_tokens=24).stats.drafted)
    assert drafted[0] > drafted[1] >= drafted[2] == 0
