"""A draft model's own rows, kept for rules that weigh its laws: chains, trees, and their ends.

F32 weights and cache, flash attention off, so that batches round like single tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.tiny_models import F32, fresh_logits

from specrun.bench.prove.rules import pair_of
from specrun.bindings.errors import OptionError, StaleViewError
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import PairRule, build_rule
from specrun.runtime.language import quoted
from specrun.runtime.laws import SeededNoise
from specrun.runtime.round import DraftRequest
from specrun.runtime.round.drafter import Keep
from specrun.runtime.trees import ROOT, DraftTree

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]
CHAINS = ["draft(FILE, n=1)", "draft(FILE, n=4)", "draft(FILE, n=auto)"]
TREES = [
    "draft(FILE, tree=2x2)",
    "draft(FILE, tree=2x2x1, sampling=with)",
    "draft(FILE, tree=3x1, sampling=argmax)",
    "draft(FILE, depth=3, topk=2, nodes=6)",
    "draft(FILE, tree=2x2, p_min=0.2)",
]
POINTS = [
    "draft(FILE, n=1, sampling=argmax)",
    "draft(FILE, n=4, sampling=argmax, p_min=0.1)",
    "draft(FILE, tree=3x1, sampling=argmax)",
    "draft(FILE, depth=3, topk=2, nodes=6)",
]
NEEDS_RAW, NEEDS_LAWS = "cascade-opt(alpha=0.2)", "cascade-token-v3(alpha=0.7)"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A drafter that is wrong often, and sure of it now and then."""
    folder = tmp_path_factory.mktemp("kept rows")
    write_random_llama(folder / "target.gguf", RandomLlama(vocab_size=400, seed=1, scale=4.0))
    write_random_llama(
        folder / "drafter.gguf", RandomLlama(vocab_size=400, seed=1, layers=1, scale=3.5)
    )
    return folder / "target.gguf", folder / "drafter.gguf"


@pytest.fixture(scope="module")
def small(pair: tuple[Path, Path]) -> Iterator[Model]:
    with Model(pair[1]) as model:
        yield model


def open_pair(pair: tuple[Path, Path], drafter: str, **options: object) -> Runtime:
    expression = drafter.replace("FILE", quoted(str(pair[1])))
    return Runtime(pair[0], drafter=expression, **{**F32, **options})


def proposed(
    runtime: Runtime, tokens: list[int], params: SamplingParams, keep: Keep, most: int = 16
) -> DraftTree:
    request = DraftRequest(tokens, params, SeededNoise(len(tokens)), most, most, keep=keep)
    return runtime.session.drafter.propose(request)


def last_logits(model: Model, tokens: list[int]) -> np.ndarray:
    return fresh_logits(model, tokens)[-1]


# -- rows ------------------------------------------------------------------------------------------


def check_rows(tree: DraftTree, tokens: list[int], small: Model, *, every: bool) -> int:
    """Compare the rows of a tree with fresh evaluations; return how many there were."""
    assert tree.rows is not None
    found = 0
    parents = set(tree.draws)
    for node in range(ROOT, len(tree)):
        row = tree.rows.logits(node)
        if row is None:
            # Where something was drawn, the draw says its law.
            assert node in parents
            assert not every
            continue
        found += 1
        text = [*tokens, *(tree.tokens[above] for above in tree.path_to(node))]
        np.testing.assert_allclose(row, last_logits(small, text), atol=1e-4)
        assert np.abs(row - last_logits(small, text[1:])).max() > 1e-2  # else anything would pass
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", CHAINS)
def test_chains_tell_the_rows_of_all_their_tokens(
    pair: tuple[Path, Path], small: Model, drafter: str, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature)
    with open_pair(pair, drafter, accept=NEEDS_RAW) as runtime:
        tree = proposed(runtime, PROMPT, params, "rows")
        assert check_rows(tree, PROMPT, small, every=True) == len(tree) + 1
        # What was evaluated for the rule is as good as what drafting evaluates.
        again = proposed(runtime, PROMPT, params, "rows")
        assert again.tokens == tree.tokens
        assert check_rows(again, PROMPT, small, every=True) == len(tree) + 1


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("drafter", TREES)
def test_trees_tell_the_row_of_one_leaf_after_the_draft(
    pair: tuple[Path, Path], small: Model, drafter: str, temperature: float
) -> None:
    """A walk ends at one leaf: that is what a context has room for."""
    params = SamplingParams(temperature=temperature, top_p=1.0, min_p=0.0)
    with open_pair(pair, drafter, accept=NEEDS_RAW) as runtime:
        leaves = 0
        for leaf in range(5):
            runtime.session.drafter.begin([])
            tree = proposed(runtime, PROMPT, params, "rows")
            assert tree.rows is not None
            ends = [node for node in range(ROOT, len(tree)) if node not in tree.draws]
            for node in (*tree.draws, *ends[leaf : leaf + 1]):
                row = tree.rows.logits(node)
                text = [*PROMPT, *(tree.tokens[above] for above in tree.path_to(node))]
                np.testing.assert_allclose(row, last_logits(small, text), atol=1e-4)
            leaves += leaf < len(ends)
        assert leaves > 1


@pytest.mark.parametrize("drafter", [CHAINS[1], POINTS[1]])
def test_where_draws_say_their_laws_the_last_row_is_enough(
    pair: tuple[Path, Path], small: Model, drafter: str
) -> None:
    with open_pair(pair, drafter, accept=NEEDS_LAWS) as runtime:
        tree = proposed(runtime, PROMPT, SamplingParams(temperature=0.8), "laws")
        favourites = "argmax" in drafter
        found = check_rows(tree, PROMPT, small, every=favourites)
        # The last evaluation's row is there as well, until the next one.
        assert found == (len(tree) + 1 if favourites else 2)


def test_nothing_drafted_has_a_row_too(pair: tuple[Path, Path], small: Model) -> None:
    """The last token of an answer leaves no room for a draft, and comes from pi as any other."""
    for drafter in (*CHAINS, *TREES):
        with open_pair(pair, drafter, accept=NEEDS_RAW) as runtime:
            tree = proposed(runtime, PROMPT, SamplingParams(), "rows", most=0)
            assert len(tree) == 0
            assert check_rows(tree, PROMPT, small, every=True) == 1


@pytest.mark.parametrize("drafter", [CHAINS[1], TREES[0]])
def test_rows_of_an_earlier_draft_say_that_they_are_dead(
    pair: tuple[Path, Path], drafter: str
) -> None:
    """Their memory holds the next draft's."""
    with open_pair(pair, drafter, accept=NEEDS_RAW) as runtime:
        tree, other = (
            proposed(runtime, tokens, SamplingParams(), "rows") for tokens in (PROMPT, PROMPT[:-1])
        )
        assert tree.rows is not None
        assert other.rows is not None
        assert other.rows.logits(ROOT) is not None
        with pytest.raises(StaleViewError, match="died with the drafter's next draft"):
            tree.rows.logits(ROOT)


@pytest.mark.parametrize("drafter", [CHAINS[1], TREES[0]])
def test_where_the_drafters_context_ends_there_is_no_row(
    pair: tuple[Path, Path], drafter: str
) -> None:
    with open_pair(pair, drafter, accept=NEEDS_RAW) as runtime:
        n_ctx = runtime.session.drafter.source.context.n_ctx  # type: ignore[attr-defined]
        for length, last in ((n_ctx - 1, True), (n_ctx, True), (n_ctx + 1, False)):
            tokens = [1 + token % 7 for token in range(length)]
            tree = proposed(runtime, tokens, SamplingParams(temperature=0.0), "rows")
            assert len(tree) == 0 or length + tree.max_depth <= n_ctx
            if not last:
                assert tree.rows is None or tree.rows.logits(ROOT) is None
            else:
                assert tree.rows is not None
                assert tree.rows.logits(len(tree) - 1) is not None


# -- texts -----------------------------------------------------------------------------------------


def text_by_hand(
    pair: tuple[Path, Path], rule: PairRule, params: SamplingParams, length: int
) -> list[int]:
    """What a rule says, place by place, of two models that are evaluated afresh for every token."""
    tokens, noise = list(PROMPT), SeededNoise.for_answer(7, PROMPT, 0)
    with Model(pair[0]) as large, Model(pair[1]) as small:
        for _ in range(length):
            laws = pair_of(last_logits(small, tokens), last_logits(large, tokens), params)
            noise.seek(len(tokens))
            tokens.append(noise.choose(rule.law(laws)))
    return tokens[len(PROMPT) :]


RULES = [NEEDS_RAW, NEEDS_LAWS, "cascade-token-v1(alpha=0.6)", "lossy(alpha=0.95, beta=solve)"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rule", RULES)
def test_favourites_give_the_text_of_pi_however_they_are_drafted(
    pair: tuple[Path, Path], rule: str, temperature: float
) -> None:
    """One draw of pi decides each token, at every length of drafts: the text is a fact."""
    params = SamplingParams(temperature=temperature, seed=7)
    built = build_rule(rule)
    assert isinstance(built, PairRule)
    wanted = text_by_hand(pair, built, params, 24)
    plain = text_by_hand(pair, AlwaysDefers(), params, 24)
    # Lossy sampling trades nothing at temperature 0; the others do, or this says little.
    assert (wanted != plain) == (temperature > 0.0 or "lossy" not in rule)
    for drafter in POINTS:
        with open_pair(pair, drafter, accept=rule) as runtime:
            result = runtime.generate(PROMPT, params, max_tokens=24)
        assert result.token_ids == wanted
        stats = result.stats
        assert stats.total_variation is not None
        assert (stats.total_variation > 0.0) == (wanted != plain)
        assert not stats.exact


class AlwaysDefers(PairRule):
    name = "target"
    law = staticmethod(lambda pair: pair.target)  # type: ignore[assignment]


@pytest.mark.parametrize("drafter", [CHAINS[1], TREES[0], TREES[1]])
@pytest.mark.parametrize("rule", RULES[:3])
def test_at_temperature_0_every_scheme_gives_the_text_of_pi(
    pair: tuple[Path, Path], rule: str, drafter: str
) -> None:
    params = SamplingParams(temperature=0.0, seed=7)
    built = build_rule(rule)
    assert isinstance(built, PairRule)
    with open_pair(pair, drafter, accept=rule) as runtime:
        found = [runtime.generate(PROMPT, params, max_tokens=24).token_ids for _ in range(2)]
    assert found == 2 * [text_by_hand(pair, built, params, 24)]


# -- statistics ------------------------------------------------------------------------------------


def test_departures_are_those_of_the_two_models(pair: tuple[Path, Path]) -> None:
    """Mean distance and changed tokens, once more by hand along the text that came out."""
    params = SamplingParams(temperature=0.8, seed=7)
    rule = build_rule(NEEDS_LAWS)
    assert isinstance(rule, PairRule)
    with open_pair(pair, CHAINS[1], accept=NEEDS_LAWS) as runtime:
        result = runtime.generate(PROMPT, params, max_tokens=24)
    noise = SeededNoise.for_answer(7, PROMPT, 0)
    distance, changed = 0.0, 0
    with Model(pair[0]) as large, Model(pair[1]) as small:
        for place, token in enumerate(result.token_ids):
            tokens = [*PROMPT, *result.token_ids[:place]]
            laws = pair_of(last_logits(small, tokens), last_logits(large, tokens), params)
            pi, target = (law.aligned_to(laws.raw_target) for law in (rule.law(laws), laws.target))
            distance += 0.5 * float(np.abs(pi - target).sum())
            noise.seek(len(tokens))
            changed += noise.choose(laws.target) != token
    assert result.stats.total_variation == pytest.approx(distance / 24, abs=1e-4)
    assert result.stats.changed_share == pytest.approx(changed / 24)
    assert changed > 2


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "accept", "problem"),
    [
        (
            "prompt-lookup",
            NEEDS_RAW,
            "cascade-opt.* weighs the drafter's distributions, and prompt-l",
        ),
        ("auto(draft(FILE))", NEEDS_RAW, "chooses by measured time, .* not exact: name one"),
        ("auto(prompt-lookup)", "typical", "chooses by measured time"),
        ("relay(draft(FILE)@2, prompt-lookup@2)", NEEDS_RAW, "relay.* has none"),
    ],
)
def test_what_does_not_go_together_is_refused_when_it_is_opened(
    pair: tuple[Path, Path], drafter: str, accept: str, problem: str
) -> None:
    with pytest.raises(OptionError, match=problem):
        open_pair(pair, drafter, accept=accept)


def test_at_temperature_0_a_rule_that_needs_no_q_takes_any_drafter(
    pair: tuple[Path, Path],
) -> None:
    with open_pair(pair, "prompt-lookup", accept=NEEDS_LAWS) as runtime:
        runtime.generate(PROMPT, SamplingParams(temperature=0.0), max_tokens=4)
        weighs = "at temperature 0.8 weighs the drafter's distributions, and prompt-lookup has none"
        with pytest.raises(OptionError, match=weighs):
            runtime.generate(PROMPT, SamplingParams(temperature=0.8), max_tokens=4)
