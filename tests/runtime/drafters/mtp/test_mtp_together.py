"""NextN blocks of several conversations: evaluated together, each drafts what it drafts alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.held_engine import answered_together
from support.tiny_models import F32
from support.tiny_nextn import TinyNextN, write_tiny_glm4moe, write_tiny_qwen35

from specrun.bindings.contexts import ContextOptions
from specrun.runtime import SamplingParams
from specrun.runtime.drafters.mtp import SharedNextn
from specrun.runtime.engine import Engine

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
PENALISED = DRAWN.replace(repeat_penalty=1.3, top_k=40)
LONG = [(7 * place + 3) % 90 for place in range(150)]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], LONG, [3, 1, 4, 1, 5], LONG[:100], [2, 7, 1, 8, 2, 8]]
LENGTH = 24
MODELS: dict[str, Callable[[Path], Path]] = {
    "one": TinyNextN(agreement=1.0, strength=0.2, seed=2).write,
    "two": TinyNextN(blocks=2, seed=1).write,
    "windowed": TinyNextN(blocks=2, layers=3, window=12, seed=3).write,
    "glm4moe": write_tiny_glm4moe,
    "qwen35": write_tiny_qwen35,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mtp together")
    return {name: write(folder / f"{name}.gguf") for name, write in MODELS.items()}


def engine_of(path: Path, drafter: str, slots: int, accept: str = "exact") -> Engine:
    # Small batches: a prompt is read in several, and not all slots fit into the same.
    options = ContextOptions(**{**F32, "n_ctx": 1024, "n_batch": 64})
    return Engine(path, drafter, slots=slots, accept=accept, context=options)


def answers(
    path: Path, drafter: str, params: SamplingParams, slots: int, accept: str = "exact"
) -> tuple[list[Sequence[int]], int, float]:
    """The texts, the tokens that drafts gave them, and the conversations an evaluation served."""
    with engine_of(path, drafter, slots, accept) as engine:
        results = answered_together(engine, PROMPTS, params, max_tokens=LENGTH)
        load = engine.statistics().load
    accepted = sum(each.stats.accepted for each in results)
    texts = [each.token_ids for each in results]
    return texts, accepted, load.drafting_texts / max(1, load.draft_evaluations)


@pytest.mark.parametrize(
    ("name", "drafter", "params"),
    [
        ("one", "mtp(n=4)", GREEDY),
        ("one", "mtp(n=4, sampling=with)", PENALISED),
        ("one", "mtp(n=5, p_min=0.1)", PENALISED),
        ("one", "mtp(tree=2x2x1, sampling=without)", PENALISED),
        ("one", "mtp(depth=4, topk=3, nodes=7)", PENALISED),
        ("two", "mtp(tree=3x2)", GREEDY),
        ("windowed", "mtp(n=2, sampling=with)", PENALISED),
        ("glm4moe", "mtp(n=3)", PENALISED),
        ("qwen35", "mtp(n=4)", GREEDY),
        ("qwen35", "mtp(n=3, sampling=with)", PENALISED),
    ],
)
def test_texts_and_drafts_are_those_of_each_alone(
    files: dict[str, Path], name: str, drafter: str, params: SamplingParams
) -> None:
    """Accepted tokens are counted, too: they show that drafts are equal, whatever is verified."""
    texts, accepted, served = answers(files[name], drafter, params, 3)
    alone, accepted_alone, _ = answers(files[name], drafter, params, 1)
    assert texts == alone
    assert accepted == accepted_alone > 0
    assert served > 1.5, "drafts were not evaluated together"


@pytest.mark.parametrize("name", ["two", "glm4moe", "qwen35"])
def test_states_of_another_conversation_would_be_seen(
    files: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: with the first one's states beside all tokens, drafts are others."""
    drafter = "mtp(n=2)"
    _, accepted, _ = answers(files[name], drafter, GREEDY, 3)
    fill = SharedNextn.fill

    def wrong(shared: SharedNextn, parts: Sequence[object]) -> None:
        fill(shared, parts)  # type: ignore[arg-type]
        if len(parts) > 1:
            shared.batch.states[:] = np.roll(shared.batch.states, 1, 0)  # type: ignore[attr-defined]

    monkeypatch.setattr(SharedNextn, "fill", wrong)
    assert answers(files[name], drafter, GREEDY, 3)[1] != accepted


def test_rules_that_read_rows_have_contexts_of_their_own(files: dict[str, Path]) -> None:
    accept = "cascade-opt(alpha=0.3)"
    together, _, served = answers(files["one"], "mtp(n=4)", GREEDY, 3, accept)
    assert together == answers(files["one"], "mtp(n=4)", GREEDY, 1, accept)[0]
    assert served == 0


@pytest.mark.parametrize("name", ["one", "two", "qwen35"])
def test_an_answer_that_ends_in_the_middle_of_a_draft_leaves_nothing(
    files: dict[str, Path], name: str
) -> None:
    with engine_of(files[name], "mtp(n=2)", 3) as engine:
        wanted = engine.generate_many(PROMPTS, DRAWN, max_tokens=LENGTH)
        for _ in range(5):
            endless = [engine.submit(prompt, DRAWN) for prompt in PROMPTS]
            next(endless[0])
            for stream in endless:
                stream.cancel()
        again = engine.generate_many(PROMPTS, DRAWN, max_tokens=LENGTH)
        contexts = [each for each in engine._schedule.shared.meeting.joint if each.asking]
    assert [each.token_ids for each in again] == [each.token_ids for each in wanted]
    assert contexts == []
