"""Answers to different prompts, and several to one prompt, are drawn independently of each other.

A text that comes back in a later prompt stands at other positions there, or at its own: neither may
meet the numbers that made it. The settings make every token one of 50 at equal chances, whatever
the text, so that the law of a repeat is known.

Hypothesis: each of `n` tokens repeats the one that it is compared with by a chance of 1/50, in
independent trials. Test: no more repeats than the binomial law's quantile .999 (`ALLOWED_SHARE`);
a correct source had a chance of .001 at most to be given a seed that fails, the seed is fixed, and
so the outcome is. Negative control: draws keyed by the position alone must fail the same test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from support.tiny_models import F32

from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.engine import answer
from specrun.runtime.laws import SeededNoise

SEED = 5
TOKENS = range(60, 110)
EVEN = SamplingParams(
    # So much heat leaves the fifty tokens of the bias equal to 1e-5.
    temperature=1e6,
    top_k=len(TOKENS),
    top_p=1.0,
    min_p=0.0,
    logit_bias=dict.fromkeys(TOKENS, 1000.0),
    seed=SEED,
)
ALLOWED_SHARE = 0.999
ANSWERS = 94


@pytest.fixture(scope="module")
def runtimes(tiny_model: Path) -> Iterator[dict[str, Runtime]]:
    lookup = "prompt-lookup(n=4, min_ngram=1)"
    with (
        Runtime(tiny_model, "none", **F32) as plain,
        Runtime(tiny_model, lookup, **F32) as drafting,
    ):
        yield {"none": plain, "prompt-lookup": drafting}


def repeats(tokens: Sequence[int], others: Sequence[int]) -> tuple[int, int]:
    """How many tokens equal their counterparts, and of how many."""
    equal = np.array(tokens) == np.array(others)
    return int(equal.sum()), len(equal)


def prompts() -> Iterator[list[int]]:
    generator = np.random.default_rng(1)
    for _ in range(ANSWERS):
        yield generator.integers(TOKENS.start, TOKENS.stop, 8).tolist()


def after_trimming(runtime: Runtime) -> tuple[int, int]:
    """An answer goes on after its prompt lost its four oldest tokens: at four positions again."""
    before, after = [], []
    for prompt in prompts():
        answer = runtime.generate(prompt, EVEN, max_tokens=8).token_ids
        before += answer[4:]
        after += runtime.generate([*prompt, *answer][4:], EVEN, max_tokens=4).token_ids
    return repeats(after, before)


def after_half_an_answer(runtime: Runtime) -> tuple[int, int]:
    """The second half of an answer is made again, with the first in the prompt."""
    before, after = [], []
    for prompt in prompts():
        answer = runtime.generate(prompt, EVEN, max_tokens=8).token_ids
        before += answer[4:]
        after += runtime.generate([*prompt, *answer[:4]], EVEN, max_tokens=4).token_ids
    return repeats(after, before)


def over_a_window(runtime: Runtime) -> tuple[int, int]:
    """Calls for one token, each with the last eight as its prompt; the token before the last."""
    text = next(prompts())
    for _ in range(200):
        text += runtime.generate(text[-8:], EVEN, max_tokens=1).token_ids
    return repeats(text[10:], text[8:-2])


def by_index(runtime: Runtime) -> tuple[int, int]:
    """Several answers to one prompt, each compared with the one before."""
    prompt = next(prompts())
    tokens = []
    for index in range(ANSWERS):
        tokens += runtime.generate(prompt, EVEN, max_tokens=4, index=index).token_ids
    return repeats(tokens[4:], tokens[:-4])


SCENARIOS = [after_trimming, after_half_an_answer, over_a_window, by_index]


@pytest.fixture(params=["by answer", "by position"])
def is_right(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the draws are keyed as they are to be; else by seed and position alone."""
    if request.param == "by position":

        class ByPosition:
            """In the place of `SeededNoise`, whose compiled class cannot be changed."""

            @staticmethod
            def for_answer(seed: int, _prompt: Sequence[int], _index: int = 0) -> SeededNoise:
                return SeededNoise(seed)

        monkeypatch.setattr(answer, "SeededNoise", ByPosition)
    return bool(request.param == "by answer")


@pytest.mark.parametrize("drafter", ["none", "prompt-lookup"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_is_repeated_more_often_than_the_law_says(
    runtimes: dict[str, Runtime],
    scenario: Callable[[Runtime], tuple[int, int]],
    drafter: str,
    is_right: bool,
) -> None:
    found, of = scenario(runtimes[drafter])
    allowed = int(stats.binom.ppf(ALLOWED_SHARE, of, 1 / len(TOKENS)))
    assert (found <= allowed) is is_right


def test_a_chat_cut_to_its_last_messages_does_not_go_round_in_circles(
    runtimes: dict[str, Runtime], is_right: bool
) -> None:
    """Forty turns with the last three messages each.

    Hypothesis: forty independent answers of four tokens. Test: they all differ. A correct source
    repeats one by a chance of 40 * 39 / 2 / 50^4, 1.3e-4 (the union bound).
    """
    messages = [{"role": "user", "content": "say something"}]
    answers = set()
    for _ in range(40):
        answer = runtimes["none"].chat(messages[-3:], EVEN, max_tokens=4)
        answers.add(tuple(answer.token_ids))
        messages += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": "go on"},
        ]
    assert (len(answers) == 40) is is_right
