"""Invariant 1 end to end: on a real GGUF, the sampled texts follow the target's joint law.

The joint law of three tokens is computed exactly from the model's own logits. Hypothesis, test and
its chance of a false alarm are `joint_law`'s, with 1,500 texts for each drafter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.joint_law import (
    ALPHA,
    REJECTED,
    WHOLE,
    KeepsTooMuch,
    Text,
    model_joint_law,
    p_value,
    sampled_texts,
)

from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.language import quoted
from specrun.runtime.trees import DraftTree

pytestmark = pytest.mark.long

VOCABULARY = 12
PROMPT = [3, 1, 4]
LENGTH = 3
SAMPLES = 1500
CUT = WHOLE.replace(top_k=VOCABULARY - 1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("law")
    # Random laws that differ clearly between target and drafter, at more than two nats of entropy.
    write_random_llama(
        folder / "target.gguf", RandomLlama(vocab_size=VOCABULARY, seed=1, scale=0.6)
    )
    write_random_llama(
        folder / "drafter.gguf", RandomLlama(vocab_size=VOCABULARY, seed=2, scale=0.8)
    )
    return folder / "target.gguf", folder / "drafter.gguf"


@pytest.fixture(scope="module")
def joint(pair: tuple[Path, Path]) -> dict[Text, float]:
    return model_joint_law(pair[0], PROMPT, LENGTH, least_entropy=2.0)


@pytest.mark.parametrize(
    "drafter",
    [
        "none",
        "draft(FILE, n=3)",
        "draft(FILE, n=3, sampling=argmax)",
        "draft(FILE, tree=2x2)",
        "draft(FILE, tree=3x1, sampling=with)",
    ],
)
def test_texts_follow_the_targets_joint_law(
    pair: tuple[Path, Path], joint: dict[Text, float], drafter: str
) -> None:
    expression = drafter.replace("FILE", quoted(str(pair[1])))
    with Runtime(pair[0], drafter=expression, n_ctx=256, n_threads=1) as runtime:
        assert p_value(sampled_texts(runtime, PROMPT, LENGTH, SAMPLES), joint) > ALPHA


@pytest.mark.parametrize("options", ["n=3", "tree=2x1"])
def test_texts_of_plain_draws_follow_the_joint_law(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    """By settings that leave one token out, from rows and cuts alone."""
    drafts: list[DraftTree] = []
    draft = GrowingDrafter._plain_draft
    noted = lambda *args: drafts.append(draft(*args)) or drafts[-1]  # noqa: E731
    monkeypatch.setattr(GrowingDrafter, "_plain_draft", noted)
    law = model_joint_law(pair[0], PROMPT, LENGTH, params=CUT)
    drafter = f"draft({quoted(str(pair[1]))}, {options})"
    with Runtime(pair[0], drafter=drafter, n_ctx=256, n_threads=1) as runtime:
        assert p_value(sampled_texts(runtime, PROMPT, LENGTH, SAMPLES, CUT), law) > ALPHA
        assert len(drafts) > SAMPLES / 2
        runtime.session.rule = KeepsTooMuch()
        assert p_value(sampled_texts(runtime, PROMPT, LENGTH, SAMPLES, CUT), law) < REJECTED


def test_a_biased_rule_is_rejected_at_the_same_sample_size(
    pair: tuple[Path, Path], joint: dict[Text, float]
) -> None:
    with Runtime(
        pair[0], drafter=f"draft({quoted(str(pair[1]))}, n=3)", n_ctx=256, n_threads=1
    ) as runtime:
        runtime.session.rule = KeepsTooMuch()
        assert p_value(sampled_texts(runtime, PROMPT, LENGTH, SAMPLES), joint) < REJECTED
