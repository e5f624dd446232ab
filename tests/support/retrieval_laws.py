"""The exact law of what the loop emits with a retrieving drafter that learns meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrun.bench.prove.rules import BranchingNoise, enumerate_law
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.round import Drafter
from specrun.runtime.round.loop import DecodeSettings, RoundLimits, decode_rounds
from support.scripted import PLAIN, LawTable, TableTarget, conversation_of


def retrieval_bias(
    make: Callable[[], Drafter], table: LawTable, prompt: Sequence[int], length: int
) -> tuple[float, int, int]:
    """Return the largest error of any text's probability, the nodes drafted in all outcomes, and
    the widest tree."""
    nodes = widest = 0

    def program(noise: BranchingNoise) -> tuple[int, ...]:
        nonlocal nodes, widest
        drafter = make()
        drafter.begin(prompt)
        conversation = conversation_of(drafter, prompt, noise)
        limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=length)
        rounds = decode_rounds(
            TableTarget(table), conversation, DecodeSettings(ExactRule(), PLAIN, limits)
        )
        for this_round in rounds:
            nodes += len(this_round.tree)
            widest = max(widest, max(map(len, this_round.tree.draws.values()), default=0))
        return tuple(conversation.tokens[len(prompt) :])

    emitted = enumerate_law(program)
    wanted = {(): 1.0}
    for _ in range(length):
        wanted = {
            (*text, token): probability * conditional
            for text, probability in wanted.items()
            for token, conditional in enumerate(table([*prompt, *text]))
            if conditional
        }
    errors = [abs(emitted.get(text, 0.0) - wanted.get(text, 0.0)) for text in {*emitted, *wanted}]
    return max(errors), nodes, widest
