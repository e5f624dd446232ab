"""Costs of predictive pipelined decoding (PPD, Yang et al. 2023) on one device and on several.

All times are shares of one evaluation of the target, 1. After the share `exit_at` of its layers the
exit's law (`exit_cost`: its norm and output matrix) guesses the next token, and another device
begins with the guess, `transfer` later, while the rest of the layers run. With the probability
`hit` the guess is right: the next token is then `exit_at + exit_cost + transfer` behind this one,
otherwise 1. A device holds one token's evaluation at a time, so m devices give at most m tokens in
a time of 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specrun.bindings.errors import OptionError


def pipelined_time(
    hit: float,
    exit_at: float,
    *,
    exit_cost: float = 0.0,
    transfer: float = 0.0,
    devices: int = 2,
) -> float:
    """Return the expected time of a token: 1 - hit (1 - step), for long texts.

    `step` is what a right guess leaves of it, no less than one over the number of devices, and no
    more than 1: a guess that starts too late is not waited for.
    """
    for name, value in (("hit", hit), ("exit_at", exit_at)):
        if not 0.0 <= value <= 1.0:
            raise OptionError(f"{name} is {value}: give a share, 0 to 1")
    if exit_cost < 0.0 or transfer < 0.0:
        raise OptionError(f"exit_cost {exit_cost} and transfer {transfer}: give 0 or more")
    if devices < 1:
        raise OptionError(f"{devices} devices: give at least 1")
    if devices == 1:
        return single_device_time(hit, exit_at, exit_cost=exit_cost)
    step = min(1.0, max(exit_at + exit_cost + transfer, 1.0 / devices))
    return 1.0 - hit * (1.0 - step)


def single_device_time(hit: float, exit_at: float, *, exit_cost: float = 0.0) -> float:
    """Return the expected time of a token where all is done by one device: never below 1.

    Layers of two tokens at different depths share no weights that could be read once for both, so
    their times add up: a right guess moves work and saves none, a wrong one wastes what was done of
    it until the token is known, 1 - exit_at.
    """
    return 1.0 + exit_cost + (1.0 - hit) * (1.0 - exit_at)


def most_transfer(speed_up: float, hit: float, exit_at: float, *, exit_cost: float = 0.0) -> float:
    """Return the longest transfer with which two devices are `speed_up` times plain decoding.

    That is what a second device has to beat to pay beside another way to draft that gives as much
    on one. Negative: no transfer is short enough.
    """
    if speed_up < 1.0:
        raise OptionError(f"speed_up is {speed_up}: plain decoding gives 1 already")
    if not 0.0 < hit <= 1.0:
        return math.copysign(math.inf, -1.0) if speed_up > 1.0 else 0.0
    # 1 / speed_up = 1 - hit (1 - step), and step is at least one half.
    step = 1.0 - (1.0 - 1.0 / speed_up) / hit
    return step - exit_at - exit_cost if step >= 0.5 else -math.inf


def pipeline_schedule(
    hits: Sequence[bool], exit_at: float, *, overhead: float = 0.0, devices: int = 2
) -> float:
    """Return when the last of `len(hits) + 1` tokens is known, hits[i] saying whether token i was
    guessed right: the schedule itself, which the formulas are tested against.

    `overhead` is the exit's cost and the transfer.
    """
    starts = [0.0]
    for hit in hits:
        known = starts[-1] + 1.0
        guessed = starts[-1] + exit_at + overhead
        # The device that it goes to has to be done with the token that it held.
        free = starts[-devices] + 1.0 if len(starts) >= devices else 0.0
        starts.append(min(known, max(guessed, free)) if hit else known)
    return starts[-1] + 1.0
