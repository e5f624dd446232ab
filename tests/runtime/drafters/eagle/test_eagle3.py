"""EAGLE-3 as a drafter: plain decoding's text, a cache that stays true, drafts better than chance
once trained."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.renamed_models import as_architecture
from support.target_texts import PROMPT_IDS, answer, greedy_answers, same_text
from support.tiny_dflash import token_matrices
from support.tiny_eagle3 import TinyEagle3, Variant, random_eagle3
from support.tiny_models import F32
from support.tiny_nextn import write_tiny_qwen35

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.models.model import Model
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.language import quoted

HIDDEN, VOCAB, LAYERS, TAPS = 32, 320, 6, (1, 3, 5)
GREEDY = SamplingParams(temperature=0.0)


def features(path: Path, text: list[int]) -> np.ndarray:
    """The target's taps at all positions, from one fresh evaluation."""
    with Model(path) as model, Context(model, ContextOptions(**F32, layer_inputs=TAPS)) as context:
        batch = Batch(context.n_batch, 1)
        batch.fill_chain(text, 0, [0], 0)
        rows = context.decode(batch)
        return np.stack(
            [
                np.concatenate([rows.layer_input(i, layer) for layer in TAPS])
                for i in range(len(text))
            ]
        )


@pytest.fixture(scope="module")
def greedy_texts(tiny_deep_model: Path) -> list[list[int]]:
    return greedy_answers(tiny_deep_model, F32, count=6)


@pytest.fixture(scope="module")
def head(tiny_deep_model: Path, greedy_texts: list[list[int]]) -> TinyEagle3:
    """A head trained for some seconds on greedy texts with two steps of training-time test, as in
    the paper."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    embedding = torch.tensor(token_matrices(tiny_deep_model)[0])
    counts = Counter(token for text in greedy_texts for token in text[2:])
    ids = np.sort([token for token, _ in counts.most_common(64)])
    start = random_eagle3(HIDDEN, VOCAB, Variant(draft_tokens=len(ids)))
    offsets = {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(VOCAB), ids)}
    start = replace(start, weights={**start.weights, **offsets})
    w = {name: torch.nn.Parameter(tensor) for name, tensor in start.tensors(torch.float32).items()}
    steps = torch.optim.Adam(w.values(), 0.01)
    known = {int(token): row for row, token in enumerate(ids)}
    data = []
    for text in greedy_texts:
        n = len(text) - 2
        wanted = torch.tensor([known.get(token, -100) for token in [*text[2:], -1]])
        data.append(
            (n, torch.tensor(features(tiny_deep_model, text))[: n + 1], embedding[text[1:]], wanted)
        )
    for _ in range(40):
        loss = torch.zeros(())
        for n, taps, tokens, wanted in data:
            states, seen = start.fused(w, taps[:n]), np.tri(n, dtype=bool)
            fed_back, read = start.predicted(w, tokens[:n], states, range(n), seen)
            loss = loss + cross_entropy(read @ w["lm_head.weight"].T, wanted[:n])
            # The second step: drafted pair i + 1 hangs below real pair i, and sees those before.
            twice = np.block([[seen, np.zeros((n, n), bool)], [seen, np.eye(n, dtype=bool)]])
            _, read = start.predicted(
                w,
                torch.cat([tokens[:n], tokens[1 : n + 1]]),
                torch.cat([states, fed_back]),
                [*range(n), *range(1, n + 1)],
                twice,
            )
            loss = loss + cross_entropy(read[n:] @ w["lm_head.weight"].T, wanted[1 : n + 1])
        steps.zero_grad()
        loss.backward()
        steps.step()
    trained = {name: weight.detach().numpy() for name, weight in w.items()}
    return replace(start, weights={**trained, **offsets})


def cross_entropy(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100)


@pytest.fixture(scope="module")
def trained(
    head: TinyEagle3, tiny_deep_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return head.write(tmp_path_factory.mktemp("eagle3") / "trained.gguf", tiny_deep_model)


@pytest.mark.parametrize("options", ["depth=4, topk=2, nodes=6", "n=3"])
def test_the_text_is_plain_decodings_own(
    tiny_deep_model: Path, trained: Path, options: str
) -> None:
    same_text(tiny_deep_model, f"eagle3({quoted(str(trained))}, {options})")


@pytest.mark.parametrize("sampling", ["with", "without"])
def test_sampled_trees_draw_tokens_of_the_draft_vocabulary_only(
    tiny_deep_model: Path, trained: Path, head: TinyEagle3, sampling: str
) -> None:
    """Their laws are the head's own over the target's tokens, so acceptance is exact; and some are
    accepted."""
    with Runtime(
        tiny_deep_model,
        drafter=f"eagle3({quoted(str(trained))}, tree=3x2, sampling={sampling})",
        **F32,
    ) as runtime:
        drafter, laws = runtime.session.drafter, []
        propose = drafter.propose

        def recorded(request):
            tree = propose(request)
            laws.extend(draw.law for draws in tree.draws.values() for draw in draws)
            assert set(tree.tokens) <= set(head.target_ids.tolist())
            return tree

        drafter.propose = recorded  # type: ignore[method-assign]
        params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
        stats = runtime.generate(PROMPT_IDS, params, max_tokens=60).stats
    assert stats.accepted > 0
    outside = np.setdiff1d(np.arange(VOCAB), head.target_ids)
    assert laws
    for law in laws:
        assert sum(law.probability(int(token)) for token in outside) == 0.0
        assert abs(float(law.probs.sum()) - 1.0) < 1e-9


@pytest.mark.parametrize(
    "options", ["depth=4, topk=2, nodes=6", "n=4", "tree=2x2x1, sampling=without"]
)
@pytest.mark.parametrize(("temperature", "n_batch"), [(0.0, 512), (1.0, 16)])
def test_the_cache_is_true_after_any_rounds(
    tiny_deep_model: Path,
    trained: Path,
    head: TinyEagle3,
    options: str,
    temperature: float,
    n_batch: int,
) -> None:
    """After many accepted and rejected rounds, and prompts in pieces, it predicts what a fresh
    evaluation does."""
    embedding = torch.tensor(token_matrices(tiny_deep_model)[0])
    w = head.tensors()
    drafter_text = f"eagle3({quoted(str(trained))}, {options})"
    with Runtime(
        tiny_deep_model, drafter=drafter_text, **F32, n_batch=n_batch, n_ubatch=8
    ) as runtime:
        drafter = runtime.session.drafter
        assert isinstance(drafter, GrowingDrafter)
        first = runtime.generate(
            PROMPT_IDS, SamplingParams(temperature=temperature, seed=1), max_tokens=30
        )
        accepted = first.stats.accepted
        long = [*PROMPT_IDS, *first.token_ids[:11], 3, 4]
        for prompt in (long, [*long, 9], [3, 4, 9], [*range(5, 60)]):
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
            states = head.fused(
                w, torch.tensor(features(tiny_deep_model, text)[base:-1], dtype=torch.float64)
            )
            n = len(states)
            embedded = embedding[text[base + 1 :]].to(torch.float64)
            seen = np.tri(n, dtype=bool)
            wanted = head.predicted(w, embedded, states, range(base, base + n), seen)[0].numpy()[-1]
            np.testing.assert_allclose(row.states[0], wanted, rtol=1e-3, atol=1e-3)
            # The control: pairs shifted by one.
            wrong = head.predicted(
                w, embedding[text[base:-1]].to(torch.float64), states, range(n), seen
            )[0].numpy()[-1]
            assert np.abs(row.states[0] - wrong).max() > 0.01
    assert temperature or accepted > 0


@pytest.mark.parametrize(
    "expression",
    [
        "relay(prompt-lookup@2, {0}@2)",
        "ensemble({0}, prompt-lookup)",
        "auto({0}, prompt-lookup, none)",
    ],
)
def test_combinators_let_the_head_see_layer_inputs(
    tiny_deep_model: Path, trained: Path, expression: str
) -> None:
    drafter = expression.format(f"eagle3({quoted(str(trained))}, n=3)")
    with Runtime(tiny_deep_model, drafter=drafter, **F32) as runtime:
        assert runtime.session.drafter.layer_inputs == TAPS
        drafted = runtime.generate(PROMPT_IDS, GREEDY, max_tokens=40)
    assert drafted.token_ids == answer(tiny_deep_model, "none", GREEDY).token_ids


def test_a_cascade_refuses_it_as_an_inner_drafter(tiny_deep_model: Path, trained: Path) -> None:
    with pytest.raises(OptionError, match="would draft for the draft model"):
        Runtime(
            tiny_deep_model,
            drafter=(
                f"cascade(draft({quoted(str(tiny_deep_model))}), eagle3({quoted(str(trained))}))"
            ),
            **F32,
        )


def test_hybrid_targets_take_chains(tmp_path: Path) -> None:
    """A head of three of its layers' inputs drafts a chain, and what is rejected is rolled back; a
    tree is refused."""
    target = write_tiny_qwen35(tmp_path / "qwen35.gguf")
    file = random_eagle3(64, VOCAB, Variant(changes={"taps": (1, 2, 3)})).write(
        tmp_path / "head.gguf", target
    )
    drafted = answer(target, f"eagle3({quoted(str(file))}, n=3)", GREEDY, 20)
    assert drafted.token_ids == answer(target, "none", GREEDY, 20).token_ids
    assert drafted.stats.drafted > drafted.stats.accepted
    with pytest.raises(UnsupportedModelError, match="one chain of drafts"):
        Runtime(target, drafter=f"eagle3({quoted(str(file))}, tree=2x2)", **F32)


def test_a_target_without_layer_inputs_is_refused(
    tiny_deep_model: Path, head: TinyEagle3, tmp_path: Path
) -> None:
    path = as_architecture(tiny_deep_model, tmp_path / "other.gguf", "xverse")
    file = head.write(tmp_path / "head.gguf", path)
    with pytest.raises(UnsupportedModelError, match="layer inputs of xverse models"):
        Runtime(path, drafter=f"eagle3({quoted(str(file))})", **F32)
    assert len(answer(path, "none", GREEDY, 5).token_ids) == 5  # it runs without
