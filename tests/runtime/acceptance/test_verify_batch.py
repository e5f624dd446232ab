"""Batched verification: row by row the engine's own exact rule, exact itself, and strict about its
arrays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.enumeration import TOLERANCE, target_law
from support.scripted import LawTable

from specrun.bench.prove.rules import BranchingNoise, enumerate_law
from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.acceptance.verify_batch import (
    PADDING,
    BatchCounts,
    GeneratorNoise,
    count_batch,
    verify_batch,
)
from specrun.runtime.laws import Law, NoiseSource, SamplingParams, SeededNoise, transformed_law
from specrun.runtime.laws.transform import penalty_window
from specrun.runtime.round.loop import target_laws
from specrun.runtime.trees import DraftTree

VOCAB = 5


def random_laws(generator: np.random.Generator, *shape: int) -> np.ndarray:
    probs = generator.dirichlet(np.full(VOCAB, 0.4), shape)
    probs *= generator.random(probs.shape) > 0.2
    probs[..., 0] += 0.01
    return probs / probs.sum(axis=-1, keepdims=True)


def random_batch(
    seed: int, batch: int = 120, k: int = 3, dtype: type = np.float64
) -> dict[str, Any]:
    """A batch whose tokens were drawn from its draft laws; some of these are close to the
    target's."""
    generator = np.random.default_rng(seed)
    target = random_laws(generator, batch, k + 1)
    closeness = generator.random((batch, 1, 1))
    draft = (
        closeness * target[:, :k] + (1.0 - closeness) * random_laws(generator, batch, k)
    ).astype(dtype)
    ids = np.array(
        [
            [generator.choice(VOCAB, p=law / law.sum()) for law in row.astype(np.float64)]
            for row in draft
        ]
    )
    return {"target_probs": target.astype(dtype), "draft_probs": draft, "draft_token_ids": ids}


def by_the_engines_rule(
    target: np.ndarray,
    draft: np.ndarray | None,
    ids: list[int],
    noise: NoiseSource,
    position: int,
    k: int,
) -> list[int]:
    """What `ExactRule` makes of one row, padded like the batched output."""
    laws = None if draft is None else [Law(row.astype(np.float64)) for row in draft]
    tree = DraftTree.chain(ids, laws)
    accepted = ExactRule().accept(
        tree, lambda node: Law(target[node + 1].astype(np.float64)), noise, position
    )
    tokens = [*(tree.tokens[node] for node in accepted.path), accepted.next_token]
    return tokens + [PADDING] * (k + 1 - len(tokens))


# -- seeds, bonus tokens and counters --------------------------------------------------------------


def test_seeds_are_the_noise_they_key() -> None:
    batch = random_batch(5)
    seeds = list(range(120))
    by_seed = verify_batch(**batch, noise=seeds)
    assert np.array_equal(by_seed, verify_batch(**batch, noise=[*map(SeededNoise, seeds)]))
    assert not np.array_equal(by_seed, verify_batch(**batch, noise=seeds[::-1]))


def test_a_bonus_token_is_given_or_left_out() -> None:
    batch, seeds = random_batch(6), list(range(120))
    drawn = verify_batch(**batch, noise=seeds)
    given = verify_batch(**batch, noise=seeds, bonus_token_ids=np.full(120, 77))
    without = verify_batch(**batch, noise=seeds, disable_bonus=True)
    whole = (drawn[:, :3] == batch["draft_token_ids"]).all(axis=1)
    assert 0 < whole.sum() < 120
    assert (given[whole, 3] == 77).all()
    assert (without[whole, 3] == PADDING).all()
    # Nothing else changes.
    assert np.array_equal(given[:, :3], drawn[:, :3])
    assert np.array_equal(without[:, :3], drawn[:, :3])
    assert np.array_equal(given[~whole], drawn[~whole])


@pytest.mark.parametrize("disable_bonus", [False, True])
def test_counters_are_those_of_the_rows(disable_bonus: bool) -> None:
    batch, lengths = random_batch(7), np.arange(120) % 4
    output = verify_batch(
        **batch, noise=list(range(120)), num_draft_tokens=lengths, disable_bonus=disable_bonus
    )
    counts = count_batch(output, batch["draft_token_ids"], lengths)
    accepted = emitted = 0
    for row, length in enumerate(lengths.tolist()):
        said = [token for token in output[row].tolist() if token != PADDING]
        emitted += len(said)
        ends_whole = said[:length] == batch["draft_token_ids"][row, :length].tolist()
        accepted += length if ends_whole else len(said) - 1
    assert (counts.drafted, counts.accepted, counts.emitted) == (lengths.sum(), accepted, emitted)
    assert counts.possible == lengths.sum() + 120
    assert counts.acceptance_rate == accepted / lengths.sum()
    assert counts.system_efficiency == emitted / counts.possible
    assert (counts + counts).acceptance_rate == counts.acceptance_rate
    assert BatchCounts(0, 0, 0, 0).system_efficiency is None


# -- equal to the engine's own rule ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point masses"])
@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_the_exact_rules(seed: int, drawn: bool, dtype: type) -> None:
    batch = random_batch(seed, dtype=dtype)
    if not drawn:
        batch["draft_probs"] = None
    positions, lengths = np.arange(120) * 7, np.arange(120) % 4
    output = verify_batch(
        **batch,
        noise=[SeededNoise(row) for row in range(120)],
        num_draft_tokens=lengths,
        positions=positions,
        strict=True,
    )
    assert output.dtype == np.int64
    assert (
        len(set(np.count_nonzero(output != PADDING, axis=1))) == 4
    )  # every length of answer occurs
    for row, length in enumerate(lengths):
        laws = batch["draft_probs"][row, :length] if drawn else None
        ids = batch["draft_token_ids"][row, :length].tolist()
        wanted = by_the_engines_rule(
            batch["target_probs"][row], laws, ids, SeededNoise(row), int(positions[row]), 3
        )
        assert output[row].tolist() == wanted


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point masses"])
def test_every_outcome_has_the_exact_rules_probability(drawn: bool) -> None:
    batch = random_batch(9, batch=2, k=2)
    target, ids = batch["target_probs"], batch["draft_token_ids"]
    draft = batch["draft_probs"] if drawn else None

    def batched(noise: BranchingNoise) -> tuple[int, ...]:
        return tuple(verify_batch(target, draft, ids, [noise, noise]).ravel().tolist())

    def engine(noise: BranchingNoise) -> tuple[int, ...]:
        rows = (
            by_the_engines_rule(
                target[row], draft[row] if drawn else None, ids[row].tolist(), noise, 0, 2
            )
            for row in range(2)
        )
        return tuple(token for row in rows for token in row)

    assert enumerate_law(batched) == enumerate_law(engine)


@pytest.mark.parametrize("seed", range(3))
def test_the_batch_gives_the_targets_law(seed: int) -> None:
    """Two sequences of one context, drafted, verified, and continued by the target: each has the
    target's law."""
    table, drafts = LawTable(3, seed), LawTable(3, seed + 10)
    context = [0, 1]

    def program(noise: BranchingNoise) -> tuple[tuple[int, ...], ...]:
        draft_law = drafts(context)
        ids = np.array([[noise.choose(Law(draft_law))] for _ in range(2)])
        target = np.array([[table(context), table([*context, token])] for token in ids[:, 0]])
        output = verify_batch(target, np.array([[draft_law]] * 2), ids, [noise, noise])
        texts = [[token for token in row if token != PADDING] for row in output.tolist()]
        return tuple(
            tuple(text) if len(text) == 2 else (*text, noise.choose(Law(table([*context, *text]))))
            for text in texts
        )

    wanted = target_law(table, 2, frozenset())
    emitted = enumerate_law(program)
    for law in wanted:
        for other in wanted:
            assert emitted.pop((law, other)) == pytest.approx(
                wanted[law] * wanted[other], abs=TOLERANCE
            )
    assert not emitted


def test_numpy_generators_serve_as_noise_one_per_sequence() -> None:
    batch = random_batch(3)
    first, again = (
        verify_batch(**batch, noise=[np.random.default_rng(row) for row in range(120)])
        for _ in range(2)
    )
    np.testing.assert_array_equal(first, again)
    wrapped = verify_batch(
        **batch, noise=[GeneratorNoise(np.random.default_rng(row)) for row in range(120)]
    )
    np.testing.assert_array_equal(first, wrapped)
    # A sequence's tokens do not depend on who else is in the batch.
    alone = verify_batch(
        **{name: values[7:8] for name, values in batch.items()}, noise=[np.random.default_rng(7)]
    )
    np.testing.assert_array_equal(alone[0], first[7])


def test_a_generators_draws_have_their_law() -> None:
    noise = GeneratorNoise(np.random.default_rng(5)).for_drafting(3)
    law = Law(np.array([0.5, 0.2, 0.3]))
    shares = np.bincount([noise.choose(law) for _ in range(4000)]) / 4000
    np.testing.assert_allclose(shares, law.probs, atol=0.03)
    assert np.mean([noise.accept(0.3) for _ in range(4000)]) == pytest.approx(0.3, abs=0.03)
    assert noise.accept(1.0)


# -- equal to the walk that ships, from rows of logits ---------------------------------------------


SETTINGS = {
    "top-k": SamplingParams(temperature=1.3, top_k=12, top_p=1.0, min_p=0.0),
    "all cuts": SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02),
    "no top-k": SamplingParams(temperature=0.8, top_k=0, top_p=0.95, min_p=0.0),
    "penalties": SamplingParams(temperature=1.1, top_k=20, repeat_penalty=1.4),
    "greedy": SamplingParams(temperature=0.0),
}
SIZE, DRAFTED, N_CHAINS = 200, 4, 150


def dense(laws: list[Law]) -> np.ndarray:
    out = np.zeros((len(laws), SIZE))
    for row, law in zip(out, laws, strict=True):
        row[np.arange(SIZE) if law.ids is None else law.ids] = law.probs
    return out


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point masses"])
@pytest.mark.parametrize("name", SETTINGS)
def test_chains_of_logits_are_decided_as_by_the_loop(name: str, drawn: bool) -> None:
    """The same noise gives the same tokens as `target_laws` and the rule, compiled or not."""
    params = SETTINGS[name]
    drawn = drawn and not params.is_greedy
    targets, drafts, ids, walked = [], [], [], []
    for seed in range(N_CHAINS):
        generator, text = np.random.default_rng(seed), [seed % SIZE, 3, 3]
        rows = (2.5 * generator.standard_normal((DRAFTED + 1, SIZE))).astype(np.float32)
        near = rows + generator.random() * generator.standard_normal(rows.shape).astype(np.float32)
        laws: list[Law] = []
        chain: list[int] = []
        for row in near[:DRAFTED]:
            laws.append(transformed_law(row, params, penalty_window(text, chain, params)))
            chain.append(SeededNoise(1000 + seed + len(chain)).choose(laws[-1]))
        tree = DraftTree.chain(chain, laws if drawn else None)
        read = SimpleNamespace(logits=lambda index, rows=rows: rows[index])
        law_at = target_laws(text, tree, read, params)  # type: ignore[arg-type]
        accepted = ExactRule().accept(tree, law_at, SeededNoise(seed), len(text))
        tokens = [*(tree.tokens[node] for node in accepted.path), accepted.next_token]
        walked.append(tokens + [PADDING] * (DRAFTED + 1 - len(tokens)))
        targets.append(dense([law_at(node) for node in range(-1, DRAFTED)]))
        drafts.append(dense(laws))
        ids.append(chain)
    output = verify_batch(
        np.array(targets),
        np.array(drafts) if drawn else None,
        np.array(ids),
        list(range(N_CHAINS)),
        positions=np.full(N_CHAINS, 3),
        strict=True,
    )
    assert output.tolist() == walked
    assert len(set(np.count_nonzero(output != PADDING, axis=1).tolist())) > 2
    other = verify_batch(
        np.array(targets),
        np.array(drafts) if drawn else None,
        np.array(ids),
        list(range(1, N_CHAINS + 1)),
    )
    assert params.is_greedy or output.tolist() != other.tolist()


# -- shapes at the edge ----------------------------------------------------------------------------


def test_an_empty_batch_and_an_empty_draft() -> None:
    laws = np.full((0, 4, VOCAB), 1 / VOCAB)
    assert verify_batch(laws, laws[:, :3], np.zeros((0, 3), int), [], strict=True).shape == (0, 4)
    bonus = np.array([[[0.0, 1.0]], [[1.0, 0.0]]])
    output = verify_batch(bonus, None, np.zeros((2, 0), int), [SeededNoise(0)] * 2, strict=True)
    assert output.tolist() == [[1], [0]]


def test_padding_follows_the_recovered_token_and_a_full_draft_ends_with_the_bonus_token() -> None:
    certain = np.eye(4)
    target = np.array([certain[[1, 2, 3]], certain[[1, 3, 0]], certain[[2, 0, 0]]])
    ids = np.array([[1, 2], [1, 2], [1, 2]])
    draft = np.full((3, 2, 4), 0.25)
    for laws in (draft, None):
        output = verify_batch(target, laws, ids, [SeededNoise(0)] * 3, strict=True)
        assert output.tolist() == [[1, 2, 3], [1, 3, -1], [2, -1, -1]]


def test_what_follows_a_short_draft_is_not_read() -> None:
    batch = random_batch(4, batch=3)
    lengths = np.array([0, 1, 2])
    sources = [SeededNoise(row) for row in range(3)]
    wanted = verify_batch(**batch, noise=sources, num_draft_tokens=lengths)
    for row, length in enumerate(lengths):
        batch["draft_token_ids"][row, length:] = -1
        batch["draft_probs"][row, length:] = np.nan
        batch["target_probs"][row, length + 1 :] = np.nan
    found = verify_batch(**batch, noise=sources, num_draft_tokens=lengths, strict=True)
    np.testing.assert_array_equal(found, wanted)


# -- strict ----------------------------------------------------------------------------------------


def broken(name: str, where: object, value: float) -> dict[str, Any]:
    batch = random_batch(1, batch=2, k=2)
    batch[name][where] = value
    return batch


def changed(**changes: object) -> dict[str, Any]:
    return {**random_batch(1, batch=2, k=2), **changes}


def never_drafted() -> dict[str, Any]:
    batch = random_batch(1, batch=2, k=2)
    batch["draft_probs"][1, 0] = np.eye(VOCAB)[0]
    batch["draft_token_ids"][1, 0] = 3
    return batch


BAD = {
    "ids of floats": (
        changed(draft_token_ids=np.zeros((2, 2))),
        "draft_token_ids is float64: .* integer",
    ),
    "ids in a list": (
        changed(draft_token_ids=[[0, 0], [0, 0]]),
        "draft_token_ids is list: .* numpy array",
    ),
    "flat ids": (
        changed(draft_token_ids=np.zeros(2, int)),
        r"draft_token_ids has shape \(2,\): .* 2 dimensions",
    ),
    "no bonus row": (changed(target_probs=np.ones((2, 2, VOCAB)) / VOCAB), r"must be \(2, 3, 5\)"),
    "whole numbers": (
        changed(target_probs=np.ones((2, 3, VOCAB), int)),
        "target_probs is int64: .* floating",
    ),
    "another vocabulary": (
        changed(draft_probs=np.ones((2, 2, 4)) / 4),
        r"draft_probs has shape \(2, 2, 4\)",
    ),
    "too few sources": (changed(noise=[SeededNoise(0)]), "noise holds 1 sources for 2 sequences"),
    "id too large": (
        broken("draft_token_ids", (1, 1), VOCAB),
        r"draft_token_ids\[1, 1\] is 5: .* between 0 and 4",
    ),
    "negative id": (broken("draft_token_ids", (0, 1), -1), r"draft_token_ids\[0, 1\] is -1"),
    "too many drafted": (
        changed(num_draft_tokens=np.array([2, 3])),
        r"num_draft_tokens\[1\] is 3: .* 0 and 2",
    ),
    "counts of one row": (
        changed(num_draft_tokens=np.array([2])),
        r"num_draft_tokens has shape \(1,\)",
    ),
    "negative position": (
        changed(positions=np.array([0, -4])),
        r"positions\[1\] is -4: it must be at least 0",
    ),
    "unnormalised": (broken("target_probs", (1, 2), 0.5), r"target_probs\[1, 2\] sums to 2.5"),
    "negative": (
        broken("draft_probs", (0, 1, 0), -0.1),
        r"draft_probs\[0, 1\] has a negative or NaN entry",
    ),
    "NaN": (
        broken("target_probs", (0, 0, 0), np.nan),
        r"target_probs\[0, 0\] has a negative or NaN entry",
    ),
    "never drafted": (
        never_drafted(),
        r"draft_token_ids\[1, 0\] is 3, to which draft_probs gives probability 0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_strict_names_what_is_wrong(name: str) -> None:
    arguments, message = BAD[name]
    with pytest.raises(OptionError, match=message):
        verify_batch(**{"noise": [SeededNoise(0)] * 2, **arguments}, strict=True)


def test_a_token_its_draft_law_excludes_is_an_error_without_strict_too() -> None:
    with pytest.raises(OptionError, match="token 3 was drafted from a distribution that lacks it"):
        verify_batch(**never_drafted(), noise=[SeededNoise(0)] * 2)
