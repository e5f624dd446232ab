"""Hybrid models whose recurrent state can be rolled back verify chains; trees and other
architectures are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_heads import random_medusa
from support.tiny_hybrids import HYBRIDS
from support.tiny_hydra import random_hydra
from support.tiny_models import F32, fresh_logits
from support.tiny_nextn import write_tiny_qwen35

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.models.model import Model
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.language import quoted
from specrun.runtime.planning import CostCurve, save_curve
from specrun.runtime.round import CachedText, GenerationResult, TargetModel
from specrun.runtime.trees import DraftTree

PROMPT = [5, 200, 7, 7, 31, 90, 2, 5, 200, 7]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen35(tmp_path_factory.mktemp("hybrid") / "qwen35.gguf")


def answer(path: Path, drafter: str, params: SamplingParams, length: int = 40) -> GenerationResult:
    with Runtime(path, drafter=drafter, **F32) as runtime:
        return runtime.generate(PROMPT, params, max_tokens=length)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
@pytest.mark.parametrize(
    "drafter", ["mtp", "mtp(n=6)", "prompt-lookup(always=yes, min_ngram=1)", "jacobi(n=3)"]
)
def test_the_text_is_plain_decodings_own(qwen: Path, drafter: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=2)
    drafted = answer(qwen, drafter, params)
    assert drafted.token_ids == answer(qwen, "none", params).token_ids
    assert drafted.stats.drafted > 0


def test_some_drafts_are_accepted_and_some_rolled_back(qwen: Path) -> None:
    stats = answer(qwen, "mtp(n=4)", GREEDY, 100).stats
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("accepted", range(5))
def test_after_a_rollback_the_logits_are_a_fresh_evaluations(qwen: Path, accepted: int) -> None:
    drafts = [9, 40, 41, 300]
    with Model(qwen) as model:
        options = ContextOptions(**F32, n_outputs=5, n_rollback=4)
        with Context(model, options) as context:
            target = TargetModel(context)
            text, tree = CachedText(PROMPT), DraftTree.chain(drafts)
            target.prefill(text, len(PROMPT) - 1)
            target.evaluate(text, tree)
            target.commit(text, tree, range(accepted))
            assert text.tokens == [*PROMPT, *drafts[:accepted]]
            for token in (17, 4, 250):  # a chain of more rounds, the second without drafts
                tree = DraftTree.chain([3, 3] if token != 4 else [])
                text.tokens.append(token)
                rows = target.evaluate(text, tree)
                np.testing.assert_allclose(
                    rows.logits(0), fresh_logits(model, text.tokens)[-1], rtol=1e-4, atol=1e-4
                )
                target.commit(text, tree, [])
        # Keeping a rejected draft would be seen.
        kept = fresh_logits(model, [*PROMPT, *drafts, 17])[-1]
        if accepted < 4:
            assert (
                np.abs(kept - fresh_logits(model, [*PROMPT, *drafts[:accepted], 17])[-1]).max()
                > 1e-2
            )


def test_what_is_further_back_cannot_be_taken_back(qwen: Path) -> None:
    with (
        Model(qwen) as model,
        Context(model, ContextOptions(**F32, n_outputs=5, n_rollback=4)) as context,
    ):
        assert model.can_roll_back
        assert not model.can_branch
        target = TargetModel(context)
        text, tree = CachedText([*PROMPT, 1]), DraftTree.chain([2, 3])
        target.prefill(text, len(PROMPT))
        target.evaluate(text, tree)
        target.commit(text, tree, [0])
        text.tokens.append(4)
        # Once per evaluation, and never into an earlier one.
        with pytest.raises(UnsupportedModelError, match="cannot drop these positions"):
            context.memory.truncate(len(PROMPT) + 1)
        target.evaluate(text, DraftTree())
        with pytest.raises(UnsupportedModelError, match="cannot drop these positions"):
            context.memory.truncate(len(PROMPT))
        with pytest.raises(UnsupportedModelError, match="chains of at most 4 drafts"):
            target.evaluate(text, DraftTree.chain([1] * 5))


def test_a_conversation_goes_on(qwen: Path) -> None:
    with Runtime(qwen, drafter="mtp(n=4)", **F32) as runtime, Runtime(qwen, "none", **F32) as plain:
        prompt = list(PROMPT)
        for _ in range(3):
            result = runtime.generate(prompt, GREEDY, max_tokens=12)
            assert result.token_ids == plain.generate(prompt, GREEDY, max_tokens=12).token_ids
            assert result.stats.drafted > 0
            prompt += [*result.token_ids, 11, 12]
        # Back to where the cache has gone past.
        assert (
            runtime.generate(PROMPT, GREEDY, max_tokens=12).token_ids
            == plain.generate(PROMPT, GREEDY, max_tokens=12).token_ids
        )


def test_an_abandoned_answer_leaves_it_usable(qwen: Path) -> None:
    wanted = answer(qwen, "none", GREEDY, 20).token_ids
    with Runtime(qwen, drafter="mtp(n=4)", **F32) as runtime:
        for n_events in (1, 2, 5):
            stream = runtime.stream(
                PROMPT, SamplingParams(temperature=1.0, seed=n_events), max_tokens=20
            )
            for _ in range(n_events):
                next(stream)
            stream.close()
            assert runtime.generate(PROMPT, GREEDY, max_tokens=20).token_ids == wanted


def test_without_a_rollback_accepted_drafts_are_evaluated_again(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An architecture whose states llama.cpp does not keep."""
    monkeypatch.setattr("specrun.bindings.models.model.ROLLBACK_ARCHITECTURES", ())
    drafted = answer(qwen, "mtp(n=4)", GREEDY, 60)
    assert drafted.token_ids == answer(qwen, "none", GREEDY, 60).token_ids
    assert 0 < drafted.stats.accepted < drafted.stats.drafted


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("kind", [random_medusa, random_hydra])
def test_heads_without_a_size_draft_chains(
    tmp_path: Path, family: str, kind: Callable[..., Any]
) -> None:
    """Filled from the text no further than states are kept. lfm2 has no logits beside states."""
    path, heads = HYBRIDS[family](tmp_path / "model.gguf", seed=5), tmp_path / "heads.gguf"
    free = CostCurve((1, 64), (1e-3, 1.01e-3), (1e-3, 1.01e-3), (0.0, 0.0))
    save_curve(free, path, ContextOptions(**F32), 0)
    prompt = PROMPT * 3
    if kind is random_medusa:
        drafter = f"medusa({quoted(str(random_medusa(64, 320).write(heads, 320)))})"
    else:
        drafter = f"hydra({quoted(str(random_hydra(64, 320).write(heads, 320)))})"
    if family == "lfm2":
        with pytest.raises(UnsupportedModelError, match="computes no logits of it beside"):
            Runtime(path, drafter, **F32)
        return
    with Runtime(path, drafter, **F32) as runtime, Runtime(path, "none", **F32) as plain:
        assert (runtime.session.drafter.max_leaves, runtime.session.drafter.max_nodes) == (1, 3)
        result = runtime.generate(prompt, GREEDY, max_tokens=40)
        assert result.token_ids == plain.generate(prompt, GREEDY, max_tokens=40).token_ids
        assert result.stats.drafted > 0


@pytest.mark.parametrize(
    "drafter",
    [
        "mtp(tree=2x2)",
        "prompt-lookup(branches=2)",
        "lookahead(window=3, guesses=2)",
        "ensemble(mtp, prompt-lookup)",
    ],
)
def test_trees_are_refused_with_what_works(qwen: Path, drafter: str) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"hybrid model \(qwen35\).*one chain.*may branch. Use mtp, draft",
    ) as caught:
        Runtime(qwen, drafter=drafter, **F32)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("name", ["n_ubatch", "n_batch", "n_ctx"])
def test_what_is_computed_at_once_must_hold_what_is_taken_back(qwen: Path, name: str) -> None:
    """llama.cpp asserts it when it evaluates: with four and fewer it would end this process."""
    shape = {**F32, "n_outputs": 5, "n_rollback": 3}
    with Model(qwen) as model:
        with pytest.raises(OptionError, match="from 4 to 5 or more"):
            Context(model, ContextOptions(**{**shape, name: 4}))
        with Context(model, ContextOptions(**{**shape, name: 5})) as context:
            batch = Batch(5, 1)
            batch.fill_chain(PROMPT[:5], 0, [0], 5)
            assert np.isfinite(context.decode(batch).logits(4)).all()
