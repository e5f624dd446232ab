"""Rules walked in compiled code keep what Python's walk keeps: paths, tokens and all."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from support.random_rounds import random_round, row_of

from specrun.bindings.errors import DecodeFailedError, OptionError
from specrun.runtime.acceptance import Acceptance, BlockRule, ExactRule
from specrun.runtime.acceptance import rule as rule_module
from specrun.runtime.acceptance.rule import ShortLaws
from specrun.runtime.compiled import LOOPS, UnmadeLaw
from specrun.runtime.laws import Law, SamplingParams, SeededNoise, transformed_law
from specrun.runtime.laws import noise as noise_module
from specrun.runtime.trees import ROOT, DraftTree
from specrun.runtime.trees.tree import ChainDraws

pytestmark = pytest.mark.skipif(LOOPS is None, reason="installed without a compiler")

RULES = {"exact": BlockRule(), "token": ExactRule()}


ROOM = 128  # for a law: what lies behind it would change it


def side_by_side(laws: list[Law]) -> list[UnmadeLaw]:
    """Laws as compiled code leaves them, each with as much room."""
    made = bytearray()
    for law in laws:
        behind = np.arange(ROOM - len(law.ids))
        made += np.append(law.ids, behind + 1000).astype(np.intp).tobytes()
        made += np.append(law.probs, behind + 0.7).tobytes()
    return [(bytes(made), place, ROOM, len(law.ids)) for place, law in enumerate(laws)]


def unmade(tree: DraftTree) -> DraftTree:
    """A draft as compiled code leaves it, room behind its laws; others as they are."""
    siblings = getattr(tree.draws, "_siblings", {})
    laws = [drawn.law for drawn in siblings.values()]
    if siblings and len(siblings) == len(tree.draws) and all(law.ids is not None for law in laws):
        drawn = {
            parent: (first, (*tokens,), law)
            for (parent, (first, tokens, _)), law in zip(
                siblings.items(), side_by_side(laws), strict=True
            )
        }
        return DraftTree.of_siblings(tree.tokens, tree.parents, drawn)
    single = [tree.draws.get(parent, ()) for parent in range(ROOT, len(tree) - 1)]
    laws = [draws[0].law for draws in single if len(draws) == 1]
    if not laws or None in laws or tree.parents != tuple(range(ROOT, len(laws) - 1)):
        return tree
    chain = DraftTree.drawn_chain([*tree.tokens], ChainDraws(side_by_side(laws)))
    assert [(at, draws[0].node, *draws[0].law.ids) for at, draws in chain.draws.items()] == [
        (at, at + 1, *law.ids) for at, law in enumerate(laws, ROOT)
    ]
    return chain


def python_way(rule, tree, laws, noise, position) -> Acceptance:
    return rule.accept(tree, lambda node: laws(node), noise, position)


@pytest.mark.parametrize("name", list(RULES))
def test_a_compiled_walk_keeps_what_the_rules_keep(name: str) -> None:
    rule, lengths, refused, differing, chains = RULES[name], set(), set(), 0, 0
    for seed in range(2500):
        tree, rows, params = random_round(seed)
        laws, noise = ShortLaws(rows.__getitem__, params), SeededNoise(seed + 2**63, seed % 5 - 2)
        kept = laws.followed(tree, noise, seed, as_block=name == "exact")
        expected = python_way(rule, tree, laws, SeededNoise(*noise.source), seed)
        assert kept == expected, seed
        chain = unmade(tree)
        chains += chain is not tree
        assert laws.followed(chain, noise, seed, as_block=name == "exact") == expected
        assert rule.accept(tree, laws, noise, seed) == expected
        assert python_way(rule, chain, laws, SeededNoise(*noise.source), seed) == expected
        lengths.add(len(kept.path))
        refused.add((kept.rejected, bool(kept.path)))
        other = laws.followed(tree, noise, seed + 1, as_block=name == "exact")
        differing += kept != other
    assert lengths >= {0, 1, 2, 3, 4, 5}
    assert len(refused) == 4
    assert chains > 100
    assert differing > 500  # with other numbers, this test sees another walk


def test_blocks_are_told_from_tokens() -> None:
    """The two rules keep different paths: a walk of the wrong one would be seen."""
    differing = 0
    for seed in range(400):
        tree, rows, params = random_round(seed)
        laws, noise = ShortLaws(rows.__getitem__, params), SeededNoise(seed)
        block, token = (laws.followed(tree, noise, 7, as_block=way) for way in (True, False))
        differing += block != token
    assert differing > 20


def test_what_is_not_short_and_plain_is_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, params = np.random.default_rng(1), SamplingParams(temperature=0.8, top_k=40)
    rows = [row_of(generator, 300) for _ in range(4)]
    laws, noise = ShortLaws(rows.__getitem__, params), SeededNoise(3)
    drawn = transformed_law(rows[0], params)
    tree = DraftTree.chain([int(drawn.ids[0])], [drawn])

    def follow(tree: DraftTree, laws: ShortLaws = laws, noise: SeededNoise = noise) -> object:
        return laws.followed(tree, noise, 0, as_block=True)

    assert isinstance(follow(tree), Acceptance)
    dense = Law(np.full(300, 1 / 300))
    assert follow(DraftTree.chain([5], [dense])) is noise
    assert RULES["exact"].accept(DraftTree.chain([5], [dense]), laws, noise, 0) is not None
    of_64_bits = ShortLaws([row.astype(np.float64) for row in rows].__getitem__, params)
    assert follow(tree, of_64_bits) is noise
    few = ShortLaws([row[:40] for row in rows].__getitem__, params)  # top-k cuts nothing
    assert follow(DraftTree(), few) is noise
    never = int(np.setdiff1d(np.arange(300), drawn.ids)[0])
    impossible = DraftTree.chain([never], [drawn])
    assert follow(impossible) is noise
    for rule in RULES.values():
        with pytest.raises(OptionError, match="probability 0"):
            rule.accept(impossible, laws, noise, 0)
    broken = [row.copy() for row in rows]
    broken[0][3] = np.nan
    for rule in RULES.values():
        with pytest.raises(DecodeFailedError, match="logits of"):
            rule.accept(tree, ShortLaws(broken.__getitem__, params), noise, 0)
    deep = DraftTree.chain([int(drawn.ids[0])] * 70, [drawn] * 70)
    same = ShortLaws(lambda _: rows[0], params)
    assert follow(deep, same) is noise
    assert len(RULES["exact"].accept(deep, same, noise, 0).path) > 64
    monkeypatch.setattr(rule_module, "LOOPS", None)
    assert follow(tree) is noise


def test_errors_of_rows_and_laws_come_through() -> None:
    params = SamplingParams(temperature=0.8, top_k=4)

    def no_row(_: int) -> np.ndarray:
        raise LookupError("no row")

    with pytest.raises(LookupError, match="no row"):
        ShortLaws(no_row, params).followed(DraftTree(), SeededNoise(0), 0, as_block=True)
    row = np.arange(9, dtype=np.float32)
    assert LOOPS is not None
    cuts, array = (np.exp, 0.9, -3.0, 1.0), np.empty(4)

    def verify(**changes: object) -> object:
        given = {
            "logits": lambda _: row,
            "tokens": (8,),
            "draws": {ROOT: ((0, None),)}.get,
            "array": array,
            "cuts": cuts,
            "noise": (1, 2),
            "position": 0,
            "as_block": True,
        }
        return LOOPS.verify(*{**given, **changes}.values())

    assert verify() is not None
    no_exp, odd_draw = (lambda *_: 1, 0.9, -3.0, 1.0), {ROOT: (("0", 3),)}.get
    wrong: dict[str, list[object]] = {"tokens": [[8], ("8",)], "cuts": [(np.exp, 0.9), no_exp]}
    wrong |= {"noise": [(1, "2"), (1,)], "position": ["0"], "logits": [3], "draws": [3, odd_draw]}
    wrong["array"] = [[0.0], np.empty(4, np.float32)]
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(TypeError):
                verify(**{name: value})
    with pytest.raises(AttributeError):
        verify(draws={ROOT: ((0, 3),)}.get)
    with pytest.raises(TypeError):
        LOOPS.verify(1, 2)
    for drawn in ([(0, None)], ((0,),), ((1, None),), ((-1, None),), (0, (), 1, 2)):
        assert verify(draws={ROOT: drawn}.get) is None
    ids = np.arange(4)
    for probs, others in ((np.full(3, 0.3), ids), (np.full(4, 0.25), ids.astype(np.int32))):
        law = Law(probs, others)
        assert verify(draws={ROOT: ((0, law),)}.get) is None
        assert verify(draws={ROOT: (0, (8, 7), law)}.get) is None
    for wrong in (np.empty(0), np.empty(9), np.empty(129)):  # not fewer than the row has, or many
        assert verify(array=wrong) is None
    assert verify(draws=lambda node: ((0, None),)) is None  # a circle


def test_digests_are_those_of_hashlib() -> None:
    assert LOOPS is not None
    generator = np.random.default_rng(5)
    for n in range(17):
        numbers = generator.integers(-(2**63), 2**63 - 1, n).tolist()
        packed = struct.pack(f"<{n}q", *numbers)
        expected = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
        assert LOOPS.digest(*numbers) == expected
        assert LOOPS.digest(*[number % 2**64 for number in numbers]) == expected
        if n:
            assert LOOPS.digest(numbers[0] ^ 1, *numbers[1:]) != expected
    for wrong in ([2**64], [-(2**63) - 1], ["1"], [1.0], [0] * 17):
        with pytest.raises((TypeError, OverflowError)):
            LOOPS.digest(*wrong)


def test_noise_is_the_same_with_and_without_compiled_digests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def numbers() -> list[int]:
        answer = SeededNoise(2**64 - 5, -3)
        drafts = [answer.for_drafting(start) for start in (0, 5, 2**40)]
        sources = [answer, *drafts, drafts[0].for_drafting(2)]
        for noise in sources:
            noise.seek(77)
        numbers = [number for noise in sources for number in (noise.source[1], noise._hash(4))]
        return numbers

    compiled = numbers()
    monkeypatch.setattr(noise_module, "LOOPS", None)
    assert numbers() == compiled
    assert len(set(compiled)) == len(compiled)
