"""Experts that rounds read: distinct ones of a layer, by the router on real text, and the weights.

An evaluation of several tokens reads every expert that one of them chose. Tokens of one text choose
more alike than by chance, so how many are read is counted, layer by layer, in evaluations of the
answers' own tokens; `expected_experts` computes it for choices by chance.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specrun.bindings.contexts import Batch, Context, ContextOptions, InputObserver
from specrun.bindings.models import Model
from specrun.runtime.planning import MemoryTraffic, expected_experts, memory_traffic

_ROUTED = re.compile(r"blk\.\d+\.ffn_down_exps\.weight")
_EVALUATIONS = 24  # of a width, at most


@dataclass(frozen=True, slots=True)
class ExpertReads:
    """The experts that a mixture's rounds of `width` tokens read, beside plain ones.

    Of the `n_experts` of a layer a token uses `n_used`; a round reads `read` of them, by chance it
    would be `by_chance`. `share` is that of all weights, `plain_share` the share for one token.
    `evaluations` were counted for it; 0: `read` is the number by chance.
    """

    n_experts: int
    n_used: int
    width: int
    read: float
    by_chance: float
    share: float
    plain_share: float
    evaluations: int

    @property
    def traffic(self) -> float:
        """How many times the weights of a plain round one of this width reads."""
        return self.share / self.plain_share


def expert_reads(
    model: Model, options: ContextOptions, texts: Sequence[Sequence[int]], width: int
) -> ExpertReads | None:
    """Count the experts that evaluations of `width` tokens of these texts read; None: no mixture.

    Texts are read once more for it, in a context of their own. All tokens give rows: of others
    llama.cpp leaves out the last layer.
    """
    traffic = memory_traffic(model, options)
    if not traffic.n_experts:
        return None
    counted = _distinct(model, options, texts, width)
    by_chance = expected_experts(traffic.n_experts, traffic.n_used, width)
    read = float(np.mean(counted)) if counted else by_chance
    return ExpertReads(
        n_experts=traffic.n_experts,
        n_used=traffic.n_used,
        width=width,
        read=read,
        by_chance=by_chance,
        share=_share(traffic, read),
        plain_share=_share(traffic, traffic.n_used),
        evaluations=len(counted),
    )


def _share(traffic: MemoryTraffic, read: float) -> float:
    whole = traffic.dense + traffic.experts
    return (traffic.dense + traffic.experts * read / traffic.n_experts) / whole


def _distinct(
    model: Model, options: ContextOptions, texts: Sequence[Sequence[int]], width: int
) -> list[float]:
    """Return how many experts of a layer each evaluation read, on the mean of the layers."""
    observer = InputObserver(lambda name: _ROUTED.fullmatch(name) is not None)
    longest = max(map(len, texts), default=0)
    if longest <= width:
        return []
    n_batch = max(width, options.n_batch)
    sized = dataclasses.replace(options, n_ctx=longest, n_outputs=width, n_batch=n_batch)
    found: list[float] = []
    with Context(model, sized, observer=observer) as context:
        batch = Batch(width, 1)
        for text in texts:
            context.memory.clear()
            for start in range(0, len(text) - width + 1, width):
                batch.fill_chain(list(text[start : start + width]), start, [0], width)
                context.decode(batch)
                layers = [np.count_nonzero(counts) for _, counts in observer.take().values()]
                found += [float(np.mean(layers))] if layers else []
                if len(found) >= _EVALUATIONS:
                    return found
    return found
