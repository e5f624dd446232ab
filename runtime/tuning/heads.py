"""Calibration of heads: right guesses on a text by depth and rank, and the best tree."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.gguf import read_header
from specrun.bindings.models.model import Model
from specrun.runtime.acceptance import ExactRule
from specrun.runtime.drafters.dflash.drafter import BlockDrafter
from specrun.runtime.drafters.dflash.rows import BlockRows
from specrun.runtime.drafters.dflash.source import BlockState
from specrun.runtime.drafters.eagle import (
    MASK_FEATURES,
    Eagle3Head,
    EagleHead,
    EagleState,
    PairHead,
)
from specrun.runtime.drafters.hydra import HydraHead
from specrun.runtime.drafters.medusa import MOST_STATES, MedusaHead
from specrun.runtime.engine.session import Session
from specrun.runtime.heads import HeadFile, RankCounts
from specrun.runtime.language import quoted
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.memory import layers_here
from specrun.runtime.memory.fit import LoadOptions
from specrun.runtime.models.pairing import check_draftable
from specrun.runtime.planning import (
    CostCurve,
    HeadPlan,
    known_curve,
    measure_cost_curve,
    plan_medusa_tree,
)
from specrun.runtime.planning.measure import MEASURED_SIZES, sized_to_measure
from specrun.runtime.round.drafter import NoDrafter, Owned, close_all
from specrun.runtime.round.target import CachedText, EvaluatedRows, TargetModel
from specrun.runtime.trees.tree import ROOT
from specrun.runtime.tuning.acceptance import CalibrationText

# == Guesses of heads along a text, by teacher forcing =============================================
#
# A guess of depth k is then measured where a tree would make it: below the right tokens of the
# depths above. With the hidden state f_t of position t, depth k guesses the token at t + 2 + k (the
# target itself chooses the one at t + 1).


FloatRows = npt.NDArray[np.float32]
Guesses = list[list[int]]
"""Tokens by depth, the most likely first."""

_Head = TypeVar("_Head", bound=Owned)
_Cells = TypeVar("_Cells")

_OUTPUT = "output.weight"
_EAGLE_DEPTHS = 5  # features that were predicted, as EAGLE counts its n-alpha
_POSITIONS, _PREFIX_ROWS = 16, 64  # of one evaluation of Hydra's heads, of its prefix layer


@dataclass(frozen=True, slots=True)
class HeadSource:
    """A file of heads for texts of up to `n_tokens`, each depth naming `ranks` tokens."""

    path: Path
    target: Model
    ranks: int
    n_tokens: int
    n_threads: int


class HeadGuesses(ABC):
    """A kind of heads as calibration sees them.

    `evaluated_params` are the weights that a depth of guesses reads; `taps` the layers of the
    target whose inputs the heads read, none if they read its final hidden state.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, n_depths: int, evaluated_params: float, *owned: Owned) -> None:
        self.n_depths, self.evaluated_params = n_depths, evaluated_params
        self._owned = owned

    @abstractmethod
    def along(self, tokens: Sequence[int], features: FloatRows, begin: int) -> Iterator[Guesses]:
        """Yield the guesses at positions `begin` to len(features) - 1, [depth][rank].

        `features` [n, ...] are the target's states for the heads at the first n positions of the
        text `tokens`, which is longer. Where the text ends, so do the depths.
        """

    def close(self) -> None:
        """Free native memory."""
        close_all(self._owned)


def _cells(head: _Head, make: Callable[[_Head], _Cells]) -> _Cells:
    """Return a head's cells; without them it is closed."""
    try:
        return make(head)
    except BaseException:
        head.close()
        raise


class MedusaGuesses(HeadGuesses):
    """Medusa's heads, which see the hidden state alone and not the tokens on the way."""

    def __init__(self, source: HeadSource) -> None:
        self._head = head = MedusaHead(source.path, source.target, n_threads=source.n_threads)
        head.prepare([min(source.ranks, source.target.vocabulary.size)] * head.n_heads)
        # A depth is one head: its share of them all.
        super().__init__(head.n_heads, head.evaluated_params / head.n_heads, head)

    def along(self, tokens: Sequence[int], features: FloatRows, begin: int) -> Iterator[Guesses]:
        """Yield all heads' tokens; see `HeadGuesses`."""
        for start in range(begin, len(features), MOST_STATES):
            # Several states share an evaluation, and so the reading of the weights.
            for row, said in enumerate(self._head.said_of(features[start : start + MOST_STATES])):
                # Depth k is cut where token t + 2 + k lies beyond the text: nothing shows whether
                # it is right.
                yield said.tokens[: max(0, len(tokens) - (start + row) - 2)]


class EagleGuesses(HeadGuesses):
    """An EAGLE head that goes on from its own predicted states along the text's tokens."""

    def __init__(self, source: HeadSource) -> None:
        target, file = source.target, HeadFile(source.path, read_header(source.path).architecture)
        if MASK_FEATURES in file:
            problem = f"{source.path} drafts all tokens at once (P-EAGLE)"
            raise UnsupportedModelError(f"{problem}: accuracies are of heads that draft one by one")
        head_class = EagleHead if file.kind == "eagle" else Eagle3Head
        head: PairHead = head_class(
            source.path, target, ranks=source.ranks, n_threads=source.n_threads
        )
        # Beside the text's cells those of the predicted states below its last position.
        self._cells = _cells(head, lambda own: own.cells(source.n_tokens + _EAGLE_DEPTHS))
        self.taps = tuple(head.taps)
        # A depth reads the head's weights, and of the target's output matrix the tokens it may
        # draft.
        borrowed = 0 if _OUTPUT in file else target.n_embd * head.sizes.vocab_size
        super().__init__(_EAGLE_DEPTHS, file.header.n_parameters + borrowed, self._cells, head)

    def along(self, tokens: Sequence[int], features: FloatRows, begin: int) -> Iterator[Guesses]:
        """Yield the head's tokens after 0, 1, ... predicted states; see `HeadGuesses`."""
        # The cells hold the target's own states up to the position, as after an accepted round;
        # only below the root are states predicted.
        state = EagleState(self._cells)
        if begin:
            state.learn(0, features[:begin], tokens)
        for position in range(begin, min(len(features), len(tokens) - 2)):
            state.learn(position, features[position : position + 1], tokens)
            row = state.root(tokens[: position + 2])
            if row is None:  # more pairs than the head has cells
                return
            guesses = [row.tokens[0].tolist()]
            for depth in range(1, min(self.n_depths, len(tokens) - position - 2)):
                # Below the root the chain's nodes count from 0: the parent of depth d is node d -
                # 2.
                above = ROOT if depth == 1 else depth - 2
                # The text's token whatever the head guessed, so that each depth guesses below right
                # tokens.
                row = state.below([above], [tokens[position + 1 + depth]])
                guesses.append(row.tokens[0].tolist())
            yield guesses


class HydraGuesses(HeadGuesses):
    """Hydra's heads, each given the text's own tokens up to its own."""

    def __init__(self, source: HeadSource) -> None:
        self._head = head = HydraHead(source.path, source.target, n_threads=source.n_threads)
        head.prepare([source.ranks] * head.n_heads)
        self._cells = _cells(head, lambda own: own.cells(source.n_tokens))
        super().__init__(head.n_heads, head.evaluated_params / head.n_heads, self._cells, head)

    def along(self, tokens: Sequence[int], features: FloatRows, begin: int) -> Iterator[Guesses]:
        """Yield all heads' tokens, several positions an evaluation; see `HeadGuesses`."""
        states = self._states(features)
        for first in range(begin, min(len(states), len(tokens) - 2), _POSITIONS):
            positions = range(first, min(first + _POSITIONS, len(states), len(tokens) - 2))
            guesses: list[Guesses] = [[] for _ in positions]
            for depth in range(self.n_depths):
                # At the end of the text the last positions drop out first: the others stay aligned
                # with `guesses`.
                known = [position for position in positions if position + 2 + depth < len(tokens)]
                if not known:
                    break
                # Head k reads the k + 1 tokens before its guess.
                paths = [tokens[position + 1 : position + 2 + depth] for position in known]
                named = self._head.best_laws(states[known[0] : known[-1] + 1], paths).tokens
                for own, best in zip(guesses, named.tolist(), strict=False):
                    own.append(best)
            yield from guesses

    def _states(self, features: FloatRows) -> FloatRows:
        layer = self._cells.prefix
        if layer is None:
            return features
        features = features[: layer.n_cells]
        # In order: the prefix layer is causal, each piece attends to the cells of those before it.
        starts = range(0, len(features), _PREFIX_ROWS)
        pieces = [layer.evaluate(features[i : i + _PREFIX_ROWS], i, i) for i in starts]
        return np.concatenate(pieces)


class BlockGuesses(HeadGuesses):
    """A block drafter, one block behind each of the text's tokens."""

    def __init__(self, source: HeadSource) -> None:
        drafter = BlockDrafter(source.path, source.target, n_threads=source.n_threads)
        file, self._ranks = drafter.file, source.ranks
        options = ContextOptions(n_ctx=source.n_tokens, n_threads=source.n_threads)
        self._cells = _cells(drafter, lambda own: own.cells(options, file.n_slots))
        self.taps = tuple(file.taps)
        # A depth is one slot: its share of a block.
        super().__init__(file.n_slots, drafter.multiplied / file.n_slots, self._cells, drafter)

    def along(self, tokens: Sequence[int], features: FloatRows, begin: int) -> Iterator[Guesses]:
        """Yield the best tokens of each slot below the text's own; see `HeadGuesses`."""
        state = BlockState(self._cells)
        state.begin(tokens)
        state.learn(0, features[:begin], tokens)
        for position in range(begin, min(len(features), len(tokens) - 2)):
            state.learn(position, features[position : position + 1], tokens)
            # A whole block wherever the text ends: its size changes all rows.
            rows = state.block(tokens[: position + 2], self.n_depths)
            if rows is None:  # more positions than there are cells
                return
            guesses: Guesses = []
            for slot, before in enumerate(tokens[position + 1 : -1][: self.n_depths]):
                if not rows.goes_on(slot, before):
                    break
                guesses.append(self._best(rows, slot, before))
            yield guesses

    def _best(self, rows: BlockRows, slot: int, before: int) -> list[int]:
        found = rows.after(slot, [before], points=True)
        if found.highest is not None:
            tokens, logits = found.highest.tokens[0], found.highest.logits[0]
        else:
            assert found.whole is not None
            logits = found.whole[0]
            tokens = np.arange(len(logits))
        order = np.argsort(-logits, kind="stable")[: self._ranks]
        return [int(token) for token in tokens[order]]


_KINDS: Mapping[str, Callable[[HeadSource], HeadGuesses]] = {
    "medusa": MedusaGuesses,
    "hydra": HydraGuesses,
    "eagle": EagleGuesses,
    "eagle3": EagleGuesses,
    "dflash": BlockGuesses,
}


def guess_kinds() -> list[str]:
    """Return the architectures of heads that can be measured."""
    return list(_KINDS)


def open_guesses(source: HeadSource) -> HeadGuesses:
    """Open the heads of a file.

    Raises UnsupportedModelError for a file that holds no such heads, PairError for heads of another
    target.
    """
    kind = read_header(source.path).architecture
    if kind not in _KINDS:
        problem = f"{source.path} is a file of architecture {kind}"
        raise UnsupportedModelError(f"{problem}: accuracies are measured for {', '.join(_KINDS)}")
    return _KINDS[kind](source)


# == Calibration ===================================================================================
#
# Medusa's authors run the target greedily and count, for each head and rank, the positions at which
# the guess is the token that came (medusa/eval/heads_accuracy.py), then take heads for independent.
# They are not: where the first head is right, the second is right more often. So a guess is counted
# here where the guesses above it were right too, and the product of such shares along a path is the
# probability of the path. The shares over all positions are kept beside them.


_ROWS = 64  # hidden states of one evaluation
_FEWEST = 16
_SHORTEST = 32  # tokens that an answer may have however many prompts there are

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class HeadCalibrationOptions:
    """The settings of a measurement: `n_tokens` guessed places, each depth with `ranks` tokens.

    `seconds` are spent on the target's cost curve; 0 leaves it as it is known. The target writes
    its texts by `params`.
    """

    target: Path
    heads: Path
    n_tokens: int = 1024
    ranks: int = 10
    seconds: float = 12.0
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    loading: LoadOptions = field(default_factory=LoadOptions)

    def __post_init__(self) -> None:
        if self.n_tokens < _FEWEST:
            problem = f"{self.n_tokens} tokens are too few to measure heads"
            raise OptionError(f"{problem}: give {_FEWEST} or more")
        if not 1 <= self.ranks <= 32:
            raise OptionError(f"{self.ranks} tokens of each head: trees have 1 to 32")
        if not self.seconds >= 0.0:
            raise OptionError(f"{self.seconds} seconds are no time to measure in: give 0 or more")


@dataclass(frozen=True, slots=True)
class HeadCalibration:
    """The `counts` of right guesses, and the tree that follows on this machine by the `curve`.

    That has the target's costs, this machine's or typical ones.
    """

    counts: RankCounts
    plan: HeadPlan | None
    curve: CostCurve


def calibrated_layers(options: HeadCalibrationOptions) -> int:
    """Return n_gpu_layers (-1: all) of the target, as in a chat with these heads."""
    # Whatever the method is called: a plan sees the kind of file.
    drafter = f"draft({quoted(str(options.heads))})"
    return layers_here(options.target, options.loading, drafter)


def calibrate_heads(
    options: HeadCalibrationOptions,
    texts_of: Callable[[Model], Sequence[CalibrationText]],
    progress: Progress = lambda _what, _share: None,
) -> HeadCalibration:
    """Measure the heads along texts. `texts_of` makes them, once the target is loaded.

    A text that is nothing but a prompt (`n_prompt` its length) is continued by the target, which
    writes `n_tokens` over all such texts; of others the tokens from `n_prompt` on are counted, all
    if it is 0. Raises OptionError if there is nothing to count, and the errors of the
    target's and the heads' files.
    """
    layers = calibrated_layers(options)
    with Model(options.target, n_gpu_layers=layers, use_mmap=options.loading.use_mmap) as target:
        check_draftable(target)
        context = sized_to_measure(options.loading.context, target)
        # First, so that heads which do not fit are refused before time is spent.
        guesses = open_guesses(
            HeadSource(options.heads, target, options.ranks, context.n_ctx, context.n_threads)
        )
        try:
            texts = list(texts_of(target))
            if options.seconds > 0.0:
                sized = dataclasses.replace(context, n_outputs=max(MEASURED_SIZES))
                with Context(target, sized) as wide:
                    curve = measure_cost_curve(
                        wide,
                        seconds=options.seconds,
                        progress=lambda done: progress("measuring the target", 0.3 * done),
                    )
            else:
                curve = known_curve(options.target, options.loading.context, layers)
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
    return HeadCalibration(counts, plan, curve)


def written_texts(
    options: HeadCalibrationOptions,
    texts_of: Callable[[Model], Sequence[CalibrationText]],
    progress: Progress = lambda _what, _share: None,
) -> list[CalibrationText]:
    """Return the texts along which heads guess, prompts continued by the target."""
    layers = calibrated_layers(options)
    with Model(options.target, n_gpu_layers=layers, use_mmap=options.loading.use_mmap) as target:
        context = sized_to_measure(options.loading.context, target)
        return _written(options, target, context, list(texts_of(target)), progress)


def features_along(
    context: Context, tokens: Sequence[int], taps: Sequence[int] = ()
) -> npt.NDArray[np.float32]:
    """Return the target's states for the heads at all positions, [n, ...]; empties the context.

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
                # The time that answers left over is for the later ones.
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
            # Cut to the places still wanted: the target need not evaluate uncounted tokens.
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
