"""Multi-token prediction: the target's own NextN blocks draft, and the text stays plain decoding's
own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from support.joint_law import (
    ALPHA,
    REJECTED,
    KeepsTooMuch,
    joint_law,
    p_value,
    sampled_texts,
    softmax,
)
from support.tiny_models import F32
from support.tiny_nextn import TinyNextN, variant, write_tiny_glm4moe

from specrun.bindings.errors import OptionError, PairError, SpecrunError, UnsupportedModelError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.growing import GrowingDrafter
from specrun.runtime.drafters.mtp import MtpSource
from specrun.runtime.language import quoted
from specrun.runtime.laws import SeededNoise
from specrun.runtime.planning import MOST_DRAFTED, account
from specrun.runtime.round import DraftRequest, GenerationResult

pytestmark = pytest.mark.long

PROMPT = [5, 200, 7, 7, 31, 90, 2, 5]
GREEDY = SamplingParams(temperature=0.0)
MODELS = {
    "one": TinyNextN(),
    # Its block and output matrix are a small part of it: of "one" they are so much that no length
    # pays, unless it is given.
    "deep": TinyNextN(layers=8),
    "two": TinyNextN(blocks=2, seed=1),
    "windowed": TinyNextN(blocks=2, layers=3, window=12, seed=3),
    "alike": TinyNextN(agreement=1.0, strength=0.2, seed=2),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mtp")
    written = {name: spec.write(folder / f"{name}.gguf") for name, spec in MODELS.items()}
    return {
        **written,
        "apart": MODELS["one"].write_blocks_only(folder / "mtp-one.gguf"),
        "none": variant(MODELS["one"], blocks=0).write(folder / "none.gguf"),
        "wide": variant(MODELS["one"], width=64).write_blocks_only(folder / "wide.gguf"),
        "other tokens": variant(MODELS["one"], vocab_size=300).write_blocks_only(
            folder / "tokens.gguf"
        ),
    }


@pytest.fixture(scope="module")
def plain(files: dict[str, Path]) -> Iterator[Callable[..., list[int]]]:
    """Plain decoding's answers, by a runtime for each model that is opened once."""
    opened: dict[str, Runtime] = {}

    def decode(
        name: str, params: SamplingParams, length: int = 40, prompt: list[int] = PROMPT
    ) -> list[int]:
        if name not in opened:
            opened[name] = Runtime(files[name], "none", **F32)
        return opened[name].generate(prompt, params, max_tokens=length).token_ids

    yield decode
    for runtime in opened.values():
        runtime.close()


def answer(path: Path, drafter: str, params: SamplingParams, length: int = 40) -> GenerationResult:
    with Runtime(path, drafter=drafter, **F32) as runtime:
        return runtime.generate(PROMPT, params, max_tokens=length)


def source_of(runtime: Runtime) -> MtpSource:
    drafter = runtime.session.drafter
    assert isinstance(drafter, GrowingDrafter)
    assert isinstance(drafter.source, MtpSource)
    return drafter.source


def pairs_of(spec: TinyNextN, tokens: list[int]) -> np.ndarray:
    """The state before each token of a text, zeros before the first."""
    return np.concatenate([np.zeros((1, spec.width)), spec.trunk(tokens)[:-1]])


# -- text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("deep", "mtp"),
        ("one", "mtp(n=1)"),
        ("two", "mtp"),
        ("alike", "mtp(n=5, p_min=0.2)"),
        ("alike", "mtp(depth=4, topk=3, nodes=7)"),
        ("windowed", "mtp(topk=2, nodes=auto)"),
    ],
)
def test_the_text_is_plain_decodings_own(
    files: dict[str, Path], plain: Callable[..., list[int]], name: str, expression: str
) -> None:
    penalties = {"repeat_penalty": 1.4, "presence_penalty": 0.3}
    drafted = 0  # what pays is learnt: of small targets soon nothing does
    with Runtime(files[name], drafter=expression, **F32) as runtime:
        for temperature, extra in ((0.0, {}), (0.8, {}), (1.0, penalties)):
            params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, seed=1, **extra)
            result = runtime.generate(PROMPT, params, max_tokens=40)
            assert result.token_ids == plain(name, params)
            drafted += result.stats.drafted
    assert drafted > 0


def test_greedy_text_is_plain_decodings_own_when_drafts_are_drawn(
    files: dict[str, Path], plain: Callable[..., list[int]]
) -> None:
    assert answer(files["one"], "mtp(sampling=with)", GREEDY).token_ids == plain("one", GREEDY)


def test_blocks_that_are_like_the_trunk_draft_far_better_than_chance(
    files: dict[str, Path],
) -> None:
    """By chance a token is right once in 320 times; each block of the second model is worse than
    the one before it."""
    assert (answer(files["alike"], "mtp(n=3)", GREEDY).stats.acceptance_rate or 0.0) > 0.3
    assert (answer(files["two"], "mtp(n=2)", GREEDY).stats.acceptance_rate or 0.0) > 0.1


# -- drafts ----------------------------------------------------------------------------------------


def proposed(
    runtime: Runtime, tokens: list[int], params: SamplingParams, depth: int = 8, nodes: int = 8
) -> Any:
    noise = SeededNoise(0).for_drafting(len(tokens))
    request = DraftRequest(tokens, params, noise, depth, nodes)
    return runtime.session.drafter.propose(request)


@pytest.mark.parametrize(("name", "n"), [("one", 4), ("two", 2), ("windowed", 2)])
def test_a_chain_is_what_the_reference_drafts(files: dict[str, Path], name: str, n: int) -> None:
    spec = MODELS[name]
    with Runtime(files[name], drafter=f"mtp(n={n})", **F32) as runtime:
        runtime.generate(PROMPT, GREEDY, max_tokens=0)
        runtime.session.conversation.begin(runtime.session.target, PROMPT)
        drafted = list(proposed(runtime, PROMPT, GREEDY).tokens)
    tokens, states = list(PROMPT), pairs_of(spec, PROMPT)
    for step in range(n):
        logits, found = spec.block(step if spec.blocks > 1 else 0, tokens, states)
        assert drafted[step] == logits[-1].argmax()
        tokens.append(drafted[step])
        states = np.concatenate([states, found[-1:]])
    assert len(drafted) == n


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("one", "tree=2x2x1, sampling=with"),
        ("one", "tree=3x2x2, sampling=without"),
        ("one", "depth=4, topk=3, nodes=12"),
        ("two", "tree=3x2, sampling=without"),
        ("windowed", "tree=2x3"),
    ],
)
def test_a_tree_has_the_references_law_at_every_node(
    files: dict[str, Path], name: str, options: str
) -> None:
    """What a node's children come from depends on its own path, and on no node beside it.

    Of two drafts in a row the second lies where the first did. It holds behind a text that grew.
    """
    spec, params = MODELS[name], SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    with Runtime(files[name], drafter=f"mtp({options})", **F32) as runtime:
        for prompt in (PROMPT, PROMPT, [*PROMPT, 9, 40]):
            runtime.session.conversation.begin(runtime.session.target, prompt)
            tree = proposed(runtime, prompt, params, nodes=16)
            for node, draws in tree.draws.items():
                wanted = law_after(spec, prompt, [tree.tokens[n] for n in tree.path_to(node)])
                if draws[0].law is None:  # point masses: the most likely tokens
                    found = [tree.tokens[draw.node] for draw in draws]
                    assert found == wanted.argsort()[::-1][: len(found)].tolist()
                    continue
                law = np.array([draws[0].law.probability(token) for token in range(len(wanted))])
                np.testing.assert_allclose(law, wanted, atol=1e-4)
            assert len(tree.draws) > 2
            assert max(map(len, tree.draws.values())) > 1


def law_after(spec: TinyNextN, prompt: list[int], path: list[int]) -> np.ndarray:
    """The blocks' law at temperature 1 below drafted tokens, by the reference."""
    tokens, states = list(prompt), pairs_of(spec, prompt)
    for depth in range(len(path) + 1):
        logits, found = spec.block(depth if spec.blocks > 1 else 0, tokens, states)
        tokens, states = [*tokens, *path[depth : depth + 1]], np.append(states, found[-1:], axis=0)
    return softmax(logits[-1])


def test_bare_it_drafts_what_pays_of_a_tree(files: dict[str, Path]) -> None:
    for name, most in (("one", MOST_DRAFTED), ("two", 2 + 4)):  # two blocks are two depths
        with Runtime(files[name], drafter="mtp", **F32) as runtime:
            drafter = runtime.session.drafter
            assert (drafter.max_leaves > 1, drafter.max_nodes) == (True, most)
    with Runtime(files["one"], drafter="mtp(sampling=with)", **F32) as runtime:
        assert runtime.session.drafter.max_leaves == 1


def test_draws_come_from_the_law_that_they_store(files: dict[str, Path]) -> None:
    """The first draw's law is the block's, tempered; draws follow it: 60 seeds, no token of 1e-9
    drawn (chance 2e-6)."""
    spec, params = MODELS["one"], SamplingParams(temperature=1.3, top_k=0, top_p=1.0, min_p=0.0)
    logits = spec.block(0, PROMPT, pairs_of(spec, PROMPT))[0][-1] / 1.3
    wanted = np.exp(logits - logits.max())
    wanted /= wanted.sum()
    firsts = set()
    with Runtime(files["one"], drafter="mtp(n=3, sampling=with)", **F32) as runtime:
        runtime.session.conversation.begin(runtime.session.target, PROMPT)
        for seed in range(60):
            noise = SeededNoise(seed).for_drafting(len(PROMPT))
            tree = runtime.session.drafter.propose(DraftRequest(PROMPT, params, noise, 8, 8))
            assert tree.parents == (-1, 0, 1)
            for node, (parent, (draw,)) in enumerate(tree.draws.items()):
                assert parent == node - 1 == draw.node - 1
                assert draw.law is not None
                assert draw.law.probability(tree.tokens[node]) > 0.0
            law = tree.draws[-1][0].law
            found = np.array([law.probability(token) for token in range(spec.vocab_size)])
            np.testing.assert_allclose(found, wanted, atol=1e-4)
            assert wanted[tree.tokens[0]] > 1e-9
            firsts.add(tree.tokens[0])
    assert len(firsts) > 3  # point masses would be one token


@pytest.mark.parametrize("options", ["n=2, sampling=with", "tree=2x2, sampling=without"])
def test_texts_of_drawn_drafts_follow_the_targets_joint_law(tmp_path: Path, options: str) -> None:
    """The law of two tokens is the reference's; hypothesis, test and its chance of a false alarm
    are `joint_law`'s."""
    spec = TinyNextN(vocab_size=12, scale=0.6, agreement=0.5, seed=4)
    prompt, length, samples = [3, 1, 4], 2, 700
    head = spec.tensors()["output.weight"].T
    law = joint_law(
        lambda text: softmax(spec.trunk([*prompt, *text])[-1] @ head), length, frozenset({11})
    )
    assert scipy.stats.entropy(list(law.values())) > 4.0
    with Runtime(spec.write(tmp_path / "small.gguf"), drafter=f"mtp({options})", **F32) as runtime:
        assert p_value(sampled_texts(runtime, prompt, length, samples), law) > ALPHA
        runtime.session.rule = KeepsTooMuch()
        assert p_value(sampled_texts(runtime, prompt, length, samples), law) < REJECTED


def test_p_min_ends_a_chain_before_a_doubtful_token(files: dict[str, Path]) -> None:
    spec = MODELS["one"]
    logits = spec.block(0, PROMPT, pairs_of(spec, PROMPT))[0][-1]
    most = math.exp(logits.max() - np.logaddexp.reduce(logits))
    lengths = {}
    for p_min in (0.9 * most, 1.1 * most):
        with Runtime(files["one"], drafter=f"mtp(n=1, p_min={p_min})", **F32) as runtime:
            runtime.session.conversation.begin(runtime.session.target, PROMPT)
            params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
            lengths[p_min > most] = len(proposed(runtime, PROMPT, params))
    assert lengths == {False: 1, True: 0}


def test_limits_of_the_round_are_kept(files: dict[str, Path]) -> None:
    with Runtime(files["one"], drafter="mtp(n=5)", **F32) as runtime:
        runtime.session.conversation.begin(runtime.session.target, PROMPT)
        assert [len(proposed(runtime, PROMPT, GREEDY, depth)) for depth in (0, 1, 3, 8)] == [
            0,
            1,
            3,
            5,
        ]


def test_an_answer_may_fill_the_context(
    files: dict[str, Path], plain: Callable[..., list[int]]
) -> None:
    params = SamplingParams(temperature=1.0, seed=0, logit_bias={319: -1e9})  # never ends by itself
    result = answer(files["alike"], "mtp(n=6)", params, 400)
    assert result.finish_reason == "length"
    assert len(PROMPT) + len(result.token_ids) == 257  # the last token needs no room
    assert result.token_ids == plain("alike", params, 400)


# -- KV truth --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("one", "n=3"),
        ("windowed", "n=2"),
        ("alike", "tree=2x2x1, sampling=without"),
        ("alike", "depth=4, topk=3, nodes=7"),
        ("two", "tree=3x2"),
        ("windowed", "tree=2x2, sampling=with"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_after_any_rounds_the_cache_is_what_a_fresh_evaluation_makes(
    files: dict[str, Path], name: str, options: str, temperature: float
) -> None:
    spec = MODELS[name]
    params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=7)
    with Runtime(files[name], drafter=f"mtp({options})", **F32) as runtime:
        accepted = drafted = 0
        for prompt in (
            PROMPT,
            PROMPT[:5],
            [*PROMPT[:5], 77, 3],
        ):  # the later ones share what is cached
            result = runtime.generate(prompt, params, max_tokens=30)
            accepted, drafted = accepted + result.stats.accepted, drafted + result.stats.drafted
            text = [*prompt, *result.token_ids]
            row = source_of(runtime).state.root(text)
            assert row is not None
            states = pairs_of(spec, text)
            wanted = spec.block(0, text, states)[0][-1]
            np.testing.assert_allclose(row, wanted, rtol=1e-3, atol=1e-3)
            # A cache that lacks the text, or has it one place off, gives something else.
            assert np.abs(spec.block(0, text[1:], states[1:])[0][-1] - wanted).max() > 1e-2
    assert 0 < accepted < drafted


def test_a_conversation_goes_on_from_what_is_cached(
    files: dict[str, Path], plain: Callable[..., list[int]]
) -> None:
    with Runtime(files["alike"], drafter="mtp(n=4)", **F32) as runtime:
        prompt = list(PROMPT)
        for turn in range(4):
            result = runtime.generate(prompt, GREEDY, max_tokens=12)
            assert result.token_ids == plain("alike", GREEDY, 12, prompt)
            # The first round of a turn drafts too: its state was seen again, with one more token
            # than plain decoding.
            assert turn == 0 or result.usage.cached_tokens >= len(prompt) - 6
            prompt += [*result.token_ids, 11, 12]
            state = source_of(runtime).state
            assert state.base == 0
        again = runtime.generate(PROMPT, GREEDY, max_tokens=12)
        assert again.token_ids == plain("alike", GREEDY, 12)
        assert runtime.generate(PROMPT, GREEDY, max_tokens=12).token_ids == again.token_ids


def test_experts_draft_and_their_cache_is_what_a_fresh_evaluation_makes(tmp_path: Path) -> None:
    """glm4moe has no reference here: rounds of drafts are compared with one evaluation of the whole
    text."""
    path = write_tiny_glm4moe(tmp_path / "glm.gguf")
    rows = []
    with Runtime(path, drafter="mtp(n=3)", **F32) as runtime, Runtime(path, "none", **F32) as plain:
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=3)
            result = runtime.generate(PROMPT, params, max_tokens=60)
            assert result.token_ids == plain.generate(PROMPT, params, max_tokens=60).token_ids
            assert 0 < result.stats.accepted < result.stats.drafted
            text = [*PROMPT, *result.token_ids]
            rows.append((text, np.array(source_of(runtime).state.root(text))))
    for text, row in rows:
        with Runtime(path, drafter="mtp(n=3)", **F32) as fresh:
            fresh.session.conversation.begin(fresh.session.target, text)
            wanted = source_of(fresh).state.root(text)
            np.testing.assert_allclose(row, wanted, rtol=1e-3, atol=1e-3)
            fresh.session.conversation.begin(fresh.session.target, [9, *text[1:]])
            assert np.abs(source_of(fresh).state.root([9, *text[1:]]) - row).max() > 1e-2


# -- files -----------------------------------------------------------------------------------------


def test_blocks_in_a_file_of_their_own_draft_the_same(files: dict[str, Path]) -> None:
    own = answer(files["one"], "mtp(n=3)", GREEDY)
    apart = answer(files["one"], f"mtp({quoted(str(files['apart']))}, n=3)", GREEDY)
    for_a_target_without = answer(files["none"], f"mtp({quoted(str(files['apart']))}, n=3)", GREEDY)
    assert own.token_ids == apart.token_ids
    assert own.stats.accepted == apart.stats.accepted > 0
    # The trunk's random weights do not depend on the blocks', which come after them.
    assert for_a_target_without.token_ids == own.token_ids
    assert for_a_target_without.stats.accepted == own.stats.accepted


@pytest.mark.parametrize(
    ("target", "expression", "kind", "problem"),
    [
        ("none", "mtp", UnsupportedModelError, "no NextN blocks: many GGUFs are made without them"),
        ("none", "auto(mtp, prompt-lookup)", UnsupportedModelError, "no NextN blocks"),
        ("one", "mtp(none)", UnsupportedModelError, "none.gguf has no NextN blocks"),
        ("one", "mtp(wide)", PairError, "states of 64 numbers, and the target's have 32"),
        ("one", "mtp(other tokens)", PairError, "tokens.gguf cannot draft for"),
        (
            "two",
            "mtp(n=3)",
            OptionError,
            "has 2 NextN blocks, one for each token, so n is at most 2",
        ),
        ("two", "mtp(tree=2x1x1)", OptionError, "so a tree has a depth of at most 2"),
        ("two", "mtp(depth=3, topk=2)", OptionError, "so a tree has a depth of at most 2"),
        ("one", "mtp(tree=2x2, n=2)", OptionError, "give one of them"),
        ("one", "mtp(topk=2, sampling=with)", OptionError, "biases the text"),
        ("one", "mtp(n=0)", OptionError, "n is 0: give 1 to 511 tokens"),
        ("one", "mtp(n=600)", OptionError, "n is 600: give 1 to 511 tokens"),
        ("one", "mtp(sampling=without)", OptionError, "without"),
        ("one", "mtp(p_min=2)", OptionError, "p_min is 2.0: it is a probability"),
    ],
)
def test_what_cannot_draft_is_refused(
    files: dict[str, Path], target: str, expression: str, kind: type[SpecrunError], problem: str
) -> None:
    for name in ("none", "wide", "other tokens"):
        expression = expression.replace(f"({name})", f"({quoted(str(files[name]))})")
    with pytest.raises(kind, match=problem):
        Runtime(files[target], drafter=expression, **F32)


def test_a_llama_is_refused_and_so_is_a_llama_file(
    files: dict[str, Path], tiny_model: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match="no NextN blocks") as caught:
        Runtime(tiny_model, drafter="mtp", **F32)
    assert caught.value.exit_code == 3
    with pytest.raises(
        PairError, match="it is made for hy_v3, and the target is a llama model"
    ) as other:
        Runtime(tiny_model, drafter=f"mtp({quoted(str(files['apart']))})", **F32)
    assert other.value.exit_code == 4


# -- with others -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression", ["ensemble(mtp(n=2), prompt-lookup)", "relay(prompt-lookup@1, mtp)"]
)
def test_combinators_let_blocks_see_their_states(
    files: dict[str, Path],
    plain: Callable[..., list[int]],
    expression: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A block of so small a model costs more than its trunk.
    monkeypatch.setattr(account, "START", 100.0)
    params = SamplingParams(temperature=0.8, seed=5)
    result = answer(files["alike"], expression, params, 60)
    assert result.token_ids == plain("alike", params, 60)
    assert result.stats.drafted > 0


def test_bare_auto_considers_the_targets_own_blocks(
    files: dict[str, Path], plain: Callable[..., list[int]]
) -> None:
    greedy = SamplingParams(temperature=0.0)
    result = answer(files["alike"], "auto", greedy)
    assert [arm["drafter"] for arm in result.stats.drafting["arms"]] == [
        "mtp",
        "prompt-lookup",
        "lookahead",
        "none",
    ]
    assert result.stats.drafting["choices"][0][0] == 3  # plain decoding is measured first
    assert result.token_ids == plain("alike", greedy)
    without = answer(files["none"], "auto", greedy)
    assert [arm["drafter"] for arm in without.stats.drafting["arms"]] == [
        "prompt-lookup",
        "lookahead",
        "none",
    ]


def test_blocks_cannot_draft_for_a_draft_model(files: dict[str, Path]) -> None:
    with pytest.raises(SpecrunError, match="hidden states"):
        Runtime(
            files["one"],
            drafter=(
                f"cascade(draft({quoted(str(files['none']))}), mtp({quoted(str(files['apart']))}))"
            ),
            **F32,
        )
    with pytest.raises(
        UnsupportedModelError, match="loaded without its NextN blocks: only the target"
    ):
        Runtime(files["one"], drafter=f"cascade(draft({quoted(str(files['one']))}), mtp)", **F32)
