"""Medusa: heads equal a reference, the tree is the best of its size, the text is plain decoding's
own."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted import asking_first_member
from support.target_texts import final_states, greedy_answers, same_text
from support.tiny_dflash import token_matrices
from support.tiny_heads import TinyMedusa, random_medusa
from support.tiny_models import F32

from specrun.bindings.errors import (
    MalformedFileError,
    OptionError,
    PairError,
    SpecrunError,
    UnsupportedModelError,
)
from specrun.bindings.models.model import Model
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.medusa import MedusaHead
from specrun.runtime.language import quoted
from specrun.runtime.planning.optimal_trees import medusa_tree
from specrun.runtime.trees import ROOT

HIDDEN, VOCAB, RANKS = 32, 320, 5
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def target(tiny_model: Path):
    with Model(tiny_model) as model:
        assert model.n_embd == HIDDEN
        yield model


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("own_output", [True, False])
def test_heads_rank_tokens_as_the_reference_does(
    target: Model, tiny_model: Path, tmp_path: Path, blocks: int, own_output: bool
) -> None:
    reference = random_medusa(HIDDEN, VOCAB, blocks=blocks, own_output=own_output)
    head = MedusaHead(
        reference.write(tmp_path / "h.gguf", VOCAB), target, n_threads=1, ranks=[RANKS] * 3
    )
    rng = np.random.default_rng(1)
    _, matrix = token_matrices(tiny_model)
    for _ in range(8):
        features = rng.normal(size=HIDDEN).astype(np.float32)
        tokens = head.said_of(features[None])[0].tokens
        for k in range(3):
            logits = reference.logits(k, features, matrix)
            # Equal but for tokens whose logits are equal to rounding.
            np.testing.assert_allclose(
                logits[tokens[k]], np.sort(logits)[::-1][:RANKS], rtol=1e-4, atol=1e-4
            )
    assert head.native_seconds > 0.0
    head.close()
    head.close()


@pytest.mark.parametrize("quantization", ["F16", "Q8_0", "Q4_0"])
def test_quantized_heads_keep_their_favourites(
    target: Model, tmp_path: Path, quantization: str
) -> None:
    reference = random_medusa(HIDDEN, VOCAB)
    head = MedusaHead(
        reference.write(tmp_path / "h.gguf", VOCAB, quantization), target, n_threads=1, ranks=[1]
    )
    rng = np.random.default_rng(2)
    allowed = {"F16": 0.01, "Q8_0": 0.05, "Q4_0": 0.8}[
        quantization
    ]  # of logits whose scale is about 1.3
    for _ in range(20):
        features = rng.normal(size=HIDDEN).astype(np.float32)
        logits = reference.logits(0, features, np.zeros((1, 1)))
        assert logits.max() - logits[head.said_of(features[None])[0].tokens[0][0]] <= allowed
    head.close()


# -- the tree --------------------------------------------------------------------------------------


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(
    st.lists(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(1, 6),
)
def test_the_tree_is_the_best_of_all_with_so_many_nodes(
    accuracy: list[list[float]], nodes: int
) -> None:
    """Against every set of nodes that is closed under parents and earlier siblings."""
    accuracy = [sorted((share / len(row) for share in row), reverse=True) for row in accuracy]
    ranges = [range(len(row)) for row in accuracy]
    every = [
        path for depth in range(1, len(accuracy) + 1) for path in itertools.product(*ranges[:depth])
    ]

    def value(path: tuple[int, ...]) -> float:
        return float(np.prod([accuracy[k][rank] for k, rank in enumerate(path)]))

    size = min(nodes, len(every))
    best = sum(sorted(map(value, every), reverse=True)[:size])
    tree = medusa_tree(accuracy, nodes)
    assert len(tree) == size
    ranks = {child: rank for below in tree.children.values() for rank, child in enumerate(below)}
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(tree.parents):
        paths.append((*(() if parent == ROOT else paths[parent]), ranks[node]))
    assert sum(map(value, paths)) == pytest.approx(best)


def test_a_tree_without_nodes_is_refused() -> None:
    with pytest.raises(OptionError, match="at least 1 node"):
        medusa_tree([[0.5]], 0)


# -- text ------------------------------------------------------------------------------------------


def answer(
    path: Path, drafter: str, params: SamplingParams, length: int = 40, prompt: list[int] = PROMPT
) -> tuple[list[int], object]:
    with Runtime(path, drafter=drafter, **F32) as runtime:
        result = runtime.generate(prompt, params, max_tokens=length)
        return result.token_ids, result.stats


@pytest.fixture(scope="module")
def fitted(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads trained for a second on greedy texts of the target."""
    texts = [*greedy_answers(tiny_model, F32, count=12), PROMPT]
    states = [final_states(tiny_model, text, F32) for text in texts]
    heads = [_trained(texts, states, k) for k in range(3)]
    fitted = TinyMedusa([[block] for block, _ in heads], [output for _, output in heads])
    folder = tmp_path_factory.mktemp("medusa")
    return fitted.write(folder / "fitted.gguf", VOCAB, accuracy=[0.5, 0.1, 0.3, 0.1, 0.2, 0.1])


def _trained(
    texts: list[list[int]], states: list[np.ndarray], k: int
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Head k's block and output after some steps of cross-entropy on the token k + 2 places after
    each state's own."""
    import torch

    torch.manual_seed(k)
    torch.set_num_threads(1)
    x = torch.tensor(
        np.concatenate(
            [state[: len(text) - k - 2] for text, state in zip(texts, states, strict=True)]
        )
    )
    tokens = torch.tensor(np.concatenate([np.array(text[k + 2 :], np.int64) for text in texts]))
    block, output = torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    steps = torch.optim.Adam([*block.parameters(), *output.parameters()], 0.03)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(
            output(x + torch.nn.functional.silu(block(x))), tokens
        )
        steps.zero_grad()
        loss.backward()
        steps.step()
    return (
        block.weight.detach().numpy(),
        block.bias.detach().numpy(),
    ), output.weight.detach().numpy()


@pytest.mark.parametrize("options", ["tree=2x2x1", "nodes=8", "tree=1x1x1"])
def test_the_text_is_plain_decodings_own(tiny_model: Path, fitted: Path, options: str) -> None:
    same_text(tiny_model, f"medusa({quoted(str(fitted))}, {options})")


def test_fitted_heads_draft_far_better_than_chance(tiny_model: Path, fitted: Path) -> None:
    """On texts they were trained on; by chance a token is right once in 320 times."""
    shares = []
    for seed in range(5):
        prompt = [5 + seed, 6, 7 + seed]
        expression = f"medusa({quoted(str(fitted))}, tree=1x1x1)"
        _, stats = answer(tiny_model, expression, SamplingParams(temperature=0.0), 30, prompt)
        shares.append(stats.acceptance_by_position[0])  # type: ignore[attr-defined]
    assert np.mean(shares) > 0.5


def test_the_first_round_drafts_from_the_prompts_state(tiny_model: Path, fitted: Path) -> None:
    """The state before the prompt's last token is evaluated, even where its keys and values are
    cached."""
    params = SamplingParams(temperature=0.0)
    with Runtime(tiny_model, drafter=f"medusa({quoted(str(fitted))}, tree=1)", **F32) as runtime:
        first = runtime.generate(
            PROMPT, params, max_tokens=2
        )  # one draft fits beside the target's own token
        assert first.stats.drafted == 1
        cached = runtime.generate(PROMPT, params, max_tokens=2)
        assert cached.stats.drafted == 1
        assert cached.token_ids == first.token_ids
        assert (
            runtime.generate([9, *PROMPT], params, max_tokens=1).stats.drafted == 0
        )  # nothing fits


def test_the_prompts_state_is_the_one_before_its_last_token(tiny_model: Path, fitted: Path) -> None:
    """What is drafted after a prompt is drafted again where the same text is an answer's own."""
    params = SamplingParams(temperature=0.0)
    with Runtime(
        tiny_model, drafter=f"medusa({quoted(str(fitted))}, tree=1x1x1)", **F32
    ) as runtime:
        drafter = runtime.session.drafter
        text = [*PROMPT, *runtime.generate(PROMPT, params, max_tokens=12).token_ids]
        after_answer, known = drafter.source.known  # type: ignore[attr-defined]
        runtime.session.forget()
        runtime.session.conversation.begin(runtime.session.target, text[:known])
        again, again_known = drafter.source.known  # type: ignore[attr-defined]
        np.testing.assert_allclose(again, after_answer, rtol=1e-4, atol=1e-4)
        assert again_known == known


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "problem"),
    [
        ({"architecture": "llama"}, UnsupportedModelError, "architecture llama"),
        ({"embedding_length": 64}, PairError, "64 numbers, and the target's have 32"),
        ({"vocab_size": 300}, PairError, "300 tokens, and the target has 320"),
        ({"vocabulary": "00" * 32}, PairError, "another vocabulary"),
        ({"head_count": 4}, MalformedFileError, "no tensor medusa.3.res.0.weight"),
        ({"head_count": 0}, MalformedFileError, "0 as medusa.head_count"),
        ({"without": "medusa.1.res.0.bias"}, MalformedFileError, "no tensor medusa.1.res.0.bias"),
        ({"accuracy": [0.5, 0.4]}, MalformedFileError, "2 accuracies for 3 heads"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    tiny_model: Path,
    tmp_path: Path,
    changes: dict[str, object],
    kind: type[SpecrunError],
    problem: str,
) -> None:
    path = random_medusa(HIDDEN, VOCAB).write(tmp_path / "h.gguf", VOCAB, **changes)
    with pytest.raises(kind, match=problem):
        Runtime(tiny_model, drafter=f"medusa({quoted(str(path))})", **F32)


def test_a_tensor_of_another_shape_is_named(tiny_model: Path, tmp_path: Path) -> None:
    wide = random_medusa(HIDDEN, VOCAB)
    wide.blocks[1][0] = (np.zeros((HIDDEN, 2 * HIDDEN), np.float32), wide.blocks[1][0][1])  # type: ignore[index]
    path = wide.write(tmp_path / "h.gguf", VOCAB)
    with pytest.raises(MalformedFileError, match=r"medusa\.1\.res\.0\.weight of shape \[64, 32\]"):
        Runtime(tiny_model, drafter=f"medusa({quoted(str(path))})", **F32)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("tree=1x1x1x1", "reach 1 to 3 tokens"),
        ("nodes=0", "at least 1 node"),
        ("tree=2x2, nodes=6", "leave out nodes"),
        ("tree=300", "300 leaves"),
        ("tree=2x2, accuracy=a.csv", "leave out accuracy="),
        ("nodes=2000", "give 1 to 1024"),
        ("depth=3", "depth"),
    ],
)
def test_trees_that_cannot_be_are_refused(
    tiny_model: Path, tmp_path: Path, options: str, problem: str
) -> None:
    path = random_medusa(HIDDEN, VOCAB).write(tmp_path / "h.gguf", VOCAB)
    with pytest.raises(OptionError, match=problem):
        Runtime(tiny_model, drafter=f"medusa({quoted(str(path))}, {options})", **F32)


@pytest.mark.parametrize(
    "expression",
    [
        "ensemble(medusa(HEADS, tree=2x1), prompt-lookup)",
        "relay(medusa(HEADS, tree=1x1), prompt-lookup)",
        "auto(medusa(HEADS, tree=2x2x1), prompt-lookup)",
    ],
)
def test_combinators_let_heads_see_hidden_states(
    tiny_model: Path, fitted: Path, expression: str, tmp_path: Path
) -> None:
    params = SamplingParams(temperature=0.8, seed=5)
    drafter = expression.replace("HEADS", quoted(str(fitted)))
    if drafter.startswith("auto"):  # which may find that heads do not pay on this machine
        with Runtime(tiny_model, drafter=drafter, **F32) as runtime:
            tried = runtime.generate("a prompt", params, max_tokens=3)
        drafter = asking_first_member(drafter, tried, tmp_path)
    drafted, stats = answer(tiny_model, drafter, params, 60)
    assert drafted == answer(tiny_model, "none", params, 60)[0]
    assert stats.drafted > 0  # type: ignore[attr-defined]
