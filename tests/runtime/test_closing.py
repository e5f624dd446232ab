"""`close()` while an answer is being made: nothing native is freed under a call, or left behind.

A fault would end the process, so runtimes are closed in child processes (`support/closing.py`).
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.closing import END, PROMPT
from support.tiny_models import F32

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.runtime import ClosedError, Runtime, SamplingParams
from specrun.runtime.drafters.lookahead import NgramStore, load_pool

pytest.importorskip("torch")
from support.every_drafter import DRAFTERS, named

pytestmark = pytest.mark.long

TESTS = Path(__file__).parent.parent
GROUPS = [DRAFTERS[first : first + 4] for first in range(0, len(DRAFTERS), 4)]
SAID = {
    "finished",
    "ClosedError: the runtime is closed",
    "ClosedError: the runtime was closed while an answer was being streamed",
    "ClosedError: the context is closed",  # asked for a log-probability
}


def endings(target: Path, drafter: str, moments: list[str]) -> list[str]:
    """What came of each moment, in a process that has to live on and free everything."""
    run = subprocess.run(
        [sys.executable, "-m", "support.closing", str(target), drafter, *moments],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    n_lines, *said, last = run.stdout.splitlines()
    assert int(n_lines) > 1000
    assert last == "all freed"
    assert len(said) == len(moments)
    return said


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_a_runtime_may_be_closed_at_any_moment_of_an_answer(
    files: dict[str, Path], group: list[tuple[str, str]], whole_sweep: bool
) -> None:
    times = 40 if whole_sweep else 6
    for target, drafter in group if whole_sweep else group[:2][-1:]:
        source = random.Random(1)
        moments = [f"line {source.randint(1, 6000)}" for _ in range(times)]
        for how in ("thread", "signal"):
            moments += [f"{how} {source.uniform(0.2, 15.0):.2f}" for _ in range(times // 2)]
        moments += [f"close {source.randint(1, 60)}" for _ in range(times // 2)]
        said = endings(files[target], named(drafter, files), moments)
        assert set(said) <= SAID
        assert sum("while an answer" in ending for ending in said) > times // 3


def test_model_and_context_may_be_closed_while_other_threads_use_them(
    files: dict[str, Path], whole_sweep: bool
) -> None:
    moments = [f"direct {0.3 * number:.1f}" for number in range(40 if whole_sweep else 8)]
    said = endings(files["shallow"], "none", moments)
    assert set(said) == {"ClosedError, ClosedError, ClosedError"}


def closed_in_the_midst(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
    """Close the runtime before its third evaluation, in the same step of the answer.

    A count of lines would not do: how many rounds an answer takes depends on the clock.
    """
    decode, calls = Context.decode, 0

    def close_first(context: Context, batch: Batch) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            runtime.close()
        return decode(context, batch)

    patch.setattr(Context, "decode", close_first)
    params = SamplingParams(temperature=0.0, logit_bias=END)
    runtime.generate(PROMPT, params, max_tokens=60)


def test_a_pool_is_saved_when_the_step_under_way_has_ended(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = tmp_path / "a.pool"
    runtime = Runtime(files["shallow"], f"lookahead(pool={pool})", **F32)
    with pytest.raises(ClosedError, match="while an answer"):
        closed_in_the_midst(runtime, monkeypatch)
    with Model(files["shallow"], vocab_only=True) as model:
        assert len(load_pool(pool, model.vocabulary)) > 0
    runtime.close()


def test_what_cannot_be_closed_then_is_raised_by_the_step(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: NgramStore) -> None:
        raise OptionError("the disk is gone")

    runtime = Runtime(files["shallow"], f"lookahead(pool={tmp_path / 'a.pool'})", **F32)
    monkeypatch.setattr(NgramStore, "close", refuse)
    with pytest.raises(OptionError, match="the disk is gone") as caught:
        closed_in_the_midst(runtime, monkeypatch)
    assert isinstance(caught.value.__context__, ClosedError)
    with pytest.raises(ClosedError):
        _ = runtime.model.handle
