"""EAGLE as a drafter: exact for every shape, a true cache after any rounds, drafts better than
chance once trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.enumeration import TOLERANCE, bias
from support.head_chains import PairChainByDepth, eagle_drafter, whole_places
from support.scripted import LawTable
from support.target_texts import PROMPT_IDS, answer, final_states, greedy_answers
from support.tiny_eagle import TinyEagle, random_eagle
from support.tiny_models import F32

from specrun.bindings.errors import OptionError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.drafters.eagle import EagleRows
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.heads import RowPlaces
from specrun.runtime.language import quoted
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import DraftTree, DynamicShape, Topology, TreeSampling, parse_topology

HIDDEN, VOCAB = 32, 320
GREEDY = SamplingParams(temperature=0.0)


# -- exactness -------------------------------------------------------------------------------------


class TableHead(PairChainByDepth):
    """A head whose logits are a table's law of the tokens that a pair sees, in float64."""

    n_cells, n_params, native_seconds = 64, 0, 0.0
    taps = ()
    whole_rows = True

    def __init__(self, table: LawTable, first: int) -> None:
        self._table = table
        self._first = first  # the text's first token is in no pair
        self._tokens: dict[int, int] = {}
        self._positions: dict[int, int] = {}

    def evaluate(
        self, tokens: Sequence[int], states: np.ndarray, places: RowPlaces, **_: object
    ) -> EagleRows:
        positions, cells, sees = whole_places(places)
        for cell, token, position in zip(cells.tolist(), tokens, positions.tolist(), strict=True):
            self._tokens[cell], self._positions[cell] = token, position
        laws = []
        for row in sees:
            seen = sorted(np.flatnonzero(row).tolist(), key=self._positions.__getitem__)
            assert [self._positions[cell] for cell in seen] == list(range(len(seen)))
            laws.append(self._table([self._first, *(self._tokens[cell] for cell in seen)]))
        probs = np.array(laws)
        ranked = np.argsort(-probs, 1, kind="stable")
        with np.errstate(divide="ignore"):
            logits = np.log(probs)
        ordered = np.take_along_axis(logits, ranked, 1)
        return EagleRows(np.zeros((len(laws), 1)), ranked.astype(np.int32), ordered, logits)

    def close(self) -> None:
        pass


def eagle(
    drafts: LawTable, shape: Topology | DynamicShape, sampling: TreeSampling, p_min: float = 0.0
):
    def propose(request: DraftRequest) -> DraftTree:
        head = TableHead(drafts, request.tokens[0])
        drafter = eagle_drafter(head, shape, sampling=sampling, p_min=p_min)  # type: ignore[arg-type]
        drafter.begin(request.tokens)
        drafter.source.state.learn(0, np.zeros((len(request.tokens) - 1, 1)), request.tokens)
        return drafter.propose(request)

    return propose


@pytest.mark.parametrize("sampling", ["with", "without", "argmax"])
@pytest.mark.parametrize("shape", ["1x1", "3", "2x1", "0 1 00 10", "2x2"])
@pytest.mark.parametrize("seed", range(2))
def test_static_trees_give_the_targets_law(sampling: TreeSampling, shape: str, seed: int) -> None:
    propose = eagle(LawTable(3, seed + 100), parse_topology(shape), sampling)
    assert bias(ExactRule(), propose, LawTable(3, seed), 2 if shape == "2x2" else 3) < TOLERANCE


class FewerTokens(LawTable):
    """Laws without mass on the last token, as those of heads with a draft vocabulary."""

    def __call__(self, prefix: Sequence[int]) -> np.ndarray:
        law = super().__call__(prefix).copy()
        law[-1] = 0.0
        law[0] += not law.any()
        return law / law.sum()


@pytest.mark.parametrize("sampling", ["with", "without", "argmax"])
@pytest.mark.parametrize("shape", ["3", "2x1"])
def test_tokens_that_are_never_drafted_keep_their_probability(
    sampling: TreeSampling, shape: str
) -> None:
    propose = eagle(FewerTokens(3, 100), parse_topology(shape), sampling)
    assert bias(ExactRule(), propose, LawTable(3, 0), 2) < TOLERANCE


@pytest.mark.parametrize("seed", range(3))
def test_dynamic_trees_give_the_targets_law(seed: int) -> None:
    propose = eagle(LawTable(3, seed + 100), DynamicShape(3, 2, 6), "argmax")
    assert bias(ExactRule(), propose, LawTable(3, seed), 3) < TOLERANCE


@pytest.mark.parametrize("sampling", ["with", "without", "argmax"])
@pytest.mark.parametrize("shape", ["1x1", "2x1"])
def test_a_confidence_stop_keeps_the_targets_law(sampling: TreeSampling, shape: str) -> None:
    propose = eagle(LawTable(3, 100), parse_topology(shape), sampling, 0.5)
    assert bias(ExactRule(), propose, LawTable(3, 0), 3) < TOLERANCE


class Silent:
    """Noise for drafters that draw nothing."""

    def seek(self, position: int) -> None:
        pass


@pytest.mark.parametrize("shape", [parse_topology("1x1x1x1"), DynamicShape(4, 1, 4)])
def test_drafts_end_before_a_token_that_the_head_is_not_sure_of(
    shape: Topology | DynamicShape,
) -> None:
    drafts, tokens = LawTable(4, 9), [0, 1, 2]
    lengths = set()
    for p_min in (0.0, 0.3, 0.5, 0.7, 0.99):
        wanted: list[int] = []
        while len(wanted) < 4:
            law = drafts([*tokens, *wanted])
            if law.max() < p_min:
                break
            wanted.append(int(law.argmax()))
        request = DraftRequest(tokens, GREEDY, Silent(), 8, 30)  # type: ignore[arg-type]
        assert list(eagle(drafts, shape, "argmax", p_min)(request).tokens) == wanted
        lengths.add(len(wanted))
    assert len(lengths) > 2


def test_a_confidence_that_is_no_probability_is_refused() -> None:
    with pytest.raises(OptionError, match=r"p_min is 1\.5"):
        eagle_drafter(TableHead(LawTable(3, 1), 0), parse_topology("1"), p_min=1.5)  # type: ignore[arg-type]


def test_ranked_tokens_passed_off_as_draws_are_caught() -> None:
    """The negative control: a head's best tokens with its law attached, as if they had been drawn
    from it."""
    from specrun.runtime.trees import TreeBuilder

    def wrong(request: DraftRequest) -> DraftTree:
        right = eagle(LawTable(3, 100), parse_topology("1"), "without")(request)
        best = eagle(LawTable(3, 100), parse_topology("1"), "argmax")(request)
        builder = TreeBuilder()
        if not len(best):
            return best
        builder.add(-1, best.tokens[0], right.draws[-1][0].law)
        return builder.build()

    assert bias(ExactRule(), wrong, LawTable(3, 0), 2) > 0.01


def test_dynamic_trees_refuse_draws() -> None:
    with pytest.raises(OptionError, match="biases the text"):
        eagle_drafter(TableHead(LawTable(3, 1), 0), DynamicShape(2, 2, 3), sampling="with")  # type: ignore[arg-type]


# -- real targets ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def greedy_texts(tiny_model: Path) -> list[list[int]]:
    return greedy_answers(tiny_model, F32)


def matrices(path: Path) -> tuple[np.ndarray, np.ndarray]:
    from gguf import GGUFReader, quants

    tensors = {
        tensor.name: quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in GGUFReader(path).tensors
    }
    return tensors["token_embd.weight"], tensors.get("output.weight", tensors["token_embd.weight"])


@pytest.fixture(scope="module")
def trained(
    tiny_model: Path, greedy_texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A head trained for some seconds on greedy texts: the loss on states and tokens, as in the
    paper."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    embedding, output = (torch.tensor(matrix) for matrix in matrices(tiny_model))
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


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
@pytest.mark.parametrize(
    "options",
    ["depth=4, topk=2, nodes=6", "n=3", "n=3, p_min=0.3", "tree=2x2x1", "depth=3, topk=4, nodes=9"],
)
def test_the_text_is_plain_decodings_own(
    tiny_model: Path, trained: Path, temperature: float, options: str
) -> None:
    params = SamplingParams(temperature=temperature, seed=3, repeat_penalty=1.1)
    drafted = answer(tiny_model, f"eagle({quoted(str(trained))}, {options})", params)
    assert drafted.token_ids == answer(tiny_model, "none", params).token_ids
    assert drafted.stats.drafted > 0


def test_a_trained_head_drafts_far_better_than_chance(
    tiny_model: Path, trained: Path, greedy_texts: list[list[int]]
) -> None:
    """On texts it was trained on; by chance a token is right once in 320 times. A random head is
    the control."""
    shares = [
        answer(
            tiny_model, f"eagle({quoted(str(trained))}, n=3)", GREEDY, 25, text[:3]
        ).stats.acceptance_rate
        for text in greedy_texts[:4]
    ]
    assert np.mean(shares) > 0.3
    control = random_eagle(HIDDEN).write(trained.parent / "random.gguf", VOCAB)
    shares = [
        answer(
            tiny_model, f"eagle({quoted(str(control))}, n=3)", GREEDY, 25, text[:3]
        ).stats.acceptance_rate
        for text in greedy_texts[:4]
    ]
    assert np.mean(shares) < 0.1


@pytest.mark.parametrize(
    "options", ["depth=4, topk=2, nodes=6", "n=4", "tree=2x2x1, sampling=without"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_cache_is_true_after_any_rounds(
    tiny_model: Path, trained: Path, options: str, temperature: float
) -> None:
    """What the head predicts after many accepted and rejected rounds equals a fresh evaluation of
    all real pairs."""
    from support.tiny_eagle import read_eagle

    reference = read_eagle(trained)
    embedding, _ = matrices(tiny_model)
    with Runtime(tiny_model, drafter=f"eagle({quoted(str(trained))}, {options})", **F32) as runtime:
        drafter = runtime.session.drafter
        assert isinstance(drafter, GrowingDrafter)
        first = runtime.generate(
            PROMPT_IDS, SamplingParams(temperature=temperature, seed=1), max_tokens=30
        )
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


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("n=0", "n is 0"),
        ("depth=3, topk=2, nodes=4, sampling=with", "biases the text"),
        ("tree=300", "use fewer branches"),
        ("guesses=3", "guesses"),
    ],
)
def test_shapes_that_cannot_be_are_refused(
    tiny_model: Path, trained: Path, options: str, problem: str
) -> None:
    with pytest.raises(OptionError, match=problem):
        Runtime(tiny_model, drafter=f"eagle({quoted(str(trained))}, {options})", **F32)
