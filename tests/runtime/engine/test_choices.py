"""Choices of a request: its drafter, its rule and how much is drafted, others answering beside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.every_drafter import named
from support.tiny_models import F32

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.engine import Engine

WHOLE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
GREEDY = SamplingParams(temperature=0.0)
CONTEXT = ContextOptions(**{**F32, "n_ctx": 512})
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8]]
LENGTH = 24
OWN, TREE = "draft(FILE:twin, n=4)", "draft(FILE:twin, tree=2x2)"
OTHERS = [TREE, "prompt-lookup(min_ngram=1)", "medusa(FILE:medusa, tree=3x2x1)", "lookahead"]
LOSSY = "cascade-opt(alpha=0.3)"


@pytest.fixture(scope="module")
def engine(files: dict[str, Path]) -> Iterator[Engine]:
    others = [named(each, files) for each in OTHERS]
    own = named(OWN, files)
    with Engine(
        files["shallow"], own, slots=3, others=others, rules=[LOSSY], context=CONTEXT
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(files: dict[str, Path]) -> list[list[int]]:
    with Runtime(files["shallow"], "none", context=CONTEXT) as runtime:
        return [runtime.generate(each, GREEDY, max_tokens=LENGTH).token_ids for each in PROMPTS]


def test_each_request_is_drafted_as_it_chose(engine: Engine, plain: list[list[int]]) -> None:
    """All drafters in one evaluation, and slots that change theirs from answer to answer."""
    chosen = ["none", *engine.drafters] * 2
    chosen += chosen[::-1]
    streams = [
        engine.submit(PROMPTS[place % 3], GREEDY, max_tokens=LENGTH, drafter=drafter)
        for place, drafter in enumerate(chosen)
    ]
    for place, (stream, drafter) in enumerate(zip(streams, chosen, strict=True)):
        result = stream.result
        assert result.token_ids == plain[place % 3], drafter
        assert result.stats.drafter == drafter
        if ".gguf" in drafter or drafter == "none":  # others may find that they do not pay
            assert bool(result.stats.drafted) == (drafter != "none")


def test_drawn_drafts_are_those_of_the_request_alone(
    engine: Engine, files: dict[str, Path]
) -> None:
    """Drawn drafts are part of which text comes of a seed: another choice, another text."""
    params, tree = WHOLE.replace(seed=3), named(TREE, files)
    choices = [(named(OWN, files), None), (tree, None), (tree, 1), ("none", None)]
    beside = [engine.submit(PROMPTS[2], WHOLE, max_tokens=60) for _ in range(2)]
    texts = []
    for drafter, n_max in choices:
        stream = engine.submit(PROMPTS[0], params, max_tokens=60, drafter=drafter, n_max=n_max)
        with Engine(files["shallow"], drafter, slots=1, context=CONTEXT) as alone:
            wanted = alone.submit(PROMPTS[0], params, max_tokens=60, n_max=n_max).result
        assert stream.result.token_ids == wanted.token_ids
        texts.append(wanted.token_ids)
    assert all(each.result for each in beside)
    assert texts[0] != texts[1] != texts[2] != texts[3], "a choice that changes nothing"


@pytest.mark.parametrize("drafter", [OWN, TREE, *OTHERS])
@pytest.mark.parametrize("n_max", [0, 1, 2])
def test_no_round_drafts_more_than_was_asked_for(
    engine: Engine, files: dict[str, Path], plain: list[list[int]], drafter: str, n_max: int
) -> None:
    named_drafter = named(drafter, files)
    results = engine.generate_many(
        PROMPTS, GREEDY, max_tokens=LENGTH, drafter=named_drafter, n_max=n_max
    )
    assert [each.token_ids for each in results] == plain
    for each in results:
        evaluated = each.stats.drafted + each.stats.non_candidates
        assert evaluated <= n_max * each.stats.rounds
        assert len(each.stats.acceptance_by_position) <= n_max


def test_without_a_limit_more_is_drafted(engine: Engine) -> None:
    stats = engine.submit(PROMPTS[0], GREEDY, max_tokens=LENGTH).result.stats
    assert stats.drafted > 2 * stats.rounds


@pytest.mark.parametrize("accept", [None, "exact", "block", "kseq", LOSSY, "cascade-opt(alpha=0)"])
def test_rules_are_those_that_requests_name(
    engine: Engine, files: dict[str, Path], accept: str | None
) -> None:
    params = WHOLE.replace(seed=7)
    beside = [engine.submit(PROMPTS[1], WHOLE, max_tokens=60) for _ in range(2)]
    result = engine.submit(PROMPTS[0], params, max_tokens=40, accept=accept).result
    own = named(OWN, files)
    with Runtime(files["shallow"], own, accept=accept or "exact", context=CONTEXT) as runtime:
        wanted = runtime.generate(PROMPTS[0], params, max_tokens=40)
    assert result.token_ids == wanted.token_ids
    assert (result.stats.rule, result.stats.exact) == (wanted.stats.rule, wanted.stats.exact)
    assert all(each.result.stats.exact for each in beside)


def test_a_lossy_rule_has_drafters_that_read_no_clock(
    engine: Engine, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text whatever evaluations are believed to take."""
    wanted = engine.submit(PROMPTS[0], WHOLE.replace(seed=2), max_tokens=40, accept=LOSSY).result
    times = iter(range(1, 10**9, 977))
    monkeypatch.setattr(type(engine._schedule.shared.clock), "__call__", lambda _: next(times))
    streams = [
        engine.submit(PROMPTS[0], WHOLE.replace(seed=2), max_tokens=40, accept=LOSSY)
        for _ in range(3)
    ]
    assert {(*each.result.token_ids,) for each in streams} == {(*wanted.token_ids,)}
    drafters = [each for each in engine._choices.slots[0].started if not each.kind.exact]
    assert len(drafters) == len(engine.drafters)
    made = [engine._choices.slots[0].started[key] for key in drafters]
    assert not any(hasattr(each, "_clock") for each in made)


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        ({"drafter": "ngram(order=2)"}, r"ngram\(order=2\) is none of the engine's: it has draft"),
        ({"drafter": "draft"}, "draft is none of the engine's"),
        ({"drafter": "prompt-lookup(min_ngram=2)"}, "none of the engine's"),
        ({"drafter": "prompt-lookup("}, "drafter 'prompt-lookup"),
        ({"n_max": -1}, "n_max is -1"),
        ({"n_max": 1.5}, "n_max is 1.5"),
        ({"n_max": True}, "n_max is True"),
        ({"accept": "typical"}, r"typical.* is not exact, and the engine was not opened"),
        ({"accept": "nonsense"}, "nonsense"),
        ({"accept": "token-cascade(alpha=0.5)"}, "give slots=1"),
        ({"accept": LOSSY, "drafter": "prompt-lookup"}, "weighs the drafter's distributions"),
    ],
)
def test_what_cannot_be_chosen_is_said_at_once(
    engine: Engine, chosen: dict[str, object], problem: str
) -> None:
    before = engine.statistics().queued
    with pytest.raises(OptionError, match=problem):
        engine.submit(PROMPTS[0], WHOLE, **chosen)  # type: ignore[arg-type]
    assert engine.statistics().queued == before


def test_a_method_that_only_one_drafter_has_is_named_by_it(engine: Engine) -> None:
    stats = engine.submit(PROMPTS[0], GREEDY, max_tokens=4, drafter="medusa").result.stats
    assert stats.drafter == engine.drafters[4]
    assert stats.drafter.startswith("medusa(")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"others": ["pass(FILE:pass, n=2)"]}, "pass.* give slots=1"),
        ({"others": ["nonsense"]}, "nonsense"),
        ({"rules": ["token-cascade(alpha=0.5)"]}, "give slots=1"),
        ({"accept": LOSSY}, "weighs the drafter's distributions"),
    ],
)
def test_what_an_engine_cannot_offer_is_said(
    files: dict[str, Path], options: dict[str, object], problem: str
) -> None:
    if isinstance(options.get("others"), list):
        options = {"others": [named(each, files) for each in options["others"]]}  # type: ignore
    with pytest.raises(OptionError, match=problem):
        Engine(files["shallow"], "prompt-lookup", slots=2, context=CONTEXT, **options)
