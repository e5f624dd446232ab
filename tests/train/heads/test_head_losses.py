"""What heads learn, against closed forms and against loops that follow the papers one position at a
time."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specrun.bindings.errors import ModelError, OptionError
from specrun.train.data.corpus import TokenBatch, TokenCorpus, choosing, corpus_of, draft_marks
from specrun.train.data.tokens import TokenSequence
from specrun.train.heads import Eagle3Recipe, EagleRecipe, HydraRecipe, MedusaRecipe
from specrun.train.heads.chains import chain_states
from specrun.train.heads.draft_laws import frequent_tokens
from specrun.train.heads.eagle import EagleLearner
from specrun.train.heads.eagle3 import Eagle3Learner, tap_scale
from specrun.train.heads.hydra import HydraLearner, shaken
from specrun.train.heads.layers import Attention
from specrun.train.heads.learner import (
    Agreement,
    best_tokens,
    divergence_from_law,
    law_cross_entropy,
    shifted,
    token_cross_entropy,
)
from specrun.train.heads.medusa import MedusaLearner
from specrun.train.target.hf_model import TargetMatrices
from specrun.train.target.shape import ModelShape
from specrun.train.target.states import Features
from specrun.train.trainer import MatrixOptimizer

VOCAB, HIDDEN = 13, 16
SHAPE = ModelShape(
    hidden=HIDDEN,
    n_layers=6,
    n_heads=4,
    n_kv_heads=2,
    feed_forward=24,
    rope_theta=100.0,
    norm_eps=1e-6,
    max_positions=64,
)


class FixedStates:
    """States that were drawn once, [sequences, length, h], and taps beside them."""

    def __init__(self, count: int, length: int, taps: int = 0) -> None:
        source = torch.Generator().manual_seed(1)
        self.final = torch.randn(count, length, HIDDEN, generator=source)
        self.tapped = torch.randn(count, length, 3 * HIDDEN, generator=source)
        self.taps = tuple(range(taps))

    def features(self, batch: TokenBatch) -> Features:
        return Features(self.final, self.tapped if self.taps else None)


@pytest.fixture
def target() -> TargetMatrices:
    source = torch.Generator().manual_seed(2)
    return TargetMatrices(
        torch.randn(VOCAB, HIDDEN, generator=source),
        torch.randn(VOCAB, HIDDEN, generator=source),
        None,
    )


def batch_of(length: int, learnt_from: int = 3) -> TokenBatch:
    ids = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(3))
    learnt = torch.zeros(2, length, dtype=torch.bool)
    learnt[0, learnt_from:] = True
    learnt[1, 1 : length - 2] = True
    valid = torch.ones(2, length, dtype=torch.bool)
    valid[1, length - 2 :] = False
    return TokenBatch((0, 1), ids, learnt, valid)


def noise() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def randomized(learner):
    """All parameters drawn anew: heads that start as the identity would hide mistakes."""
    torch.manual_seed(7)
    for parameter in learner.module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return learner


def chain_learner(
    kind: str, target: TargetMatrices, states: FixedStates, drafted: Tensor | None = None, **recipe
) -> EagleLearner | Eagle3Learner:
    """A head of EAGLE's or EAGLE-3's, which drafts every token or those `drafted`."""
    if kind == "eagle":
        return EagleLearner(EagleRecipe(**recipe), SHAPE, target, states)
    tokens = torch.arange(VOCAB) if drafted is None else drafted
    return Eagle3Learner(Eagle3Recipe(**recipe), SHAPE, target, states, tokens)


# -- closed forms ----------------------------------------------------------------------------------


def test_losses_in_closed_form() -> None:
    logits = torch.tensor([[math.log(0.5), math.log(0.25), math.log(0.25)]])
    law = torch.tensor([[0.25, 0.75, 0.0]])
    assert float(token_cross_entropy(logits, torch.tensor([1]))) == pytest.approx(math.log(4))
    assert float(law_cross_entropy(logits, law)) == pytest.approx(
        0.25 * math.log(2) + 0.75 * math.log(4)
    )
    expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.25)
    assert float(divergence_from_law(logits, law)) == pytest.approx(expected)
    assert float(divergence_from_law(logits, logits.exp())) == pytest.approx(0.0, abs=1e-7)


def test_untrained_medusa_heads_weigh_lambda_to_the_k_times_the_targets_own_loss(
    target: TargetMatrices,
) -> None:
    """Blocks start as the identity and output matrices as the target's, so every head has the
    target's logits."""
    states = FixedStates(2, 9)
    batch = batch_of(9)
    learner = MedusaLearner(MedusaRecipe(heads=3, layers=2), SHAPE, target, states)
    for k, part in enumerate(learner.losses(batch, noise(), 0), 1):
        terms = [
            float(
                -torch.log_softmax(target.output @ states.final[row, t], 0)[
                    batch.ids[row, t + k + 1]
                ]
            )
            for row in range(2)
            for t in range(9 - k - 1)
            if batch.learnt[row, t + 2 : t + k + 2].all()
        ]
        assert part.plain == pytest.approx(np.mean(terms), rel=1e-5)
        assert part.value.item() == pytest.approx(0.8**k * np.mean(terms), rel=1e-5)
        assert part.name == f"head {k}"
    assert k == 3


@pytest.mark.parametrize("own_output", [True, False])
def test_medusa_learns_the_targets_law_where_asked_for(
    target: TargetMatrices, own_output: bool
) -> None:
    states, batch = FixedStates(2, 8), batch_of(8)
    recipe = MedusaRecipe(heads=2, decay=0.5, own_output=own_output, from_law=True)
    learner = randomized(MedusaLearner(recipe, SHAPE, target, states))
    output = learner.heads[1][-1].weight if own_output else target.output
    block = learner.heads[1][0].linear
    terms = []
    for row in range(2):
        for t in range(8 - 3):
            if batch.learnt[row, t + 2 : t + 4].all():
                x = states.final[row, t]
                x = x + F.silu(block.weight @ x + block.bias)
                log_q = torch.log_softmax(output @ x, 0)
                p = torch.softmax(target.output @ states.final[row, t + 2], 0)
                terms.append((p * (p.log() - log_q)).sum().item())
    part = list(learner.losses(batch, noise(), 0))[1]
    assert part.plain == pytest.approx(np.mean(terms), rel=1e-4)
    assert part.value.item() == pytest.approx(0.25 * np.mean(terms), rel=1e-4)


def eagle_by_hand(
    learner: EagleLearner, embeddings: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """EAGLE's head over pairs of one sequence, written out: fc, attention, feed-forward."""
    layer, d = learner.head.layers[0], HIDDEN // SHAPE.n_heads
    x = torch.cat([embeddings, states], -1) @ learner.head.fc.weight.T + learner.head.fc.bias
    positions = torch.arange(len(x))

    def turned(rows: torch.Tensor) -> torch.Tensor:
        half = d // 2
        angles = positions[:, None] * SHAPE.rope_theta ** (-torch.arange(half) / half)
        a, b = rows[:, :half], rows[:, half:]
        return torch.cat(
            [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1
        )

    mixed = []
    for head in range(SHAPE.n_heads):
        shared = head // (SHAPE.n_heads // SHAPE.n_kv_heads)
        q = turned((x @ layer.self_attn.q_proj.weight.T)[:, head * d : head * d + d])
        k = turned((x @ layer.self_attn.k_proj.weight.T)[:, shared * d : shared * d + d])
        v = (x @ layer.self_attn.v_proj.weight.T)[:, shared * d : shared * d + d]
        scores = (q @ k.T / math.sqrt(d)).masked_fill(
            torch.ones(len(x), len(x)).triu(1).bool(), -math.inf
        )
        mixed.append(scores.softmax(-1) @ v)
    x = x + torch.cat(mixed, -1) @ layer.self_attn.o_proj.weight.T
    normed = (
        x
        / (x.square().mean(-1, keepdim=True) + SHAPE.norm_eps).sqrt()
        * layer.post_attention_layernorm.weight
    )
    gate, up = normed @ layer.mlp.gate_proj.weight.T, normed @ layer.mlp.up_proj.weight.T
    return x + (F.silu(gate) * up) @ layer.mlp.down_proj.weight.T


def test_eagles_loss_is_smooth_l1_and_a_tenth_of_the_cross_entropy(target: TargetMatrices) -> None:
    states, batch = FixedStates(2, 7), batch_of(7)
    learner = randomized(EagleLearner(EagleRecipe(), SHAPE, target, states))
    shaken = states.final + 0.1 * (2 * torch.rand(states.final.shape, generator=noise()) - 1)
    distances, tokens = [], []
    with torch.no_grad():
        for row in range(2):
            predicted = eagle_by_hand(
                learner, target.embedding[batch.ids[row, 1:]], shaken[row, :-1]
            )
            for j in range(5):
                if batch.learnt[row, j + 2]:
                    error = (predicted[j] - states.final[row, j + 1]).abs()
                    distances.append(
                        float(torch.where(error < 1, error**2 / 2, error - 0.5).mean())
                    )
                    p = torch.softmax(target.output @ states.final[row, j + 1], 0)
                    tokens.append(
                        float(-(p * torch.log_softmax(target.output @ predicted[j], 0)).sum())
                    )
    (part,) = learner.losses(batch, noise(), 0)
    assert part.value.item() == pytest.approx(np.mean(distances) + 0.1 * np.mean(tokens), rel=1e-4)
    # Noise is bounded, and the same for the same step.
    assert float((shaken - states.final).abs().max()) <= 0.1
    (again,) = learner.losses(batch, noise(), 0)
    assert again.value.item() == part.value.item()
    (other,) = learner.losses(batch, torch.Generator().manual_seed(6), 0)
    assert other.value.item() != part.value.item()


def test_noise_and_tokens_can_be_left_out(target: TargetMatrices) -> None:
    states, batch = FixedStates(2, 7), batch_of(7)
    learner = randomized(
        EagleLearner(EagleRecipe(noise=0.0, token_weight=0.0), SHAPE, target, states)
    )
    predicted, _ = learner.head(target.embedding[batch.ids[:, 1:]], states.final[:, :-1])
    marks = draft_marks(batch.learnt, 0)
    (part,) = learner.losses(batch, noise(), 0)
    expected = F.smooth_l1_loss(predicted[:, :5][marks], states.final[:, 1:6][marks])
    assert part.value.item() == pytest.approx(expected.item(), rel=1e-6)


def test_laws_are_compared_among_the_tokens_said_most_and_others_that_change(
    target: TargetMatrices,
) -> None:
    """Of 8 of 13 tokens 6 stay, and 2 are drawn at each step: by hand, with the same draws."""
    states, batch = FixedStates(2, 7), batch_of(7)
    said = [TokenSequence.of([1, 1, 2, 2, 5, 5, 7, 7, 8, 8, 11, 11, 0], 0)]
    corpus = corpus_of(said, held_out=0.0)
    recipe = EagleRecipe(noise=0.0, law_tokens=8)
    learner = recipe.learner(SHAPE, target, states, corpus)
    assert isinstance(learner, EagleLearner)
    randomized(learner)
    often, others = [1, 2, 5, 7, 8, 11], torch.tensor([0, 3, 4, 6, 9, 10, 12])
    predicted, _ = learner.head(target.embedding[batch.ids[:, 1:]], states.final[:, :-1])
    marks = draft_marks(batch.learnt, 0)
    shown, wanted = predicted[:, :5][marks], states.final[:, 1:6][marks]
    drawn: set[int] = set()
    for seed in range(12):
        source = torch.Generator().manual_seed(seed)
        torch.rand(states.final.shape, generator=source)
        more = others[torch.randperm(7, generator=source)[:2]].tolist()
        drawn.update(more)
        rows = target.output[[*often, *more]]
        law = (wanted @ rows.T).softmax(-1)
        tokens = -(law * (shown @ rows.T).log_softmax(-1)).sum(-1).mean()
        (part,) = learner.losses(batch, torch.Generator().manual_seed(seed), 0)
        expected = F.smooth_l1_loss(shown, wanted) + 0.1 * tokens
        assert part.value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert drawn == set(others.tolist())
    whole = EagleRecipe(noise=0.0, law_tokens=13).learner(SHAPE, target, states, corpus)
    whole.module.load_state_dict(learner.module.state_dict())
    plain = EagleRecipe(noise=0.0).learner(SHAPE, target, states, corpus)
    plain.module.load_state_dict(learner.module.state_dict())
    losses = [next(iter(each.losses(batch, noise(), 0))).value.item() for each in (whole, plain)]
    assert losses[0] == losses[1]


def test_laws_of_draft_tokens_are_theirs_and_measures_rank_no_others(
    target: TargetMatrices,
) -> None:
    states, batch = FixedStates(2, 7), batch_of(7)
    rng = np.random.default_rng(2)
    said = [TokenSequence.of(rng.integers(0, 64, 400).tolist(), 0)]
    corpus, wide = corpus_of(said, held_out=0.0), torch.randn(64, HIDDEN)
    matrices = TargetMatrices(wide, wide, None)
    recipe = EagleRecipe(noise=0.0, draft_tokens=16)
    learner = recipe.learner(SHAPE, matrices, states, corpus)
    assert isinstance(learner, EagleLearner)
    randomized(learner)
    counts = np.bincount(said[0].ids, minlength=64)
    drafted = sorted(range(64), key=lambda token: (-counts[token], token))[:16]
    assert learner.drafted is not None
    assert learner.drafted.tolist() == drafted
    predicted, _ = learner.head(wide[batch.ids[:, 1:]], states.final[:, :-1])
    marks = draft_marks(batch.learnt, 0)
    shown, wanted = predicted[:, :5][marks], states.final[:, 1:6][marks]
    law = (wanted @ wide[drafted].T).softmax(-1)
    tokens = -(law * (shown @ wide[drafted].T).log_softmax(-1)).sum(-1).mean()
    (part,) = learner.losses(batch, noise(), 0)
    expected = F.smooth_l1_loss(shown, wanted) + 0.1 * tokens
    assert part.value.item() == pytest.approx(expected.item(), rel=1e-5)
    best = learner.best(shown)
    for row, logits in zip(best.tolist(), (shown @ wide.T).tolist(), strict=True):
        assert row == sorted(drafted, key=lambda token: -logits[token])[:5]
    files = recipe.files(learner, SHAPE)
    assert files.tensors["draft_tokens"].tolist() == drafted
    whole = EagleRecipe().learner(SHAPE, matrices, states, corpus)
    assert "draft_tokens" not in EagleRecipe().files(whole, SHAPE).tensors


class LinearStates:
    """States that follow a linear law of the state before and the next token's embedding."""

    def __init__(self, corpus: TokenCorpus, embedding: Tensor) -> None:
        source = torch.Generator().manual_seed(11)
        of_token, of_state = (
            0.5 * torch.randn(HIDDEN, HIDDEN, generator=source) / HIDDEN**0.5 for _ in range(2)
        )
        bias = torch.randn(HIDDEN, generator=source)
        self.taps: tuple[int, ...] = ()
        self._texts = []
        for text in corpus.sequences:
            states = [torch.randn(HIDDEN, generator=source)]
            for token in text.ids[1:].tolist():
                states.append(of_token @ embedding[token] + of_state @ states[-1] + bias)
            self._texts.append(torch.stack(states))

    def features(self, batch: TokenBatch) -> Features:
        found = torch.zeros(*batch.ids.shape, HIDDEN)
        for row, number in enumerate(batch.numbers):
            found[row, : len(self._texts[number])] = self._texts[number]
        return Features(found, None)


def texts_of(count: int, length: int) -> TokenCorpus:
    ids = torch.randint(0, VOCAB, (count, length), generator=torch.Generator().manual_seed(12))
    return corpus_of([TokenSequence.of(row.tolist(), 2) for row in ids], held_out=0.0)


@torch.no_grad()
def test_a_fitted_head_starts_as_the_linear_law_of_the_states(target: TargetMatrices) -> None:
    corpus = texts_of(8, 40)
    states = LinearStates(corpus, target.embedding)
    learner = EagleLearner(EagleRecipe(), SHAPE, target, states)
    batch = corpus.batch([0, 1])
    final = states.features(batch).final

    def error() -> float:
        found, _ = learner.head(target.embedding[batch.ids[:, 1:]], final[:, :-1])
        # Of the states that learnt tokens are chosen from: the others were no part of the fit.
        return float((found - final[:, 1:])[:, 1:].norm() / final[:, 2:].norm())

    assert error() > 0.3
    learner.start(corpus)
    assert error() < 0.01


@torch.no_grad()
def test_a_fit_to_states_beside_the_wrong_tokens_is_no_law(target: TargetMatrices) -> None:
    """The negative control: one place off, the law of the test above is not found."""
    corpus = texts_of(8, 40)
    states = LinearStates(corpus, target.embedding)
    learner = EagleLearner(EagleRecipe(), SHAPE, target, states)
    learner.start(corpus)
    batch = corpus.batch([0])
    final = states.features(batch).final
    found, _ = learner.head(target.embedding[batch.ids[:, :-1]], final[:, :-1])
    assert float((found - final[:, 1:])[:, 1:].norm() / final[:, 2:].norm()) > 0.1


def test_a_random_start_leaves_the_head_as_it_was_made(target: TargetMatrices) -> None:
    corpus = texts_of(2, 8)
    states = LinearStates(corpus, target.embedding)
    learner = EagleLearner(EagleRecipe(start="random"), SHAPE, target, states)
    before = {name: each.clone() for name, each in learner.module.state_dict().items()}
    learner.start(corpus)
    for name, each in learner.module.state_dict().items():
        assert torch.equal(each, before[name])


# -- chains ----------------------------------------------------------------------------------------


def chains_by_hand(
    head, embedding: torch.Tensor, ids: torch.Tensor, states: torch.Tensor, depth: int
) -> dict:
    """Each chain alone: the text up to its position as step 0, then its own states appended one by
    one.

    The whole row of pairs is evaluated anew with ordinary causal attention for every depth, as if
    it were decoded.
    """
    found = {}
    for start in range(len(ids) - 1):
        inputs = states[: start + 1]
        for step in range(depth):
            if start + step + 1 >= len(ids):
                break
            tokens = ids[1 : start + step + 2]
            out, _ = head(embedding[tokens][None], inputs[None])
            found[start, step] = out[0, -1]
            inputs = torch.cat([inputs, out[0, -1:]])
    return found


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@torch.no_grad()
def test_unrolled_chains_are_what_decoding_them_one_by_one_gives(
    target: TargetMatrices, kind: str
) -> None:
    """The growing mask of training-time test against plain causal attention: one misplaced entry or
    position fails."""
    length, depth = 8, 4
    states = FixedStates(1, length, taps=3)
    ids = torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(4))
    learner = randomized(chain_learner(kind, target, states))
    read = learner.first_states(Features(states.final, states.tapped))
    wanted = chains_by_hand(learner.head, target.embedding, ids[0], read[0], depth)
    compared = 0
    for step, found in enumerate(chain_states(learner.head, target.embedding, ids, read, depth)):
        for start in range(length - 1 - step):
            torch.testing.assert_close(found[0, start], wanted[start, step], rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared == 7 + 6 + 5 + 4


@torch.no_grad()
def test_a_chain_that_sees_others_chains_is_noticed(target: TargetMatrices, monkeypatch) -> None:
    """The negative control of the test above: earlier steps as full causal keys, a usual
    mistake."""
    from specrun.train.heads import layers

    def wrong(query, text, chain):
        keys = torch.cat([text.keys, *(link.keys for link in chain)], 2)
        values = torch.cat([text.values, *(link.values for link in chain)], 2)
        n = query.shape[2]
        mask = torch.ones(n, n, dtype=torch.bool).tril().repeat(1, 1 + len(chain))
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    monkeypatch.setattr(layers, "_unrolled", wrong)
    states = FixedStates(1, 6)
    ids = torch.arange(6)[None]
    learner = randomized(EagleLearner(EagleRecipe(), SHAPE, target, states))
    wanted = chains_by_hand(learner.head, target.embedding, ids[0], states.final[0, :-1], 2)
    second = list(chain_states(learner.head, target.embedding, ids, states.final[:, :-1], 2))[1]
    assert not torch.allclose(second[0, 3], wanted[3, 1], rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_chains_of_learnt_tokens_are_whole_where_they_count_and_only_there(
    target: TargetMatrices,
) -> None:
    states, batch = FixedStates(2, 8), batch_of(8, learnt_from=3)
    learner = randomized(EagleLearner(EagleRecipe(), SHAPE, target, states))
    given = (learner.head, target.embedding, batch.ids, states.final[:, :-1], 3)
    skipped = 0
    for depth, (whole, sparse) in enumerate(
        zip(chain_states(*given), chain_states(*given, learnt=batch.learnt), strict=True)
    ):
        marks = draft_marks(batch.learnt, depth)
        torch.testing.assert_close(
            sparse[:, : marks.shape[1]][marks], whole[:, : marks.shape[1]][marks]
        )
        skipped += int((~torch.isclose(sparse, whole).all(-1)).sum())
    assert skipped  # else the test above says nothing: question tokens' states are cut short


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_recomputing_changes_no_number(target: TargetMatrices, kind: str) -> None:
    states, batch = FixedStates(2, 8, taps=3), batch_of(8)
    drafted = torch.arange(0, VOCAB, 2)
    learner = randomized(chain_learner(kind, target, states, drafted, steps=3))
    found = []
    for recompute in (True, False):
        learner.recompute = recompute
        learner.module.zero_grad()
        part = next(learner.losses(batch, torch.Generator().manual_seed(1), 0))
        part.value.backward()
        found.append(
            [
                part.value.detach(),
                *(parameter.grad.clone() for parameter in learner.module.parameters()),
            ]
        )
    assert all(torch.equal(first, other) for first, other in zip(*found, strict=True))


def test_muon_trains_eagle3s_matrices_between_states(target: TargetMatrices) -> None:
    """The rows of tokens and the norms are AdamW's. By AdamW alone all are one group, in the
    module's order."""
    states, drafted = FixedStates(2, 8, taps=3), torch.arange(0, VOCAB, 2)

    def learner(optimizer: MatrixOptimizer) -> Eagle3Learner:
        return Eagle3Learner(Eagle3Recipe(optimizer=optimizer), SHAPE, target, states, drafted)

    usual, split = learner("adamw"), learner("muon")
    (group,) = usual.groups()
    assert list(map(id, group.parameters)) == list(map(id, usual.module.parameters()))
    matrices, rest = split.groups()
    assert (matrices.hidden_matrices, rest.hidden_matrices) == (True, False)
    named = {id(each): name for name, each in split.module.named_parameters()}
    parts = (*(f"self_attn.{x}" for x in "qkvo"), *(f"mlp.{x}" for x in ("gate", "up", "down")))
    expected = {"fc.weight", *(f"midlayer.{part}_proj.weight" for part in parts)}
    assert {named.pop(id(each)) for each in matrices.parameters} == expected
    assert {id(each) for each in rest.parameters} == set(named)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_chains_may_be_longer_late_in_the_training(target: TargetMatrices, kind: str) -> None:
    """Of ten updates the first six learn chains of 2, the others chains of 4."""
    states, batch = FixedStates(2, 8, taps=3), batch_of(8)

    def losses(**steps: int) -> list[float]:
        learner = chain_learner(kind, target, states, torch.arange(0, VOCAB, 2), **steps)
        randomized(learner).n_updates = 10
        return [next(learner.losses(batch, noise(), step)).value.item() for step in (0, 5, 6, 9)]

    short, long = losses(steps=2), losses(steps=4)
    assert short[0] != long[0]  # else nothing could be told apart
    assert losses(steps=2, late_steps=4) == [*short[:2], *long[2:]]
    assert losses(steps=2, late_steps=0) == short


def test_eagle3s_loss_sums_decayed_cross_entropies_over_draftable_tokens(
    target: TargetMatrices,
) -> None:
    states, batch = FixedStates(2, 7, taps=3), batch_of(7)
    drafted = torch.tensor([0, 2, 3, 5, 8, 11])
    recipe = Eagle3Recipe(steps=3, step_decay=0.5, draft_tokens=6)
    learner = randomized(Eagle3Learner(recipe, SHAPE, target, states, drafted))
    read = learner.head.fc(states.tapped[:, :-1])
    total = 0.0
    with torch.no_grad():
        for step in range(3):
            terms = []
            for row in range(2):
                chains = chains_by_hand(
                    learner.head, target.embedding, batch.ids[row], read[row], 3
                )
                for start in range(7 - 2 - step):
                    if not batch.learnt[row, start + 2 : start + step + 3].all():
                        continue
                    logits = target.output @ states.final[row, start + step + 1]
                    if int(logits.argmax()) not in drafted:
                        terms.append(0.0)
                        continue
                    p = torch.softmax(logits[drafted], 0)
                    q = torch.log_softmax(learner.head.logits(chains[start, step]), 0)
                    terms.append(float(-(p * q).sum()))
            total += 0.5**step * np.mean(terms)
    (part,) = learner.losses(batch, noise(), 0)
    assert part.value.item() == pytest.approx(total, rel=1e-4)


def test_eagle3_compares_laws_among_the_tokens_said_most_and_others_that_change(
    target: TargetMatrices,
) -> None:
    """Of 10 draft tokens 6 stay, and 2 are drawn at each step: by hand, with the same draws."""
    states, batch = FixedStates(2, 7, taps=3), batch_of(7)
    said = [TokenSequence.of([1, 1, 2, 2, 5, 5, 7, 7, 8, 8, 11, 11, 0, 3, 4, 6], 0)]
    corpus = corpus_of(said, held_out=0.0)
    recipe = Eagle3Recipe(steps=1, draft_tokens=10, law_tokens=8)
    learner = recipe.learner(SHAPE, target, states, corpus)
    assert isinstance(learner, Eagle3Learner)
    randomized(learner)
    often, others = [1, 2, 5, 7, 8, 11], torch.tensor([0, 3, 4, 6])
    head, marks = learner.head, draft_marks(batch.learnt, 0)
    place = {token: at for at, token in enumerate(head.draft_tokens.tolist())}
    predicted, _ = head(target.embedding[batch.ids[:, 1:]], head.fc(states.tapped[:, :-1]))
    shown, wanted = predicted[:, :5][marks], states.final[:, 1:6][marks]
    choices = (wanted @ target.output.T).argmax(-1).tolist()
    drawn: set[int] = set()
    for seed in range(12):
        source = torch.Generator().manual_seed(seed)
        more = others[torch.randperm(4, generator=source)[:2]].tolist()
        drawn.update(more)
        compared = [*often, *more]
        law = (wanted @ target.output[compared].T).softmax(-1)
        logits = head.logits(shown)[:, [place[token] for token in compared]]
        terms = -(law * logits.log_softmax(-1)).sum(-1)
        counted = torch.tensor([choice in compared for choice in choices])
        assert counted.any()
        (part,) = learner.losses(batch, torch.Generator().manual_seed(seed), 0)
        assert part.value.item() == pytest.approx((terms * counted).mean().item(), rel=1e-5)
    assert drawn == set(others.tolist())
    values = []
    for law_tokens in (0, 10):  # all of them
        whole = dataclasses.replace(recipe, law_tokens=law_tokens).learner(
            SHAPE, target, states, corpus
        )
        whole.module.load_state_dict(learner.module.state_dict())
        values.append(next(iter(whole.losses(batch, noise(), 0))).value.item())
    assert values[0] == values[1]


def test_eagle3_asks_once_which_choices_can_be_drafted(
    target: TargetMatrices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts in another order, and alone, are known by their numbers; others are asked."""
    states, batch = FixedStates(2, 7, taps=3), batch_of(7)
    drafted = torch.tensor([0, 2, 3, 5, 8, 11])
    recipe = Eagle3Recipe(steps=2, draft_tokens=6)
    asked: list[int] = []
    logits = TargetMatrices.logits

    def counted(matrices: TargetMatrices, rows: Tensor) -> Tensor:
        if len(matrices.output) == VOCAB:
            asked.append(len(rows))
        return logits(matrices, rows)

    monkeypatch.setattr(TargetMatrices, "logits", counted)
    learner = randomized(Eagle3Learner(recipe, SHAPE, target, states, drafted))
    turned = TokenBatch((1, 0), batch.ids.flip(0), batch.learnt.flip(0), batch.valid.flip(0))
    values = []
    for each in (batch, turned):
        (part,) = learner.losses(each, noise(), 0)
        values.append(part.value.item())
        states.final, states.tapped = states.final.flip(0), states.tapped.flip(0)
    assert asked == [int(choosing(batch.learnt).sum())]
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    other = TokenBatch((0, 2), batch.ids, batch.learnt, batch.valid)
    list(learner.losses(other, noise(), 0))
    assert len(asked) == 2


def test_the_draft_vocabulary_is_what_was_said_most() -> None:
    said = np.array([5, 5, 5, 1, 1, 9, 4, 7], np.int32)
    learnt = np.array([1, 1, 1, 1, 1, 1, 1, 0], np.bool_)
    unseen = TokenSequence(np.full(9, 2, np.int32), np.ones(9, np.bool_))
    corpus = TokenCorpus(
        (TokenSequence(said, learnt), unseen), (0,), (1,), measured_on_training=False
    )
    assert frequent_tokens(corpus, VOCAB, 3).tolist() == [5, 1, 4]
    assert frequent_tokens(corpus, VOCAB, 5).tolist() == [5, 1, 4, 9, 0]
    assert sorted(frequent_tokens(corpus, VOCAB, 99).tolist()) == list(range(VOCAB))


def test_offsets_and_marks_name_the_same_tokens(target: TargetMatrices) -> None:
    drafted = torch.tensor([1, 4, 5, 12])
    head = Eagle3Learner(Eagle3Recipe(), SHAPE, target, FixedStates(1, 5, taps=3), drafted).head
    assert head.d2t.tolist() == [1, 3, 3, 9]
    assert head.t2d.nonzero().flatten().tolist() == drafted.tolist()
    assert head.draft_tokens.tolist() == drafted.tolist()
    torch.testing.assert_close(head.lm_head.weight, target.output[drafted])


# -- the size of what EAGLE-3 reads ----------------------------------------------------------------


class SizedStates(FixedStates):
    """The same states with taps of another size."""

    def __init__(self, count: int, length: int, size: float) -> None:
        super().__init__(count, length, taps=3)
        self.tapped = size * self.tapped


def learnt_from(
    target: TargetMatrices, size: float, scale: float
) -> tuple[Eagle3Learner, list[float]]:
    """Return a head after a few steps on taps of `size`, and its losses."""
    torch.manual_seed(6)
    tokens = torch.arange(VOCAB)
    learner = Eagle3Learner(
        Eagle3Recipe(steps=3), SHAPE, target, SizedStates(2, 8, size), tokens, scale
    )
    optimizer = torch.optim.AdamW(learner.module.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(12):
        optimizer.zero_grad()
        part = next(learner.losses(batch_of(8), noise(), step))
        part.value.backward()
        optimizer.step()
        losses.append(part.value.item())
    return learner, losses


def test_eagle3_learns_alike_whatever_the_size_of_the_targets_states(
    target: TargetMatrices,
) -> None:
    """Norms' epsilons aside; a head that does not know the size (the last line) learns
    otherwise."""
    _, plain = learnt_from(target, 1.0, 1.0)
    assert learnt_from(target, 1000.0, 1000.0)[1] == pytest.approx(plain, rel=1e-3)
    assert learnt_from(target, 0.125, 0.125)[1] == pytest.approx(plain, rel=1e-3)
    assert learnt_from(target, 1000.0, 1.0)[1] != pytest.approx(plain, rel=0.05)


def test_upstreams_tensors_need_no_scale(target: TargetMatrices) -> None:
    learner, _ = learnt_from(target, 300.0, 300.0)
    tensors = learner.head.upstream_tensors()
    assert set(tensors) == set(learner.head.state_dict()) - {"midlayer.scale"}
    states = SizedStates(2, 8, 300.0)
    theirs = Eagle3Learner(Eagle3Recipe(), SHAPE, target, states, torch.arange(VOCAB)).head
    theirs.load_state_dict({**tensors, "midlayer.scale": torch.tensor(1.0)})
    ids, read = batch_of(8).ids, states.tapped[:, :-1]
    with torch.no_grad():
        chains = [
            chain_states(head, target.embedding, ids, head.fc(read), 3)
            for head in (learner.head, theirs)
        ]
        for ours, upstreams in zip(*chains, strict=True):
            torch.testing.assert_close(upstreams / 300, ours / 300, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                theirs.logits(upstreams), learner.head.logits(ours), rtol=1e-4, atol=1e-4
            )


def test_the_size_of_taps_is_that_of_the_usual_position() -> None:
    states = FixedStates(2, 8, taps=3)
    text = TokenSequence(np.arange(8, dtype=np.int32), np.ones(8, np.bool_))
    corpus = TokenCorpus((text, text), (0, 1), (0,), measured_on_training=True)
    by_text = SimpleNamespace(
        taps=(0, 1, 2),
        features=lambda batch: Features(states.final, states.tapped[list(batch.numbers)]),
    )
    sizes = states.tapped.square().mean(-1).sqrt().flatten().sort().values
    found = tap_scale(by_text, corpus, torch.device("cpu"))
    assert found == pytest.approx(float(sizes[7]))
    states.tapped[:, 0] *= 1000.0  # the first token, on which attention rests
    assert tap_scale(by_text, corpus, torch.device("cpu")) == pytest.approx(found, rel=0.2)


def test_taps_of_no_size_are_refused() -> None:
    states = SizedStates(1, 8, 0.0)
    text = TokenSequence(np.arange(8, dtype=np.int32), np.ones(8, np.bool_))
    corpus = TokenCorpus((text,), (0,), (0,), measured_on_training=True)
    with pytest.raises(ModelError, match=r"inputs of layers \(0, 1, 2\) have a usual size of 0\.0"):
        tap_scale(states, corpus, torch.device("cpu"))


# -- Hydra -----------------------------------------------------------------------------------------


def test_untrained_hydra_heads_say_what_the_target_says(target: TargetMatrices) -> None:
    states, batch = FixedStates(2, 8), batch_of(8)
    learner = HydraLearner(HydraRecipe(heads=3, layers=2), SHAPE, target, states)
    medusa = MedusaLearner(MedusaRecipe(heads=3), SHAPE, target, states)
    ours, theirs = (list(taught.losses(batch, noise(), 0)) for taught in (learner, medusa))
    assert [part.plain for part in ours] == pytest.approx([part.plain for part in theirs], rel=1e-5)


def test_hydra_heads_read_the_tokens_in_between(target: TargetMatrices) -> None:
    states, batch = FixedStates(2, 8), batch_of(8)
    learner = randomized(HydraLearner(HydraRecipe(heads=2), SHAPE, target, states))
    block = learner.heads.hydra_mlp[1][0]
    terms = []
    with torch.no_grad():
        for row in range(2):
            for t in range(8 - 3):
                if batch.learnt[row, t + 2 : t + 4].all():
                    ids = batch.ids[row]
                    followers = target.embedding[ids[t + 1 : t + 3]]
                    x = torch.cat([states.final[row, t], followers.flatten()])
                    x = block.res_connection(x) + F.silu(block.linear(x))
                    logits = learner.heads.hydra_lm_head[1].weight @ x
                    terms.append(float(-torch.log_softmax(logits, 0)[ids[t + 3]]))
    part = list(learner.losses(batch, noise(), 0))[1]
    assert part.plain == pytest.approx(np.mean(terms), rel=1e-4)


def test_hydra_plus_plus_learns_the_law_behind_a_prefix_layer(target: TargetMatrices) -> None:
    states, batch = FixedStates(2, 8), batch_of(8)
    recipe = HydraRecipe.plus_plus(heads=2, dropout=0.0)
    learner = randomized(HydraLearner(recipe, SHAPE, target, states))
    with torch.no_grad():
        read = learner.heads.prefixed(states.final)
        assert not torch.allclose(read, states.final)
        changed = states.final.clone()
        changed[:, 5:] += 1.0
        torch.testing.assert_close(learner.heads.prefixed(changed)[:, :5], read[:, :5])
        expected = 0.0
        for head in range(2):
            marks = draft_marks(batch.learnt, head)
            logits = learner._logits(head, read, batch.ids, marks)
            law = target.law(shifted(states.final, head + 1, marks.shape[1])[marks])
            expected += float(-(law * logits.log_softmax(-1)).sum(-1).mean())
    (part,) = learner.losses(batch, noise(), 0)
    assert part.value.item() == pytest.approx(expected, rel=1e-4)
    prefix = {"layers.0.self_attn.q_proj.weight", "norm.weight"}
    blocks = {"0.1.res_connection.weight", "0.7.linear.bias"}
    assert {
        *(f"prefix_embeding_layer.{name}" for name in prefix),
        *(f"hydra_mlp.{name}" for name in blocks),
        "hydra_lm_head.1.1.weight",
    } <= set(learner.module.state_dict())


def test_dropout_draws_from_the_steps_noise(target: TargetMatrices) -> None:
    states, batch = FixedStates(2, 8), batch_of(8)
    learner = randomized(
        HydraLearner(HydraRecipe.plus_plus(heads=2, dropout=0.5), SHAPE, target, states)
    )
    learner.module.train()
    before = torch.random.get_rng_state()
    values = [
        next(learner.losses(batch, torch.Generator().manual_seed(seed), 0)).value.item()
        for seed in (1, 1, 2)
    ]
    assert values[0] == values[1] != values[2]
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("plus", [False, True])
def test_hydras_noise_shakes_what_heads_read_and_not_what_they_learn(
    target: TargetMatrices, plus: bool
) -> None:
    states, batch = FixedStates(2, 8), batch_of(8)
    recipe = HydraRecipe.plus_plus(heads=2, dropout=0.0) if plus else HydraRecipe(heads=2)
    quiet, loud = (
        randomized(HydraLearner(dataclasses.replace(recipe, noise=a), SHAPE, target, states))
        for a in (0.0, 3.0)
    )

    def losses(learner, seed: int) -> list[float]:
        parts = learner.losses(batch, torch.Generator().manual_seed(seed), 0)
        return [part.plain for part in parts]

    assert losses(loud, 1) == losses(loud, 1)
    assert losses(loud, 1) != losses(loud, 2)
    # As on states and embeddings shaken by hand; laws are those of the target's own states.
    source = torch.Generator().manual_seed(1)
    read = loud.heads.prefixed(shaken(states.final, batch.valid, 3.0, source))
    embedded = shaken(target.embedding[batch.ids], batch.valid, 3.0, source)
    with torch.no_grad():
        found = []
        for head in range(2):
            marks = draft_marks(batch.learnt, head)
            logits = loud._logits(head, read, batch.ids, marks, embedded)
            found.append(loud._loss(logits, batch, states.final, marks, head).item())
    assert losses(loud, 1) == pytest.approx([sum(found)] if plus else found, rel=1e-5)
    assert losses(quiet, 1) == losses(quiet, 2)
    assert list(loud.drafts(batch, Features(states.final, None), draft_marks(batch.learnt, 1)))


def test_noise_has_one_length_whatever_the_text_and_the_width() -> None:
    """Uniform within +-alpha / sqrt(n h): over a text its length is alpha / sqrt(3)."""
    for n, width in ((50, 64), (200, 256)):
        states = torch.zeros(1, n, width)
        valid = torch.ones(1, n, dtype=torch.bool)
        found = shaken(states, valid, 75.0, noise())
        assert float(found.abs().max()) <= 75.0 / math.sqrt(n * width)
        assert float(found.norm()) == pytest.approx(75.0 / math.sqrt(3), rel=0.05)
    valid[:, 50:] = False  # a text of 50 tokens in a batch of longer ones
    assert float(shaken(states, valid, 75.0, noise()).abs().max()) > 75.0 / math.sqrt(n * width)
    assert shaken(states, valid, 0.0, noise()) is states


# -- marks and measures ----------------------------------------------------------------------------


def test_marks_ask_for_the_models_own_tokens_and_begin_before_its_first() -> None:
    learnt = batch_of(6, learnt_from=3).learnt  # the first row's answer is tokens 3 to 5
    # Token 3 follows state 1 and token 2.
    assert draft_marks(learnt, 0)[0].tolist() == [False, True, True, True]
    assert draft_marks(learnt, 1)[0].tolist() == [False, True, True]
    assert draft_marks(learnt, 3).shape == (2, 1)
    assert draft_marks(learnt, 9).shape == (2, 0)
    assert choosing(learnt)[0].tolist() == [False, False, True, True, True, False]
    gap = torch.tensor([[True, True, True, False, True, True]])
    # No draft passes what a user says.
    assert draft_marks(gap, 1)[0].tolist() == [False, False, True]


def test_chains_count_until_their_first_mistake() -> None:
    agreement = Agreement(2, "head")
    drafted = [torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([[1, 2], [3, 4], [5, 6]])]
    chosen = [torch.tensor([1, 4, 5]), torch.tensor([1, 3, 9])]
    counted = [torch.tensor([True, True, True]), torch.tensor([True, True, False])]
    # Three texts, of one position each.
    agreement.add(drafted, chosen, counted, torch.ones(3, 1, dtype=torch.bool))
    found = agreement.measures()
    assert found["head 1 top-1"] == pytest.approx(2 / 3)
    assert found["head 1 top-5"] == 1.0
    assert found["head 2 top-1"] == 1.0
    assert found["tokens a round"] == pytest.approx(1 + (2 + 0 + 1) / 3)
    assert best_tokens(torch.tensor([[0.1, 0.9, 0.5]])).tolist() == [[1, 2, 0]]


def test_a_round_goes_on_where_the_one_before_ended() -> None:
    """Six easy positions take two rounds, six hard ones six: 12 tokens of 8 rounds, not 2."""
    agreement = Agreement(2, "depth")
    right = torch.tensor([True] * 6 + [False] * 6)
    chosen = torch.arange(12)
    drafted = torch.where(right, chosen, chosen + 1)[:, None]
    counted = torch.ones(12, dtype=torch.bool)
    # Between two answers of the text lies what the user says, where nothing is drafted.
    start = torch.tensor([[True] * 6 + [False] * 3 + [True] * 6])
    agreement.add([drafted] * 2, [chosen] * 2, [counted] * 2, start)
    assert agreement.measures()["tokens a round"] == pytest.approx(12 / 8)


def test_attention_shares_keys_among_heads() -> None:
    attention = Attention(SHAPE, 2 * HIDDEN)
    mixed, own = attention(torch.randn(2, 5, 2 * HIDDEN))
    assert mixed.shape == (2, 5, HIDDEN)
    assert own.keys.shape == (2, SHAPE.n_heads, 5, HIDDEN // SHAPE.n_heads)
    torch.testing.assert_close(own.values[:, 0], own.values[:, 1])


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: MedusaRecipe(heads=0), "0 heads"),
        (lambda: MedusaRecipe(layers=17), "17 residual blocks"),
        (lambda: MedusaRecipe(decay=0.0), "a decay of 0"),
        (lambda: EagleRecipe(steps=0), "0 steps"),
        (lambda: EagleRecipe(noise=-1.0), "a weight or noise below 0"),
        (lambda: EagleRecipe(start="warm"), "the start is 'warm'"),  # type: ignore[arg-type]
        (lambda: EagleRecipe(law_tokens=3), "distributions of 3 tokens: give at least 4"),
        (lambda: Eagle3Recipe(law_tokens=3), "distributions of 3 tokens: give at least 4"),
        (lambda: EagleRecipe(draft_tokens=3), "3 draft tokens: give at least 16"),
        (lambda: EagleRecipe(draft_tokens=64, law_tokens=64), "so leave law_tokens out"),
        (lambda: EagleRecipe(step_decay=1.5), r"a step decay of 1\.5"),
        (lambda: Eagle3Recipe(steps=17), "17 steps"),
        (lambda: Eagle3Recipe(steps=4, late_steps=3), "3 steps late in the training, 4 before"),
        (lambda: EagleRecipe(late_steps=17), "17 steps late in the training, 1 before"),
        (lambda: Eagle3Recipe(draft_tokens=0), "0 draft tokens"),
        (lambda: Eagle3Recipe(layers=(1, 2)), "2 layers to read"),
        (lambda: Eagle3Recipe(layers=(1, 2, 6)).taps(SHAPE), "layer 6 is to be read"),
        (lambda: HydraRecipe(heads=33), "33 heads"),
        (lambda: HydraRecipe(layers=0), "0 blocks a head"),
        (lambda: HydraRecipe(token_weight=0.0), "the weights of the losses"),
        (lambda: HydraRecipe(dropout=1.0), "a dropout of 1"),
        (lambda: HydraRecipe(noise=-1.0), "noise of -1"),
    ],
)
def test_recipes_that_cannot_be(make, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        make()


def test_usual_taps() -> None:
    assert Eagle3Recipe().taps(SHAPE) == (1, 3, 5)
    assert Eagle3Recipe(layers=(0, 2, 4)).taps(SHAPE) == (0, 2, 4)
    assert Eagle3Recipe().taps(dataclasses.replace(SHAPE, n_layers=32)) == (2, 16, 29)
    assert Eagle3Recipe().taps(dataclasses.replace(SHAPE, n_layers=1)) == (0, 0, 0)
