"""Fixed shape: the same bits whatever drafts, on quantized models, where free shapes differ."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.tiny_mamba import write_tiny_mamba
from support.tiny_models import F32, fresh_logits

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import DecodeError, OptionError, UnsupportedModelError
from specrun.bindings.library import llama
from specrun.bindings.models.model import Model
from specrun.convert.quantize import quantize_model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.round import CachedText, FixedShapeTarget, fixed_shape_options
from specrun.runtime.round.padding import require_equal_bits
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.trees import ROOT, DraftTree

pytestmark = pytest.mark.long

# K-quants need rows of 256 numbers.
WIDE: dict[str, Any] = {"vocab_size": 300, "width": 256, "ffn": 256, "layers": 2, "context": 1024}
TYPES = ["F16", "Q8_0", "Q4_0", "Q4_K_M"]
CHAINS = ["prompt-lookup(min_ngram=1, n=5, branches=1)", "draft(DRAFTER, n=5, sampling=argmax)"]
TREES = [
    "draft(DRAFTER, tree=3x2x1, sampling=argmax)",
    "lookahead(window=2, ngram=3, guesses=3)",
    "auto(draft(DRAFTER, depth=3, topk=2, nodes=7, sampling=argmax), prompt-lookup(min_ngram=1))",
]
WIDTH = 24
SEED = 3


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("shapes")
    files = {name: folder / f"{name}.gguf" for name in (*TYPES, "DRAFTER")}
    write_random_llama(files["F16"], RandomLlama(**WIDE, file_type="F16", scale=4.0))
    for name in TYPES[1:]:
        quantize_model(files["F16"], files[name], name, n_threads=1)
    # Its first layer alone: a drafter that is right now and then.
    write_random_llama(files["DRAFTER"], RandomLlama(**{**WIDE, "layers": 1}, scale=4.0))
    return files


def opened(files: dict[str, Path], target: str, drafter: str, **options: Any) -> Runtime:
    drafter = drafter.replace("DRAFTER", f'"{files["DRAFTER"]}"')
    shared = {"n_ctx": 512, "n_threads": 1, **options}
    return Runtime(files[target], drafter, **shared)


class CountedTarget(FixedShapeTarget):
    """Counts its evaluations."""

    evaluations = 0

    def evaluate(self, text: CachedText, tree: DraftTree) -> EvaluatedRows:
        self.evaluations += 1
        return super().evaluate(text, tree)


class ShiftedRows:
    """Rows of an evaluation, of which some are wrong in their last bits."""

    def __init__(self, rows: EvaluatedRows, wrong: set[int]) -> None:
        self.rows, self.wrong = rows, wrong

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rows, name)

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        logits = self.rows.logits(row)
        return np.nextafter(logits, np.float32(np.inf)) if row in self.wrong else logits


Bits = list[tuple[int, float]]


def said(runtime: Runtime, prompt: Sequence[int], temperature: float, length: int = 16) -> Bits:
    """The tokens of an answer with their log-probabilities, to the last bit."""
    params = SamplingParams(temperature=temperature, seed=SEED, logit_bias={299: float("-inf")})
    stream = runtime.stream(prompt, params, max_tokens=length)
    return [(event.token_id, event.logprob) for event in stream]


def conversation(runtime: Runtime) -> list[Bits]:
    """Three turns that go on from each other, over a step of 256 cells, and a shortened one."""
    source = random.Random(1)
    text = [source.randrange(299) for _ in range(30)] * 2
    answers = []
    for temperature in (0.0, 1.0, 0.7):
        answers.append(said(runtime, text, temperature))
        text += [token for token, _ in answers[-1]]
        text += [source.randrange(299) for _ in range(50)]
    # The step from 256 to 512 cells lies inside.
    answers.append(said(runtime, text[-240:], 0.7))
    answers.append(said(runtime, text[-240:-30], 0.0))
    return answers


def equal(a: list[Bits], b: list[Bits]) -> int:
    """How many tokens are the same, and their log-probabilities to the bit."""
    return sum(x == y for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))


@pytest.mark.parametrize("target", TYPES)
def test_bits_do_not_depend_on_what_drafts(files: dict[str, Path], target: str) -> None:
    with opened(files, target, "none", shape=WIDTH) as runtime:
        plain = conversation(runtime)
    accepted = 0
    for drafter in (*CHAINS, *TREES):
        with opened(files, target, drafter, shape=WIDTH) as runtime:
            assert conversation(runtime) == plain, drafter
            stats = runtime.generate([1, 2, 3, 1, 2], SamplingParams(temperature=0.0)).stats
            assert stats.width == WIDTH
            accepted += stats.accepted
    assert accepted > 20


@pytest.mark.parametrize("target", ["F16", "Q4_K_M"])
@pytest.mark.parametrize("cache", ["f16", "q8_0"])
def test_chains_have_equal_bits_with_other_kernels_of_attention(
    files: dict[str, Path], target: str, cache: str
) -> None:
    # llama.cpp quantizes cached values with flash attention only.
    kinds = {"cache_type_k": cache, "flash_attention": "off" if cache == "f16" else "on"}
    with opened(files, target, "none", shape=8, **kinds) as runtime:
        plain = conversation(runtime)
    for drafter in CHAINS:
        with opened(files, target, drafter, shape=8, **kinds) as runtime:
            assert conversation(runtime) == plain, drafter


def test_bits_differ_where_the_shape_is_free(files: dict[str, Path]) -> None:
    """The control: without it, what drafts is seen in the bits."""
    with opened(files, "Q4_K_M", "none") as runtime:
        plain = conversation(runtime)
    with opened(files, "Q4_K_M", CHAINS[1]) as runtime:
        drafted = conversation(runtime)
    n_tokens = sum(map(len, plain))
    assert equal(plain, drafted) < n_tokens / 2


def test_a_prompt_has_the_bits_of_a_fresh_session(files: dict[str, Path]) -> None:
    """Whatever was cached of it as a prompt: pieces are cut at the same places."""
    source = random.Random(2)
    prompt = [source.randrange(299) for _ in range(150)]
    with opened(files, "Q4_K_M", CHAINS[1], shape=WIDTH) as runtime:
        fresh = said(runtime, prompt, 0.0)
    for n_shared in (1, 63, 64, 100, 149, 150):
        with opened(files, "Q4_K_M", "none", shape=WIDTH) as runtime:
            said(runtime, [*prompt[:n_shared], 5, 6, 7], 0.0, 4)
            assert said(runtime, prompt, 0.0) == fresh
            assert said(runtime, prompt, 0.0) == fresh


@pytest.mark.parametrize("at", [1, 2, 4, 7])
def test_a_failed_evaluation_changes_no_bit(
    files: dict[str, Path], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(files, "Q4_K_M", TREES[0], shape=WIDTH) as runtime:
        wanted = said(runtime, list(range(100)), 0.0)
        runtime.session.forget()
        native, calls = llama().llama_decode, 0

        def failing(context: object, batch: Any) -> int:
            nonlocal calls
            calls += batch.n_tokens > 1
            return -3 if calls == at else int(native(context, batch))

        monkeypatch.setattr(llama(), "llama_decode", failing)
        with pytest.raises(DecodeError):
            said(runtime, list(range(100)), 0.0)
        assert said(runtime, list(range(100)), 0.0) == wanted


def test_a_sliding_window_has_equal_bits(tmp_path: Path) -> None:
    """Most layers of Gemma 3 attend to a few tokens: what fills up must push nothing out."""
    pytest.importorskip("transformers")
    from support.transformers_models import make_model, write_model

    path = write_model(tmp_path / "gemma3.gguf", make_model("gemma3", 6), "gemma3")
    answers = []
    for drafter in ("none", "prompt-lookup(min_ngram=1, n=5)", "lookahead(window=2, ngram=3)"):
        with Runtime(path, drafter, n_ctx=512, n_threads=1, shape=WIDTH) as runtime:
            size, text = runtime.vocabulary.size, list[int]()
            for temperature in (0.0, 1.0):
                text += [number * 7 % size for number in range(40)] * 2
                params = SamplingParams(temperature=temperature, seed=SEED)
                stream = runtime.stream(text, params, max_tokens=40)
                answers.append([(event.token_id, event.logprob) for event in stream])
                text += [token for token, _ in answers[-1]]
            assert stream.result.stats.drafted > 0 or drafter == "none"
    assert answers[2:4] == answers[:2]
    assert answers[4:] == answers[:2]


# -- where everything lies -------------------------------------------------------------------------


def random_parents(source: random.Random) -> tuple[int, ...]:
    return tuple(source.randrange(-1, node) for node in range(source.randrange(8)))


@pytest.mark.parametrize(("flash", "within"), [("off", 1e-4), ("on", 1e-2)])
def test_rows_are_those_of_a_fresh_evaluation(tiny_model: Path, flash: str, within: float) -> None:
    """In float32, after rounds of random drafts with any path accepted: nothing that fills up, and
    no branch, is seen by any row. Flash attention, which trees need, rounds to half precision."""
    source = random.Random(6)
    options = ContextOptions(
        **{**F32, "flash_attention": flash}, n_sequences=8 if flash == "on" else 1, n_outputs=16
    )
    with Model(tiny_model) as model:
        sized = fixed_shape_options(model, options, 16)
        with Context(model, sized) as context:
            target, text = FixedShapeTarget(context, 16), CachedText([5, 9, 2])
            target.prefill(text, 2)
            waited = 0
            for _ in range(25):
                parents = random_parents(source)
                if flash == "off":
                    parents = tuple(range(-1, len(parents) - 1))
                tree = DraftTree.of_points([source.randrange(300) for _ in parents], parents)
                waited += len(text.tokens) - text.n_cached > 1
                rows = target.evaluate(text, tree)
                path = tree.path_to(source.randrange(-1, len(tree)))
                for node in (ROOT, *path):
                    before = [*text.tokens, *(tree.tokens[i] for i in tree.path_to(node))]
                    wanted = fresh_logits(model, before)[-1]
                    np.testing.assert_allclose(rows.logits(node + 1), wanted, atol=within, rtol=0)
                    assert np.abs(wanted - fresh_logits(model, before[:-1])[-1]).max() > 0.1
                target.commit(text, tree, path)
                text.tokens.append(source.randrange(300))
            assert (waited > 3) == (flash == "on")  # paths that lay elsewhere, evaluated again


# -- what cannot be had ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "options", "said"),
    [
        ("none", {"shape": 10}, "multiple of 4 from 4 to 512"),
        ("none", {"shape": 0}, "multiple of 4"),
        ("none", {"shape": True}, "free, pairs, fixed or a width"),
        ("none", {"shape": "wide"}, "free, pairs, fixed or a width"),
        ("none", {"shape": 64, "n_batch": 32}, "from 4 to 32"),
        ("jacobi(n=12)", {"shape": 8}, "from 16"),
        (TREES[0], {"shape": "fixed", "flash_attention": "off"}, "with flash attention only"),
    ],
)
def test_shapes_that_cannot_be_are_refused(
    files: dict[str, Path], drafter: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        opened(files, "Q8_0", drafter, **options)


@pytest.mark.parametrize("flash", ["on", "off"])
@pytest.mark.parametrize(("width", "fails"), [(6, True), (4, False), (8, False), (20, False)])
def test_a_width_is_tried_before_it_is_promised(
    files: dict[str, Path], flash: Any, width: int, *, fails: bool
) -> None:
    """Kernels of Q4_K treat rows after the last four apart: the control is a width of 6."""
    shape = ContextOptions(n_ctx=512, n_threads=1, flash_attention=flash)
    shape = dataclasses.replace(shape, n_sequences=4 if flash == "on" else 1)
    with Model(files["Q4_K_M"], n_gpu_layers=0) as model:
        for _ in range(2):  # what failed is not remembered, what came through is
            with Context(model, fixed_shape_options(model, shape, width)) as context:
                counted = CountedTarget(context, width)
                if fails:
                    with pytest.raises(OptionError, match=rf"shape is {width}.*give a larger"):
                        require_equal_bits(counted)
                else:
                    require_equal_bits(counted)
                    assert context.memory.last_position() == -1
    assert (counted.evaluations == 0) is not fails


@pytest.mark.parametrize("beside", ["their places", "other branches"])
def test_what_a_trial_is_to_find(files: dict[str, Path], beside: str) -> None:
    """Controls: a place whose row is another, and rows that see what branches off beside them."""

    class Dependent(FixedShapeTarget):
        def evaluate(self, text: CachedText, tree: DraftTree) -> EvaluatedRows:
            rows = super().evaluate(text, tree)
            branching = len(set(tree.parents)) < len(tree)
            wrong = {5} if beside == "their places" else {*range(9)} if branching else set()
            return ShiftedRows(rows, wrong)

    shape = ContextOptions(n_ctx=256, n_threads=1, n_sequences=4)
    with (
        Model(files["F16"], n_gpu_layers=0) as model,
        Context(model, fixed_shape_options(model, shape, 24)) as context,
        pytest.raises(OptionError, match=beside),
    ):
        require_equal_bits(Dependent(context, 24))


def test_recurrent_models_are_refused(tmp_path: Path) -> None:
    path = write_tiny_mamba(tmp_path / "mamba.gguf")
    with pytest.raises(UnsupportedModelError, match="recurrent state"):
        Runtime(path, "none", shape="fixed", n_ctx=256)


def test_an_answer_ends_before_what_fills_up_does_not_fit(files: dict[str, Path]) -> None:
    with opened(files, "Q8_0", CHAINS[1], n_ctx=256, shape=WIDTH) as runtime:
        answer = said(runtime, [4] * 200, 1.0, 1000)
    assert len(answer) == 256 - WIDTH - 200 + 1
