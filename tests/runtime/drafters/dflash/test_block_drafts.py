"""Block drafters in the runtime: texts, sizes, several conversations, files that do not fit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_dflash import Generation, TinyDFlash, variant
from support.tiny_models import CHAT, F32
from support.tiny_nextn import TinyNextN
from support.workers import running_worker

from specrun.bindings.contexts import ContextOptions
from specrun.bindings.errors import (
    MalformedFileError,
    OptionError,
    PairError,
    SpecrunError,
    UnsupportedModelError,
)
from specrun.convert.quantize import quantize_model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Engine, Runtime, SamplingParams
from specrun.runtime.drafters.dflash.drafter import SharedBlocks
from specrun.runtime.language import quoted

GENERATIONS: tuple[Generation, ...] = ("dflash", "dflash2", "dspark")
PROMPT = list(b"the quick brown fox, the quick")
END = {319: float("-inf"), 318: float("-inf"), 317: float("-inf")}
WARM = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logit_bias=END, seed=7)
GREEDY = WARM.replace(temperature=0.0)
POINTS = [
    ", nodes=4",
    ", topk=1",
    ", tree=sequoia, nodes=5",
    "",
    ", n=3",
    ", n=auto",
    ", tree=2x2x1",
    ", depth=4, topk=2, nodes=6",
    ", topk=2, nodes=auto",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blocks")
    write_random_llama(folder / "target.gguf", RandomLlama(**CHAT))
    for generation in GENERATIONS:
        TinyDFlash(generation, spread=0.2).write(folder / f"{generation}.gguf", target(folder))
    for head in ("gated", "rnn"):
        tiny = TinyDFlash("dspark", spread=0.2, head=head)
        tiny.write(folder / f"{head}.gguf", target(folder))
    return folder


def target(folder: Path) -> Path:
    return folder / "target.gguf"


def drafted(folder: Path, name: str, options: str = "") -> str:
    return f"dflash({quoted(str(folder / name))}{options})"


@pytest.fixture(scope="module")
def plain_texts(folder: Path) -> list[list[int]]:
    with Runtime(target(folder), "none", **F32) as plain:
        return [plain.generate(PROMPT, each, max_tokens=30).token_ids for each in (GREEDY, WARM)]


@pytest.mark.parametrize(
    ("generation", "options"),
    [(GENERATIONS[place % 3], options) for place, options in enumerate(POINTS)],
)
def test_point_masses_keep_plain_decodings_text(
    folder: Path, plain_texts: list[list[int]], generation: Generation, options: str
) -> None:
    expression = drafted(folder, f"{generation}.gguf", options)
    with Runtime(target(folder), expression, **F32) as runtime:
        for params, text in zip((GREEDY, WARM), plain_texts, strict=True):
            found = runtime.generate(PROMPT, params, max_tokens=30)
            assert found.token_ids == text
            # What pays is learnt: of random drafters soon nothing does.
            assert found.stats.drafted > 0 or "auto" in options or not options


def test_something_is_accepted(folder: Path) -> None:
    """Or the tests above would compare plain decoding with itself."""
    with Runtime(target(folder), drafted(folder, "dspark.gguf", ", tree=6x4x2"), **F32) as runtime:
        found = runtime.generate(PROMPT, WARM, max_tokens=40)
        assert found.stats.accepted > 3
        assert found.stats.mean_accepted_length > 1.1


@pytest.mark.parametrize("generation", GENERATIONS)
def test_drawn_drafts_repeat_with_their_seed(folder: Path, generation: Generation) -> None:
    for options in (", n=4, sampling=with", ", tree=2x2x1, sampling=without"):
        with Runtime(target(folder), drafted(folder, f"{generation}.gguf", options), **F32) as one:
            texts = [one.generate(PROMPT, WARM, max_tokens=20).token_ids for _ in range(2)]
            assert texts[0] == texts[1]


def test_a_block_is_no_longer_than_its_file_has_it(folder: Path) -> None:
    """As in llama.cpp, whose users name n for all drafters; a tree that is deeper is refused."""
    for name, slots in (("dflash.gguf", 5), ("dspark.gguf", 6)):
        with Runtime(target(folder), drafted(folder, name, ", n=99"), **F32) as runtime:
            stats = runtime.generate(PROMPT, GREEDY, max_tokens=20).stats
            assert len(stats.acceptance_by_position) == slots
        with pytest.raises(OptionError, match=f"drafts {slots} tokens at most"):
            Runtime(target(folder), drafted(folder, name, ", depth=9, nodes=9"), **F32)


def test_conversations_share_one_drafter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their blocks are one evaluation; texts and accepted drafts are those of each alone."""
    together, answers = list[int](), SharedBlocks.answers

    def counted(self: SharedBlocks, taken: Any) -> Any:
        together.append(len(taken))
        return answers(self, taken)

    monkeypatch.setattr(SharedBlocks, "answers", counted)
    prompts = [PROMPT, [*PROMPT[:9], *b"lazy dog"], list(b"to be or not")]
    names = (*GENERATIONS, "gated", "rnn")
    for name, shape in itertools.product(names, ("n=3", "depth=3, topk=2, nodes=5")):
        expression = drafted(folder, f"{name}.gguf", f", {shape}")
        with Runtime(target(folder), expression, **F32) as runtime:
            alone = [runtime.generate(prompt, WARM, max_tokens=16) for prompt in prompts]
        options = ContextOptions(**{**F32, "n_ctx": 768})
        with Engine(target(folder), expression, slots=3, context=options) as engine:
            results = engine.generate_many(prompts, WARM, max_tokens=16)
        for found, wanted in zip(results, alone, strict=True):
            assert found.token_ids == wanted.token_ids
            assert found.stats.accepted == wanted.stats.accepted
    assert sum(n > 1 for n in together) > len(together) / 2


def test_a_full_context_ends_in_order(folder: Path) -> None:
    with Runtime(target(folder), drafted(folder, "dspark.gguf", ", n=6"), **F32) as runtime:
        result = runtime.generate(PROMPT * 8, GREEDY, max_tokens=100)
        assert result.finish_reason == "length"
        # The last token is not evaluated, so it needs no cell.
        assert result.usage.prompt_tokens + result.usage.completion_tokens == 257
        assert runtime.generate(PROMPT[:8], GREEDY, max_tokens=8).token_ids


# -- files that do not fit -------------------------------------------------------------------------


SMALL = TinyDFlash()
REFUSED: list[tuple[TinyDFlash, dict[str, Any], type[SpecrunError], str]] = [
    (variant(SMALL, width=64, heads=4), {}, PairError, "hidden states of 64 numbers.* have 32"),
    (variant(SMALL, taps=(0, 2)), {}, PairError, "inputs of layers 0, 2.*layers 0 to 1"),
    (variant(SMALL, mask=320), {}, PairError, "mask is 320, and the target has 320 tokens"),
    (SMALL, {"tokenizer__ggml__mask_token_id": None}, MalformedFileError, "no mask token"),
    (SMALL, {"dflash__target_layers": None}, MalformedFileError, "the layers that it reads"),
    (variant(SMALL, block_size=1), {}, MalformedFileError, "a block of 1 tokens"),
    (TinyDFlash("dspark"), {"dflash__block_size": None}, MalformedFileError, "block_size"),
    (SMALL, {"without": ["fc.weight"]}, MalformedFileError, "no tensor fc.weight"),
    (variant(SMALL, taps=(0,)), {"dflash__target_layers": [0, 1]}, MalformedFileError, "fc.weight"),
]


@pytest.mark.parametrize(("tiny", "changes", "error", "match"), REFUSED)
def test_files_that_do_not_fit_are_refused_by_name(
    folder: Path,
    tmp_path: Path,
    tiny: TinyDFlash,
    changes: dict[str, Any],
    error: type[SpecrunError],
    match: str,
) -> None:
    path = tiny.write(tmp_path / "wrong.gguf", target(folder), **changes)
    with pytest.raises(error, match=match) as caught:
        Runtime(target(folder), drafted(tmp_path, "wrong.gguf"), **F32)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code in (3, 4)
    assert "\n" not in str(caught.value)


def test_a_file_for_other_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    write_random_llama(other, RandomLlama(**{**CHAT, "vocab_size": 300}))
    variant(SMALL, vocab_size=300).write(tmp_path / "wrong.gguf", other)
    with pytest.raises(PairError, match="300 tokens, and the target has 320"):
        Runtime(target(folder), drafted(tmp_path, "wrong.gguf"), **F32)


def test_a_draft_vocabulary_of_other_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    """llama.cpp would write behind its rows."""
    for wrong in ([5, 900], [5, 5], [-1, 5]):

        class Elsewhere(TinyDFlash):
            def tensors(self) -> Any:
                return super().tensors() | {"d2t": np.array(wrong, np.int64)}  # noqa: B023

        path = Elsewhere(draft_tokens=2).write(tmp_path / f"{wrong}.gguf", target(folder))
        with pytest.raises(MalformedFileError, match="draft vocabulary"):
            Runtime(target(folder), drafted(tmp_path, path.name), **F32)


def test_an_unknown_generation_is_refused(folder: Path, tmp_path: Path) -> None:
    class Newer(TinyDFlash):
        def tensors(self) -> Any:
            extra = {"markov_gate.weight": super().tensors()["output_norm.weight"]}
            return super().tensors() | extra

    Newer("dspark").write(tmp_path / "newer.gguf", target(folder))
    with pytest.raises(UnsupportedModelError, match=r"unknown generation: it has markov_gate"):
        Runtime(target(folder), drafted(tmp_path, "newer.gguf"), **F32)


def test_a_threshold_needs_a_confidence_head(folder: Path, tmp_path: Path) -> None:
    TinyDFlash("dspark", confidence=False).write(tmp_path / "plain.gguf", target(folder))
    with pytest.raises(UnsupportedModelError, match=r"no confidence head.*leave out p_min"):
        Runtime(target(folder), drafted(tmp_path, "plain.gguf", ", p_min=0.5"), **F32)
    with Runtime(target(folder), drafted(tmp_path, "plain.gguf", ", n=3"), **F32) as runtime:
        assert runtime.generate(PROMPT, GREEDY, max_tokens=8).token_ids


def test_a_chain_ends_at_the_slot_that_the_confidence_head_doubts(folder: Path) -> None:
    """As in llama.cpp: at the first slot below the threshold; no token of it is drafted."""
    lengths = []
    for p_min in (0.05, 0.3, 0.6, 0.95):
        expression = drafted(folder, "dspark.gguf", f", n=6, p_min={p_min}")
        with Runtime(target(folder), expression, **F32) as runtime:
            stats = runtime.generate(PROMPT, GREEDY, max_tokens=20).stats
            lengths.append(stats.drafted / stats.rounds)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]


def test_targets_whose_layers_llama_cpp_does_not_show_are_refused(tmp_path: Path) -> None:
    nextn = TinyNextN(blocks=0).write(tmp_path / "hy.gguf")
    SMALL.write(tmp_path / "drafter.gguf", nextn)
    with pytest.raises(UnsupportedModelError, match="layer inputs of hy_v3"):
        Runtime(nextn, drafted(tmp_path, "drafter.gguf"), **F32)


def test_a_drafter_apart_from_its_targets_matrices_is_refused(folder: Path) -> None:
    """llama.cpp would end the process: its graph names tensors that its scheduler cannot reach."""
    with running_worker() as (worker, _):
        settings = {**F32, "rpc": [worker], "n_gpu_layers": "all"}
        apart = {"devices_draft": ["none"], "n_gpu_layers_draft": 0}
        with pytest.raises(OptionError, match=r"output.weight of the target, which lies on RPC"):
            Runtime(target(folder), drafted(folder, "dflash.gguf"), **settings, **apart)
        own = TinyDFlash(own_tokens=True).write(folder / "own.gguf", target(folder))
        with Runtime(
            target(folder), drafted(folder, own.name, ", n=3"), **settings, **apart
        ) as one:
            assert one.generate(PROMPT, GREEDY, max_tokens=8).token_ids


@pytest.mark.parametrize("generation", GENERATIONS)
def test_quantized_drafters_draft(folder: Path, tmp_path: Path, generation: Generation) -> None:
    """llama.cpp drops the dimension of 1 of a confidence head, and may repack the matrices."""
    tiny = TinyDFlash(generation, rank=32, ffn=64)
    source = tiny.write(tmp_path / "whole.gguf", target(folder))
    quantize_model(source, tmp_path / "q8.gguf", "Q8_0")
    with Runtime(target(folder), "none", **F32) as plain:
        wanted = plain.generate(PROMPT, WARM, max_tokens=16).token_ids
    with Runtime(target(folder), drafted(tmp_path, "q8.gguf", ", tree=2x2x1"), **F32) as runtime:
        found = runtime.generate(PROMPT, WARM, max_tokens=16)
        assert found.token_ids == wanted
        assert found.stats.drafted > 0
