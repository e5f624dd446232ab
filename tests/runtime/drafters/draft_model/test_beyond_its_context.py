"""A draft model that was trained for shorter texts goes on from a window, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_models import F32

from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.engine import Engine
from specrun.runtime.language import quoted

TRAINED, N_CTX = 64, 400
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6] * 4, [2, 7, 1, 8, 2, 8] * 30)
"""One that it reads whole, and one that is longer than it was trained for."""
DRAFTS = ["n=4, sampling=argmax", "n=4", "tree=2x2", "depth=3, topk=2, nodes=5"]
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.9, seed=7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("short")
    shape = {"vocab_size": 400, "scale": 4.0, "seed": 1}
    write_random_llama(folder / "target.gguf", RandomLlama(**shape, context=2048))
    write_random_llama(folder / "short.gguf", RandomLlama(**shape, context=TRAINED))
    write_random_llama(folder / "long.gguf", RandomLlama(**shape, context=2048))
    return folder


def opened(folder: Path, drafter: str, **options: object) -> Runtime:
    return Runtime(folder / "target.gguf", drafter=drafter, **{**F32, "n_ctx": N_CTX, **options})


def draft(folder: Path, options: str, name: str = "short") -> str:
    return f"draft({quoted(str(folder / f'{name}.gguf'))}, {options})"


@pytest.mark.parametrize(
    ("options", "params"), [*((options, GREEDY) for options in DRAFTS), (DRAFTS[0], WARM)]
)
def test_it_drafts_on_and_the_text_is_plain_decodings(folder, options, params):
    with opened(folder, "none") as plain, opened(folder, draft(folder, options)) as runtime:
        assert f"trained for {TRAINED} tokens" in runtime.session.drafter.remark
        for prompt in PROMPTS:
            result = runtime.generate(prompt, params, max_tokens=120)
            assert result.usage.completion_tokens == 120
            assert result.token_ids == plain.generate(prompt, params, max_tokens=120).token_ids
            assert result.stats.drafted > 2 * result.stats.rounds * 0.9
            assert result.stats.accepted > 0


def test_conversations_of_an_engine_go_on_too(folder):
    options = {**F32, "n_ctx": 2 * N_CTX}
    expression = draft(folder, "n=4, sampling=argmax")
    with opened(folder, "none") as plain:
        expected = [plain.generate(prompt, GREEDY, max_tokens=100).token_ids for prompt in PROMPTS]
    with Engine(folder / "target.gguf", expression, slots=2, **options) as engine:
        for _ in range(2):
            streams = [engine.submit(prompt, GREEDY, max_tokens=100) for prompt in PROMPTS]
            assert [stream.result.token_ids for stream in streams] == expected
            for stream in streams:
                assert stream.result.stats.drafted > stream.result.stats.rounds


def test_within_its_context_nothing_changes(folder):
    prompt = PROMPTS[0][:8]
    with opened(folder, draft(folder, "n=4"), n_ctx=TRAINED) as short:
        assert short.session.drafter.remark == ""
        first = short.generate(prompt, WARM, max_tokens=20)
    with opened(folder, draft(folder, "n=4")) as windowed:
        again = windowed.generate(prompt, WARM, max_tokens=20)
    with opened(folder, draft(folder, "n=4", "long")) as long:
        assert long.session.drafter.remark == ""
        other = long.generate(prompt, WARM, max_tokens=20)
    assert first.token_ids == again.token_ids == other.token_ids
    assert first.stats.drafted == again.stats.drafted == other.stats.drafted


OF_IT = {
    "cascade": "cascade({}, prompt-lookup)",
    "ouroboros": "ouroboros({}, phrases=2, length=2)",
    "relay": "relay({}@2, prompt-lookup@2)",
}


@pytest.mark.parametrize("kind", OF_IT)
def test_drafters_made_of_it_draft_on_and_say_so(folder, kind):
    expression = OF_IT[kind].format(draft(folder, "n=4"))
    with opened(folder, "none") as plain, opened(folder, expression) as own:
        assert own.remark.count(f"trained for {TRAINED} tokens") == 1
        for prompt in PROMPTS:
            expected = plain.generate(prompt, GREEDY, max_tokens=60).token_ids
            result = own.generate(prompt, GREEDY, max_tokens=60)
            assert result.token_ids == expected
            # The second prompt is beyond its context from the first round on.
            assert result.stats.drafted > 2 * 0.9 * result.stats.rounds
            assert result.stats.accepted > 0
