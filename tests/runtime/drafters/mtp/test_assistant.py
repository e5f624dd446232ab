"""Gemma 4's assistants: they read the target's cache, and the text stays plain decoding's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from support.tiny_gemma4 import TinyAssistant, TinyGemma4, variant
from support.tiny_models import F32, fresh_logits

from specrun.bindings.contexts import AssistantContext, Context, ContextOptions
from specrun.bindings.errors import (
    NoCacheSlotError,
    OptionError,
    PairError,
    SpecrunError,
    UnsupportedModelError,
)
from specrun.bindings.memory_breakdown import HOST as HOST_NAME
from specrun.bindings.memory_breakdown import memory_breakdown
from specrun.bindings.models import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Engine, Runtime, SamplingParams
from specrun.runtime.language import quoted
from specrun.runtime.laws import SeededNoise
from specrun.runtime.memory import MemoryCounts, PlanRequest, PlanSettings, count_plan, parts_of
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import DraftTree

TEXT = [5, 200, 7, 7, 31, 90, 2, 5, 9, 14, 77, 33, 2, 61, 8, 8, 100, 4]
GREEDY = SamplingParams(temperature=0.0)
WARM = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
TARGET, ASSISTANT = TinyGemma4(strength=0.05), TinyAssistant(strength=0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("assistant")
    TARGET.write(made / "target.gguf")
    ASSISTANT.write(made / "assistant.gguf")
    return made


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Runtime]:
    with Runtime(folder / "target.gguf", **F32) as runtime:
        yield runtime


def assisted(folder: Path, options: str = "", **settings: Any) -> Runtime:
    file = quoted(str(folder / "assistant.gguf"))
    expression = f"mtp({', '.join(filter(None, (file, options)))})"
    return Runtime(folder / "target.gguf", drafter=expression, **{**F32, **settings})


def proposed(runtime: Runtime, tokens: Sequence[int], params: SamplingParams) -> DraftTree:
    noise = SeededNoise(0).for_drafting(len(tokens))
    return runtime.session.drafter.propose(DraftRequest(tokens, params, noise, 8, 16))


def reference_chain(text: Sequence[int], n: int) -> list[int]:
    """The drafts of llama.cpp's driver at temperature 0: the likeliest token, n times."""
    state, token, found = TARGET.run(text[:-1])[0][-1], text[-1], list[int]()
    for _ in range(n):
        logits, state = ASSISTANT.draft(TARGET, text[:-1], token, state)
        token = int(logits.argmax())
        found.append(token)
    return found


def test_target_and_assistant_are_as_the_reference_says(folder: Path) -> None:
    """Logits of scale 14, and both kinds of layers; a text that is longer than the window."""
    states, logits, _ = TARGET.run(TEXT)
    options = ContextOptions(**F32, nextn_states=True)
    with Model(folder / "target.gguf") as target:
        np.testing.assert_allclose(fresh_logits(target, TEXT), logits, atol=2e-4)
        with (
            Model(folder / "assistant.gguf", load_nextn=True) as model,
            Context(target, options) as context,
            AssistantContext(model, context, n_tokens=3) as assistant,
        ):
            from specrun.bindings.contexts import Batch

            batch = Batch(32, 1)
            batch.fill_chain(TEXT, 0, [0], 0)
            state = context.decode(batch).nextn_state(len(TEXT) - 1).copy()
            np.testing.assert_allclose(state, states[-1], atol=1e-4)
            tokens, given = [3, 250, 77], np.stack([state, -state, state])
            rows = assistant.evaluate(tokens, given, [0] * 3)
            for row, token in enumerate(tokens):
                wanted, after = ASSISTANT.draft(TARGET, TEXT, token, given[row])
                np.testing.assert_allclose(rows.logits(row), wanted, atol=1e-4)
                np.testing.assert_allclose(rows.nextn_state(row), after, atol=1e-4)
            assert context.memory.last_position(0) == len(TEXT) - 1  # it has written nothing


def test_a_chain_is_what_llama_cpp_drafts(folder: Path) -> None:
    with assisted(folder, "n=5") as runtime:
        runtime.session.conversation.begin(runtime.session.target, TEXT)
        assert list(proposed(runtime, TEXT, GREEDY).tokens) == reference_chain(TEXT, 5)


@pytest.mark.parametrize(
    "options",
    ["n=4", "n=5, p_min=0.2", "", "depth=4, topk=3, nodes=10", "tree=3x2x1", "nodes=auto, depth=4"],
)
def test_the_text_is_plain_decodings_own(folder: Path, plain: Runtime, options: str) -> None:
    for temperature in (0.0, 0.9):
        params = SamplingParams(temperature=temperature, seed=3, **WARM)
        with assisted(folder, options) as runtime:
            result = runtime.generate(TEXT, params, max_tokens=50)
        assert result.token_ids == plain.generate(TEXT, params, max_tokens=50).token_ids
        assert result.stats.drafted > 0


def test_drafts_behind_an_accepted_branch_see_all_of_the_text(folder: Path) -> None:
    """A node off the likeliest path is evaluated again with the next round: until then the
    assistant reads it where it lies. Without it drafts would be others'."""
    seen = 0
    with assisted(folder, "depth=4, topk=3, nodes=10") as runtime:
        drafter = runtime.session.drafter
        propose = drafter.propose

        def compared(request: DraftRequest) -> DraftTree:
            nonlocal seen
            tree, text = propose(request), runtime.session.conversation
            if text.n_cached < len(text.tokens) - 1 and len(tree):
                seen += 1
                assert tree.tokens[0] == reference_chain(request.tokens, 1)[0]
            return tree

        drafter.propose = compared  # type: ignore[method-assign]
        runtime.generate(TEXT, GREEDY, max_tokens=80)
    assert seen > 2


@pytest.mark.parametrize("options", ["n=3, sampling=with", "tree=3x2, sampling=without"])
def test_draws_come_from_the_assistants_law(folder: Path, options: str) -> None:
    """The first draws: their law is the reference's, tempered, and draws differ by seed."""
    params, firsts = SamplingParams(temperature=1.3, **WARM), set()
    logits, _ = ASSISTANT.draft(TARGET, TEXT[:-1], TEXT[-1], TARGET.run(TEXT[:-1])[0][-1])
    wanted = np.exp((logits - logits.max()) / 1.3)
    wanted /= wanted.sum()
    with assisted(folder, options) as runtime:
        runtime.session.conversation.begin(runtime.session.target, TEXT)
        for seed in range(20):
            noise = SeededNoise(seed).for_drafting(len(TEXT))
            tree = runtime.session.drafter.propose(DraftRequest(TEXT, params, noise, 8, 16))
            law = tree.draws[-1][0].law
            assert law is not None
            found = np.array([law.probability(token) for token in range(TARGET.vocab_size)])
            np.testing.assert_allclose(found, wanted, atol=1e-4)
            firsts.add(tree.tokens[0])
    assert len(firsts) > 3


@pytest.mark.parametrize("options", ["n=3", "depth=3, topk=2, nodes=5"])
def test_depths_of_several_conversations_are_one_evaluation(
    folder: Path, plain: Runtime, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their texts are their own, and each evaluation has the rows of conversations alone."""
    evaluate, together, all_begun = AssistantContext.evaluate, list[int](), Event()

    def compared(self: AssistantContext, tokens: Any, states: Any, sequences: Any) -> Any:
        all_begun.wait(60)
        together.append(len(set(sequences)))
        alone = list[Any]()
        if len(together) < 20:
            for each in dict.fromkeys(sequences):
                own = [place for place, sequence in enumerate(sequences) if sequence == each]
                rows = evaluate(
                    self, [tokens[place] for place in own], states[own], [each] * len(own)
                )
                alone += [np.array(rows.logits(row)) for row in range(len(own))]
        rows = evaluate(self, tokens, states, sequences)
        for row, logits in enumerate(alone):
            np.testing.assert_allclose(rows.logits(row), logits, atol=1e-4)
        return rows

    monkeypatch.setattr(AssistantContext, "evaluate", compared)
    prompts = [TEXT, TEXT[3:12], [9, *TEXT]]
    file = quoted(str(folder / "assistant.gguf"))
    params = SamplingParams(temperature=0.8, seed=1, **WARM)
    with Engine(folder / "target.gguf", f"mtp({file}, {options})", slots=3, **F32) as engine:
        streams = [engine.stream(prompt, params, max_tokens=30) for prompt in prompts]
        all_begun.set()
        results = [[*stream] and stream.result for stream in streams]
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == plain.generate(prompt, params, max_tokens=30).token_ids
        assert result.stats.accepted > 0
    assert together.count(3) > 3


def test_a_full_cache_ends_the_drafts_of_all_that_wait(
    folder: Path, plain: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama.cpp finds no cells for their tokens; the texts go on."""

    def full(*_: Any) -> None:
        raise NoCacheSlotError("no cells", 1)

    monkeypatch.setattr(AssistantContext, "evaluate", full)
    file = quoted(str(folder / "assistant.gguf"))
    with Engine(folder / "target.gguf", f"mtp({file}, n=3)", slots=2, **F32) as engine:
        streams = [engine.stream(prompt, GREEDY, max_tokens=8) for prompt in (TEXT, TEXT[3:])]
        results = [[*stream] and stream.result for stream in streams]
    for prompt, result in zip((TEXT, TEXT[3:]), results, strict=True):
        assert result.token_ids == plain.generate(prompt, GREEDY, max_tokens=8).token_ids
        assert result.stats.drafted == 0


def test_combinators_lend_their_members_the_target(folder: Path, plain: Runtime) -> None:
    file = quoted(str(folder / "assistant.gguf"))
    params = SamplingParams(temperature=0.8, seed=5, **WARM)
    for expression in (
        f"ensemble(mtp({file}, n=2), prompt-lookup)",
        f"relay(mtp({file})@2, ngram)",
    ):
        with Runtime(folder / "target.gguf", drafter=expression, **F32) as runtime:
            result = runtime.generate(TEXT, params, max_tokens=40)
        assert result.token_ids == plain.generate(TEXT, params, max_tokens=40).token_ids


@pytest.mark.parametrize("options", ["n=2", "tree=2x2"])
def test_a_part_of_a_combination_reads_any_of_several_conversations(
    folder: Path, plain: Runtime, options: str
) -> None:
    """It drafts alone, over a target that others share: their sequences are not the first."""
    file = quoted(str(folder / "assistant.gguf"))
    drafter = f"ensemble(mtp({file}, {options}), prompt-lookup)"
    prompts = [TEXT, TEXT[3:12], [9, *TEXT]]
    with Engine(folder / "target.gguf", drafter, slots=3, **F32) as engine:
        streams = [engine.submit(prompt, GREEDY, max_tokens=30) for prompt in prompts]
        results = [stream.drain() for stream in streams]
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == plain.generate(prompt, GREEDY, max_tokens=30).token_ids
        assert result.stats.accepted > 0


def test_a_full_context_ends_the_drafts_and_not_the_text(folder: Path, plain: Runtime) -> None:
    with assisted(folder, "n=4", n_ctx=64) as runtime:
        result = runtime.generate(TEXT, GREEDY)
        n_positions = runtime.session.target.n_positions
    assert len(TEXT) + len(result.token_ids) == n_positions + 1
    wanted = plain.generate(TEXT, GREEDY, max_tokens=len(result.token_ids))
    assert result.token_ids == wanted.token_ids


def test_the_targets_context_outlives_an_assistants(folder: Path) -> None:
    """Whichever is closed first, native memory goes in the order that llama.cpp needs."""
    with Model(folder / "target.gguf") as target:
        model = Model(folder / "assistant.gguf", load_nextn=True)
        context = Context(target, ContextOptions(**F32, nextn_states=True))
        assistant = AssistantContext(model, context)
        context.close()
        with pytest.raises(SpecrunError, match="closed"):
            assistant.evaluate([1], np.zeros((1, 32), np.float32), [0])
        assistant.close()
        model.close()


def test_a_cache_that_holds_a_text_is_not_shared(folder: Path) -> None:
    """llama.cpp would empty it."""
    with assisted(folder, "n=2") as runtime, Model(folder / "assistant.gguf") as model:
        runtime.generate(TEXT, GREEDY, max_tokens=3)
        with pytest.raises(OptionError, match="holds a text already"):
            AssistantContext(model, runtime.session.target.context)


def test_an_assistant_is_counted(folder: Path) -> None:
    path, options = folder / "assistant.gguf", ContextOptions(n_ctx=1024, n_threads=1)
    with (
        Model(folder / "target.gguf") as target,
        Model(path) as model,
        Context(target, options) as context,
        AssistantContext(model, context, n_tokens=16) as assistant,
    ):
        real = memory_breakdown(assistant)[HOST_NAME]
    parts = parts_of(folder / "target.gguf", f"mtp({path})", options)
    assert [part.title for part in parts] == ["target", "assistant"]
    with MemoryCounts() as counts:
        plan = count_plan(PlanRequest(tuple(parts), (), (), ()), PlanSettings(1024, 0), counts)
    found = {row.kind: sum(row.by_place.values()) for row in plan.rows if row.part != "target"}
    assert found["weights"] == pytest.approx(real.weights, rel=0.001)  # ggml aligns single numbers
    assert found.get("keys and values", 0) == real.cells == 0
    assert found["compute"] == pytest.approx(real.compute, rel=0.05)


OTHERS = {
    "other width": {"target_width": 48},
    "other tokens": {"vocab_size": 300},
    "other keys": {"kv_heads": (4, 1)},
    "other heads": {"head_widths": (8, 24)},
}


@pytest.mark.parametrize(
    ("name", "kind", "problem"),
    [
        ("other width", PairError, "hidden states of 48 numbers, and the target's have 32"),
        ("other tokens", PairError, "it predicts 300 tokens, and the target has 320"),
        ("other keys", PairError, r"its layer 0 has 4 as attention.head_count_kv, .* layer 1 2"),
        ("other heads", PairError, r"its layer 1 has 24 as attention.key_length, .* layer 2 16"),
        ("llama", PairError, "an assistant of Gemma 4, and the target is a llama model"),
        ("other layers", UnsupportedModelError, "the target's last two are others"),
        ("alone", UnsupportedModelError, "it can only draft for a target, as mtp"),
    ],
)
def test_what_does_not_fit_is_refused(
    folder: Path, tmp_path: Path, name: str, kind: type[SpecrunError], problem: str
) -> None:
    target, file, drafter = folder / "target.gguf", folder / "assistant.gguf", ""
    if name in OTHERS:
        file = variant(ASSISTANT, **OTHERS[name]).write(tmp_path / "other.gguf")
    elif name == "llama":
        target = tmp_path / "llama.gguf"
        write_random_llama(target, RandomLlama(vocab_size=320))
    elif name == "other layers":
        target = variant(TARGET, windows=(True, False, True)).write(tmp_path / "target.gguf")
    elif name == "trees of blocks":
        drafter = "mtp(tree=2x2)"
    elif name == "alone":
        target, drafter = file, "none"
    with pytest.raises(kind, match=problem) as caught:
        Runtime(target, drafter=drafter or f"mtp({quoted(str(file))})", **F32)
    assert caught.value.exit_code in (2, 3, 4)
