"""Several conversations in one evaluation keep the target's law, each its own and independently.

Two conversations are enumerated through the shipped loop to 1e-12: their joint law is the product
of the target's laws. Three are sampled through the engine on a real GGUF; hypothesis, test and
chance of a false alarm are those of `joint_law`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.enumeration import TOLERANCE, proposals
from support.held_engine import held
from support.joint_law import (
    ALPHA,
    REJECTED,
    WHOLE,
    KeepsTooMuch,
    Text,
    model_joint_law,
    p_value,
)
from support.scripted import (
    PLAIN,
    LawTable,
    ScriptedDrafter,
    TableRows,
    TableTarget,
    conversation_of,
)
from support.tiny_nextn import write_tiny_qwen35

from specrun.bench.prove.rules import BranchingNoise, enumerate_law
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.engine import Engine
from specrun.runtime.language import quoted
from specrun.runtime.round import CachedText, Conversation, NoDrafter
from specrun.runtime.round.loop import DecodeSettings, RoundLimits, decode_rounds
from specrun.runtime.trees import DraftTree

pytestmark = pytest.mark.long

PROMPTS = ((0, 1), (2, 0))
LENGTH = 2

# -- two, enumerated -------------------------------------------------------------------------------


class SharedTables(TableTarget):
    """A slot whose evaluations wait until `evaluate_all` was called, as an engine's do."""

    def __init__(self, table: LawTable) -> None:
        super().__init__(table)
        self.asked: tuple[CachedText, DraftTree] | None = None
        self.rows: TableRows | None = None

    def evaluate(self, text: CachedText, tree: DraftTree) -> TableRows | None:  # type: ignore[override]
        if self.rows is None:
            self.asked = text, tree
            return None
        rows, self.rows = self.rows, None
        return rows

    def answer(self) -> None:
        if self.asked is not None:
            self.rows = super().evaluate(*self.asked)
            self.asked = None


def joint_error(name: str, *, mixes_rows: bool = False) -> float:
    """The largest error of any pair of texts' probability."""
    table = LawTable(3, 1)

    def program(noise: BranchingNoise) -> tuple[tuple[int, ...], ...]:
        slots = [SharedTables(table) for _ in PROMPTS]
        conversations: list[Conversation] = []
        rounds = []
        for slot, prompt in zip(slots, PROMPTS, strict=True):
            propose = proposals(3, 0)[name]
            drafter = NoDrafter() if propose is None else ScriptedDrafter(propose)
            conversation = conversation_of(drafter, prompt, noise)
            limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=LENGTH)
            settings = DecodeSettings(ExactRule(), PLAIN, limits)
            rounds.append(decode_rounds(slot, conversation, settings))
            conversations.append(conversation)
        while rounds:
            # Each up to where it waits, then one evaluation, then each takes its rows.
            rounds = [each for each in rounds if next(each, "ended") is None]
            for slot in slots:
                slot.answer()
            waiting = [slot for slot in slots if slot.rows is not None]
            if mixes_rows and len(waiting) == 2:
                slots[0].rows, slots[1].rows = slots[1].rows, slots[0].rows
            for each in rounds:
                assert next(each) is not None
        return tuple(tuple(each.tokens[2:]) for each in conversations)

    found = enumerate_law(program)
    wanted: dict[tuple[Text, ...], float] = {((), ()): 1.0}
    for _ in range(LENGTH):
        wanted = {
            ((*a, x), (*b, y)): probability * p * q
            for (a, b), probability in wanted.items()
            for x, p in enumerate(table([*PROMPTS[0], *a]))
            for y, q in enumerate(table([*PROMPTS[1], *b]))
        }
    return max(abs(found.get(key, 0.0) - wanted.get(key, 0.0)) for key in {*found, *wanted})


@pytest.mark.parametrize("name", ["plain", "chain", "point masses"])
def test_two_conversations_together_keep_the_joint_law(name: str) -> None:
    assert joint_error(name) < TOLERANCE


def test_rows_of_the_other_conversation_are_caught() -> None:
    assert joint_error("plain", mixes_rows=True) > 0.01


# -- three, sampled --------------------------------------------------------------------------------

TALKS = ([3, 1, 4], [1, 5], [9, 2, 6, 5])
SAMPLES = 1000


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("law")
    for name, seed, scale in (("target", 1, 0.6), ("drafter", 2, 0.8)):
        write_random_llama(
            folder / f"{name}.gguf", RandomLlama(vocab_size=10, seed=seed, scale=scale)
        )
    return folder / "target.gguf", folder / "drafter.gguf"


CHOICES: list[dict[str, Any]] = [{}, {"n_max": 1}, {"drafter": ""}]


def counted(engine: Engine) -> list[Counter[Text]]:
    """The texts of each talk, by how often they came, all talks going on at the same time.

    The first two draft together, with one model, the third drafts trees.
    """
    counts: list[Counter[Text]] = [Counter() for _ in TALKS]
    seeds = [WHOLE.replace(seed=seed) for seed in range(SAMPLES)]
    with held(engine):
        streams = [
            (place, engine.submit(prompt, params, max_tokens=2, **CHOICES[place]))
            for params in seeds
            for place, prompt in enumerate(TALKS)
        ]
    for place, stream in streams:
        counts[place][tuple(stream.result.token_ids)] += 1
    return counts


def p_values(pair: tuple[Path, Path], counts: Sequence[Counter[Text]]) -> list[float]:
    return [
        p_value(counts[place], model_joint_law(pair[0], list(prompt), 2, least_entropy=1.8))
        for place, prompt in enumerate(TALKS)
    ]


def test_three_conversations_each_follow_the_targets_joint_law(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tests, each of size ALPHA; a biased rule is rejected in each at the same size."""
    file = quoted(str(pair[1]))
    options: dict[str, Any] = {"slots": 3, "n_ctx": 256, "n_threads": 1}
    tree = f"draft({file}, tree=2x1)"
    monkeypatch.setitem(CHOICES[2], "drafter", tree)
    with Engine(pair[0], f"draft({file}, n=2)", others=[tree], **options) as engine:
        assert min(p_values(pair, counted(engine))) > ALPHA
        load = engine.statistics().load
        assert load.texts_per_evaluation is not None
        assert load.texts_per_evaluation > 2.0
        assert load.drafting_texts > 1.5 * load.draft_evaluations
        for session in engine._schedule.sessions:
            monkeypatch.setattr(session, "rule", KeepsTooMuch())
        assert max(p_values(pair, counted(engine))) < REJECTED


def test_two_conversations_of_a_hybrid_each_follow_the_targets_joint_law(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Drawn chains of the same draft model; two tests of size ALPHA, one of which sees a bias."""
    hybrid = write_tiny_qwen35(tmp_path / "hybrid.gguf", vocab_size=10, scale=0.6)
    drafter, options = f"draft({quoted(str(pair[1]))}, n=2)", {"n_ctx": 512, "n_threads": 1}
    laws = [model_joint_law(hybrid, list(talk), 2, least_entropy=1.8) for talk in TALKS[:2]]

    def found(engine: Engine) -> list[float]:
        seeds = [WHOLE.replace(seed=seed) for seed in range(700)]
        with held(engine):
            streams = [
                engine.submit(talk, params, max_tokens=2) for params in seeds for talk in TALKS[:2]
            ]
        texts = [tuple(stream.result.token_ids) for stream in streams]
        return [p_value(Counter(texts[at::2]), law) for at, law in enumerate(laws)]

    with Engine(hybrid, drafter, slots=2, **options) as engine:  # type: ignore[arg-type]
        assert min(found(engine)) > ALPHA
        load = engine.statistics().load
        assert load.texts_per_evaluation is not None
        assert load.texts_per_evaluation > 1.5
        for session in engine._schedule.sessions:
            session.rule = KeepsTooMuch()
        assert min(found(engine)) < REJECTED
