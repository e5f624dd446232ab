"""Fixed shapes on a published model: SmolLM2-135M-Instruct, of which `make test-real` gets a file.

That file is Q4_1; the others are made of it, so F32 and F16 mean Q4_1 dequantized. The run takes a
sample of texts and settings. `--sweep whole` answers 20 prompts of 50 to 3,000 tokens with 200
tokens each, in six types, which takes two to three hours: each prompt and type in a setting of its
own, so that every type meets 20 of the 24 settings, and every setting four types or more. (All
prompts in all settings would take days.)
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from specrun.convert.quantize import quantize_model
from specrun.runtime import Runtime, SamplingParams

pytestmark = pytest.mark.real

TYPES = ["Q4_1", "F32", "F16", "Q8_0", "Q4_0", "Q4_K_M", "IQ4_XS"]
WIDTH = 16
LONG_WIDTH = 8
CHAINS = [
    "prompt-lookup(n=7, branches=1)",
    "jacobi(n=5)",
    "draft(PUBLISHED, n=5, sampling=argmax)",
    "auto(prompt-lookup(n=7, branches=1), jacobi(n=5))",
]
TREES = ["prompt-lookup(n=7, branches=2)", "lookahead(window=2, ngram=3, guesses=3)"]
SMALL_TREES = [TREES[0], "lookahead(window=2, ngram=3, guesses=2)"]
SEED = 11
ROOT = Path(__file__).parents[2]


class Setting(NamedTuple):
    """How a model is evaluated, and at which temperature."""

    flash: str
    cache: str
    threads: int
    temperature: float


# llama.cpp quantizes cached values with flash attention only; keys alone it does without, too.
WHOLE = [
    Setting(*chosen)
    for chosen in itertools.product(["on", "off"], ["f16", "q8_0"], [1, 2], [0.0, 0.8, 1.0])
]
# Every two values of two kinds meet in one of these.
SAMPLED = [
    Setting("on", "f16", 1, 0.0),
    Setting("on", "q8_0", 2, 0.8),
    Setting("off", "q8_0", 1, 1.0),
    Setting("off", "f16", 2, 0.0),
    Setting("on", "f16", 2, 1.0),
    Setting("off", "f16", 1, 0.8),
    Setting("on", "q8_0", 1, 0.0),
]
LENGTHS = [50, 400, 1100, 2000, 3000]
Bits = list[list[tuple[int, float]]]


@pytest.fixture(scope="module")
def in_type(
    published: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Path]]:
    """The model in a type, made once: 1.2 GB of files in all."""
    folder = tmp_path_factory.mktemp("real")

    def made(name: str) -> Path:
        path = folder / f"{name}.gguf"
        if name == TYPES[0]:
            return published
        if not path.exists():
            quantize_model(published, path, name, allow_requantize=True)
        return path

    yield made
    shutil.rmtree(folder)


def opened(model: Path, drafter: str, setting: Setting, **options: Any) -> Runtime:
    return Runtime(
        model,
        drafter,
        n_ctx=4096,
        n_threads=setting.threads,
        flash_attention=setting.flash,
        cache_type_k=setting.cache,
        cache_type_v=setting.cache if setting.flash == "on" else "f16",
        **options,
    )


def texts() -> list[str]:
    """Prose, tables and code of this repository."""
    files = [
        "docs/exactness-proof.md",
        "docs/measurements.md",
        "runtime/round/target.py",
        "docs/architecture.md",
    ]
    return [(ROOT / name).read_text(encoding="utf-8") for name in files]


def answer(
    runtime: Runtime, tokens: list[int], setting: Setting, n_tokens: int
) -> list[tuple[int, float]]:
    """Tokens and log-probabilities of an answer."""
    params = SamplingParams(temperature=setting.temperature, seed=SEED, top_k=0)
    stream = runtime.stream(tokens, params, max_tokens=n_tokens)
    return [(event.token_id, event.logprob) for event in stream]


def short_answers(runtime: Runtime, setting: Setting) -> Bits:
    """Answers of 24 tokens to ever longer beginnings of a text.

    What is cached of the one before serves the next as far as its bits are those of a prompt.
    """
    tokens = runtime.vocabulary.tokenize(texts()[0])
    return [answer(runtime, tokens[:length], setting, 24) for length in LENGTHS[:3]]


def named(drafter: str, published: Path) -> str:
    return drafter.replace("PUBLISHED", f'"{published}"')


@pytest.mark.parametrize("index", range(len(TYPES)), ids=TYPES)
def test_bits_do_not_depend_on_what_drafts(
    in_type: Callable[[str], Path], published: Path, index: int
) -> None:
    model, setting = in_type(TYPES[index]), SAMPLED[index]
    with opened(model, "none", setting, shape=WIDTH) as runtime:
        plain = short_answers(runtime, setting)
    assert sum(map(len, plain)) > 30
    chains = [CHAINS[(index + i) % len(CHAINS)] for i in range(2)]
    # llama.cpp's attention keeps the order of its sums for trees only in flash attention.
    for drafter in (*chains, *(TREES if setting.flash == "on" else ())):
        with opened(model, named(drafter, published), setting, shape=WIDTH) as runtime:
            assert short_answers(runtime, setting) == plain, (drafter, setting)


@pytest.mark.parametrize("type_name", [name for name in TYPES if name != "F32"])
@pytest.mark.parametrize("prompt", range(20))
def test_bits_of_long_answers(
    in_type: Callable[[str], Path],
    published: Path,
    type_name: str,
    prompt: int,
    whole_sweep: bool,
) -> None:
    if not whole_sweep:
        pytest.skip("hours: `make test-real SWEEP=whole`")
    index = TYPES.index(type_name)
    setting = WHOLE[(7 * prompt + 5 * index) % len(WHOLE)]
    text, length = texts()[prompt // len(LENGTHS)], LENGTHS[prompt % len(LENGTHS)]
    able = [*CHAINS, *(SMALL_TREES if setting.flash == "on" else ())]
    drafter = named(able[(prompt + index) % len(able)], published)
    model = in_type(type_name)
    with opened(model, "none", setting, shape=LONG_WIDTH) as runtime:
        tokens = runtime.vocabulary.tokenize(text)[:length]
        plain = answer(runtime, tokens, setting, 200)
    with opened(model, drafter, setting, shape=LONG_WIDTH) as runtime:
        assert answer(runtime, tokens, setting, 200) == plain, (drafter, setting)


def test_bits_depend_on_what_drafts_where_the_shape_is_free(
    published: Path, tmp_path: Path
) -> None:
    """The control: kernels round by the tokens of an evaluation, Q4_K's on every machine seen."""
    setting, path = SAMPLED[0], tmp_path / "Q4_K_M.gguf"
    quantize_model(published, path, "Q4_K_M", allow_requantize=True)
    with opened(path, "none", setting) as runtime:
        plain = short_answers(runtime, setting)
    with opened(path, "jacobi(n=5, always=yes)", setting) as runtime:
        found = short_answers(runtime, setting)
    assert found != plain
