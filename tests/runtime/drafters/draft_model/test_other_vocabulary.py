"""Draft models of another vocabulary: exact by enumeration, the twin's drafts, KV truth, text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.enumeration import TOLERANCE, drafter_bias
from support.moved_tokens import with_moved_tokens
from support.scripted import LawTable, law_of
from support.tiny_models import F32, fresh_logits
from support.tree_laws import drawn_chain

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import PairError
from specrun.bindings.models.model import Model
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import build_rule
from specrun.runtime.drafters.draft_model.vocabulary import (
    SpelledModelSource,
    TextReader,
    TokenMap,
    tokens_after,
    whole_characters,
)
from specrun.runtime.language import quoted
from specrun.runtime.laws import Law, transformed_law
from specrun.runtime.round import Drafter, DraftRequest
from specrun.runtime.trees import DraftTree, Topology

LOST = range(260, 300)  # pairs of letters, which the drafter then spells with two tokens
GREEDY, WARM = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=3)
PROMPT = "hello abc, the world's end in theirs"


@dataclass
class Words:
    """A vocabulary of a few pieces, as much of one as a map reads."""

    pieces: list[bytes]
    bos: int | None = None
    eos: int | None = 0
    adds_bos: bool = False

    @property
    def size(self) -> int:
        return len(self.pieces)

    def piece(self, token: int) -> bytes:
        return self.pieces[token]

    def label(self, token: int) -> str:
        return ""

    def is_byte(self, token: int) -> bool:
        return False


# Of the target's four tokens the drafter has three, in another order, and one of its own.
TARGET, DRAFT = Words([b"a", b"b", b"c", b"d"]), Words([b"x", b"c", b"a", b"b"])


class ForeignChain(Drafter):
    """The shipped map and the shipped chain over a table of a drafter's own laws."""

    name = "chain"

    def __init__(self, drafts: LawTable, *, forgets: bool = False) -> None:
        self._drafts, self._forgets = drafts, forgets
        self._map = TokenMap(TARGET, DRAFT)  # type: ignore[arg-type]

    def propose(self, request: DraftRequest) -> DraftTree:
        def law_after(drafted: list[int]) -> Law:
            own = self._drafts([*request.tokens, *drafted])
            if self._forgets:
                # The mistake: the law is noted as it was before it was cut to shared tokens.
                return law_of(own[[2, 3, 1, 0]])
            logits = np.log(own).astype(np.float32)
            return transformed_law(self._map.row(logits), SamplingParams(temperature=1.0))

        most = min(2, request.max_depth)
        tree = drawn_chain(law_after, request, most)
        if self._forgets and any(token == 3 for token in tree.tokens):
            return DraftTree()  # and drafts that cannot be said are thrown away
        return tree


@pytest.mark.parametrize("rule", ["exact", "token"])
def test_the_law_is_the_targets(rule: str) -> None:
    table, drafts, accept = LawTable(4, 1), LawTable(4, 2, zeros=0.0), build_rule(rule)
    assert drafter_bias(accept, lambda: ForeignChain(drafts), table) < TOLERANCE
    wrong = drafter_bias(accept, lambda: ForeignChain(drafts, forgets=True), table)
    assert wrong > 0.01


# -- by shared tokens ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moved(tiny_flat_twin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The twin, its tokens under other ids."""
    path = tmp_path_factory.mktemp("moved") / "moved.gguf"
    with_moved_tokens(tiny_flat_twin, path)
    return path


@pytest.fixture(scope="module")
def poorer(tiny_flat_twin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, which lacks some of the target's tokens."""
    path = tmp_path_factory.mktemp("poorer") / "poorer.gguf"
    with_moved_tokens(tiny_flat_twin, path, lost=LOST)
    return path


@pytest.mark.parametrize("options", ["n=4", "tree=2x2", "depth=3, topk=2, nodes=5"])
def test_other_ids_for_the_same_tokens_change_nothing(
    tiny_model: Path, tiny_flat_twin: Path, moved: Path, options: str
) -> None:
    found = []
    for path in (tiny_flat_twin, moved):
        with Runtime(tiny_model, f"draft({quoted(str(path))}, {options})", **F32) as runtime:
            remark = runtime.session.drafter.remark
            assert ("the 320 of 320 tokens" in remark) == (path == moved)
            assert ("nearly all that texts are made of" in remark) == (path == moved)
            answers = [runtime.generate(PROMPT, each, max_tokens=30) for each in (GREEDY, WARM)]
        found.append([(a.token_ids, a.stats.drafted, a.stats.accepted) for a in answers])
    assert found[0] == found[1]
    assert found[0][0][2] > 3
    with pytest.raises(PairError, match="token"):
        Runtime(tiny_model, f"draft({quoted(str(moved))}, vocabulary=same)", **F32)


@pytest.mark.parametrize(
    "options", ["n=4", "tree=2x2, sampling=argmax", "depth=3, topk=2, nodes=5"]
)
def test_texts_stay_where_tokens_are_missing(tiny_model: Path, poorer: Path, options: str) -> None:
    for params in (GREEDY, *((WARM,) if options != "n=4" else ())):
        with (
            Runtime(tiny_model, "none", **F32) as plain,
            Runtime(tiny_model, f"draft({quoted(str(poorer))}, {options})", **F32) as drafted,
        ):
            wanted = plain.generate(PROMPT, params, max_tokens=60)
            found = drafted.generate(PROMPT, params, max_tokens=60)
        assert found.token_ids == wanted.token_ids
        assert found.stats.accepted > 3


@pytest.mark.parametrize("options", ["n=4", "tree=2x2"])
def test_cells_are_those_of_the_spelled_text_after_any_rounds(
    tiny_model: Path, poorer: Path, options: str
) -> None:
    """KV truth: what the drafter says next equals a fresh evaluation of what it was spelled."""
    with Runtime(tiny_model, f"draft({quoted(str(poorer))}, {options})", **F32) as runtime:
        drafter = runtime.session.drafter
        state = drafter.source  # type: ignore[attr-defined]
        assert isinstance(state, SpelledModelSource)
        spelled_apart = 0
        for number, prompt in enumerate([PROMPT, PROMPT[:20], PROMPT + " and there", "other"]):
            params = SamplingParams(temperature=1.0, seed=number)
            tokens = runtime.vocabulary.tokenize(prompt)
            tokens += runtime.generate(tokens, params, max_tokens=20).token_ids
            spelled = [id_ for token in tokens for id_ in state._map.spelled(token)]
            spelled_apart += len(spelled) > len(tokens)
            state.rewind(min(len(state.cached), len(tokens) - 1))
            assert state.cached == tokens[: len(state.cached)]
            row = np.array(state.feed(tokens[len(state.cached) :]))
            with Model(poorer) as model:
                own = fresh_logits(model, spelled)
            np.testing.assert_allclose(row, state._map.row(own[-1]), rtol=1e-3, atol=1e-3)
            before = state._map.row(own[-2])  # the control
            assert np.abs(row[np.isfinite(row)] - before[np.isfinite(row)]).max() > 0.01
            assert state.cells(len(tokens)) == len(spelled)
        assert spelled_apart > 1


def test_the_map_prefers_whole_tokens_and_spells_what_is_missing(
    tiny_model: Path, poorer: Path
) -> None:
    with Model(tiny_model) as target, Model(poorer) as draft:
        tokens = TokenMap(target.vocabulary, draft.vocabulary)
        assert tokens.n_shared == 320 - len(LOST)
        assert 0.9 < tokens.coverage < 1.0
        for token in range(320):
            ids = tokens.spelled(token)
            assert len(ids) == (2 if token in LOST else 1)
            if piece := target.vocabulary.piece(token):
                assert b"".join(draft.vocabulary.pieces(ids)) == piece
        row = tokens.row(np.zeros(320, np.float32))
        assert sorted(np.flatnonzero(np.isinf(row))) == list(LOST)


def test_a_text_longer_than_the_drafters_context_is_not_drafted_for(
    tiny_model: Path, poorer: Path
) -> None:
    with Model(poorer) as model, Model(tiny_model) as target:
        tokens = TokenMap(target.vocabulary, model.vocabulary)
        with Context(model, ContextOptions(**{**F32, "n_ctx": 256})) as context:
            state = SpelledModelSource(context, Topology.chain(1), tokens)
            few, many = [5] * 100, [LOST[0]] * 100
            assert (state.room(few), state.room(many)) == (156, 56)
            state.feed(many[:30])
            assert state.room(many) == 56
            state.rewind(10)
            assert state.room(few[:10] + many[:20]) == 256 - 20 - 40


# -- by text ---------------------------------------------------------------------------------------


def test_text_drafts_keep_the_text(tiny_model: Path, tiny_flat_twin: Path, poorer: Path) -> None:
    for path in (tiny_flat_twin, poorer):
        expression = f"draft({quoted(str(path))}, n=4, vocabulary=text)"
        with (
            Runtime(tiny_model, "none", **F32) as plain,
            Runtime(tiny_model, expression, **F32) as drafted,
        ):
            accepted = 0
            for params in (GREEDY, WARM):
                for prompt in (PROMPT, "abc", PROMPT * 4):
                    wanted = plain.generate(prompt, params, max_tokens=40)
                    found = drafted.generate(prompt, params, max_tokens=40)
                    assert found.token_ids == wanted.token_ids
                    accepted += found.stats.accepted
        assert accepted > 3


@pytest.fixture(scope="module")
def demo() -> Iterator[Runtime]:
    with Runtime.demo("none", n_ctx=128) as runtime:
        yield runtime


def test_a_growing_text_is_read_as_a_whole_one(demo: Runtime) -> None:
    words = demo.vocabulary
    text = "def sqrt(x):\n    return x ** 0.5  # naïve, 東京\n" * 40
    tokens, reader = words.tokenize(text, add_special=False), TextReader(words, words)
    for length in range(1, len(tokens) + 1, 7):
        found = reader.read(tokens[:length])
        whole = b"".join(words.pieces(tokens[:length]))
        if found is None:
            assert whole_characters(whole) != whole
        else:
            assert b"".join(words.pieces(found)) == whole
            assert len(reader._tail) < 800
    # What was read before and is no longer there is forgotten.
    shorter = tokens[:20]
    assert b"".join(words.pieces(reader.read(shorter) or [])) == b"".join(words.pieces(shorter))


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        (b"", b""),
        (b"abc", b"abc"),
        ("naïve".encode()[:3], b"na"),
        ("東".encode(), "東".encode()),
        (b"a" + "東".encode()[:2], b"a"),
        (b"\x80\x80\x80\x80\x80", b"\x80\x80\x80\x80\x80"),
        ("👩".encode()[:3], b""),
    ],
)
def test_only_whole_characters_are_passed_on(text: bytes, whole: bytes) -> None:
    assert whole_characters(text) == whole


def test_tokens_in_the_middle_of_a_text_are_the_tokenizers_own(demo: Runtime) -> None:
    words = demo.vocabulary
    whole = words.tokenize("What does math.sqrt do?", add_special=False)
    for place in range(1, len(whole)):
        rest = b"".join(words.pieces(whole[place:]))
        assert tokens_after(words, whole[max(0, place - 4) : place], rest) == whole[place:]
    assert words.tokenize_within(b"") == []
    assert b"".join(words.pieces(words.tokenize_within(b" x"))) == b" x"


# -- refusals --------------------------------------------------------------------------------------


def test_nothing_in_common_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "foreign.gguf"
    with_moved_tokens(tiny_model, path, lost=range(320))
    for way in ("auto", "tokens", "text"):
        with pytest.raises(PairError, match="no token in common"):
            Runtime(tiny_model, f"draft({quoted(str(path))}, vocabulary={way})", **F32)


def test_few_shared_tokens_are_passed_on_as_text(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "few.gguf"
    with_moved_tokens(tiny_model, path, lost=range(200))
    with Runtime(tiny_model, f"draft({quoted(str(path))})", **F32) as runtime:
        assert "vocabulary=text" in runtime.session.drafter.remark
