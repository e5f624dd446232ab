"""Alpha of a drafter that drafts: by enumeration, along a text, and for every kind of drafter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.enumeration import (
    PROMPT,
    TOLERANCE,
    Propose,
    branching_tree,
    chain,
    target_law,
    top_k_points,
)
from support.law_pairs import TellingDrafter
from support.scripted import PLAIN, LawTable, TableTarget, conversation_of, law_of

from specrun.bench.prove.rules import BranchingNoise, enumerate_law
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import PairAt
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.laws import NoiseSource
from specrun.runtime.round import DraftRequest
from specrun.runtime.round.loop import DecodeSettings, RoundLimits, decode_rounds
from specrun.runtime.trees import DraftTree
from specrun.runtime.tuning import CalibrationText, DrawnAlpha, law_pairs, measure_alpha
from specrun.runtime.tuning.acceptance import AlphaRule, mean_alpha, shared_mass

LENGTH = 3
DRAWN = SamplingParams(temperature=0.8, seed=3)


class OnlyTestedPlaces(AlphaRule):
    """Wrong: the place after a whole draft, which nobody tested, is left out."""

    def accept(self, tree: DraftTree, pair_at: PairAt, noise: NoiseSource, position: int) -> object:  # type: ignore[override]
        accepted = super().accept(tree, pair_at, noise, position)
        last = accepted.path[-1] if accepted.path else -1
        if not accepted.rejected:
            pair = pair_at(last)
            self.total -= shared_mass(pair.target, pair.draft)
            self.n_places -= 1
        return accepted


def proposals(drafts: LawTable) -> dict[str, Propose]:
    return {
        "chain": chain(drafts, 2),
        "without": branching_tree(drafts, [2, 2], replace=False),
        "with": branching_tree(drafts, [2, 1], replace=True),
        "points": top_k_points(drafts, 2, 2),
    }


def enumerated(
    make: Callable[[], AlphaRule], propose: Propose, drafts: LawTable, table: LawTable
) -> tuple[float, float]:
    """The expected sum of min(p, q) over an answer's places, and the expected number of places."""

    def program(noise: BranchingNoise) -> tuple[float, int]:
        rule, drafter = make(), TellingDrafter(propose, drafts)
        conversation = conversation_of(drafter, PROMPT, noise)
        limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=LENGTH)
        settings = DecodeSettings(rule, PLAIN, limits)
        for _ in decode_rounds(TableTarget(table), conversation, settings):
            pass
        return rule.total, rule.n_places

    found = enumerate_law(program)
    total = sum(chance * key[0] for key, chance in found.items())
    return total, sum(chance * key[1] for key, chance in found.items())


def wanted(drafts: LawTable, table: LawTable) -> float:
    """The same by the definition: over the target's own texts, without a drafter."""
    sums = 0.0
    for length in range(LENGTH):
        for text, chance in target_law(table, length, frozenset()).items():
            prefix = [*PROMPT, *text]
            sums += chance * shared_mass(law_of(table(prefix)), law_of(drafts(prefix)))
    return sums


@pytest.mark.parametrize("kind", ["chain", "without", "with", "points"])
@pytest.mark.parametrize("seed", [1])
def test_alpha_is_the_mean_over_the_targets_own_texts(kind: str, seed: int) -> None:
    """Every place of an answer is looked at once, whatever is drafted and accepted."""
    drafts, table = LawTable(3, seed + 40), LawTable(3, seed)
    propose = proposals(drafts)[kind]
    total, places = enumerated(AlphaRule, propose, drafts, table)
    assert places == pytest.approx(LENGTH, abs=TOLERANCE)
    assert total == pytest.approx(wanted(drafts, table), abs=TOLERANCE)
    # The places that were tested are not a fair sample of them.
    total, places = enumerated(OnlyTestedPlaces, propose, drafts, table)
    assert abs(total / places - wanted(drafts, table) / LENGTH) > 1e-3


# -- models ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("alpha")
    target, draft = folder / "target.gguf", folder / "draft.gguf"
    shape = {"vocab_size": 320, "width": 32, "ffn": 32, "context": 256, "scale": 2.0}
    write_random_llama(target, RandomLlama(**shape, layers=2, seed=1))
    write_random_llama(draft, RandomLlama(**shape, layers=1, seed=1))
    return target, draft


OPTIONS = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1}


def measured(pair: tuple[Path, Path], drafter: str, params: SamplingParams = DRAWN) -> DrawnAlpha:
    expression = drafter.replace("FILE", f'"{pair[1]}"')
    with Model(pair[0]) as target:
        environment = DraftEnvironment(target, ContextOptions(**OPTIONS))
        return measure_alpha(environment, expression, [[1, 5, 9, 5]], params, max_tokens=24)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_of_a_pair_it_is_what_both_models_say_along_the_answer(
    pair: tuple[Path, Path], temperature: float
) -> None:
    params = DRAWN.replace(temperature=temperature)
    prompt = [1, 5, 9, 5]
    with Runtime(pair[0], "none", **OPTIONS) as runtime:
        answer = runtime.generate(prompt, params, max_tokens=24).token_ids
    text = CalibrationText((*prompt, *answer), len(prompt))
    wide = ContextOptions(n_ctx=256, n_threads=1, n_threads_batch=1, n_outputs=32)
    with (
        Model(pair[0]) as target,
        Model(pair[1]) as draft,
        Context(target, wide) as ours,
        Context(draft, wide) as theirs,
    ):
        pairs, _ = law_pairs(ours, theirs, text, params)
    alpha = mean_alpha((each.target, each.draft) for each in pairs)
    found = measured(pair, "draft(FILE, n=3, sampling=argmax)", params)
    assert found.n_places == len(answer)
    assert found.n_silent == 0
    assert found.alpha == pytest.approx(alpha, abs=1e-4)
    assert found.n_params > 0
    assert found.step_seconds > 0.0


@pytest.mark.parametrize(
    "drafter",
    [
        "draft(FILE, tree=2x2)",
        "draft(FILE, n=3, vocabulary=tokens)",
        "partial(sink=2, window=7, n=3)",
        "early-exit(layers=1, n=3)",
        "early-exit(layers=1, n=3, sampling=argmax)",
        "ngram(order=2, n=3)",
        "ngram(order=2, n=3, sampling=argmax)",
        "cascade(draft(FILE, n=3), ngram)",
    ],
)
def test_it_is_there_for_every_drafter_with_a_law(pair: tuple[Path, Path], drafter: str) -> None:
    found = measured(pair, drafter)
    assert 0.0 < found.alpha <= 1.0
    assert found.n_places > 20


@pytest.mark.parametrize("drafter", ["prompt-lookup", "lookahead", "draft(FILE, vocabulary=text)"])
def test_a_drafter_of_point_masses_alone_has_none(pair: tuple[Path, Path], drafter: str) -> None:
    with pytest.raises(OptionError, match="has no distribution of which alpha is the mean"):
        measured(pair, drafter)


def test_the_whole_target_as_its_own_drafter_has_an_alpha_of_one(pair: tuple[Path, Path]) -> None:
    found = measured((pair[0], pair[0]), "draft(FILE, n=3)")
    assert found.alpha == pytest.approx(1.0, abs=1e-3)


def test_a_request_is_asked_for_no_more_than_laws() -> None:
    """Whole rows of every node would cost a copy of each."""
    asked: list[str] = []

    def propose(request: DraftRequest) -> DraftTree:
        asked.append(request.keep)
        return DraftTree()

    enumerated(AlphaRule, propose, LawTable(3, 1), LawTable(3, 0))
    assert set(asked) == {"laws"}
