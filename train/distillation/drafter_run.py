"""A run that distils a drafter: what is given, what comes out, its identity and its memory.

Memory is estimated from the sizes in the folders' files alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from specrun.bindings.errors import OptionError
from specrun.convert.checkpoint import open_checkpoint
from specrun.train.data.token_corpus import TokenCorpus
from specrun.train.distillation.acceptance import AcceptanceGain
from specrun.train.distillation.learner import Comparison, DistillationLoss
from specrun.train.target.hf_model import read_config
from specrun.train.target.target_shape import source_digest
from specrun.train.trainer.memory import MemoryNeed
from specrun.train.trainer.run import TrainingReport, TrainingRun
from specrun.train.trainer.settings import TrainingDefaults

ANSWER_SOURCES = ("given", "target")
"""Who may have written answers before training: the data, or the target, which samples them."""

WEIGHTS_NAME = "model.safetensors"
"""The file that a finished run leaves."""

DEFAULTS = TrainingDefaults(learning_rate=3e-4, clip_norm=1.0)
"""The rate is DistillSpec's, of its larger drafters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRun(TrainingRun):
    """A run that distils a drafter.

    `draft` is a Hugging Face folder as `target` is. Training learns on `answers`, of which the
    drafter writes a share of its own (`loss.on_policy`); alpha is measured on `measured_on`, at
    temperature `measured_at`. Sampled answers have at most `longest_answer` tokens, and at most
    `most_held_out` texts are only measured on.
    """

    draft: Path
    loss: DistillationLoss = field(default_factory=DistillationLoss)
    answers: str = "given"
    measured_on: str = "target"
    measured_at: float = 1.0
    not_covered_by: tuple[Path, ...] = ()
    longest_answer: int = 128
    most_held_out: int = 200

    def __post_init__(self) -> None:
        TrainingRun.__post_init__(self)  # super() does not know a class with slots
        for name in ("answers", "measured_on"):
            if getattr(self, name) not in ANSWER_SOURCES:
                known = ", ".join(ANSWER_SOURCES)
                raise OptionError(f"{name} is {getattr(self, name)!r}: use one of {known}")
        if not 0 <= self.measured_at <= 100:
            raise OptionError(
                f"alpha cannot be measured at temperature {self.measured_at:g}: give 0 or more"
            )
        if self.longest_answer < 1:
            raise OptionError(f"answers of {self.longest_answer} tokens: give at least 1")


@dataclass(frozen=True, slots=True)
class DrafterReport(TrainingReport):
    """`acceptance` is alpha before and after on the same texts, of which the others say more."""

    acceptance: AcceptanceGain
    before: Comparison
    after: Comparison


def run_identity(run: DrafterRun, corpus: TokenCorpus) -> dict[str, Any]:
    """Return what a resumed run must share with its checkpoint, beside the trainer's settings."""
    # Answers that the drafter writes are cut there; of other texts the data's digest says it.
    cut = {"max length": run.max_length} if run.loss.on_policy else {}
    sources = {"target": (run.target,), "drafter": (run.draft,), "covered by": run.not_covered_by}
    return {
        "kind": "drafter",
        "data": corpus.digest[:16],
        "answers": run.answers,
        "longest answer": run.longest_answer,
        **cut,
        **{f"loss {name}": value for name, value in dataclasses.asdict(run.loss).items()},
        **{name: [source_digest(path) for path in paths] for name, paths in sources.items()},
    }


_FLOAT = 4
# Of each position the laws of two models, their logarithms, what a divergence keeps, and gradients.
_ROWS_PER_POSITION = 12
# Of each position and layer what the gradient needs, in widths of states and of the feed-forward.
_HIDDEN_PER_LAYER, _FEED_FORWARD_PER_LAYER = 16, 4
# Of each position what a pass without gradients holds at once, beside all keys and values.
_HIDDEN_IN_PASSING, _FEED_FORWARD_IN_PASSING = 8, 3


def drafter_memory(
    target: Path, draft: Path, target_dtype: torch.dtype, *, tokens_per_batch: int
) -> MemoryNeed:
    """Return what is needed at the widest step, where every position of a batch is an answer's."""
    teacher, learner = (_Sizes.of(read_config(folder)) for folder in (target, draft))
    vocab_size = max(teacher.vocab_size, learner.vocab_size)
    passing = _HIDDEN_IN_PASSING * teacher.hidden + _FEED_FORWARD_IN_PASSING * teacher.feed_forward
    kept = _HIDDEN_PER_LAYER * learner.hidden + _FEED_FORWARD_PER_LAYER * learner.feed_forward
    # The target's keys and values are kept while it writes answers; other passes do without.
    per_target_position = passing + 2 * teacher.layers * teacher.hidden
    target_numbers = _n_parameters(target) + tokens_per_batch * per_target_position
    return MemoryNeed(
        {
            "target": target_numbers * target_dtype.itemsize,
            # Itself, its gradient, and the two averages of AdamW.
            "drafter and optimizer": _n_parameters(draft) * _FLOAT * 4,
            "laws": tokens_per_batch * vocab_size * _FLOAT * _ROWS_PER_POSITION,
            "activations": tokens_per_batch * learner.layers * kept * _FLOAT,
        }
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What config.json says of a model's sizes; what it does not say counts nothing."""

    vocab_size: int
    layers: int
    hidden: int
    feed_forward: int

    @staticmethod
    def of(config: Mapping[str, object]) -> _Sizes:
        def size(name: str) -> int:
            value = config.get(name)
            return value if isinstance(value, int) else 0

        hidden = size("hidden_size")
        inner = size("intermediate_size") or 4 * hidden
        return _Sizes(size("vocab_size"), size("num_hidden_layers"), hidden, inner)


def _n_parameters(folder: Path) -> int:
    return sum(prod(tensor.shape) for tensor in open_checkpoint(folder).tensors.values())
