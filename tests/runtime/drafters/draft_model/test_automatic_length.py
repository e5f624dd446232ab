"""`n=auto` in real drafters: texts stay, seeds give them again, fixed shapes bound it."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.language import quoted
from specrun.runtime.planning import CostCurve

OPTIONS = {"n_ctx": 256, "n_threads": 1}
GREEDY = SamplingParams(temperature=0.0)
CHEAP = CostCurve((1, 32), (1.0, 1.1), (1.0, 1.1))


@pytest.fixture
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafts pay: a tiny drafter is as large as its target."""
    whole = DraftEnvironment.draft_plan
    monkeypatch.setattr(DraftEnvironment, "curve", CHEAP)
    monkeypatch.setattr(
        DraftEnvironment, "draft_plan", lambda self, *_, **named: whole(self, 0.0, **named)
    )


@pytest.mark.usefixtures("cheap_drafts")
@pytest.mark.parametrize(
    "expression", ["draft({})", "draft({}, n=auto, sampling=argmax, p_min=.01)"]
)
def test_texts_stay_whatever_the_lengths(
    tiny_model: Path, tiny_flat_twin: Path, expression: str
) -> None:
    expression = expression.format(quoted(str(tiny_flat_twin)))
    warm = SamplingParams(temperature=0.8, seed=3)
    with (
        Runtime(tiny_model, "none", **OPTIONS) as plain,
        Runtime(tiny_model, drafter=expression, **OPTIONS) as speculative,
    ):
        for params in (GREEDY, *((warm,) if "argmax" in expression else ())):
            wanted = plain.generate("abc", params, max_tokens=40)
            found = speculative.generate("abc", params, max_tokens=40)
            assert found.token_ids == wanted.token_ids
            assert found.stats.drafted > found.stats.rounds
            assert len(found.stats.acceptance_by_position) <= 15


@pytest.mark.usefixtures("cheap_drafts")
def test_a_seed_gives_a_drawn_text_again(tiny_model: Path, tiny_flat_twin: Path) -> None:
    drawn = SamplingParams(temperature=0.8, seed=3)
    expression = f"draft({quoted(str(tiny_flat_twin))})"
    with Runtime(tiny_model, drafter=expression, **OPTIONS) as runtime:
        first = runtime.generate("abc", drawn, max_tokens=40)
        runtime.generate("another", GREEDY, max_tokens=40)
        again = runtime.generate("abc", drawn, max_tokens=40)
    assert first.stats.rule == "exact"
    assert first.stats.drafted > 0
    assert (first.token_ids, first.stats.drafted) == (again.token_ids, again.stats.drafted)


@pytest.mark.usefixtures("cheap_drafts")
@pytest.mark.parametrize("shape", [8, "fixed"])
def test_a_fixed_shape_bounds_the_length(
    tiny_model: Path, tiny_flat_twin: Path, shape: int | str
) -> None:
    expression = f"draft({quoted(str(tiny_flat_twin))})"
    width = 8
    with Runtime(tiny_model, drafter=expression, shape=shape, **OPTIONS) as runtime:
        result = runtime.generate("abc", GREEDY, max_tokens=40)
    assert result.stats.width == width
    assert 0 < len(result.stats.acceptance_by_position) < width
    with (
        pytest.raises(OptionError, match="give a multiple of 4 from 12"),
        Runtime(tiny_model, drafter=expression.replace(")", ", n=9)"), shape=8, **OPTIONS),
    ):
        pass


def test_what_is_evaluated_in_any_case_costs_nothing_more(tiny_model: Path) -> None:
    """In a fixed shape only the drafter's own time speaks against a token; the least of that and
    the batch bound the length."""
    curve = CostCurve((1, 2, 16), (1.0, 1.9, 9.0), (1.0, 1.9, 9.0))
    with Model(tiny_model) as model:

        def drafted(n_batch: int, certainty: float, share: float, **options: object) -> int:
            context = ContextOptions(n_ctx=64, n_batch=n_batch)
            environment = DraftEnvironment(model, context, costs=curve, **options)  # type: ignore[arg-type]
            length, count = environment.draft_plan(share), 0
            length.start(points=True)
            while length.goes_on() and length.takes(certainty):
                count += 1
            return count

        assert drafted(64, 0.5, 1e-4) == 0
        assert drafted(64, 0.9, 1e-4, shape=8) == 7
        assert drafted(64, 0.9, 1e-4, shape="fixed") == 7
        assert drafted(4, 0.9, 1e-4, shape="fixed") == 3
        assert drafted(64, 0.9, 20.0, shape=8) == 0


def test_prompt_lookup_takes_the_word_too(tiny_model: Path) -> None:
    with Runtime(tiny_model, drafter="prompt-lookup(n=auto)", **OPTIONS) as runtime:
        assert runtime.session.drafter.max_nodes == 15
