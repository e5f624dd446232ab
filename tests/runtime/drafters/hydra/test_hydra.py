"""Hydra as a drafter: exact for every shape, a true state after any rounds, drafts better than
chance once trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.enumeration import TOLERANCE, bias, law_with_drafter
from support.head_chains import hydra_drafter
from support.law_pairs import Pi, deferral, distance, pi_at, texts_law, token_rule
from support.scripted import PLAIN, LawTable, ScriptedDrafter
from support.tiny_models import F32

from specrun.bindings.errors import MalformedFileError, OptionError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import ExactRule, build_rule
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.drafters.growing.draft import Draft
from specrun.runtime.drafters.hydra import HydraSource
from specrun.runtime.heads import RankedTokens
from specrun.runtime.language import quoted
from specrun.runtime.laws import Law
from specrun.runtime.planning import TYPICAL_PATH_ACCURACY
from specrun.runtime.planning.optimal_trees import medusa_tree
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import DraftTree, DynamicShape, Topology, TreeBuilder, parse_topology

torch = pytest.importorskip("torch")
from support.target_texts import (  # noqa: E402
    PROMPT_IDS,
    answer,
    final_states,
    greedy_answers,
    same_text,
)
from support.tiny_dflash import token_matrices  # noqa: E402
from support.tiny_hydra import TinyHydra, log_probs, random_hydra, train  # noqa: E402

HIDDEN, VOCAB = 32, 320
GREEDY = SamplingParams(temperature=0.0)


# -- exactness -------------------------------------------------------------------------------------


class TableHeads:
    """Heads whose laws are a table's after the text and the path."""

    n_params, depth_params, native_seconds, prefix = 0, 0.0, 0.0, None
    whole_rows, ranks = True, range(9)

    @property
    def head(self) -> TableHeads:
        return self

    def __init__(self, table: LawTable, tokens: Sequence[int]) -> None:
        self._table = table
        self._before = list(tokens[:-1])

    def best_laws(self, state: np.ndarray, paths: Sequence[Sequence[int]]) -> RankedTokens:
        probs = np.array([self._table([*self._before, *path]) for path in paths])
        ranked = np.argsort(-probs, 1, kind="stable")
        with np.errstate(divide="ignore"):
            return RankedTokens(
                ranked.astype(np.int32), np.log(np.take_along_axis(probs, ranked, 1))
            )

    def rows(
        self, state: np.ndarray, paths: Sequence[Sequence[int]]
    ) -> tuple[RankedTokens, list[np.ndarray]]:
        with np.errstate(divide="ignore"):
            whole = [np.log(self._table([*self._before, *path])) for path in paths]
        return self.best_laws(state, paths), whole

    def tree(self, *_: object) -> None:
        """No graph of a whole tree: it is grown depth by depth."""

    def states(self, states: np.ndarray, position: int, count: int) -> np.ndarray:
        return states

    def close(self) -> None:
        pass


def hydra(drafts: LawTable, shape: Topology | DynamicShape):
    def propose(request: DraftRequest) -> DraftTree:
        drafter = hydra_drafter(TableHeads(drafts, request.tokens), shape)  # type: ignore[arg-type]
        drafter.source.state.learn(
            len(request.tokens) - 2, np.zeros((1, 1), np.float32), request.tokens
        )
        tree = drafter.propose(request)
        assert len(tree) or request.max_depth < 1
        return tree

    return propose


@pytest.mark.parametrize("shape", ["1x1", "3", "2x1", "0 1 00 10", "2x2"])
@pytest.mark.parametrize("seed", range(2))
def test_static_trees_give_the_targets_law(shape: str, seed: int) -> None:
    propose = hydra(LawTable(3, seed + 100), parse_topology(shape))
    assert bias(ExactRule(), propose, LawTable(3, seed), 3) < TOLERANCE


@pytest.mark.parametrize("seed", range(3))
def test_dynamic_trees_give_the_targets_law(seed: int) -> None:
    propose = hydra(LawTable(3, seed + 100), DynamicShape(3, 2, 6))
    assert bias(ExactRule(), propose, LawTable(3, seed), 3) < TOLERANCE


class Telling(ScriptedDrafter):
    keeps_rows = True


@pytest.mark.parametrize(
    "shape", [parse_topology("1x1"), parse_topology("2x1"), DynamicShape(2, 2, 3)]
)
@pytest.mark.parametrize(
    ("rule", "pi"),
    [
        ("cascade-opt(alpha=0.3)", deferral("cascade-opt", 0.3)),
        ("cascade-token-v3(alpha=0.5)", token_rule("cascade-token-v3", 0.5)),
    ],
)
def test_rules_that_weigh_its_laws_emit_pi(
    rule: str, pi: Pi, shape: Topology | DynamicShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a whole draft; these heads' laws depend on the text alone."""
    table, drafts = LawTable(3, 1), LawTable(3, 101)
    wanted = texts_law(pi_at(pi, drafts, table, PLAIN), 3, 3)

    def error() -> float:
        propose = hydra(drafts, shape)
        found = law_with_drafter(build_rule(rule), lambda: Telling(propose), table, 3)
        return distance(found, wanted)

    assert error() < TOLERANCE
    monkeypatch.setattr(Draft, "leaf", lambda *_: None)
    assert error() > 1e-3


def test_best_tokens_passed_off_as_draws_are_caught() -> None:
    """The negative control: a head's best token with its law attached, as if it had been drawn from
    it."""

    def wrong(request: DraftRequest) -> DraftTree:
        tree = hydra(LawTable(3, 100), parse_topology("1"))(request)
        builder = TreeBuilder()
        if len(tree):
            builder.add(-1, tree.tokens[0], Law(LawTable(3, 100)(request.tokens)))
        return builder.build()

    assert bias(ExactRule(), wrong, LawTable(3, 0), 2) > 0.01


class Silent:
    """Noise for drafters that draw nothing."""

    def seek(self, position: int) -> None:
        pass


@pytest.mark.parametrize("shape", [parse_topology("2x2x2x1"), DynamicShape(4, 2, 30)])
def test_each_path_has_best_tokens_of_its_own(shape: Topology | DynamicShape) -> None:
    table, tokens = LawTable(5, 3), [0, 1, 2]
    tree = hydra(table, shape)(DraftRequest(tokens, GREEDY, Silent(), 8, 30))  # type: ignore[arg-type]
    assert tree.max_depth == 4
    for parent, draws in tree.draws.items():
        path = [tree.tokens[ancestor] for ancestor in tree.path_to(parent)]
        best = np.argsort(-table([*tokens, *path]), kind="stable")
        assert [tree.tokens[draw.node] for draw in draws] == best[: len(draws)].tolist()
        assert all(draw.law is None for draw in draws)


# -- the state -------------------------------------------------------------------------------------


class NoLayer:
    """Heads that read the target's own states."""

    prefix: Any = None
    n_params, depth_params, whole_rows = 0, 0.0, False

    @property
    def head(self) -> NoLayer:
        return self

    def states(self, states: np.ndarray, position: int, count: int) -> np.ndarray:
        return states


class SumLayer(NoLayer):
    """Heads below a layer whose output is the sum of what it sees, each state times its position:
    any mistake shows."""

    n_cells = 40

    def __init__(self) -> None:
        self._cells = np.zeros(self.n_cells)
        self.prefix = self

    def states(self, states: np.ndarray, position: int, count: int) -> np.ndarray:
        for i, state in enumerate(states):
            self._cells[count + i] = state[0] * (position + i + 1)
        return np.array(
            [[self._cells[: count + i + 1].sum()] for i in range(len(states))], np.float32
        )


def state_of(text: Sequence[int], position: int) -> float:
    """A hidden state that depends on all tokens up to a position."""
    return float(hash(tuple(text[: position + 1])) % 997)


ROUNDS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 4), st.booleans()), min_size=1, max_size=8
)


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(ROUNDS, st.booleans(), st.integers(0, 3))
@example(
    [(0, 4, True), (1, 1, True)], True, 0
)  # the second prompt is a beginning of the first text
def test_the_state_is_that_of_the_text_after_any_rounds(
    rounds: list[tuple[int, int, bool]], layered: bool, more: int
) -> None:
    """Answers that share beginnings with earlier ones, whose cached part the prompt's states leave
    out."""
    kept = HydraSource(SumLayer() if layered else NoLayer()).state  # type: ignore[arg-type]
    text: list[int] = []
    cached: list[int] = []
    for number, (shared, new, begins) in enumerate(rounds):
        if begins or not text:
            text = [*text[: shared * 2], *range(number, number + more)] or [number]
            common = next(
                (i for i, (a, b) in enumerate(zip(cached, text, strict=False)) if a != b), None
            )
            start = min(
                common if common is not None else min(len(cached), len(text)), len(text) - 1
            )
            start = max(
                0, min(start, len(text) - 2)
            )  # a session shows the state before the last token in any case
            kept.begin(text)
            fresh = range(start, len(text) - 1)
            if fresh:
                kept.learn(start, np.array([[state_of(text, i)] for i in fresh], np.float32), text)
        before = len(text)
        text = [
            *text,
            *range(100 + number, 100 + number + new),
        ]  # `new - 1` accepted, then the target's own
        known = range(before - 1, len(text) - 1)
        kept.learn(before - 1, np.array([[state_of(text, i)] for i in known], np.float32), text)
        cached = text[:-1]
        if len(text) - 1 <= SumLayer.n_cells:
            found = kept.said(text)
            assert found is not None
            states = [state_of(text, i) * (i + 1) for i in range(len(text) - 1)]
            assert found[0] == (
                np.float32(sum(states)) if layered else state_of(text, len(text) - 2)
            )
        assert kept.said([*text, 3]) is None


def test_a_gap_or_a_full_cache_costs_drafts_and_nothing_else() -> None:
    layer = SumLayer()
    kept = HydraSource(layer).state  # type: ignore[arg-type]
    text = list(range(60))
    kept.learn(0, np.ones((3, 1), np.float32), text)
    kept.learn(10, np.ones((2, 1), np.float32), text)  # positions 3 to 9 are missing
    found = kept.said(text[:13])
    assert found is not None
    assert found[0] == 11 + 12
    kept.learn(11, np.full((2, 1), 5, np.float32), text)  # position 11 is known already
    found = kept.said(text[:14])
    assert found is not None
    assert found[0] == 11 + 12 + 5 * 13
    kept.learn(10, np.full((1, 1), 7, np.float32), text)
    assert kept.said(text[:14]) is found
    kept.learn(13, np.ones((45, 1), np.float32), text)  # more than there are cells
    assert kept.said(text[:58]) is None


# -- real targets ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def greedy_texts(tiny_model: Path) -> list[list[int]]:
    return greedy_answers(tiny_model, F32)


@pytest.fixture(scope="module")
def matrices(tiny_model: Path) -> tuple[np.ndarray, np.ndarray]:
    return token_matrices(tiny_model)


@pytest.fixture(scope="module", params=[False, True], ids=["hydra", "hydra++"])
def trained(
    request: pytest.FixtureRequest,
    tiny_model: Path,
    greedy_texts: list[list[int]],
    matrices: tuple[np.ndarray, np.ndarray],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[TinyHydra, Path]:
    """Heads trained for some seconds on greedy texts."""
    states = [final_states(tiny_model, text, F32) for text in greedy_texts]
    start = random_hydra(HIDDEN, VOCAB, prefix=request.param)
    fitted = train(start, greedy_texts, states, *matrices)
    path = fitted.write(tmp_path_factory.mktemp("hydra") / "trained.gguf", VOCAB)
    return fitted, path


@pytest.mark.parametrize("options", ["", ", n=3", ", depth=3, topk=4, nodes=9"])
def test_the_text_is_plain_decodings_own(
    tiny_model: Path, trained: tuple[TinyHydra, Path], options: str
) -> None:
    same_text(tiny_model, f"hydra({quoted(str(trained[1]))}{options})")


@pytest.mark.parametrize("options", ["depth=3, topk=2, nodes=6", "n=3", "tree=2x2x1"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_the_references_after_any_rounds(
    tiny_model: Path,
    trained: tuple[TinyHydra, Path],
    matrices: tuple[np.ndarray, np.ndarray],
    options: str,
    temperature: float,
) -> None:
    """After accepted and rejected rounds, the state and the tokens equal a fresh evaluation of the
    whole text."""
    fitted, path = trained
    checked = 0
    with Runtime(tiny_model, drafter=f"hydra({quoted(str(path))}, {options})", **F32) as runtime:
        drafter = runtime.session.drafter
        assert isinstance(drafter, GrowingDrafter)
        first = runtime.generate(
            PROMPT_IDS, SamplingParams(temperature=temperature, seed=1), max_tokens=30
        )
        # Answers that share some tokens with the first, all but the last, all of them, and none.
        part = [*PROMPT_IDS, *first.token_ids[:11]]
        for prompt in ([*part, 3, 4], [*part, 3, 4, 9], [*part, 3, 4, 9], part[:7], [3, 4, 9]):
            result = runtime.generate(
                prompt, SamplingParams(temperature=temperature, seed=2), max_tokens=20
            )
            text = [*prompt, *result.token_ids]
            if result.finish_reason == "stop":
                continue
            checked += 1
            state = drafter.source.state.said(text)
            assert state is not None
            states = torch.tensor(final_states(tiny_model, text, F32)[:-1], dtype=torch.float64)
            expected = fitted.double().read_states(states).numpy()
            np.testing.assert_allclose(state, expected[-1], rtol=1e-3, atol=1e-4)
            assert np.abs(state - expected[-2]).max() > 0.01  # the control: shifted by one
            best = drafter.source._cells.best_laws(state, [[text[-1]]])
            laws = log_probs(fitted, expected[-1], [[text[-1]]], *matrices)
            np.testing.assert_allclose(
                best.log_probs[0], laws[0, best.tokens[0]], rtol=1e-3, atol=1e-3
            )
    assert checked > 2


def test_the_first_round_drafts_from_the_prompt(
    tiny_model: Path, trained: tuple[TinyHydra, Path]
) -> None:
    """The prompt's states are learnt; of a prompt that is cached whole, all but the last are known
    already."""
    with Runtime(tiny_model, drafter=f"hydra({quoted(str(trained[1]))}, n=2)", **F32) as runtime:
        first = runtime.generate(PROMPT_IDS, GREEDY, max_tokens=3)
        assert first.stats.drafted >= 2
        assert first.token_ids == answer(tiny_model, "none", GREEDY, 3).token_ids


# -- shapes ----------------------------------------------------------------------------------------


def shape_of(model: Path, heads: Path, options: str = "") -> Topology | DynamicShape:
    with Runtime(model, drafter=f"hydra({quoted(str(heads))}{options})", **F32) as runtime:
        drafter = runtime.session.drafter
        assert isinstance(drafter, GrowingDrafter)
        return drafter._shape


def test_static_trees_follow_measured_accuracies(tiny_model: Path, tmp_path: Path) -> None:
    """Of a CSV, or of the heads' file where they stand there, typical ones otherwise."""
    heads = random_hydra(HIDDEN, VOCAB)
    wide = heads.write(
        tmp_path / "wide.gguf", VOCAB, accuracy=[0.3, 0.28, 0.27] + [0.1, 0.0, 0.0] * 2
    )
    assert shape_of(tiny_model, wide, ", nodes=3") == parse_topology("3")
    deep = heads.write(tmp_path / "deep.gguf", VOCAB, accuracy=[0.9, 0.05, 0.0] * 3)
    assert shape_of(tiny_model, deep, ", nodes=3") == parse_topology("1x1x1")
    table = tmp_path / "wide.csv"
    table.write_text("head,rank,accuracy\n0,0,0.3\n0,1,0.28\n0,2,0.27\n1,0,0.1\n")
    assert shape_of(
        tiny_model, deep, f", nodes=3, accuracy={quoted(str(table))}"
    ) == parse_topology("3")
    plain = heads.write(tmp_path / "plain.gguf", VOCAB)
    assert shape_of(tiny_model, plain, ", nodes=5") == medusa_tree([TYPICAL_PATH_ACCURACY] * 3, 5)
    planned = shape_of(tiny_model, plain)
    assert isinstance(planned, Topology)
    assert planned == medusa_tree([TYPICAL_PATH_ACCURACY] * planned.max_depth, len(planned))


def test_upstreams_own_tree(tiny_model: Path, tmp_path: Path) -> None:
    heads = random_hydra(HIDDEN, VOCAB, heads=4).write(tmp_path / "h.gguf", VOCAB)
    shape = shape_of(tiny_model, heads, ", tree=mc_sim_7b_63")
    assert isinstance(shape, Topology)
    assert (len(shape), shape.max_depth) == (63, 4)


def test_dynamic_trees_are_no_deeper_than_the_heads_reach(tiny_model: Path, tmp_path: Path) -> None:
    heads = random_hydra(HIDDEN, VOCAB).write(tmp_path / "h.gguf", VOCAB)
    assert shape_of(tiny_model, heads, ", topk=3") == DynamicShape(3, 3, 16)
    assert shape_of(tiny_model, heads, ", topk=2, nodes=2") == DynamicShape(2, 2, 2)
    assert shape_of(tiny_model, heads, ", depth=2") == DynamicShape(2, 4, 16)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("n=0", "n is 0"),
        ("n=4", "draft 1 to 3 tokens"),
        ("n=2, nodes=3", "n=2 drafts a chain"),
        ("tree=1x1x1x1", "reach 1 to 3 tokens"),
        ("depth=4", "reach 1 to 3 tokens"),
        ("depth=3, nodes=2", "nodes=2 is less than depth=3"),
        ("topk=0", "topk is 0"),
        ("nodes=0", "at least 1 node"),
        ("tree=2x2, nodes=6", "leave out nodes"),
        ("tree=2x2, topk=2", "leave out topk"),
        ("depth=2, accuracy=x.csv", "accuracy= is for static trees only"),
        ("tree=300", "use fewer branches"),
        ("nodes=2000", "nodes is 2000"),
        ("sampling=with", "sampling"),
    ],
)
def test_shapes_that_cannot_be_are_refused(
    tiny_model: Path, tmp_path: Path, options: str, problem: str
) -> None:
    path = random_hydra(HIDDEN, VOCAB).write(tmp_path / "h.gguf", VOCAB)
    with pytest.raises(OptionError, match=problem):
        Runtime(tiny_model, drafter=f"hydra({quoted(str(path))}, {options})", **F32)


def test_wrong_accuracies_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    path = random_hydra(HIDDEN, VOCAB).write(tmp_path / "h.gguf", VOCAB, accuracy=[0.5, 0.4])
    with pytest.raises(MalformedFileError, match="2 accuracies for 3 heads"):
        Runtime(tiny_model, drafter=f"hydra({quoted(str(path))})", **F32)
