"""PaSS and SPACE: the law is the target's, drafts are what a fresh evaluation says at look-ahead
positions below the accepted node, and files of another target are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.enumeration import PROMPT, TOLERANCE, LawTable, drafter_bias, noted
from support.renamed_models import as_architecture
from support.scripted import PLAIN, TableTarget, conversation_of
from support.tiny_lookahead import random_embeddings, write_lookahead
from support.tiny_models import CHAT, F32

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.contexts.embedding_inputs import EmbeddingBatch
from specrun.bindings.errors import (
    MalformedFileError,
    OptionError,
    PairError,
    UnsupportedModelError,
)
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.drafters import environment
from specrun.runtime.drafters.combinators import EnsembleDrafter
from specrun.runtime.drafters.lookahead_positions import LookaheadFile, ParallelDrafter
from specrun.runtime.laws import Law, SeededNoise
from specrun.runtime.round import Drafter, DraftRequest
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.round.loop import DecodeSettings, Round, RoundLimits, decode_rounds
from specrun.runtime.trees import ROOT, DraftTree
from specrun.runtime.trees.layout import count_leaves
from specrun.runtime.trees.tree import Draw

GREEDY = SamplingParams(temperature=0.0)


class TableFile:
    """Stands for a file of look-ahead embeddings where laws come from a table."""

    n_params, inputs = 0, None

    def __init__(self, first: int, shared: bool = False) -> None:
        self._first, self._shared = first, shared

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._first + index * (not self._shared) for index in range(count))


def over_table(size: int, n: int, shared: bool = False, **options: Any) -> ParallelDrafter:
    return ParallelDrafter(TableFile(size, shared), n, **options)  # type: ignore[arg-type]


# -- the law ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["every", "last"])
@pytest.mark.parametrize("sampling", ["argmax", "with"])
@pytest.mark.parametrize("seed", range(2))
def test_the_loop_keeps_the_targets_law(below: Any, sampling: Any, seed: int) -> None:
    table = LawTable(3, seed)
    found = drafter_bias(
        ExactRule(), lambda: over_table(3, 2, below=below, sampling=sampling), table, 4
    )
    assert found < TOLERANCE


@pytest.mark.parametrize("below", ["every", "last"])
def test_siblings_of_the_first_draft_keep_it(below: Any) -> None:
    table = LawTable(4, 1)
    made: list[DraftTree] = []

    def make() -> Drafter:
        return noted(over_table(4, 2, topk=3, below=below), made)

    assert drafter_bias(ExactRule(), make, table, 4) < TOLERANCE
    assert max(len(tree.draws.get(ROOT, ())) for tree in made) == 3
    assert max(map(len, made)) <= make().max_nodes
    assert max(count_leaves(tree.parents) for tree in made) <= (5 if below == "every" else 3)


def test_masks_and_merged_trees_keep_it_too() -> None:
    def make() -> Drafter:
        parts = (over_table(3, 2, shared=True, sampling="with"), over_table(3, 1, sampling="with"))
        return EnsembleDrafter(parts)

    assert drafter_bias(ExactRule(), make, LawTable(3, 5), 3) < TOLERANCE


class Misstated(ParallelDrafter):
    """Says that its draws came from another position's law, as if they had been drawn there."""

    def _drafts(self, request: DraftRequest) -> DraftTree:
        tree = super()._drafts(request)
        flat = Law(np.full(3, 1 / 3))
        draws = {parent: (Draw(made[0].node, flat),) for parent, made in tree.draws.items()}
        return DraftTree(tree.tokens, tree.parents, tree.depths, tree.is_candidate, draws)


def test_laws_that_draws_were_not_made_from_are_caught() -> None:
    file: Any = TableFile(3)
    found = drafter_bias(
        ExactRule(), lambda: Misstated(file, 2, sampling="with"), LawTable(3, 0), 4
    )
    assert found > 1e-3


# -- what is drafted -------------------------------------------------------------------------------


def rounds_over(
    drafter: Drafter, table: LawTable, length: int, params: SamplingParams = PLAIN
) -> list[Round]:
    drafter.begin(PROMPT)
    conversation = conversation_of(drafter, PROMPT, SeededNoise(3))
    limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=length)
    settings = DecodeSettings(ExactRule(), params, limits)
    return [*decode_rounds(TableTarget(table), conversation, settings)]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("below", ["every", "last"])
def test_drafts_are_the_best_tokens_at_the_positions_below_the_accepted_node(
    n: int, below: Any
) -> None:
    table, text, n_accepted = LawTable(3, 1), list(PROMPT), 0
    drafter = over_table(3, n, below=below)
    wanted: list[int] = []
    for made in rounds_over(drafter, table, 40, GREEDY):
        tree = made.tree
        candidates = [tree.tokens[i] for i in range(len(tree)) if tree.is_candidate[i]]
        assert candidates == wanted[: len(candidates)]
        assert len(tree) <= drafter.max_nodes
        everywhere = below == "every" or len(made.path) == len(candidates)
        before = [*text, *(tree.tokens[node] for node in made.path)]
        ahead = [[*before, *range(3, 4 + index)] for index in range(n)]
        wanted = [int(table(prefix).argmax()) for prefix in ahead] if everywhere else []
        if made.is_last:
            break
        text += made.new
        n_accepted += len(made.path)
    assert n_accepted > 0  # or rows below accepted candidates were never read


def test_a_round_has_the_nodes_it_says() -> None:
    every, last = over_table(3, 3), over_table(3, 3, below="last")
    shapes = [
        {tree.parents for tree in (made.tree for made in rounds_over(each, LawTable(3, 1), 30))}
        for each in (every, last)
    ]
    # Behind the root, then behind three candidates and the root.
    assert (ROOT, 0, 1, ROOT, 3, 4, 0, 6, 7, 1, 9, 10, 2, 12, 13) in shapes[0]
    assert (ROOT, 0, 1, 2, 3, 4) in shapes[1]
    assert (ROOT, 0, 1) in shapes[0] & shapes[1]
    assert (every.max_nodes, every.max_leaves) == (15, 4)
    assert (last.max_nodes, last.max_leaves) == (6, 1)


def test_rounds_stay_within_their_limits() -> None:
    for depth in range(5):
        for nodes in range(8):
            drafter = over_table(3, 3)
            drafter._rows_source.rows = [np.log([0.2, 0.5, 0.3])] * 3, len(PROMPT)
            tree = drafter.propose(DraftRequest(PROMPT, GREEDY, SeededNoise(0), depth, nodes))
            assert len(tree) <= nodes
            assert tree.max_depth <= depth
            assert tree.n_candidates == min(3, depth, nodes)


def test_what_another_drafter_was_verified_for_teaches_nothing() -> None:
    drafter = over_table(3, 2)
    request = DraftRequest([*PROMPT], GREEDY, SeededNoise(0), 9, 9)
    tree = drafter.propose(request)
    rows = TableTarget(LawTable(3, 0)).evaluate(_text(), tree)
    drafter.observe(RoundOutcome([*PROMPT, 2], DraftTree.chain([1]), (), 2, rows))
    assert not drafter.propose(
        DraftRequest([*PROMPT, 2], GREEDY, SeededNoise(0), 9, 9)
    ).n_candidates
    drafter.observe(RoundOutcome([*PROMPT, 2, 0], tree, (), 0, rows))
    assert not drafter.propose(
        DraftRequest([*PROMPT, 1], GREEDY, SeededNoise(0), 9, 9)
    ).n_candidates


def _text() -> Any:
    from specrun.runtime.round import CachedText

    return CachedText(PROMPT)


# -- with a model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("parallel")
    target = folder / "target.gguf"
    write_random_llama(target, RandomLlama(**{**CHAT, "scale": 3.0}))
    positions = random_embeddings(32, 3)
    return {
        "target": target,
        "pass": write_lookahead(folder / "pass.gguf", positions, 320),
        "space": write_lookahead(
            folder / "space.gguf", positions[:1], 320, kind="space", position_count=3
        ),
    }


@pytest.fixture
def model(files: dict[str, Path]) -> Iterator[Model]:
    with Model(files["target"]) as opened:
        yield opened


def fresh_drafts(model: Model, file: LookaheadFile, text: Sequence[int], n: int) -> list[int]:
    """The best tokens at n look-ahead positions behind a text, evaluated anew as one chain."""
    tokens = [*text, *file.tokens(n)]
    with Context(model, ContextOptions(**F32, n_outputs=len(tokens))) as context:
        batch = EmbeddingBatch(len(tokens), 1, model.n_embd)
        batch.fill_chain([0] * len(tokens), 0, (0,), len(tokens))
        batch.give(file.inputs.rows(tokens))
        rows = context.decode(batch)
        return [int(rows.logits(len(text) + index).argmax()) for index in range(n)]


@pytest.mark.parametrize("kind", ["pass", "space"])
def test_drafts_are_a_fresh_evaluations(kind: str, files: dict[str, Path], model: Model) -> None:
    text = [5, 6, 7, 8, 9]
    n_drafted = 0
    options = {"n_ctx": 64, "n_threads": 1, "cache_type_k": "f32", "cache_type_v": "f32"}
    with (
        closing(LookaheadFile(files[kind], kind, model)) as file,
        Runtime(files["target"], f"{kind}({files[kind]})", flash_attention="off", **options) as rt,
    ):
        drafter = rt.session.drafter
        seen: list[tuple[list[int], tuple[int, ...]]] = []
        propose = drafter.propose

        def noted(request: DraftRequest) -> DraftTree:
            tree = propose(request)
            candidates = tree.tokens[: tree.n_candidates]
            seen.append((list(request.tokens), candidates))
            return tree

        drafter.propose = noted  # type: ignore[method-assign]
        rt.generate(text, GREEDY, max_tokens=16)
        for tokens, drafted in seen[1:]:
            wanted = fresh_drafts(model, file, tokens[:-1], 3)
            assert list(drafted) == wanted[: len(drafted)]
            n_drafted += len(drafted)
    assert n_drafted > 10


def test_a_file_may_be_named_as_models_are(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    locate = environment.locate_model
    stored = {"stored": files["pass"]}
    monkeypatch.setattr(
        environment, "locate_model", lambda path: locate(stored.get(path.name, path))
    )
    with Runtime(files["target"], "pass(stored)", n_ctx=64) as runtime:
        assert runtime.session.drafter.max_nodes == 15


def test_files_for_other_targets_are_refused(files: dict[str, Path], tmp_path: Path) -> None:
    target, rows = files["target"], random_embeddings(32, 2)
    wrong: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
        ("width", PairError, "the target's have 32", {"rows": random_embeddings(16, 2)}),
        ("vocabulary", PairError, "the target has 320", {"vocab_size": 319}),
        ("hash", PairError, "made for another vocabulary", {"vocabulary": "ab" * 32}),
        ("count", MalformedFileError, "2 embeddings for 3 look-ahead", {"position_count": 3}),
        ("type", MalformedFileError, "as F16, which must be F32", {"dtype": np.float16}),
        ("kind", UnsupportedModelError, r"pass\(...\) needs pass heads", {"kind": "space"}),
    ]
    for name, error, message, changes in wrong:
        embeddings = changes.pop("rows", rows)
        path = write_lookahead(tmp_path / f"{name}.gguf", embeddings, 320, **changes)
        with pytest.raises(error, match=message):
            Runtime(target, f"pass({path})", n_ctx=64)
    other = as_architecture(target, tmp_path / "xverse.gguf", "xverse")
    with pytest.raises(UnsupportedModelError, match="look-ahead positions of xverse models"):
        Runtime(other, f"pass({files['pass']})", n_ctx=64)


def test_more_positions_than_were_trained_are_refused(files: dict[str, Path]) -> None:
    for n in (0, 4):
        with pytest.raises(OptionError, match=f"n is {n}, and .* trained for 3 look-ahead pos"):
            Runtime(files["target"], f"pass({files['pass']}, n={n})", n_ctx=64)
    with pytest.raises(OptionError, match="do not fit a batch of 8"):
        Runtime(files["target"], f"space({files['space']})", n_ctx=64, n_batch=8)
    with pytest.raises(OptionError, match="sampling=with draws it: leave one of them out"):
        Runtime(files["target"], f"pass({files['pass']}, topk=2, sampling=with)", n_ctx=64)


def test_embeddings_of_two_files_do_not_fit_one_evaluation(files: dict[str, Path]) -> None:
    both = f"ensemble(pass({files['pass']}), space({files['space']}))"
    with pytest.raises(OptionError, match="takes those of one file: leave one of them out"):
        Runtime(files["target"], both, n_ctx=64)
    inside = f"cascade(draft({files['target']}), pass({files['pass']}))"
    with pytest.raises(OptionError, match="in a cascade it would draft for the draft model"):
        Runtime(files["target"], inside, n_ctx=64)
