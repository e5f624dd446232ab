"""Prediction of a self-draft's speed from acceptance and costs, without running the method.

The target writes texts once, and its cost curve T(n), the time of an evaluation of n tokens, is
measured. A cut (the target with some layers left out) is then judged by two numbers: alpha, the
share of its tokens that would be accepted (the mean over the texts of sum min(p, q), or of p at the
cut's most likely token), and c, the seconds one of its tokens takes. A draft of n tokens produces
(1 - alpha^(n + 1)) / (1 - alpha) tokens in n c + T(n + 1) seconds (`costs.expected_tokens`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import ContextFullError, OptionError
from specrun.bindings.models.model import Model
from specrun.convert.cut import LayeredModel
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.drafters.growing import RANKED_TOKENS, ranking_params
from specrun.runtime.engine import Session
from specrun.runtime.laws import Law
from specrun.runtime.memory import resolve_gpu_layers
from specrun.runtime.models import check_draftable
from specrun.runtime.planning import (
    MEASURED_SIZES,
    CostCurve,
    expected_tokens,
    measure_cost_curve,
    predicted_tokens_per_second,
)
from specrun.runtime.round import NoDrafter
from specrun.runtime.trees import TreeSampling
from specrun.runtime.tuning import CalibrationText, RankedPair, acceptance_by_rank, laws_along

if TYPE_CHECKING:
    from specrun.bench.layers.layer_search import LayerSearchOptions, Progress

_FEWEST_TOKENS = 8
_TARGETS_SHARE = 0.75  # of the time for measuring costs


@dataclass(frozen=True, slots=True)
class LayerTrial:
    """A set of layers, expected to give `predicted` tokens a second with drafts of `n_draft`.

    `acceptance` is the share of its tokens that would be accepted with `sampling`, "with" or
    "argmax"; `speed_up` is over plain decoding.
    """

    kept: tuple[int, ...]
    sampling: str
    acceptance: float
    n_draft: int
    predicted: float
    speed_up: float

    def skipped(self, n_layers: int) -> tuple[int, ...]:
        """Return the layers of the whole model that are left out."""
        return tuple(layer for layer in range(n_layers) if layer not in self.kept)


class CutJudge:
    """Judges sets of layers on texts that the target wrote, with laws and costs measured once."""

    def __init__(
        self,
        options: LayerSearchOptions,
        layered: LayeredModel,
        folder: Path,
        texts: Sequence[tuple[CalibrationText, list[Law]]],
        curve: CostCurve,
    ) -> None:
        self._options = options
        self._layered = layered
        self._folder = folder
        self._texts = texts
        # More tokens never cost less: where they seem to, something else ran meanwhile.
        costs = map(curve.seconds, range(1, options.max_draft + 2))
        self._curve = CostCurve.flat(list(accumulate(costs, max)))
        # Layers of the one cut that was timed, and its seconds a token.
        self._measured: tuple[int, float] | None = None

    @property
    def plain_speed(self) -> float:
        """Tokens a second of plain decoding, by the target's evaluations alone."""
        return 1.0 / self._curve.seconds(1)

    def judge(self, kept: tuple[int, ...]) -> LayerTrial:
        """Cut the model to these layers, and say how fast it would make the target."""
        path = self._folder / "cut.gguf"
        self._layered.write(path, kept, force=True)
        try:
            acceptance, sampling = self._acceptance(path, kept)
        finally:
            path.unlink(missing_ok=True)
        step = self._step_seconds(len(kept))

        def speed(n_draft: int) -> float:
            tokens = expected_tokens(acceptance, n_draft)
            return predicted_tokens_per_second(tokens, n_draft, self._curve.seconds, n_draft * step)

        best = max(range(1, self._options.max_draft + 1), key=speed)  # the shortest of equals
        predicted = speed(best)
        speed_up = predicted / self.plain_speed
        return LayerTrial(kept, sampling, acceptance, best, predicted, speed_up)

    def _acceptance(self, path: Path, kept: tuple[int, ...]) -> tuple[float, TreeSampling]:
        """Return the greatest share of accepted tokens over the ways to draft.

        The first cut that is opened is also timed, for `_step_seconds`.
        """
        params = self._options.params
        ranking = ranking_params(params, RANKED_TOKENS)
        pairs: list[RankedPair] = []
        with (
            _open(path, self._options, drafts=True) as model,
            Context(model, _wide(self._options.context, model)) as context,
        ):
            for text, laws in self._texts:
                drafted = laws_along(context, text, (params, ranking))
                pairs += (RankedPair(law, *both) for law, both in zip(laws, drafted, strict=True))
            if self._measured is None:
                seconds = (1 - _TARGETS_SHARE) * self._options.seconds
                curve = measure_cost_curve(context, seconds=seconds, sizes=(1,))
                self._measured = len(kept), curve.seconds(1)
        ways: tuple[TreeSampling, ...] = ("argmax",) if params.is_greedy else ("with", "argmax")
        shares = [(min(1.0, float(acceptance_by_rank(pairs, way, 1)[0])), way) for way in ways]
        return max(shares, key=lambda share: share[0])

    def _step_seconds(self, count: int) -> float:
        """Return the cost of a token, on the line through the whole model and the timed cut."""
        whole, all_layers = self._curve.seconds(1), self._layered.n_layers
        measured, seconds = self._measured or (all_layers, whole)
        if measured == all_layers:
            return whole * count / all_layers
        slope = (whole - seconds) / (all_layers - measured)
        # Noise must not make more layers cheaper, nor a model without any cost less than nothing.
        slope = min(max(slope, 0.0), whole / all_layers)
        return whole - slope * (all_layers - count)


def prepare_judge(
    options: LayerSearchOptions,
    prompts_of: Callable[[Model], Sequence[Sequence[int]]],
    layered: LayeredModel,
    folder: Path,
    progress: Progress,
) -> CutJudge:
    """Let the target write, and measure it; it is closed again, so that a cut has the memory."""
    with _open(options.target, options) as model:
        check_draftable(model)
        size = _wide(options.context, model)
        prompts = _checked(prompts_of(model), options.n_tokens, size.n_ctx)
        progress("writing a text", 0.0)
        texts = _written(model, size, prompts, options)
        with Context(model, size) as context:
            judged = [
                (text, [law for (law,) in laws_along(context, text, (options.params,))])
                for text in texts
            ]
            curve = measure_cost_curve(
                context,
                seconds=_TARGETS_SHARE * options.seconds,
                sizes=tuple(size for size in MEASURED_SIZES if size <= options.max_draft + 1),
                progress=lambda done: progress("measuring the target", 0.1 + 0.2 * done),
            )
    return CutJudge(options, layered, folder, judged, curve)


def _open(path: Path, options: LayerSearchOptions, *, drafts: bool = False) -> Model:
    wanted = options.n_gpu_layers_draft if drafts else options.n_gpu_layers
    layers = resolve_gpu_layers(wanted, path, drafts=drafts)
    return Model(path, n_gpu_layers=layers, use_mmap=options.use_mmap, drafts=drafts)


def _wide(options: ContextOptions, model: Model) -> ContextOptions:
    """Return a context whose evaluations give many rows."""
    rows = max(MEASURED_SIZES)
    return dataclasses.replace(
        options, n_ctx=options.size_for(model), n_batch=max(rows, options.n_batch), n_outputs=rows
    )


def _checked(prompts: Sequence[Sequence[int]], n_tokens: int, n_ctx: int) -> list[list[int]]:
    if not prompts or not all(prompts):
        raise OptionError("the prompt is empty: the search needs a text to continue")
    longest = max(map(len, prompts))
    if longest + n_tokens > n_ctx:
        raise ContextFullError(
            f"a prompt of {longest} tokens and {n_tokens} more do not fit a context of {n_ctx}: "
            "shorten the prompt or raise the context size (-c)"
        )
    return [list(prompt) for prompt in prompts]


def _written(
    model: Model, size: ContextOptions, prompts: list[list[int]], options: LayerSearchOptions
) -> list[CalibrationText]:
    """Return the prompts with what the target answers, where it answers anything."""
    most = max(_FEWEST_TOKENS, options.n_tokens // len(prompts))
    texts = []
    with Session.open(model, NoDrafter(), size, ExactRule()) as session:
        for prompt in prompts:
            stream = session.stream(prompt, options.params, seed=options.seed, max_tokens=most)
            answer = stream.drain().token_ids
            if answer:
                texts.append(CalibrationText((*prompt, *answer), len(prompt)))
    written = sum(len(text.tokens) - text.n_prompt for text in texts)
    if written < _FEWEST_TOKENS:
        raise OptionError(
            f"the target answered with {written} tokens, which say too little about acceptance: "
            "give other prompts"
        )
    return texts
