"""Calibration of heads: shares of right guesses on a text by depth and rank, and their best tree.

Medusa's authors run the target greedily and count, for each head and rank, the positions at which
the guess is the token that came (medusa/eval/heads_accuracy.py), then take heads for independent.
They are not: where the first head is right, the second is right more often. So a guess is counted
here where the guesses above it were right too, and the product of such shares along a path is the
probability of the path. The shares over all positions are kept beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.costs import (
    CostCurve,
    HeadPlan,
    measure_cost_curve,
    measured_or_typical,
    plan_medusa_tree,
)
from specrun.runtime.costs.measure import MEASURED_SIZES, sized_to_measure
from specrun.runtime.drafter import NoDrafter
from specrun.runtime.heads import Accuracy, RankCounts
from specrun.runtime.language import quoted
from specrun.runtime.memory import layers_here
from specrun.runtime.offload import LayerCount
from specrun.runtime.pairing import check_draftable
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.session import Session
from specrun.runtime.target import CachedText, EvaluatedRows, TargetModel
from specrun.runtime.tuning.head_guesses import HeadGuesses, open_guesses
from specrun.runtime.tuning.rank_acceptance import CalibrationText

_ROWS = 64  # hidden states of one evaluation
_FEWEST = 16
_SHORTEST = 32  # tokens that an answer may have however many prompts there are

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class HeadCalibrationOptions:
    """What to measure: `n_tokens` guessed places, each depth with `ranks` tokens.

    `seconds` are spent on the target's cost curve; 0 leaves it as it is known. `params` say how the
    target writes its texts.
    """

    target: Path
    heads: Path
    n_tokens: int = 1024
    ranks: int = 10
    seconds: float = 12.0
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    context: ContextOptions = field(default_factory=ContextOptions)
    n_gpu_layers: LayerCount = "auto"
    use_mmap: bool = True

    def __post_init__(self) -> None:
        if self.n_tokens < _FEWEST:
            problem = f"{self.n_tokens} tokens say too little about heads"
            raise OptionError(f"{problem}: give {_FEWEST} or more")
        if not 1 <= self.ranks <= 32:
            raise OptionError(f"{self.ranks} tokens of each head: trees have 1 to 32")
        if not self.seconds >= 0.0:
            raise OptionError(f"{self.seconds} seconds are no time to measure in: give 0 or more")


@dataclass(frozen=True, slots=True)
class HeadCalibration:
    """What was measured at `n_positions`: `accuracy` along paths, `alone` for each depth by itself.

    `n_reached[k]` and `n_asked[k]` are the numbers of positions behind their rows k. `plan` is the
    tree that follows on this machine, `curve` the target's costs and `is_measured` whether they are
    this machine's.
    """

    accuracy: Accuracy
    alone: Accuracy
    n_reached: tuple[int, ...]
    n_asked: tuple[int, ...]
    n_positions: int
    plan: HeadPlan | None
    curve: CostCurve
    is_measured: bool


def calibrated_layers(options: HeadCalibrationOptions) -> int:
    """Return n_gpu_layers (-1: all) of the target, as in a chat with these heads."""
    # Whatever the method is called: a plan sees what the file is.
    drafter = f"draft({quoted(str(options.heads))})"
    layers, _ = layers_here(options.target, options.context, options.n_gpu_layers, drafter=drafter)
    return layers


def calibrate_heads(
    options: HeadCalibrationOptions,
    texts_of: Callable[[Model], Sequence[CalibrationText]],
    progress: Progress = lambda _what, _share: None,
) -> HeadCalibration:
    """Measure the heads along texts. `texts_of` makes them, once the target is loaded.

    A text that is nothing but a prompt (`n_prompt` its length) is continued by the target, which
    writes `n_tokens` over all such texts; of others the tokens from `n_prompt` on are counted, all
    where it is 0. Raises OptionError where there is nothing to count, and the errors of the
    target's and the heads' files.
    """
    layers = calibrated_layers(options)
    with Model(options.target, n_gpu_layers=layers, use_mmap=options.use_mmap) as target:
        check_draftable(target)
        context = sized_to_measure(options.context, target)
        # First, so that heads which do not fit are refused before time is spent.
        sizes = {"n_tokens": context.n_ctx, "n_threads": context.n_threads}
        guesses = open_guesses(options.heads, target, ranks=options.ranks, **sizes)
        try:
            texts = list(texts_of(target))
            curve, is_measured = _curve(options, target, context, layers, progress)
            texts = _written(options, target, context, texts, progress)
            counts = _count(target, context, guesses, texts, options, progress)
            # An evaluation of few tokens is bound by reading weights: a depth costs its share of
            # them.
            depth_seconds = curve.seconds(1) * guesses.evaluated_params / target.n_params
        finally:
            guesses.close()
    if not counts.n_positions:
        raise OptionError("the text is too short: heads guess the third token at the earliest")
    accuracy = counts.accuracy
    # Heads whose first guess is never right have no tree, but their counts are still worth showing.
    plan = plan_medusa_tree(accuracy, curve, depth_seconds) if any(accuracy[0]) else None
    progress("done", 1.0)
    behind = (counts.n_reached, counts.n_asked, counts.n_positions)
    return HeadCalibration(accuracy, counts.alone, *behind, plan, curve, is_measured)


def features_along(
    context: Context, tokens: Sequence[int], taps: Sequence[int] = ()
) -> npt.NDArray[np.float32]:
    """Return what heads read of the target at all positions, [n, ...]; empties the context.

    That is its final hidden state, or the inputs of the layers `taps` one after another.
    """
    pieces: list[npt.NDArray[np.float32]] = []

    def of(rows: EvaluatedRows, row: int) -> npt.NDArray[np.float32]:
        if not taps:
            return rows.hidden_states((row,)).reshape(-1)
        return np.concatenate([rows.layer_input(row, layer) for layer in taps])

    def learn(_start: int, rows: EvaluatedRows, count: int) -> None:
        pieces.append(np.array([of(rows, row) for row in range(count)], np.float32))

    context.memory.clear()
    TargetModel(context).prefill(CachedText(tokens), len(tokens), learn)
    context.memory.clear()
    return np.concatenate(pieces)


def _curve(
    options: HeadCalibrationOptions,
    target: Model,
    context: ContextOptions,
    layers: int,
    progress: Progress,
) -> tuple[CostCurve, bool]:
    """Return the target's cost curve, and whether it was measured on this machine."""
    if options.seconds <= 0.0:
        return measured_or_typical(options.target, options.context, layers)

    def report(done: float) -> None:
        progress("measuring the target", 0.3 * done)

    with Context(target, dataclasses.replace(context, n_outputs=max(MEASURED_SIZES))) as wide:
        return measure_cost_curve(wide, seconds=options.seconds, progress=report), True


def _written(
    options: HeadCalibrationOptions,
    target: Model,
    context: ContextOptions,
    texts: list[CalibrationText],
    progress: Progress,
) -> list[CalibrationText]:
    """Return the texts, prompts continued, all cut to the context and the number of tokens."""
    prompts = [text for text in texts if len(text.tokens) == text.n_prompt]
    found = [text for text in texts if len(text.tokens) > text.n_prompt]
    if prompts:
        left = options.n_tokens
        with Session.open(target, NoDrafter(), context, ExactRule()) as session:
            for number, prompt in enumerate(prompts):
                if left <= 0:
                    break
                progress("writing texts", 0.6 - 0.3 * left / options.n_tokens)
                # What answers that ended early left over is for the later ones.
                most = max(_SHORTEST, -(-left // (len(prompts) - number)))
                stream = session.stream(prompt.tokens, options.params, seed=number, max_tokens=most)
                written = stream.drain()
                found.append(CalibrationText((*prompt.tokens, *written.token_ids), prompt.n_prompt))
                left -= len(written.token_ids)
    return [CalibrationText(answer.tokens[: context.n_ctx], answer.n_prompt) for answer in found]


def _count(
    target: Model,
    context: ContextOptions,
    guesses: HeadGuesses,
    texts: Sequence[CalibrationText],
    options: HeadCalibrationOptions,
    progress: Progress,
) -> RankCounts:
    """Count the right guesses along the texts, until `n_tokens` places were guessed."""
    counts = RankCounts(guesses.n_depths, options.ranks)
    taps = guesses.taps
    reading = dataclasses.replace(
        context, n_outputs=_ROWS, hidden_states=not taps, layer_inputs=tuple(sorted(set(taps)))
    )
    with Context(target, reading) as wide:
        for text in texts:
            # The state at position t guesses t + 2 first: the last two have nothing to guess.
            begin = max(0, text.n_prompt - 2)
            # Cut to the places still wanted: the target need not evaluate what is not counted.
            tokens = text.tokens[: begin + 2 + options.n_tokens - counts.n_positions]
            if len(tokens) < begin + 3:
                continue
            features = features_along(wide, tokens[:-2], taps)
            for offset, named in enumerate(guesses.along(tokens, features, begin)):
                # Depth k at position t guesses token t + 2 + k.
                first = begin + offset + 2
                counts.add(named, tokens[first : first + guesses.n_depths])
                if counts.n_positions % 16 == 0:
                    share = min(1.0, counts.n_positions / options.n_tokens)
                    progress("asking the heads", 0.6 + 0.4 * share)
    return counts
