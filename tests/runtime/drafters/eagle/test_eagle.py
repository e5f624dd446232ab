"""EAGLE as a drafter: a true cache after any rounds, drafts better than chance once trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.target_texts import (
    PROMPT_IDS,
    final_states,
    greedy_answers,
    same_text,
)
from support.tiny_dflash import token_matrices
from support.tiny_eagle import TinyEagle, random_eagle, read_eagle
from support.tiny_models import F32

from specrun.bindings.errors import OptionError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.language import quoted

HIDDEN, VOCAB = 32, 320
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def greedy_texts(tiny_model: Path) -> list[list[int]]:
    return greedy_answers(tiny_model, F32)


@pytest.fixture(scope="module")
def trained(
    tiny_model: Path, greedy_texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A head trained for some seconds on greedy texts: the loss on states and tokens, as in the
    paper."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    embedding, output = (torch.tensor(matrix) for matrix in token_matrices(tiny_model))
    pairs = []
    for text in greedy_texts:
        states = torch.tensor(final_states(tiny_model, text, F32))
        following = torch.tensor(text)
        pairs.append((embedding[following[1:-1]], states[:-2], states[1:-1], following[2:]))
    start = random_eagle(HIDDEN, n_heads=1, n_kv_heads=1)
    weights = {
        name: torch.nn.Parameter(torch.tensor(weight)) for name, weight in start.weights.items()
    }
    steps = torch.optim.Adam(weights.values(), 0.01)
    for _ in range(80):
        loss = torch.zeros(())
        for tokens, states, wanted, following in pairs:
            predicted = one_head_layer(torch, weights, tokens, states)
            loss = loss + torch.nn.functional.smooth_l1_loss(predicted, wanted)
            loss = loss + torch.nn.functional.cross_entropy(predicted @ output.T, following)
        steps.zero_grad()
        loss.backward()
        steps.step()
    fitted = TinyEagle({name: weight.detach().numpy() for name, weight in weights.items()}, 1, 1)
    return fitted.write(tmp_path_factory.mktemp("eagle") / "trained.gguf", VOCAB)


def one_head_layer(torch, w, embedded, states):
    """The reference with one attention head, in torch; positions from 0."""
    x = torch.cat([embedded, states], 1) @ w["fc.weight"].T + w["fc.bias"]
    n, half = len(x), HIDDEN // 2
    angles = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(half) / half)

    def rotated(y):
        a, b = y[:, :half], y[:, half:]
        return torch.cat(
            [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], 1
        )

    q, k = rotated(x @ w["attn_q.weight"].T), rotated(x @ w["attn_k.weight"].T)
    scores = (q @ k.T / HIDDEN**0.5).masked_fill(
        ~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf")
    )
    x = x + scores.softmax(1) @ (x @ w["attn_v.weight"].T) @ w["attn_output.weight"].T
    normed = x / (x.pow(2).mean(1, keepdim=True) + 1e-6).sqrt() * w["ffn_norm.weight"]
    gate = torch.nn.functional.silu(normed @ w["ffn_gate.weight"].T)
    return x + (gate * (normed @ w["ffn_up.weight"].T)) @ w["ffn_down.weight"].T


@pytest.mark.parametrize("options", ["depth=4, topk=2, nodes=6", "n=3, p_min=0.3"])
def test_the_text_is_plain_decodings_own(tiny_model: Path, trained: Path, options: str) -> None:
    same_text(tiny_model, f"eagle({quoted(str(trained))}, {options})")


@pytest.mark.parametrize(
    "options", ["depth=4, topk=2, nodes=6", "n=4", "tree=2x2x1, sampling=without"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_cache_is_true_after_any_rounds(
    tiny_model: Path, trained: Path, options: str, temperature: float
) -> None:
    """What the head predicts after many accepted and rejected rounds equals a fresh evaluation of
    all real pairs."""
    reference = read_eagle(trained)
    embedding, _ = token_matrices(tiny_model)
    with Runtime(tiny_model, drafter=f"eagle({quoted(str(trained))}, {options})", **F32) as runtime:
        drafter = runtime.session.drafter
        assert isinstance(drafter, GrowingDrafter)
        first = runtime.generate(
            PROMPT_IDS, SamplingParams(temperature=temperature, seed=1), max_tokens=30
        )
        accepted = first.stats.accepted
        # A second answer that shares some tokens with the first, and a third that shares all but
        # the last.
        for prompt in (
            [*PROMPT_IDS, *first.token_ids[:11], 3, 4],
            [*PROMPT_IDS, *first.token_ids[:11], 3, 4, 9],
            [3, 4, 9],
        ):
            result = runtime.generate(
                prompt, SamplingParams(temperature=temperature, seed=2), max_tokens=20
            )
            accepted += result.stats.accepted
            text = [*prompt, *result.token_ids]
            row = drafter.source.state.root(text)
            if row is None:  # the answer ended with an end token: nothing follows it
                assert result.finish_reason == "stop"
                continue
            base = drafter.source.state.base
            assert base == 0  # no pair was given up where the cache had all but the new tokens
            states = final_states(tiny_model, text, F32)[base:-1]
            n = len(states)
            wanted = reference.states(
                embedding[text[base + 1 :]], states, range(base, base + n), np.tri(n, dtype=bool)
            )
            np.testing.assert_allclose(row.states[0], wanted[-1], rtol=1e-3, atol=1e-4)
            shifted = reference.states(
                embedding[text[base + 1 :]], states, range(n, 2 * n), np.tri(n, dtype=bool)
            )
            assert n < 5 or np.allclose(
                shifted[-1], wanted[-1], atol=1e-6
            )  # rotary positions are relative
            wrong = reference.states(
                embedding[text[base:-1]], states, range(n), np.tri(n, dtype=bool)
            )
            assert (
                np.abs(row.states[0] - wrong[-1]).max() > 0.01
            )  # the control: pairs shifted by one
    assert temperature or accepted > 5  # by chance one in 320 is right


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("n=0", "n is 0"),
        ("depth=3, topk=2, nodes=4, sampling=with", "biases the text"),
        ("tree=300", "use fewer branches"),
        ("n=3, p_min=1.5", r"p_min is 1\.5"),
        ("guesses=3", "guesses"),
    ],
)
def test_shapes_that_cannot_be_are_refused(
    tiny_model: Path, trained: Path, options: str, problem: str
) -> None:
    with pytest.raises(OptionError, match=problem):
        Runtime(tiny_model, drafter=f"eagle({quoted(str(trained))}, {options})", **F32)
