"""Log-probabilities of the most likely tokens: under speculation they are plain decoding's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.every_drafter import named
from support.tiny_models import F32

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.engine import Engine
from specrun.runtime.laws.transform import highest_tokens
from specrun.runtime.round import TokenEvent
from specrun.runtime.round.loop import Round

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.7, top_k=20, seed=4)
CONTEXT = ContextOptions(**{**F32, "n_ctx": 512})
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8]]
LENGTH, TOP = 24, 5
DRAFTERS = ["none", "draft(FILE:twin, n=4)", "draft(FILE:twin, tree=2x2)"]

Told = list[tuple[int, float, list[tuple[int, float]]]]


def told(events: list[TokenEvent]) -> Told:
    return [(event.token_id, event.logprob, event.top_logprobs()) for event in events]


def answers(target: Path, drafter: str, params: SamplingParams) -> list[Told]:
    """What a runtime tells of all its tokens, each read while the next one is made."""
    with Runtime(target, drafter, context=CONTEXT) as runtime:
        return [
            told([*runtime.stream(prompt, params, max_tokens=LENGTH, top_logprobs=TOP)])
            for prompt in PROMPTS
        ]


def require_same(got: list[Told], wanted: list[Told]) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        assert [token for token, _, _ in ours] == [token for token, _, _ in theirs]
        for (_, value, best), (_, plain_value, plain_best) in zip(ours, theirs, strict=True):
            assert value == pytest.approx(plain_value, abs=1e-5)
            assert [token for token, _ in best] == [token for token, _ in plain_best]
            values, plain_values = ([each for _, each in row] for row in (best, plain_best))
            assert values == pytest.approx(plain_values, abs=1e-5)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_runtime_tells_those_of_plain_decoding(files: dict[str, Path], drafter: str) -> None:
    plain = answers(files["shallow"], "none", GREEDY)
    require_same(answers(files["shallow"], named(drafter, files), GREEDY), plain)
    # At temperature 0 each token is the first of its most likely ones.
    assert all(token == best[0][0] and value == best[0][1] for token, value, best in plain[0])
    assert all(len(best) == TOP for _, _, best in plain[0])
    assert all(
        values == sorted(values)[::-1] for _, _, best in plain[0] for values in [best_of(best)]
    )


def best_of(best: list[tuple[int, float]]) -> list[float]:
    return [value for _, value in best]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_an_engine_tells_those_of_plain_decoding(files: dict[str, Path], drafter: str) -> None:
    plain = answers(files["shallow"], "none", GREEDY)
    with Engine(files["shallow"], named(drafter, files), slots=3, context=CONTEXT) as engine:
        streams = [
            engine.submit(prompt, GREEDY, max_tokens=LENGTH, top_logprobs=TOP) for prompt in PROMPTS
        ]
        for stream in streams:
            assert stream.result.token_ids  # all are over before anything is read
        require_same([told([*stream]) for stream in streams], plain)


def test_they_are_of_the_law_before_any_transformation(files: dict[str, Path]) -> None:
    with Runtime(files["shallow"], "none", context=CONTEXT) as runtime:
        stream = runtime.stream(PROMPTS[0], WARM, max_tokens=1, top_logprobs=320)
        event = next(stream)
        assert event._decided_by is not None
        row = event._decided_by.logits_of(0).astype(np.float64)
        best = event.top_logprobs()
    law = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    assert [token for token, _ in best] == np.argsort(-law, kind="stable").tolist()
    assert sum(np.exp(value) for _, value in best) == pytest.approx(1.0)
    assert best_of(best) == pytest.approx(np.log(np.sort(law)[::-1]).tolist(), abs=1e-5)


def test_those_of_another_place_would_be_seen(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = answers(files["shallow"], "none", GREEDY)
    monkeypatch.setattr(Round, "logits_of", lambda self, index: self.rows.logits(0))
    with pytest.raises(AssertionError):
        require_same(answers(files["shallow"], named(DRAFTERS[1], files), GREEDY), plain)


def test_of_equal_logits_the_lower_tokens_come_first() -> None:
    row = np.array([1.0, 3.0, 2.0, 3.0, 2.0, 2.0], np.float32)
    assert highest_tokens(row, 4) == [1, 3, 2, 4]
    assert highest_tokens(row, 0) == []
    assert highest_tokens(row, 9) == [1, 3, 2, 4, 5, 0]


def test_more_than_was_asked_for_is_an_error(files: dict[str, Path]) -> None:
    with Runtime(files["shallow"], "none", context=CONTEXT) as runtime:
        event = next(runtime.stream(PROMPTS[0], GREEDY, max_tokens=1, top_logprobs=2))
        assert len(event.top_logprobs(1)) == 1
        with pytest.raises(OptionError, match="top_logprobs is 3: the answer was asked for with 2"):
            event.top_logprobs(3)
        with pytest.raises(OptionError, match="top_logprobs is -1: give how many"):
            runtime.stream(PROMPTS[0], GREEDY, top_logprobs=-1)
    with Engine(files["shallow"], "none", slots=1, context=CONTEXT) as engine:
        with pytest.raises(OptionError, match=r"top_logprobs is 1\.5: give how many"):
            engine.submit(PROMPTS[0], GREEDY, top_logprobs=1.5)  # type: ignore[arg-type]
        event = next(engine.submit(PROMPTS[0], GREEDY, max_tokens=1))
        with pytest.raises(OptionError, match="no log-probability"):
            event.top_logprobs()
