"""Work of answers: tokens, rounds and drafts, and the seconds of target, drafter and Python.

Only what comes after the prompt counts: all drafters have to evaluate the prompt alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from specrun.bindings.errors import SpecrunError
from specrun.runtime.round import GenerationResult


@dataclass(frozen=True, slots=True)
class Work:
    """Sums over answers.

    `nodes` were evaluated beside the last committed token, in `drafting_rounds` of the `rounds`.
    `tests` are the depths at which there were drafts to accept, and `accepted` those at which one
    was. `seconds` are wall time, of which the others are parts. In `rebuilt` rounds the target's
    graph was built anew.
    """

    tokens: int
    rounds: int
    drafting_rounds: int
    nodes: int
    tests: int
    accepted: int
    seconds: float
    target_s: float
    drafter_s: float
    python_s: float
    rebuilt: int = 0

    @staticmethod
    def together(parts: Iterable[Work]) -> Work:
        """Return the sum of at least one."""
        columns = zip(*map(astuple, parts), strict=True)
        return Work(*map(sum, columns))

    @property
    def tokens_per_second(self) -> float:
        """Tokens over seconds."""
        return self.tokens / self.seconds

    @property
    def tokens_per_round(self) -> float:
        """Tokens over rounds: tau, with the target's own token."""
        return self.tokens / self.rounds

    @property
    def acceptance(self) -> float | None:
        """How often one of the drafts at a tested depth was kept; None where nothing was tested."""
        return self.accepted / self.tests if self.tests else None

    @property
    def coverage(self) -> float:
        """The share of rounds in which anything was drafted."""
        return self.drafting_rounds / self.rounds


def work_of(results: Iterable[GenerationResult]) -> Work:
    """Return what answers took; raises SpecrunError if one has no tokens that were timed."""
    return Work.together(map(_of_answer, results))


def _of_answer(result: GenerationResult) -> Work:
    stats, n = result.stats, len(result.token_ids)
    if not n or not stats.tokens_per_second:
        problem = "an answer without tokens cannot be timed"
        raise SpecrunError(f"{problem}: is the context (-c) long enough?")
    seconds = n / stats.tokens_per_second
    prompt = result.usage.prompt_tokens - 1
    rate = stats.prompt_tokens_per_second
    # What the target took for the prompt is no part of decoding; the rest, but for Python, drafts.
    target = min(seconds, max(0.0, stats.target_s - (prompt / rate if rate else 0.0)))
    python = min(seconds - target, stats.overhead_s)
    tested = stats.tested_by_position
    return Work(
        tokens=n,
        rounds=stats.rounds,
        drafting_rounds=tested[0] if tested else 0,
        nodes=stats.drafted + stats.non_candidates,
        tests=sum(tested),
        accepted=stats.accepted,
        seconds=seconds,
        target_s=target,
        drafter_s=seconds - target - python if stats.drafter_s else 0.0,
        python_s=python if stats.drafter_s else seconds - target,
        rebuilt=stats.rebuilt or 0,
    )
