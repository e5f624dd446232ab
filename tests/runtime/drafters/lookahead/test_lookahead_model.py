"""Lookahead and Jacobi decoding on real models: plain decoding's text, the cache, bad sizes, and
pools in files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.tiny_models import EXACT, F32, fresh_logits

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import (
    FileMissingError,
    MalformedFileError,
    ModelError,
    OptionError,
    SpecrunError,
)
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.lookahead import load_pool
from specrun.runtime.language import quoted
from specrun.runtime.laws import SeededNoise
from specrun.runtime.planning import (
    CostCurve,
    load_curve,
    save_curve,
)
from specrun.runtime.round import CachedText, Drafter, DraftRequest, SpecStats, TargetModel
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]
LENGTH = 64
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lookahead") / "target.gguf"
    write_random_llama(path, RandomLlama(vocab_size=64, seed=1, scale=4.0))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Measured curves of whoever runs the tests must not change them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def answer(target: Path, drafter: str, params: SamplingParams) -> tuple[list[int], SpecStats]:
    with Runtime(target, drafter=drafter, **F32) as runtime:
        result = runtime.generate(PROMPT, params, max_tokens=LENGTH)
        return result.token_ids, result.stats


def test_statistics_count_the_window_apart(target: Path) -> None:
    _, stats = answer(target, "lookahead(window=3, ngram=3, guesses=2)", GREEDY)
    assert stats.non_candidates > 5 * stats.rounds - 20
    assert stats.drafted <= 4 * stats.rounds
    assert len(stats.acceptance_by_position) <= 2
    assert stats.acceptance_rate == stats.accepted / stats.drafted
    _, plain = answer(target, "prompt-lookup", GREEDY)
    assert plain.non_candidates == 0


# -- the cache -------------------------------------------------------------------------------------


class Oracle(Drafter):
    """Lookahead, whose pool is told the answer: deep acceptance beside a wide window in every
    round."""

    name = "oracle"

    def __init__(self, inner: Drafter, text: list[int]) -> None:
        self._inner, self._text = inner, text
        self.max_nodes, self.max_leaves = inner.max_nodes, inner.max_leaves
        self.begin, self.observe = inner.begin, inner.observe  # type: ignore[method-assign]

    def propose(self, request: DraftRequest) -> DraftTree:
        start = len(request.tokens) - 1
        self._inner._store.pool.add(self._text[start : start + 5])
        return self._inner.propose(request)


@pytest.fixture
def model(target: Path) -> Iterator[Model]:
    with Model(target) as model:
        yield model


def test_after_many_wide_rounds_the_cache_is_that_of_the_committed_tokens(model: Model) -> None:
    """Windows of 19 nodes, and guesses of which four are accepted, in every round."""
    with Runtime(model.path, "none", **F32) as runtime:
        text = [*PROMPT, *runtime.generate(PROMPT, GREEDY, max_tokens=LENGTH).token_ids]
    environment = DraftEnvironment(model, ContextOptions(**F32))
    drafter = Oracle(
        build_drafter("lookahead(window=5, ngram=5, guesses=4)", environment).start(), text
    )
    options = ContextOptions(**F32, n_sequences=drafter.max_leaves, n_outputs=drafter.max_nodes + 1)
    with Context(model, options) as context:
        target = TargetModel(context)
        cached, deepest, widest = CachedText(PROMPT), 0, 0
        tokens = cached.tokens
        drafter.begin(tokens)
        target.prefill(cached, len(PROMPT) - 1)
        while len(tokens) < len(text) - 6:
            tree = drafter.propose(
                DraftRequest(tokens, GREEDY, SeededNoise(0), 100, drafter.max_nodes)
            )
            rows = target.evaluate(cached, tree)
            np.testing.assert_allclose(rows.logits(0), fresh_logits(model, tokens)[-1], atol=1e-5)
            path: list[int] = []
            while (child := child_of(tree, path, text[len(tokens) + len(path)])) is not None:
                path.append(child)
            target.commit(cached, tree, path)
            tokens.append(text[len(tokens)])
            drafter.observe(RoundOutcome(tokens, tree, tuple(path), tokens[-1], rows))
            deepest, widest = max(deepest, len(path)), max(widest, len(tree) - tree.n_candidates)
        assert (deepest, widest) == (4, 19)
        assert {context.memory.last_position(number) for number in range(drafter.max_leaves)} == {
            len(tokens) - 2
        }


def test_a_cell_of_the_window_left_in_the_cache_is_seen(model: Model) -> None:
    """Negative control: a commit that keeps the window's node in place of the guess gives other
    logits."""
    guess, hidden = 7, 9
    builder = TreeBuilder()
    nodes = builder.add(ROOT, guess), builder.add_hidden(ROOT, hidden)
    with Context(model, ContextOptions(**F32, n_sequences=2, n_outputs=3)) as context:
        target, text = TargetModel(context), CachedText()
        for node, is_right in zip(nodes, (True, False), strict=True):
            target.rewind(text, 0)
            text.tokens = list(PROMPT)
            target.prefill(text, len(PROMPT) - 1)
            target.evaluate(text, builder.build())
            target.commit(text, builder.build(), [node])
            wanted = fresh_logits(model, [*PROMPT, guess, 5])[-1]
            text.tokens.append(5)
            difference = np.abs(target.evaluate(text, DraftTree()).logits(0) - wanted).max()
            assert difference < 1e-5 if is_right else difference > 1e-3


def child_of(tree: DraftTree, path: list[int], token: int) -> int | None:
    draws = tree.draws.get(path[-1] if path else -1, ())
    return next((draw.node for draw in draws if tree.tokens[draw.node] == token), None)


def test_answers_share_the_pool(target: Path) -> None:
    """A second answer over a warm pool: same text, more accepted."""
    drafter = "lookahead(window=2, ngram=4, guesses=3)"
    with Runtime(target, drafter=drafter, **F32) as runtime:
        first, second = (runtime.generate(PROMPT, GREEDY, max_tokens=LENGTH) for _ in range(2))
        assert second.token_ids == first.token_ids
        assert second.stats.rounds < first.stats.rounds


# -- pools in files --------------------------------------------------------------------------------


def with_pool(path: Path, *more: str) -> str:
    options = ("window=2", "ngram=4", "guesses=3", f"pool={quoted(str(path))}", *more)
    return f"lookahead({', '.join(options)})"


def test_a_pool_is_written_at_the_end_and_warms_the_next_run(target: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.pool"
    cold, first = answer(target, with_pool(path), GREEDY)
    assert [file.name for file in tmp_path.iterdir()] == ["a.pool"]
    warm, second = answer(target, with_pool(path), GREEDY)
    assert warm == cold
    assert second.rounds < first.rounds


def test_save_no_reads_only_and_the_next_question_saves_the_last_answer(
    target: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.pool"
    with pytest.raises(FileMissingError):
        Runtime(target, drafter=with_pool(path, "save=no"), **F32)
    with Runtime(target, drafter=with_pool(path), **F32) as runtime:
        runtime.generate(PROMPT, GREEDY, max_tokens=16)
        assert not path.exists()
        runtime.generate(PROMPT, GREEDY, max_tokens=16)
        assert path.exists()
    before = path.read_bytes()
    answer(target, with_pool(path, "save=no"), GREEDY)
    assert path.read_bytes() == before


def test_forgetting_between_measurements_still_saves_everything(
    target: Path, tmp_path: Path
) -> None:
    """What `bench` does before every answer: nobody profits, nothing is lost."""
    path = tmp_path / "a.pool"
    with Runtime(target, drafter=with_pool(path), **F32) as runtime:
        rounds = []
        for prompt in (PROMPT, PROMPT, [7, 8, 9]):
            runtime.session.forget()
            rounds.append(runtime.generate(prompt, GREEDY, max_tokens=32).stats.rounds)
        assert rounds[0] == rounds[1]
    with Runtime(target, drafter="none", **F32) as runtime:
        pool = load_pool(path, runtime.vocabulary)
        for prompt in (PROMPT, [7, 8, 9]):
            text = [*prompt, *runtime.generate(prompt, GREEDY, max_tokens=32).token_ids]
            assert tuple(text[-4:]) in set(pool)


def test_files_that_are_no_pools_are_file_errors(target: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.pool"
    path.write_bytes(b"GGUF and more")
    with pytest.raises(MalformedFileError, match="not a pool"):
        Runtime(target, drafter=with_pool(path), **EXACT)
    with pytest.raises(FileMissingError, match="no folder"):
        Runtime(target, drafter=with_pool(tmp_path / "none" / "a.pool"), **EXACT)
    with pytest.raises(OptionError, match="folder"):
        Runtime(target, drafter=with_pool(tmp_path), **EXACT)
    path.unlink()
    answer(target, with_pool(path), GREEDY)
    other = tmp_path / "other.gguf"
    write_random_llama(other, RandomLlama(vocab_size=80, seed=1))
    with pytest.raises(ModelError, match="another vocabulary") as caught:
        Runtime(other, drafter=with_pool(path), **EXACT)
    assert caught.value.exit_code == 3


def test_a_pool_that_cannot_be_saved_is_an_error_and_frees_the_models(
    target: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    runtime = Runtime(target, drafter=with_pool(folder / "a.pool"), **F32)
    runtime.generate(PROMPT, GREEDY, max_tokens=8)
    folder.rmdir()
    with pytest.raises(SpecrunError, match="no folder"):
        runtime.close()
    runtime.close()


# -- what the curve decides ------------------------------------------------------------------------


def test_a_measured_curve_decides_how_far_to_look_ahead(model: Model) -> None:
    environment = DraftEnvironment(model, ContextOptions(**EXACT))

    def width() -> int:
        return build_drafter("lookahead", environment).start()._width  # type: ignore[attr-defined,no-any-return]

    assert width() == 0  # a typical CPU
    flat = CostCurve((1, 64), (1.0, 1.1), (1.0, 1.1))
    save_curve(flat, model.path, environment.context, 0)
    assert width() > 0
    assert load_curve(model.path, ContextOptions(**{**EXACT, "n_threads": 2}), 0) is None
    assert load_curve(model.path, environment.context, 3) is None


def test_a_measured_curve_decides_how_much_is_retrieved(model: Model) -> None:
    environment = DraftEnvironment(model, ContextOptions(**EXACT))
    text = [5, 6, 7, 8, 9] * 4

    def drafted() -> int:
        drafter = build_drafter("prompt-lookup", environment).start()
        drafter.begin(text)
        return len(drafter.propose(DraftRequest(text, GREEDY, SeededNoise(0), 20, 20)))

    assert drafted() > 1  # a typical CPU
    save_curve(
        CostCurve((1, 2, 64), (1.0, 2.5, 70.0), (1.0, 2.5, 70.0)),
        model.path,
        environment.context,
        0,
    )
    assert drafted() == 0
    save_curve(
        CostCurve((1, 2, 3, 64), (1.0, 1.1, 9.0, 99.0), (1.0, 1.1, 9.0, 99.0)),
        model.path,
        environment.context,
        0,
    )
    assert drafted() == 1
