"""Online speculative decoding in an engine: what is noted of each conversation, and swaps between
answers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.every_drafter import named
from support.tiny_models import F32

from specrun.bindings.errors import ClosedError, FileMissingError, OptionError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.engine import Engine

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8], [9, 9, 8, 9, 9], [7], [5, 5, 6]]
LENGTH = 24
SMALL, TWIN = "draft(FILE:small, n=3)", "draft(FILE:twin, n=3)"


def opened(files: dict[str, Path], drafter: str = SMALL, **options: object) -> Engine:
    settings = {**F32, "n_ctx": 1024, **options}
    return Engine(files["shallow"], named(drafter, files), slots=3, **settings)


def test_what_was_rejected_is_noted_of_each_conversation(files: dict[str, Path]) -> None:
    """As it is of each answer alone: no conversation's places stand in another's text."""
    with Runtime(files["shallow"], named(SMALL, files), learn=True, **F32) as runtime:
        for prompt in PROMPTS:
            runtime.generate(prompt, GREEDY, max_tokens=LENGTH)
        assert runtime.rejections is not None
        alone = {
            each.tokens.tobytes(): each.positions.tolist() for each in runtime.rejections.buffer
        }
    with opened(files, learn=True) as engine:
        engine.generate_many(PROMPTS, GREEDY, max_tokens=LENGTH)
        assert engine.rejections is not None
        together = {
            each.tokens.tobytes(): each.positions.tolist() for each in engine.rejections.buffer
        }
    assert together == alone
    assert len(alone) == len(PROMPTS)


def test_without_the_flag_nothing_is_noted(files: dict[str, Path]) -> None:
    with opened(files) as engine:
        assert engine.rejections is None


def test_a_swap_waits_for_the_answers_under_way_and_holds_those_that_come(
    files: dict[str, Path],
) -> None:
    with Runtime(files["shallow"], "none", **F32) as plain:
        wanted = [plain.generate(each, GREEDY, max_tokens=60).token_ids for each in PROMPTS]
    with opened(files) as engine:
        first = [engine.submit(prompt, GREEDY, max_tokens=60) for prompt in PROMPTS[:3]]
        for stream in first:
            next(iter(stream))  # all three are in the middle of an answer
        swapping = threading.Thread(
            target=engine.swap_drafter, args=(named(TWIN, files).replace("n=3", "n=2"),)
        )
        swapping.start()
        later = [engine.submit(prompt, GREEDY, max_tokens=60) for prompt in PROMPTS[3:]]
        swapping.join()
        assert "twin" in engine.drafter
        results = [stream.result for stream in (*first, *later)]
        assert [result.token_ids for result in results] == wanted
        assert all("small" in result.stats.drafter for result in results[:3])
        assert all("n=3" in result.stats.drafter for result in results[:3])
        assert engine.generate_many(PROMPTS[:1], GREEDY, max_tokens=60)[0].token_ids == wanted[0]
        last = engine.submit(PROMPTS[0], GREEDY, max_tokens=8, drafter=named(SMALL, files)).result
        assert "twin" in last.stats.drafter  # the name that requests know means the new one


def test_a_swap_that_cannot_be_leaves_everything_as_it_was(
    files: dict[str, Path], tmp_path: Path
) -> None:
    with opened(files) as engine:
        before = engine.generate_many(PROMPTS, GREEDY, max_tokens=LENGTH)
        for expression, error in (
            (f'draft("{tmp_path / "nothing.gguf"}")', FileMissingError),
            (named("draft(FILE:twin, n=9)", files), OptionError),
            (named("medusa(FILE:medusa, tree=2)", files), OptionError),
        ):
            with pytest.raises(error):
                engine.swap_drafter(expression)
        assert "small" in engine.drafter
        after = engine.generate_many(PROMPTS, GREEDY, max_tokens=LENGTH)
        assert [each.token_ids for each in after] == [each.token_ids for each in before]
        assert engine.draft_file == files["small"]


def test_a_closed_engine_swaps_nothing(files: dict[str, Path]) -> None:
    with opened(files) as engine:
        pass
    assert engine.closed
    with pytest.raises(ClosedError):
        engine.swap_drafter(named(TWIN, files))


def test_swaps_go_on_for_a_long_time(files: dict[str, Path]) -> None:
    """Each is as good as new: nothing that is closed drafts, and texts stay."""
    with opened(files) as engine:
        wanted = engine.generate_many(PROMPTS, GREEDY, max_tokens=LENGTH)
        for number in range(6):
            engine.swap_drafter(named((TWIN, SMALL)[number % 2], files))
            found = engine.generate_many(PROMPTS, GREEDY, max_tokens=LENGTH)
            assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
