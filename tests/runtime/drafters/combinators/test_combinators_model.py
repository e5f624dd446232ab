"""Cascades, relays and phrase pools over real (tiny, random) models: texts, caches, refusals.

F32 weights and cache, flash attention off, so that batches round like single tokens to 1e-5.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.tiny_models import F32, fresh_logits

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import PairError
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.combinators import CascadeDrafter, DraftModelTarget
from specrun.runtime.drafters.draft_model.window import KeptTokens, Window
from specrun.runtime.language import quoted
from specrun.runtime.round import CachedText, TargetModel
from specrun.runtime.trees import DraftTree

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]
LENGTH = 40
WHOLE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
CASCADES = [
    "cascade(draft(FILE, n=6), SMALL)",
    "cascade(draft(FILE, n=6), draft(OTHER, tree=3x2))",
    "cascade(draft(FILE, n=8, p_min=0.2), prompt-lookup(min_ngram=1), rounds=3)",
    "cascade(draft(FILE, n=5), lookahead(window=3, ngram=3, guesses=2))",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("combined")
    write_random_llama(folder / "target.gguf", RandomLlama(vocab_size=400, seed=1, scale=4.0))
    write_random_llama(
        folder / "drafter.gguf", RandomLlama(vocab_size=400, seed=1, layers=2, scale=3.0)
    )
    write_random_llama(
        folder / "other.gguf", RandomLlama(vocab_size=400, seed=1, layers=1, scale=2.5)
    )
    return folder


def expand(models: Path, drafter: str) -> str:
    drafter = drafter.replace("FILE", quoted(str(models / "drafter.gguf")))
    return drafter.replace("OTHER", quoted(str(models / "other.gguf"))).replace(
        "SMALL", "prompt-lookup(min_ngram=1)"
    )


def open_models(models: Path, drafter: str, **options: object) -> Runtime:
    return Runtime(models / "target.gguf", drafter=expand(models, drafter), **{**F32, **options})


@pytest.mark.parametrize(
    "inner", ["prompt-lookup(min_ngram=1)", "draft(OTHER, sampling=argmax)", "none"]
)
@pytest.mark.parametrize("sampling", ["with", "argmax"])
def test_with_a_deterministic_inner_drafter_the_draft_is_the_models_own(
    models: Path, inner: str, sampling: str
) -> None:
    """Drawn from the same laws by the same numbers: whole answers agree, drafted and accepted
    counts too."""

    def run(drafter: str) -> tuple[list[int], int, int]:
        with open_models(models, drafter) as runtime:
            result = runtime.generate(PROMPT, WHOLE.replace(seed=3), max_tokens=LENGTH)
            return result.token_ids, result.stats.drafted, result.stats.accepted

    alone = run(f"draft(FILE, n=4, sampling={sampling})")
    assert run(f"cascade(draft(FILE, n=4, sampling={sampling}), {inner})") == alone


def test_a_cascade_whose_guesses_are_right_evaluates_its_model_less(models: Path) -> None:
    """The inner model is the draft model itself: three guesses and a bonus token for each
    evaluation."""
    with open_models(models, "cascade(draft(FILE, n=8), draft(FILE, n=3))") as runtime:
        result = runtime.generate(PROMPT, SamplingParams(temperature=0.0), max_tokens=LENGTH)
        inner = result.stats.drafting["inner"]
        assert inner["mean_accepted_length"] > 2.0
        assert inner["acceptance_rate"] == 1.0


@pytest.mark.parametrize("drafter", CASCADES)
def test_caches_stay_true(models: Path, drafter: str) -> None:
    """After many rounds, and answers that share a prefix, the next logits of all models equal fresh
    ones."""
    prompts = [PROMPT, PROMPT[:6], [*PROMPT[:6], 8, 8], [1, 2, 3, 4]]
    with open_models(models, drafter) as runtime:
        for seed, prompt in enumerate(prompts):
            tokens = [
                *prompt,
                *runtime.generate(prompt, WHOLE.replace(seed=seed), max_tokens=LENGTH).token_ids,
            ]
            cascade = runtime.session.drafter
            assert isinstance(cascade, CascadeDrafter)
            _assert_true_cache(cascade._model, cascade._text, tokens)


def _assert_true_cache(target: TargetModel, text: CachedText, tokens: list[int]) -> None:
    """The text is the tokens' beginning, and what is cached of it gives the logits of a fresh
    evaluation."""
    assert text.tokens == tokens[: len(text.tokens)]
    cached = text.n_cached
    target.rewind(text, cached)
    text.tokens.append(tokens[cached] if cached < len(tokens) else 0)
    rows = target.evaluate(text, DraftTree())
    np.testing.assert_allclose(
        rows.logits(0), fresh_logits(target.context.model, text.tokens)[-1], atol=1e-5
    )
    target.rewind(text, cached)


def target_of(context: Context, size: int, kept: KeptTokens | None = None) -> DraftModelTarget:
    return DraftModelTarget(context, target_vocab_size=size, n_positions=1000, kept=kept)


def test_tokens_that_only_one_model_knows(models: Path) -> None:
    """Rows are cut to shared tokens; tokens that the draft model lacks are fed as a stand-in, alone
    and in trees."""
    options = ContextOptions(**F32, n_sequences=2, n_outputs=5)
    with Model(models / "drafter.gguf") as model, Context(model, options) as context:
        larger, smaller = (target_of(context, size) for size in (500, 300))
        text, tree = CachedText([3, 450, 7, 499]), DraftTree.chain([420, 5])
        larger.prefill(text, 3)
        rows = larger.evaluate(text, tree)
        assert len(rows.logits(2)) == 400
        larger.commit(text, tree, (0, 1))
        assert (text.tokens, text.n_cached) == ([3, 450, 7, 499, 420, 5], 6)
        larger.rewind(text, 0)
        assert len(smaller.evaluate(CachedText([3]), DraftTree()).logits(0)) == 300


def test_a_window_of_tokens_that_only_the_target_knows(models: Path) -> None:
    text, kept = [450, 7, 3, 1, 4, 499, 5, 9, 2, 6, 5], KeptTokens(Window(sink=2, size=4))
    options = ContextOptions(**F32, n_outputs=5)
    with Model(models / "drafter.gguf") as model, Context(model, options) as context:
        bounded = target_of(context, 500, kept)
        eos, known = model.vocabulary.eos, CachedText(text)
        bounded.prefill(known, len(text) - 1)
        rows = bounded.evaluate(known, DraftTree.chain([420, 5]))
        fed = [eos, 7, 4, eos, 5, 9, 2, 6, 5, eos, 5]  # sink, window, tree
        for row, wanted in enumerate(fresh_logits(model, fed)[-3:]):
            np.testing.assert_allclose(rows.logits(row), wanted, atol=1e-5)


@pytest.mark.parametrize("n_known", [0, 1, 2, 5])
def test_missing_tokens_join_the_next_tree(models: Path, n_known: int) -> None:
    """However many tokens are not evaluated yet, the rows are those of the tree, and the cache is
    true."""
    text = [3, 1, 4, 1, 5, 9]
    with (
        Model(models / "drafter.gguf") as model,
        Context(model, ContextOptions(**F32, n_outputs=4)) as context,
    ):
        target = target_of(context, 400)
        known, tree = CachedText(text), DraftTree.chain([2, 6])
        target.prefill(known, n_known)
        target.prefill(known, len(text) - 1)
        rows = target.evaluate(known, tree)
        fresh = fresh_logits(model, [*text, 2, 6])
        for row in range(3):
            np.testing.assert_allclose(rows.logits(row), fresh[len(text) - 1 + row], atol=1e-5)
        target.commit(known, tree, (0,))
        assert (known.tokens, known.n_cached) == ([*text, 2], len(text) + 1)
        target.rewind(known, len(text) - 1)
        known.tokens.append(text[-1])
        np.testing.assert_allclose(
            target.evaluate(known, DraftTree()).logits(0), fresh[len(text) - 1], atol=1e-5
        )


def test_a_shorter_inner_context_only_ends_the_drafting(models: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    write_random_llama(short, RandomLlama(vocab_size=400, seed=1, layers=1, scale=2.5, context=256))
    prompt, params = [number % 399 for number in range(240)], SamplingParams(temperature=0.0)
    with open_models(models, "none", n_ctx=512) as runtime:
        wanted = runtime.generate(prompt, params, max_tokens=60).token_ids
    drafter = f"cascade(draft(FILE), draft({quoted(str(short))}))"
    with open_models(models, drafter, n_ctx=512) as runtime:
        assert runtime.generate(prompt, params, max_tokens=60).token_ids == wanted


# -- refusals --------------------------------------------------------------------------------------


def test_inner_drafters_must_fit_the_draft_model(models: Path, tiny_small_vocab: Path) -> None:
    small = quoted(str(tiny_small_vocab))
    with pytest.raises(PairError, match=r"cannot draft for .*drafter\.gguf"):
        open_models(models, f"cascade(draft(FILE), draft({small}, vocabulary=same))")


def test_a_count_is_the_parts_own_length(models: Path) -> None:
    with open_models(models, "relay(draft(FILE)@7, prompt-lookup(n=2)@9)") as runtime:
        assert runtime.session.drafter.max_nodes == 9
        assert "@7" in runtime.drafter
