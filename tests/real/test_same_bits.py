"""Fixed shapes on a published model: SmolLM2-135M-Instruct, of which `make test-real` gets a file.

That file is Q4_1; the others are made of it, so F32 and F16 mean Q4_1 dequantized. The run takes a
sample of texts and settings; `--sweep whole` takes 20 prompts of 50 to 3,000 tokens, 200 tokens of
answer to each, with all settings.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from specrun.convert.quantize import quantize_model
from specrun.runtime import Runtime, SamplingParams

pytestmark = pytest.mark.real

TYPES = ["Q4_1", "F32", "F16", "Q8_0", "Q4_0", "Q4_K_M", "IQ4_XS"]
WIDTH = 16
CHAINS = ["prompt-lookup(n=7, branches=1)", "jacobi(n=5)"]
TREES = ["prompt-lookup(n=7, branches=2)", "lookahead(window=2, ngram=3, guesses=3)"]
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
def published() -> Path:
    """The model as it was published; without it (a bare `pytest -m real`) there is no test."""
    path = os.environ.get("SPECRUN_REAL_MODEL", "")
    if not path:
        pytest.skip("needs the published model: run `make test-real`")
    return Path(path)


@pytest.fixture(scope="module", params=TYPES)
def model(
    request: pytest.FixtureRequest, published: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The model in each type, one at a time: together they would take more than a gigabyte."""
    if request.param == TYPES[0]:
        yield published
        return
    path = tmp_path_factory.mktemp("real") / f"{request.param}.gguf"
    quantize_model(published, path, request.param, allow_requantize=True)
    yield path
    path.unlink()


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
    files = ["docs/exactness.md", "docs/train.md", "runtime/target.py", "docs/architecture.md"]
    return [(ROOT / name).read_text(encoding="utf-8") for name in files]


def answers(runtime: Runtime, setting: Setting, *, whole: bool) -> Bits:
    """Tokens and log-probabilities of answers to beginnings of the texts, from short to long.

    What is cached of the one before serves the next as far as its bits are those of a prompt.
    """
    params = SamplingParams(temperature=setting.temperature, seed=SEED, top_k=0)
    chosen, lengths, n_tokens = (texts(), LENGTHS, 200) if whole else (texts()[:1], LENGTHS[:3], 24)
    found: Bits = []
    for text in chosen:
        tokens = runtime.vocabulary.tokenize(text)
        for length in lengths:
            stream = runtime.stream(tokens[:length], params, max_tokens=n_tokens)
            found.append([(event.token_id, event.logprob) for event in stream])
    return found


def test_bits_do_not_depend_on_what_drafts(model: Path, whole_sweep: bool) -> None:
    n_tokens = 0
    sample = SAMPLED[TYPES.index(model.stem.rpartition(".")[2])]
    for setting in WHOLE if whole_sweep else [sample]:
        with opened(model, "none", setting, shape=WIDTH) as runtime:
            plain = answers(runtime, setting, whole=whole_sweep)
        for drafter in (*CHAINS, *(TREES if setting.flash == "on" else ())):
            with opened(model, drafter, setting, shape=WIDTH) as runtime:
                found = answers(runtime, setting, whole=whole_sweep)
            assert found == plain, (drafter, setting)
            n_tokens += sum(map(len, found))
    assert n_tokens > 100


def test_bits_depend_on_what_drafts_where_the_shape_is_free(
    published: Path, tmp_path: Path
) -> None:
    """The control: kernels round by the tokens of an evaluation, Q4_K's on every machine seen."""
    setting, path = SAMPLED[0], tmp_path / "Q4_K_M.gguf"
    quantize_model(published, path, "Q4_K_M", allow_requantize=True)
    with opened(path, "none", setting) as runtime:
        plain = answers(runtime, setting, whole=False)
    with opened(path, "jacobi(n=5, always=yes)", setting) as runtime:
        found = answers(runtime, setting, whole=False)
    assert found != plain
