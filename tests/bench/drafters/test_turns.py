"""The order of arms in a comparison: no arm may have a minute of the machine to itself."""

from __future__ import annotations

from pathlib import Path

from specrun.bench.drafters.comparison import DrafterBench, measure_drafters
from specrun.bindings.contexts import ContextOptions
from specrun.runtime.laws import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def test_arms_take_turns_prompt_by_prompt(tiny_model: Path) -> None:
    prompts, repetitions = ("abc", "bcd", "cde"), 2
    options = {"context": ContextOptions(n_ctx=256, n_threads=1), "trust": True}
    bench = DrafterBench(
        tiny_model,
        ("prompt-lookup",),
        prompts,
        (GREEDY,),
        max_tokens=8,
        repetitions=repetitions,
        options=options,
    )
    asked: list[str] = []

    def note(_done: int, _total: int, what: str) -> None:
        if not what.startswith("warming"):
            asked.append(what.partition(",")[0])

    plain, drafted = measure_drafters(bench, progress=note)
    n_turns = len(prompts) * repetitions
    turns = [tuple(asked[2 * turn : 2 * turn + 2]) for turn in range(n_turns)]
    there = ("none", "prompt-lookup")
    assert turns == [there, there[::-1]] * (n_turns // 2)
    # Each repetition has all the prompts, and every answer is counted once.
    assert plain.tokens_per_second.n == drafted.tokens_per_second.n == repetitions
    assert plain.tokens == drafted.tokens
    assert plain.tokens % repetitions == 0
    assert drafted.text is not None
    assert drafted.text.n_prompts == len(prompts)
