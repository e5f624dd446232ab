"""Proof: checks that a pair's text is the target's own, on the machine and with the options in use.

What tests show of tiny models is shown of the user's: the rule by enumeration, the cache against
plain evaluations, texts against plain decoding's, their law, and answers after faults. Every check
has a control: something wrong that it would have seen, or else it says nothing and is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specrun.bench.models.batch_noise import BatchNoise, NoiseOptions, measure_batch_noise
from specrun.bench.prove.cache import check_cache
from specrun.bench.prove.rules import check_rule
from specrun.bench.prove.setting import PROMPTS, Check, Setting
from specrun.bench.prove.texts import check_faults, check_law, check_texts
from specrun.bench.table import Table
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.runtime.runtime import Runtime
from specrun.runtime.sampling import SamplingParams

_POSITIONS = 32  # of batch noise
_TIMES_NOISE = 4.0  # two tokens, each moved by twice what was seen


@dataclass(frozen=True, slots=True)
class ProofOptions:
    """`seconds` are shared among the checks, which all do their least however long that takes.

    `params` are the settings of sampling by which the acceptance rule is enumerated.
    """

    seconds: float = 30.0
    seed: int = 0
    params: tuple[SamplingParams, ...] = (SamplingParams(),)


@dataclass(frozen=True, slots=True)
class Proof:
    """What was checked. `width` is that of every evaluation, None where it is free."""

    target: str
    drafter: str
    rule: str
    exact: bool
    width: int | None
    seed: int
    seconds: float
    checks: tuple[Check, ...]
    interrupted: bool = False

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.status != "failed" for check in self.checks)


Step = Callable[[Setting], Check]


def check_noise(setting: Setting) -> Check:
    """Measure how far widths alone move log-probabilities, and so what rounding may explain."""
    options = setting.runtime.options
    settings = NoiseOptions(_POSITIONS, options.context, options.n_gpu_layers)
    text = "\n".join(PROMPTS * 2)
    try:
        noise = measure_batch_noise(setting.model.path, text, settings)
    except (OptionError, UnsupportedModelError) as error:
        return Check("batch noise", "left out", note=str(error))
    largest = max(found.logprob_largest for found in noise.widths)
    if setting.width is None:
        setting.near = max(setting.near, _TIMES_NOISE * largest)
    return _noise_check(noise, largest, fixed=setting.width is not None)


def _noise_check(noise: BatchNoise, largest: float, *, fixed: bool) -> Check:
    bits = noise.fixed_shape
    same = f"in a fixed shape {bits.n_equal} of {bits.n_positions} rows have the same bits"
    wrong = fixed and bits.n_equal < bits.n_positions
    widest = max(noise.widths, key=lambda found: found.logprob_mean)
    parts = widest.parts_after
    moved = (
        f"evaluations of {widest.width} tokens move log-probabilities by {widest.logprob_mean:.2g}"
        f" on average and laws by {widest.variation_largest:.2g} in total variation at most; "
        f"{widest.other_top:.1%} of the most likely tokens are others: greedy texts are expected "
        + ("not to part in so few" if parts is None else f"to part after about {parts:.0f}")
        + "; inspect --batch-noise measures longer texts"
    )
    return Check(
        "batch noise",
        "failed" if wrong else "measured",
        f"positions in evaluations of 1 to {noise.widths[-1].width} tokens",
        noise.n_positions,
        largest,
        None,
        "nats by which widths move a log-probability, the largest",
        "none: nothing is required of a free shape",
        moved,
        bits.left_out or same,
    )


STEPS: tuple[tuple[str, Step], ...] = (
    ("rule", check_rule),
    ("batch noise", check_noise),
    ("cache", check_cache),
    ("same text", check_texts),
    ("law of texts", check_law),
    ("faults", check_faults),
)
"""In this order: what batch noise measures bounds what the later ones allow."""


def prove(
    runtime: Runtime,
    options: ProofOptions | None = None,
    *,
    progress: Callable[[str], None] = lambda _: None,
    steps: Sequence[tuple[str, Step]] = STEPS,
) -> Proof:
    """Check a runtime that is open and idle; Ctrl-C ends that with what is known so far.

    An error in a check is its failure: a sound pair raises none.
    """
    options = options or ProofOptions()
    started = time.monotonic()
    setting = Setting(runtime, options.seed, options.seconds, options.params)
    checks: list[Check] = []
    interrupted = False
    try:
        for name, step in steps:
            progress(name)
            try:
                checks.append(step(setting))
            except UnsupportedModelError as error:  # recurrent targets that take no drafts at all
                checks.append(Check(name, "left out", note=str(error)))
            except Exception as error:  # whatever it is, it is what a proof is for
                what = f"{type(error).__name__}: {error}"
                checks.append(Check(name, "failed", note=what))
    except KeyboardInterrupt:
        interrupted = True
        done = len(checks)
        checks += [Check(name, "left out", note="interrupted") for name, _ in steps[done:]]
    return Proof(
        target=str(runtime.model.path),
        drafter=runtime.drafter,
        rule=setting.rule.name,
        exact=setting.rule.exact,
        width=setting.width,
        seed=options.seed,
        seconds=time.monotonic() - started,
        checks=tuple(checks),
        interrupted=interrupted,
    )


def proof_table(proofs: Sequence[Proof]) -> Table:
    """Return the table of `specrun prove`, a row a check, and in words what each of them did."""
    rows, notes = [], []
    for proof in proofs:
        width = "free" if proof.width is None else f"{proof.width} tokens"
        exact = proof.rule if proof.exact else f"not exact: {proof.rule}"
        notes.append(
            f"{proof.target} with {proof.drafter}; rule {exact}; shape {width}; "
            f"seed {proof.seed}; {proof.seconds:.0f} s."
        )
        for check in proof.checks:
            rows.append(
                {
                    "check": check.name,
                    "result": check.status,
                    "times": f"{check.times:,}" if check.times else "-",
                    "figure": _number(check.figure),
                    "bound": _number(check.bound),
                }
            )
            notes.append(_words(check))
    return Table.of(rows, *notes)


def _words(check: Check) -> str:
    note = check.note
    if not note and check.status == "left out":
        note = "its control was not seen, so it says nothing of this model"
    parts = [f"{check.name}, {check.status}: {note}" if note else check.name]
    if check.tested:
        parts.append(f"{check.times:,} {check.tested}")
        parts.append(f"figure and bound in {check.unit}")
        parts.append(f"false alarm: {check.false_alarm}")
        parts.append(f"control: {check.control}")
    return "; ".join(parts) + "."


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
