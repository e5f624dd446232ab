"""Recurrent and hybrid models go on from kept states: less is read, and no text changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.tiny_hybrids import HYBRIDS
from support.tiny_mamba import write_tiny_mamba
from support.tiny_models import F32, fresh_logits

from specrun.bindings.contexts import Checkpoints, Context, ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models import Model
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.round import CachedText, TargetModel, checkpoint_places
from specrun.runtime.trees import DraftTree

GREEDY = SamplingParams(temperature=0.0)
FAMILIES = {**HYBRIDS, "mamba": write_tiny_mamba}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: write(folder / f"{name}.gguf") for name, write in FAMILIES.items()}


class Chats:
    """Messages of random tokens behind a control token, as a chat template writes them."""

    def __init__(self, runtime: Runtime) -> None:
        self._random = random.Random(3)
        vocabulary = runtime.vocabulary
        tokens = range(vocabulary.size)
        self.control = next(token for token in reversed(tokens) if vocabulary.is_control(token))
        self._words = [token for token in tokens if not vocabulary.is_control(token)]

    def message(self, length: int) -> list[int]:
        return [self.control, *self._random.choices(self._words, k=length - 1)]


@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        *((family, "none") for family in FAMILIES),
        ("qwen35", "mtp(n=4)"),
        ("qwen35", "prompt-lookup(branches=1, always=yes)"),
        ("lfm2", "jacobi(n=3, always=yes)"),
    ],
)
def test_what_a_chat_reads(files: dict[str, Path], family: str, drafter: str) -> None:
    """By turn: the tokens read, and the text of a runtime that keeps no checkpoints."""
    path = files[family]
    with (
        Runtime(path, drafter=drafter, **F32) as runtime,
        Runtime(path, drafter=drafter, checkpoint_memory=0, **F32) as other,
    ):
        chats = Chats(runtime)
        opening = [*chats.message(60), *chats.message(50), *chats.message(40)]
        first = [*opening, *chats.message(4)]

        def read(prompt: list[int]) -> tuple[list[int], int]:
            answer = runtime.generate(prompt, GREEDY, max_tokens=8)
            assert answer.token_ids == other.generate(prompt, GREEDY, max_tokens=8).token_ids
            return answer.token_ids, len(prompt) - answer.usage.cached_tokens

        said, n_read = read(first)
        assert n_read == len(first)
        assert read(first) == (said, 4)  # said once more
        following = [*first, *said, *chats.message(10)]
        assert read(following)[1] == 11  # what is new, and the last token that was said
        thought_left_out = [*first, *said[4:], *chats.message(10)]
        assert read(thought_left_out)[1] == len(thought_left_out) - len(opening)
        edited = [*opening[:100], *chats.message(30)]
        assert read(edited)[1] == len(edited) - 60


def test_the_next_turn_of_a_long_chat_reads_less_than_a_twentieth(files: dict[str, Path]) -> None:
    with Runtime(files["qwen35"], drafter="mtp", **{**F32, "n_ctx": 512}) as runtime:
        chats = Chats(runtime)
        first = [*chats.message(400), *chats.message(3)]
        said = runtime.generate(first, GREEDY, max_tokens=10).token_ids
        # A template that leaves out what was thought: the text departs where the answer began.
        following = [*first, *said[7:], *chats.message(9)]
        again = runtime.generate(following, GREEDY, max_tokens=2).usage
        assert again.prompt_tokens - again.cached_tokens < 0.05 * len(first)


# -- the state is that of the text -----------------------------------------------------------------


@pytest.fixture(params=[*HYBRIDS, "qwen35, held", "nemotron_h, held"])
def target(
    request: pytest.FixtureRequest, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[TargetModel]:
    """Of hybrids whose states llama.cpp keeps, or, as those of others, holds for a round."""
    family, _, held = request.param.partition(", ")
    if held:
        monkeypatch.setattr("specrun.bindings.models.model.ROLLBACK_ARCHITECTURES", ())
    options = ContextOptions(**F32, n_outputs=5, n_rollback=4)
    with Model(files[family]) as model, Context(model, options) as context:
        assert (context.memory.spare is not None) == bool(held)
        yield TargetModel(context)


def departures(target: TargetModel, seed: int = 0) -> list[float]:
    """The largest differences from fresh logits, in random rounds of texts cut at random."""
    random_ = random.Random(seed)
    text, found = CachedText(), []
    for _ in range(12):
        prompt = text.tokens[: random_.randrange(len(text.tokens) + 1)]
        prompt += [319, *random_.choices(range(1, 300), k=random_.randrange(18, 40))]
        target.rewind(text, target.reusable(text, prompt, states=random_.random() < 0.5))
        text.tokens = prompt
        target.prefill(text, len(prompt) - 1)
        for _ in range(random_.randrange(1, 6)):
            tree = DraftTree.chain(random_.choices(range(300), k=random_.randrange(5)))
            rows = target.evaluate(text, tree)
            last = len(text.tokens) - 1
            fresh = fresh_logits(target.context.model, [*text.tokens, *tree.tokens])[last:]
            ours = np.stack([rows.logits(row) for row in range(len(fresh))])
            found.append(float(np.abs(ours - fresh).max()))
            target.commit(text, tree, range(random_.randrange(len(tree.tokens) + 1)))
            text.tokens.append(random_.randrange(300))
        if len(text.tokens) > 180:
            target.rewind(text, 0)
    return found


def test_the_logits_after_any_return_are_fresh_ones(target: TargetModel) -> None:
    assert max(departures(target)) < 1e-4


def test_a_checkpoint_of_what_was_cut_is_seen(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: checkpoints stay though their text was cut."""
    monkeypatch.setattr(Checkpoints, "forget", lambda *_: None)
    assert max(departures(target)) > 1e-2


def test_a_round_that_holds_nothing_is_seen(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: rounds return to a state that was held before."""
    monkeypatch.setattr("specrun.bindings.models.model.ROLLBACK_ARCHITECTURES", ())
    options = ContextOptions(**F32, n_outputs=5, n_rollback=4)
    with Model(files["qwen35"]) as model, Context(model, options) as context:
        hold, held = context.memory.hold, list[int]()

        def once() -> None:
            held.append(1)
            if len(held) < 3:
                hold()

        monkeypatch.setattr(context.memory, "hold", once)
        assert max(departures(TargetModel(context))) > 1e-2


# -- their memory ----------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first(target: TargetModel) -> None:
    kept = target.context.memory.checkpoints
    assert kept is not None
    target.prefill(CachedText([1] * 40), 20)
    assert kept.lengths() == [20]
    kept.budget = 3 * kept.n_bytes
    for length in (5, 6):
        kept.take(0, length)
    assert kept.place(0, 20)
    kept.take(0, 7)
    assert kept.lengths() == [6, 7, 20]
    kept.take(0, 6)
    kept.take(0, 8)
    assert kept.lengths() == [6, 7, 8]
    assert kept.n_bytes == kept.budget
    kept.budget = 1  # room for none: nothing more is kept, and nothing fails
    kept.take(0, 9)
    assert 9 not in kept.lengths()


@pytest.mark.parametrize("budget", [-1, 2**60])
def test_a_budget_that_is_none(files: dict[str, Path], budget: int) -> None:
    with pytest.raises(OptionError, match=f"checkpoint_memory is {budget}: give bytes"):
        Runtime(files["qwen35"], checkpoint_memory=budget, **F32)


def test_where_states_are_kept() -> None:
    """Before messages, not twice within 16 tokens, every 2,048 tokens, and at the end."""
    assert checkpoint_places([0, 50, 52, 55, 120], 0, 124) == {50, 120}
    assert checkpoint_places([], 0, 30) == {30}
    assert checkpoint_places([], 100, 110) == {110}
    assert checkpoint_places([4100], 0, 4400) == {2048, 4096, 4100, 4400}
    assert checkpoint_places([], 7, 7) == frozenset()
