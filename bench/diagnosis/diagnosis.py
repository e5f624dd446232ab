"""Diagnosis of a pair: expected against measured, the largest costs, and the best achievable.

A round of w drafted nodes takes T(1 + w) for the target, the drafter's own time and Python's. T is
the measured cost curve, which has a second time for a round of another width than the one before,
as llama.cpp then builds its graph anew. The possible gain without one of these, or with a better
drafter, shows the cause. Nothing is measured here: the same figures give the
same words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any, Literal

from specrun.bench.diagnosis.experts import ExpertReads
from specrun.bench.drafters.answers import timed_speed
from specrun.bench.timing import Ratio
from specrun.runtime.language import parse_expression
from specrun.runtime.planning import CostCurve, Count, Number, expected_tokens
from specrun.runtime.round import GenerationResult

# == Work: tokens, rounds and seconds of answers ===================================================


@dataclass(frozen=True, slots=True)
class Work:
    """Sums over answers.

    `nodes` were evaluated beside the last committed token, in `drafting_rounds` of the `rounds`.
    `tests` are the depths at which there were drafts to accept, and `accepted` those at which one
    was. `seconds` are wall time, of which the others are parts. In `rebuilt` rounds the target's
    graph was built anew.
    """

    tokens: Count
    rounds: Count
    drafting_rounds: Count
    nodes: Count
    tests: Count
    accepted: Count
    seconds: Number
    target_s: Number
    drafter_s: Number
    python_s: Number
    rebuilt: Count = 0

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
        """How often one of the drafts at a tested depth was kept; None if nothing was tested."""
        return self.accepted / self.tests if self.tests else None

    @property
    def coverage(self) -> float:
        """The share of rounds in which anything was drafted."""
        return self.drafting_rounds / self.rounds


def work_of(results: Iterable[GenerationResult]) -> Work:
    """Return the times of answers; raises SpecrunError if one has no tokens that were timed."""
    return Work.together(map(_of_answer, results))


def _of_answer(result: GenerationResult) -> Work:
    stats, n = result.stats, len(result.token_ids)
    seconds = n / timed_speed(result)
    prompt = result.usage.prompt_tokens - 1
    rate = stats.prompt_tokens_per_second
    # The target's time for the prompt is no part of decoding; the rest, but for Python, drafts.
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


# == The diagnosis =================================================================================


PAYS = 1.02
"""The speed-up from which drafting pays: less is within the variation of a drafter."""

_LONGEST = 16  # tokens of a chain that is imagined
_GOOD = 0.8  # the acceptance of a good drafter
_WORTH = 1.1  # by how much something must raise the speed to be worth saying
_STEEP, _STEEP_AT = 1.5, 4  # times one token, for so many
_SELDOM = 0.4  # of the rounds
_FITS = 1.4  # times, up or down, that a plain token may take of the curve's time
_QUOTING = ("prompt-lookup", "lookahead", "rest", "ngram", "auto")  # they need repetitions
_MOST_REASONS = 3

ReasonKind = Literal["curve", "drafter", "silent", "drafting", "python", "experts", "rounds"]

IN_SHORT: dict[ReasonKind, str] = {
    "curve": "the cost curve is steep",
    "drafter": "drafts are accepted too seldom",
    "silent": "little repeats",
    "drafting": "drafting takes too long",
    "python": "too much of a round is Python",
    "experts": "several tokens read more experts",
    "rounds": "its rounds take longer than by the cost curve",
}
"""Reasons in a few words."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A cause of lost speed, a possible remedy, and the speed-up that there would be without it."""

    kind: ReasonKind
    text: str
    help: str
    without: float


@dataclass(frozen=True, slots=True)
class Achievable:
    """Speed-ups over plain decoding by the curve alone, if drafts cost nothing.

    `same` is that of chains of the best length (`same_length`) with the measured acceptance,
    `perfect` that of drafts that are always right. `needed` is the acceptance from which chains
    would pay with the measured times of drafter and Python, None if even 1 is not enough.
    """

    same: float
    same_length: int
    perfect: float
    perfect_length: int
    needed: float | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings on a drafter, against plain decoding in the same run.

    `speed_up` was measured, with its least and greatest value in a repetition. `expected` follows
    from tokens a round, the curve, and the time of drafter and Python. `rebuilt_share` is the share
    of the rounds that built the target's graph anew. Milliseconds are those of a round. `experts`
    are those that rounds of a mixture read. `workload` names the texts, if there are several kinds.
    """

    drafter: str
    temperature: float
    speed_up: float
    speed_up_low: float
    speed_up_high: float
    expected: float
    plain_tokens_per_second: float
    tokens_per_second: float
    tokens_per_round: float
    acceptance: float | None
    coverage: float
    nodes_per_drafting_round: float
    rebuilt_share: float
    round_ms: float
    target_ms: float
    expected_target_ms: float
    drafter_ms: float
    python_ms: float
    plain_ms: float
    expected_plain_ms: float
    curve: tuple[tuple[int, float], ...]
    best: Achievable
    reasons: tuple[Reason, ...]
    experts: ExpertReads | None = None
    workload: str = ""

    @property
    def pays(self) -> bool:
        """Whether drafting is faster in every repetition, and by its drafts."""
        is_faster = self.speed_up >= PAYS and self.speed_up_low > 1.0
        return is_faster and self.has_kept_drafts

    @property
    def ratio(self) -> Ratio:
        """The speed-up with its range."""
        return Ratio(self.speed_up, self.speed_up_low, self.speed_up_high)

    @property
    def has_kept_drafts(self) -> bool:
        """Whether drafts were kept often enough to make a difference."""
        return self.tokens_per_round >= PAYS

    @property
    def curve_fits(self) -> bool:
        """Whether plain tokens took about the curve's time: else the machine was busy."""
        return 1.0 / _FITS <= self.plain_ms / self.expected_plain_ms <= _FITS

    def to_dict(self) -> dict[str, Any]:
        """Return everything as a mapping, ready for JSON."""
        return {"pays": self.pays, "curve_fits": self.curve_fits, **dataclasses.asdict(self)}


@dataclass(frozen=True, slots=True)
class _Round:
    """The parts of a round, in seconds, as measured or imagined."""

    curve: CostCurve
    nodes: float
    coverage: float
    tokens: float
    drafter_s: float
    python_s: float
    plain_python_s: float
    rebuilt: float

    @property
    def target_s(self) -> float:
        """The target's expected seconds, over rounds with drafts and without."""
        reused, rebuilt = self._target_s(rebuilt=False), self._target_s(rebuilt=True)
        return reused + self.rebuilt * (rebuilt - reused)

    def _target_s(self, *, rebuilt: bool) -> float:
        drafting = _seconds(self.curve, 1.0 + self.nodes, rebuilt=rebuilt)
        single = self.curve.seconds(1, rebuilt=rebuilt)
        return self.coverage * drafting + (1.0 - self.coverage) * single

    @property
    def speed_up(self) -> float:
        """Over plain decoding, which takes T(1) and Python's share of a plain round."""
        plain = self.curve.seconds(1) + self.plain_python_s
        return self.tokens * plain / (self.target_s + self.drafter_s + self.python_s)


def diagnose(
    drafter: str,
    temperature: float,
    plain: Work,
    drafted: Work,
    curve: CostCurve,
    *,
    speed_up: Ratio | None = None,
    mixture: tuple[int, int] = (0, 0),
    experts: ExpertReads | None = None,
    workload: str = "",
) -> Diagnosis:
    """Return the diagnosis of the measurements; seconds of `curve` are those of the same machine.

    `speed_up` is the one to report, None: that of the sums. `mixture` are the experts of a layer
    and how many of them a token uses, zeros for a dense model; `experts`, the experts that its
    rounds read, if these were counted; `workload` names the texts.
    """
    curve = curve.as_padded()
    rounds, drafting = drafted.rounds, max(1, drafted.drafting_rounds)
    as_measured = _Round(
        curve=curve,
        nodes=drafted.nodes / drafting if drafted.drafting_rounds else 0.0,
        coverage=drafted.coverage,
        tokens=drafted.tokens_per_round,
        drafter_s=drafted.drafter_s / rounds,
        python_s=drafted.python_s / rounds,
        plain_python_s=plain.python_s / plain.rounds,
        rebuilt=drafted.rebuilt / rounds,
    )
    measured = drafted.tokens_per_second / plain.tokens_per_second
    ratio = Ratio(measured, measured, measured) if speed_up is None else speed_up
    speed = ratio.value
    best = _achievable(as_measured, drafted.acceptance)
    quotes = parse_expression(drafter).atom in _QUOTING
    singles = tuple(
        (n, curve.seconds(n) / curve.seconds(1)) for n in (2, 4, 8) if n <= curve.sizes[-1]
    )
    return Diagnosis(
        drafter=drafter,
        temperature=temperature,
        speed_up=speed,
        speed_up_low=ratio.low,
        speed_up_high=ratio.high,
        expected=as_measured.speed_up,
        plain_tokens_per_second=plain.tokens_per_second,
        tokens_per_second=drafted.tokens_per_second,
        tokens_per_round=drafted.tokens_per_round,
        acceptance=drafted.acceptance,
        coverage=drafted.coverage,
        nodes_per_drafting_round=as_measured.nodes,
        rebuilt_share=as_measured.rebuilt,
        round_ms=1e3 * drafted.seconds / rounds,
        target_ms=1e3 * drafted.target_s / rounds,
        expected_target_ms=1e3 * as_measured.target_s,
        drafter_ms=1e3 * as_measured.drafter_s,
        python_ms=1e3 * as_measured.python_s,
        plain_ms=1e3 * plain.seconds / plain.rounds,
        expected_plain_ms=1e3 * (curve.seconds(1) + as_measured.plain_python_s),
        curve=singles,
        best=best,
        reasons=_reasons(as_measured, plain, drafted, best, mixture, experts, speed, quotes=quotes),
        experts=experts,
        workload=workload,
    )


def _seconds(curve: CostCurve, n: float, *, rebuilt: bool) -> float:
    """Return T of a mean number of tokens, on the line between whole ones."""
    low = int(n)
    share = n - low
    here = curve.seconds(low, rebuilt=rebuilt)
    return here + share * (curve.seconds(low + 1, rebuilt=rebuilt) - here) if share else here


def _achievable(found: _Round, acceptance: float | None) -> Achievable:
    lengths = range(1, _LONGEST + 1)
    perfect = max(lengths, key=lambda n: _chain(found, 1.0, n, free=True, coverage=1.0))
    known = acceptance or 0.0
    same = max(range(_LONGEST + 1), key=lambda n: (_chain(found, known, n, free=True), -n))
    paying = (
        hundredths / 100
        for hundredths in range(101)
        if max(_chain(found, hundredths / 100, n) for n in lengths) >= PAYS
    )
    return Achievable(
        same=_chain(found, known, same, free=True),
        same_length=same,
        perfect=_chain(found, 1.0, perfect, free=True, coverage=1.0),
        perfect_length=perfect,
        needed=next(paying, None),
    )


def _chain(
    found: _Round, acceptance: float, n: int, *, free: bool = False, coverage: float | None = None
) -> float:
    """Return the speed-up of chains of n tokens; `free` ones cost the target's time alone."""
    if n == 0:
        return 1.0
    covered = found.coverage if coverage is None else coverage
    tokens = 1.0 + covered * (expected_tokens(acceptance, n) - 1.0)
    changed = dataclasses.replace(found, nodes=float(n), coverage=covered, tokens=tokens)
    if free:
        # Python's share of a plain round remains: plain decoding pays it, too.
        return dataclasses.replace(changed, drafter_s=0.0, python_s=found.plain_python_s).speed_up
    drafts = n / found.nodes if found.nodes else 1.0
    return dataclasses.replace(changed, drafter_s=found.drafter_s * drafts).speed_up


# -- causes ----------------------------------------------------------------------------------------


def _reasons(
    found: _Round,
    plain: Work,
    drafted: Work,
    best: Achievable,
    mixture: tuple[int, int],
    experts: ExpertReads | None,
    speed_up: float,
    *,
    quotes: bool,
) -> tuple[Reason, ...]:
    """Return the largest costs, the first first; each would raise the speed by a tenth or more."""
    acceptance = drafted.acceptance
    slower = _slower(found, plain, drafted, speed_up)
    candidates = (
        _steep(found, best, mixture, experts),
        _weak(found, acceptance, best),
        _silent(found, acceptance) if quotes else None,
        _dear(found),
        _python(found),
    )
    worth = _WORTH * found.speed_up
    kept = [reason for reason in candidates if reason is not None and reason.without >= worth]
    kept += [] if slower is None else [slower]
    return tuple(sorted(kept, key=lambda reason: -reason.without)[:_MOST_REASONS])


def _steep(
    found: _Round, best: Achievable, mixture: tuple[int, int], experts: ExpertReads | None
) -> Reason | None:
    curve = found.curve
    if curve.seconds(_STEEP_AT) < _STEEP * curve.seconds(1):
        return None
    flat = dataclasses.replace(found, curve=CostCurve.flat([curve.seconds(1)] * 2))
    without = flat.speed_up
    if found.coverage < _SELDOM:
        # Drafters that plan by the curve draft nothing if nothing pays.
        without = max(without, _chain(flat, _GOOD, _STEEP_AT, free=True, coverage=_SELDOM))
    times = ", ".join(f"{curve.seconds(n) / curve.seconds(1):.1f}" for n in (2, 4, 8))
    sizes = f"2, 4 and 8 tokens take {times} times as long as one"
    most = f"even drafts that cost nothing and are always right would give {best.perfect:.1f} times"
    n_experts, n_used = mixture
    if n_experts:
        what = f"a token uses {n_used} of {n_experts} experts, and several tokens read more"
        if experts is not None:
            what += f" ({experts.read:.1f} in a round of {experts.width}, {experts.traffic:.1f} "
            what += "times the weights of a token)"
        help = "a dense model of the same family, or a GPU that holds all experts"
        return Reason("experts", f"{what}: {sizes}; {most}", help, without)
    help = (
        "another weight type of the same model (specrun tune -m compares those beside it), or a "
        "GPU, on which several tokens cost hardly more than one"
    )
    return Reason("curve", f"the cost curve is steep: {sizes}; {most}", help, without)


def _slower(found: _Round, plain: Work, drafted: Work, speed_up: float) -> Reason | None:
    """The target's rounds took longer than by its curve, and that is why it is slower."""
    expected = found.curve.seconds(1) + found.plain_python_s
    machine = plain.seconds / plain.rounds / expected  # how much slower plain tokens were, too
    times = drafted.target_s / drafted.rounds / found.target_s / machine
    if times < _WORTH or found.speed_up < _WORTH * speed_up:
        return None
    text = f"the target's rounds take {times:.1f} times as long as by the cost curve"
    help = (
        "a quiet machine, or the curve measured anew (specrun tune); if heads read states or "
        "layers of the target, those cost it time, too"
    )
    return Reason("rounds", text, help, found.speed_up)


def _weak(found: _Round, acceptance: float | None, best: Achievable) -> Reason | None:
    if acceptance is None or acceptance >= _GOOD:
        return None
    without = max(_chain(found, _GOOD, n) for n in range(1, _LONGEST + 1))
    share = f"{100 * acceptance:.0f} % of its drafts are accepted"
    needed = "no drafter that costs as much would be right often enough"
    if best.needed is not None:
        needed = f"{100 * best.needed:.0f} % would have to be for it to pay here"
    help = "a drafter made for this model (specrun accelerate --hours, specrun train eagle)"
    if best.needed is not None and acceptance >= best.needed:
        better = f"by the cost curve {100 * best.needed:.0f} % are enough, and more pay more"
        return Reason("drafter", f"the drafter could be better: {share}; {better}", help, without)
    return Reason("drafter", f"the drafter is too weak: {share}, and {needed}", help, without)


def _silent(found: _Round, acceptance: float | None) -> Reason | None:
    if found.coverage >= _SELDOM:
        return None
    known = _GOOD if acceptance is None else acceptance
    without = max(_chain(found, known, n, coverage=1.0) for n in range(1, _LONGEST + 1))
    text = f"it drafts in {100 * found.coverage:.0f} % of the rounds only, as little repeats"
    help = "a drafter that drafts in every round: a small model of the same family, a head"
    return Reason("silent", text, help, without)


def _dear(found: _Round) -> Reason | None:
    total = found.target_s + found.drafter_s + found.python_s
    without = dataclasses.replace(found, drafter_s=0.0).speed_up
    text = f"drafting takes {100 * found.drafter_s / total:.0f} % of a round"
    return Reason("drafting", text, "a smaller drafter, or shorter drafts (n=)", without)


def _python(found: _Round) -> Reason | None:
    total = found.target_s + found.drafter_s + found.python_s
    # Plain decoding has a share of Python, too: the part that drafting adds to it could be saved.
    without = dataclasses.replace(found, python_s=found.plain_python_s).speed_up
    text = f"Python takes {100 * found.python_s / total:.0f} % of a round"
    help = "a larger target, whose evaluations outweigh it; a chain instead of a tree"
    return Reason("python", text, help, without)
