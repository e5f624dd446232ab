"""Ctrl-C at any line of an answer, with drafters of every method: the next is a fresh session's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.interrupts import FOLDERS, Interrupted, sampled_points
from support.tiny_models import F32

from specrun.bindings.contexts import memory
from specrun.runtime import Runtime, SamplingParams, SpecrunError
from specrun.runtime.round import Conversation, TargetModel, common_prefix, target

pytest.importorskip("torch")
from support.every_drafter import DRAFTERS, named

END = {319: float("-inf"), 318: float("-inf"), 317: float("-inf")}
WARM = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logit_bias=END, seed=7)
PROMPT = list(b"the quick brown fox, the quick")
OTHER = [*PROMPT[:17], *b"another brown fox"]
POINTS = 10


def said(
    runtime: Runtime, prompt: Sequence[int], params: SamplingParams, length: int = 8
) -> tuple[list[int], list[float], tuple[int, ...]]:
    """Tokens and log-probabilities of an answer, and how its drafts fared."""
    tokens, log_probs = [], []
    stream = runtime.stream(prompt, params, max_tokens=length)
    for event in stream:
        tokens.append(event.token_id)
        log_probs.append(event.logprob)
    stats = stream.result.stats
    return tokens, log_probs, (stats.rounds, stats.drafted, stats.accepted)


def about(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """What an equal answer equals: batches of other sizes round otherwise, far below this."""
    tokens, log_probs, *others = answer
    return tokens, pytest.approx(log_probs, abs=1e-4), *others


def problems(
    files: dict[str, Path],
    target: str,
    drafter: str,
    *,
    whole: bool,
    within: Sequence[str] = FOLDERS,
    accept: str = "exact",
) -> list[str]:
    """Interrupt an answer at some lines, or all; return where what follows is not a fresh answer.

    One session lives through all of it. It has answered a prompt that shares a part with the one
    that is interrupted, then answers either of them and, once it has forgotten everything, the
    interrupted one again (in a whole sweep after every eighth line).
    """
    # Where drafts are drawn and depend on more than the text, the text at a temperature does, too.
    by_history = any(part in drafter for part in ("auto", "ouroboros", "sampling=", "ensemble"))
    params = WARM.replace(temperature=0.0) if by_history else WARM
    # Which drafter is the fastest `auto` measures, and sizes follow the answers before.
    follows = drafter.startswith("auto") or "nodes=auto" in drafter or "ensemble(draft" in drafter
    n_told = 2 if follows else 3

    def interrupted(runtime: Runtime, at: int) -> Interrupted:
        with Interrupted(at, within) as interrupt:
            try:
                runtime.generate(PROMPT, params, max_tokens=5)
            except KeyboardInterrupt:
                # Here, in the handler of Ctrl-C, a session that is busy would stay so.
                runtime.session.require_idle()
                raise
        return interrupt

    found = []
    with Runtime(files[target], named(drafter, files), accept=accept, **F32) as runtime:
        fresh = {}
        for prompt in (PROMPT, OTHER):
            fresh[len(prompt)] = about(said(runtime, prompt, params))
            runtime.session.forget()
        said(runtime, OTHER, params, 2)
        n_lines = interrupted(runtime, 0).lines
        points = sampled_points(n_lines, POINTS, whole=whole)
        for place, at in enumerate(points):
            # What follows is the interrupted prompt, or the one before it.
            prompt = (PROMPT, OTHER)[place % 2]
            runtime.session.forget()
            said(runtime, OTHER, params, 2)
            interrupted(runtime, at)
            where = f"after an interrupt before line {at} of {n_lines}"
            try:
                if said(runtime, prompt, params)[:2] != fresh[len(prompt)][:2]:
                    found.append(f"another answer {where}")
            except SpecrunError as error:
                found.append(f"{error} {where}")
            if whole and at % 8:
                continue
            runtime.session.forget()
            if said(runtime, PROMPT, params)[:n_told] != fresh[len(PROMPT)][:n_told]:
                found.append(f"another answer of a session that forgot, {where}")
    assert n_lines > (500 if within is FOLDERS else 3)
    return found


@pytest.mark.parametrize(("target", "drafter"), DRAFTERS)
def test_an_interrupt_at_any_line_leaves_a_session_that_answers_as_a_fresh_one(
    files: dict[str, Path], target: str, drafter: str, whole_sweep: bool
) -> None:
    assert problems(files, target, drafter, whole=whole_sweep) == []


@pytest.mark.parametrize("held", [False, True])
def test_a_return_to_an_earlier_state_may_be_interrupted(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, held: bool, whole_sweep: bool
) -> None:
    """Both prompts go on from the state before their second message, and rounds from theirs."""
    if held:
        monkeypatch.setattr("specrun.bindings.models.model.ROLLBACK_ARCHITECTURES", ())
    message = [*PROMPT[:20], 319]
    monkeypatch.setitem(globals(), "PROMPT", [*message, *PROMPT])
    monkeypatch.setitem(globals(), "OTHER", [*message, *OTHER])
    within = [str(Path(str(each.__file__))) for each in (memory, target)]
    assert problems(files, "hybrid", "mtp(n=3)", whole=whole_sweep, within=within) == []


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ("shallow", "draft(FILE:twin, tree=2x2)"),
        ("shallow", "eagle(FILE:eagle, n=4)"),
        ("shallow", "eagle(FILE:eagle, tree=2x2x1, sampling=without)"),
        ("shallow", "hydra(FILE:hydra++, tree=2x2x1)"),
        ("shallow", "medusa(FILE:medusa, tree=3x2)"),
        ("nextn", "mtp(n=3, sampling=with)"),
        ("nextn", "mtp(tree=2x2x1, sampling=without)"),
        ("two blocks", "mtp(n=2)"),
        ("two blocks", "mtp(tree=2x1)"),
        ("shallow", "cascade(draft(FILE:twin, n=3), draft(FILE:small))"),
        ("shallow", "relay(draft(FILE:twin)@2, eagle(FILE:eagle, n=2))"),
    ],
)
def test_rows_that_are_evaluated_for_a_rule_may_be_interrupted_too(
    files: dict[str, Path], target: str, drafter: str, whole_sweep: bool
) -> None:
    """Those after a whole draft: between what is accepted and what is committed."""
    accept = "cascade-opt(alpha=0.05)"
    assert problems(files, target, drafter, whole=whole_sweep, accept=accept) == []


def test_a_prompt_whose_reading_did_not_begin_is_not_taken_for_generated_tokens(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text is there, and nothing of it was read: heads still have to learn its states."""
    drafter, accept = named("eagle(FILE:eagle, n=4)", files), "cascade-opt(alpha=0.05)"
    with Runtime(files["shallow"], drafter, accept=accept, **F32) as runtime:
        fresh = about(said(runtime, PROMPT, WARM))
        runtime.session.forget()
        said(runtime, OTHER, WARM, 2)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(TargetModel, "prefill_pieces", interrupt)
            runtime.generate(PROMPT, WARM, max_tokens=5)
        assert said(runtime, PROMPT, WARM)[:2] == fresh[:2]


def test_a_text_that_changes_before_its_cache_is_caught(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""

    def turn_to(self: Conversation, target: TargetModel, prompt: Sequence[int]) -> int:
        shared = min(common_prefix(self.tokens, prompt), self.n_cached, len(prompt) - 1)
        self.tokens = list(prompt)
        target.rewind(self, shared)
        self.tokens = list(prompt)
        self.drafter.begin(prompt)
        return shared

    monkeypatch.setattr(Conversation, "turn_to", turn_to)
    found = problems(files, "shallow", "none", whole=True, within=[__file__])
    assert found != []


def test_a_stream_interrupted_at_any_line_leaves_its_session_usable(
    files: dict[str, Path], whole_sweep: bool
) -> None:
    """Ctrl-C while somebody consumes the events and asks for log-probabilities."""
    with Runtime(files["shallow"], named("draft(FILE:twin, n=4)", files), **F32) as runtime:
        wanted = about(said(runtime, OTHER, WARM)[:2])
        with Interrupted() as counting:
            said(runtime, PROMPT, WARM, 5)
        for at in sampled_points(counting.lines, 3 * POINTS, whole=whole_sweep):
            with Interrupted(at):
                said(runtime, PROMPT, WARM, 5)
            assert said(runtime, OTHER, WARM)[:2] == wanted, f"line {at} of {counting.lines}"
