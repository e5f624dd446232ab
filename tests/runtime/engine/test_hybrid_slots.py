"""Several conversations of models with a recurrent state: each has the states of its own text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.held_engine import answered_together
from support.tiny_hybrids import HYBRIDS
from support.tiny_mamba import write_tiny_mamba
from support.tiny_models import F32, fresh_logits

from specrun.bindings.contexts import Context, ContextOptions
from specrun.bindings.errors import DecodeError
from specrun.bindings.models import Model
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.engine import Engine, SharedEvaluation, SlotClock, slot_options
from specrun.runtime.engine.slots import SlotTarget
from specrun.runtime.planning import CostCurve
from specrun.runtime.trees import DraftTree

N_SLOTS, N_DRAFTED = 4, 4
CURVE = CostCurve((1, 2, 4, 8), (1.0, 1.2, 1.6, 2.4), (1.0, 1.2, 1.6, 2.4))
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)
FAMILIES: dict[str, Callable[[Path], Path]] = {**HYBRIDS, "mamba": write_tiny_mamba}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hybrid slots")
    return {name: write(folder / f"{name}.gguf") for name, write in FAMILIES.items()}


@pytest.fixture(params=[*HYBRIDS])
def shared(request: pytest.FixtureRequest, files: dict[str, Path]) -> Iterator[SharedEvaluation]:
    with Model(files[request.param]) as model:
        own = ContextOptions(
            **{**F32, "n_ctx": 1024}, n_outputs=N_SLOTS * (N_DRAFTED + 1), n_rollback=N_DRAFTED
        )
        with Context(model, slot_options(own, N_SLOTS, can_branch=False)) as context:
            yield SharedEvaluation(context, N_SLOTS, 1024, CURVE, SlotClock())


# -- the state of each is that of its text ---------------------------------------------------------


def departures(shared: SharedEvaluation, turns: int = 32) -> list[float]:
    """The largest differences from fresh logits, in random rounds of random slots together.

    Texts are as long as they come, begin anew, take over others and are cut, between rounds of any
    of the others. Several at once begin anew in any order, so states lie in any order.
    """
    draw, found = random.Random(1), []
    trees: dict[SlotTarget, DraftTree] = {}
    for _ in range(turns):
        if draw.random() < 0.2:
            for slot in {*shared.slots} - {*trees}:
                slot.rewind(slot.text, 0)
        for slot in draw.sample(shared.slots, N_SLOTS):
            text = slot.text
            if slot in trees or draw.random() < 0.2:
                continue
            if draw.random() < 0.2 or not 0 < len(text.tokens) < 100:
                giver = draw.choice(shared.slots)
                if giver is not slot and giver.text.n_cached and draw.random() < 0.5:
                    slot.take_over(giver, giver.text.n_cached)
                prompt = text.tokens[: draw.randrange(60)]
                prompt += [319, *draw.choices(range(1, 300), k=draw.randrange(17, 30))]
                slot.rewind(text, slot.reusable(text, prompt, states=False))
                text.tokens = prompt
                slot.prefill(text, len(prompt) - 1)
            tree = DraftTree.chain(draw.choices(range(300), k=draw.randrange(N_DRAFTED + 1)))
            assert slot.evaluate(text, tree) is None
            trees[slot] = tree
        for slot in shared.evaluate([slot for slot in trees if draw.random() < 0.8]):
            tree, text = trees.pop(slot), slot.text
            rows = slot.evaluate(text, tree)
            assert rows is not None
            tokens = [*text.tokens, *tree.tokens]
            fresh = fresh_logits(shared.context.model, tokens)[len(text.tokens) - 1 :]
            ours = np.stack([rows.logits(row) for row in range(1 + len(tree.tokens))])
            found.append(float(np.abs(ours - fresh).max()))
            slot.commit(text, tree, range(draw.randrange(len(tree.tokens) + 1)))
            text.tokens.append(draw.randrange(300))
    assert len(found) > turns
    return found


def test_the_logits_of_every_conversation_are_fresh_ones(shared: SharedEvaluation) -> None:
    assert max(departures(shared)) < 1e-4


def test_filled_up_to_a_cheaper_width_they_still_are(shared: SharedEvaluation) -> None:
    """Every evaluation has as many tokens as the states can take back, and one for each text."""
    seen = set()

    def widest(n: int, most: int, step: int) -> int:
        seen.add((n // step, most // step))
        return most

    shared._wider = widest
    assert max(departures(shared, 16)) < 1e-4
    assert {wide for _, wide in seen} == {1 + N_DRAFTED}
    assert len(seen) > 2


def departure_of_moved(shared: SharedEvaluation) -> float:
    """The difference after a round in which the state of a slot lies between those of two others.

    The first slot drafts more than the other two, of which llama.cpp could make a part of their
    own; that part would bring their states together.
    """
    slots, prompt = shared.slots, [319, *range(1, 20)]
    trees = [DraftTree.chain(range(40, 40 + n)) for n in (4, 2, 2)]
    for index in (1, 0, 2):
        slots[index].text.tokens = [*prompt, index]
        slots[index].prefill(slots[index].text, len(prompt))
    for slot, tree in zip(slots, trees, strict=False):
        slot.evaluate(slot.text, tree)
    assert len(shared.evaluate(slots[:3])) == 3
    for slot, tree in zip(slots, trees, strict=False):
        slot.evaluate(slot.text, tree)
        slot.commit(slot.text, tree, [0])
    text = slots[0].text
    text.tokens.append(7)
    slots[0].evaluate(text, DraftTree())
    shared.evaluate(slots[:1])
    rows = slots[0].evaluate(text, DraftTree())
    assert rows is not None
    fresh = fresh_logits(shared.context.model, text.tokens)[-1]
    return float(np.abs(rows.logits(0) - fresh).max())


def test_states_that_lie_between_others_stay(shared: SharedEvaluation) -> None:
    assert departure_of_moved(shared) < 1e-4


def test_chains_that_are_not_filled_up_would_be_seen(
    shared: SharedEvaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: chains of different lengths in one batch, as attention allows."""
    monkeypatch.setattr(SlotTarget, "fill_up", lambda *_: None)
    assert departure_of_moved(shared) > 1e-2


# -- texts -----------------------------------------------------------------------------------------


def prompts_of(family: str, n: int = 6) -> list[list[int]]:
    draw = random.Random(4)
    most = 60 if family == "mamba" else 300
    return [draw.choices(range(most), k=draw.randrange(3, 40)) for _ in range(n)]


@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        *((family, "none") for family in FAMILIES),
        *((family, "jacobi(n=3, always=yes)") for family in HYBRIDS),
        ("qwen35", "mtp(n=4)"),
    ],
)
def test_texts_are_those_of_each_alone(files: dict[str, Path], family: str, drafter: str) -> None:
    path, prompts = files[family], prompts_of(family)
    with (
        Runtime(path, "none", **F32) as runtime,
        Engine(path, drafter, slots=3, **{**F32, "n_ctx": 768}) as engine,
    ):
        for params in (GREEDY, WARM):
            alone = [runtime.generate(each, params, max_tokens=12).token_ids for each in prompts]
            found = answered_together(engine, prompts, params, max_tokens=12)
            assert [each.token_ids for each in found] == alone
        load = engine.statistics().load
    assert load.texts_per_evaluation is not None
    assert load.texts_per_evaluation > 1.3, "conversations were not evaluated together"


def test_why_nothing_is_drafted_is_said(files: dict[str, Path]) -> None:
    """mamba's states cannot be taken back, and are held in a context of one conversation only."""
    with Engine(files["mamba"], "jacobi(n=3, always=yes)", slots=2, n_ctx=512) as engine:
        assert "with 2 conversations nothing is drafted" in engine.remark
        assert engine.generate([1, 2, 3], GREEDY, max_tokens=8).stats.drafted == 0
    with Runtime(files["mamba"], "jacobi(n=3, always=yes)", n_ctx=512) as runtime:
        assert runtime.remark == ""
        assert runtime.generate([1, 2, 3], GREEDY, max_tokens=8).stats.drafted > 0


def test_a_prefix_of_another_conversation_is_not_read_again(files: dict[str, Path]) -> None:
    first = [319, *range(1, 60)]
    branches = [[*first, 319, *range(n, n + 20)] for n in (100, 200)]
    long, short = 600, 40  # the first goes on for longer than the second takes
    with (
        Engine(files["qwen35"], "none", slots=2, **{**F32, "n_ctx": 1024}) as engine,
        Runtime(files["qwen35"], "none", **{**F32, "n_ctx": 1024}) as runtime,
    ):
        wanted = [
            runtime.generate(text, GREEDY, max_tokens=length).token_ids
            for text, length in zip(branches, (long, short), strict=True)
        ]
        stream = engine.submit(branches[0], GREEDY, max_tokens=long)
        begun = [next(stream).token_id]
        other = engine.generate(branches[1], GREEDY, max_tokens=short)
        assert [[*begun, *(event.token_id for event in stream)], other.token_ids] == wanted
        assert other.usage.cached_tokens == 60
        assert engine.statistics().load.shared_prompt_tokens == 60


def test_conversations_go_on_after_the_failure_of_another(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed prompt takes all states with it: the others read their texts again."""
    prompts = [*prompts_of("qwen35", 2), [5] * 200]
    with Engine(files["qwen35"], "none", slots=3, **{**F32, "n_ctx": 768}) as engine:
        wanted = [engine.generate(each, GREEDY, max_tokens=40).token_ids for each in prompts[:2]]
        decode = Context.decode

        def failing(context: Context, batch: object) -> object:
            rows = decode(context, batch)  # type: ignore[arg-type]
            if batch.n_tokens > 50:  # type: ignore[attr-defined]
                context._drop_failed(batch)  # type: ignore[arg-type]
                raise DecodeError("no luck", -3)
            return rows

        monkeypatch.setattr(Context, "decode", failing)
        streams = [engine.submit(each, GREEDY, max_tokens=40) for each in prompts]
        assert [stream.result.token_ids for stream in streams[:2]] == wanted
        with pytest.raises(DecodeError, match="no luck"):
            _ = streams[2].result
        assert engine.statistics().load.preempted > 0
