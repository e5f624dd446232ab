"""The embedded pair is good enough to ship, and says the same as llama-cpp-python's own sampler."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from llama_cpp import LLAMA_SPLIT_MODE_NONE, Llama

from specrun.bindings.machine.devices import devices, offload_devices
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.demo import demo_drafters, demo_questions, demo_target

pytestmark = pytest.mark.long

GREEDY = SamplingParams(temperature=0.0)


def questions() -> list[tuple[str, str]]:
    """The questions drawn with a fixed seed, with the first sentence of the docstring they ask
    for."""
    lines = demo_questions().read_text(encoding="utf-8").splitlines()
    return [(record["question"], record["answer"]) for record in map(json.loads, lines)]


def ask(runtime: Runtime, question: str, max_tokens: int = 96):
    return runtime.chat([{"role": "user", "content": question}], GREEDY, max_tokens=max_tokens)


@pytest.fixture(scope="module")
def drafted() -> Iterator[Runtime]:
    with Runtime.demo("draft(n=5)", n_ctx=1024) as runtime:
        yield runtime


def test_at_least_80_percent_of_200_questions_are_answered_to_the_letter(drafted: Runtime) -> None:
    asked = questions()
    assert len(asked) == 200
    right = sum(ask(drafted, question).text.startswith(answer) for question, answer in asked)
    assert right >= 160


def test_a_chain_of_five_accepts_at_least_three_tokens_a_round(drafted: Runtime) -> None:
    results = [ask(drafted, question) for question, _ in questions()[:50]]
    tokens = sum(result.usage.completion_tokens for result in results)
    assert tokens / sum(result.stats.rounds for result in results) >= 3.0


@pytest.mark.parametrize(
    ("question", "beginning"),
    [
        ("What does shutil.copytree do?", "Recursively copy a directory tree"),
        (
            "What does os.getcwd do?",
            "Return a unicode string representing the current working directory.",
        ),
    ],
)
def test_the_questions_of_the_readme_are_answered_from_their_docstrings(
    drafted: Runtime, question: str, beginning: str
) -> None:
    assert ask(drafted, question).text.startswith(beginning)


def test_llama_cpp_pythons_own_sampler_gives_the_same_tokens() -> None:
    """Greedy, 64 tokens or up to the end token, with and without the drafter."""
    # On the processor alone: llama.cpp offers every model the devices that tests before this one
    # registered, such as workers that are gone, and a context on one of those ends the process.
    alone = {"split_mode": LLAMA_SPLIT_MODE_NONE, "main_gpu": -1}
    own = Llama(str(demo_target()), n_ctx=1024, verbose=False, **alone)
    try:
        for drafter in ("none", "draft(n=5)"):
            with Runtime.demo(drafter, n_ctx=1024) as runtime:
                end = runtime.vocabulary.end_of_generation
                for question, _ in questions()[:8]:
                    prompt = runtime.chat_prompt([{"role": "user", "content": question}])
                    wanted = []
                    for token in own.generate(
                        prompt, temp=0.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
                    ):
                        wanted.append(token)
                        if token in end or len(wanted) == 64:
                            break
                    assert runtime.generate(prompt, GREEDY, max_tokens=64).token_ids == wanted
    finally:
        own.close()


@pytest.mark.parametrize(
    ("drafter", "fewest"),
    [
        ("medusa", 2.5),
        ("eagle(n=5)", 3.4),
        ("eagle(depth=5, topk=4, nodes=16)", 3.6),
        ("eagle3(n=3)", 3.0),
        ("pass(n=1, topk=8)", 1.3),
    ],
)
def test_heads_draft_what_the_target_says(drafter: str, fewest: float) -> None:
    asked = [question for question, _ in questions()[:20]]
    own = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1}
    with Runtime.demo("none", **own) as plain, Runtime.demo(drafter, **own) as runtime:
        results = [ask(runtime, question) for question in asked]
        assert [result.text for result in results] == [
            ask(plain, question).text for question in asked
        ]
        warm = SamplingParams(temperature=1.0, seed=0)
        for question in asked[:4]:
            message = [{"role": "user", "content": question}]
            texts = [
                opened.chat(message, warm, max_tokens=48).token_ids for opened in (plain, runtime)
            ]
            assert texts[0] == texts[1]
    tokens = sum(result.usage.completion_tokens for result in results)
    assert tokens / sum(result.stats.rounds for result in results) >= fewest


@pytest.mark.parametrize("layers", [-1, 0, 5, "all", "auto"])
@pytest.mark.parametrize("drafter", ["draft", "medusa", "eagle", "eagle3"])
def test_heads_take_the_layers_that_models_take(drafter: str, layers: int | str) -> None:
    """Without a GPU all of them mean 0, as llama.cpp has it; with one, all of them work."""
    with Runtime.demo(drafter, n_ctx=256, n_threads=1, n_gpu_layers=layers) as runtime:
        offloads = bool(offload_devices(devices()))
        assert (runtime.model.n_gpu_layers != 0) == (offloads and layers != 0)
        result = runtime.generate([1, 2, 3], GREEDY, max_tokens=4)
        assert result.stats.drafted > 0


def test_the_family_is_whole_and_small_enough_to_ship() -> None:
    assert set(demo_drafters()) == {"draft", "medusa", "eagle", "eagle3", "pass"}
    assert (
        sum(path.stat().st_size for path in (demo_target(), *demo_drafters().values()))
        <= 25_000_000
    )
