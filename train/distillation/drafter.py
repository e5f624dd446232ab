"""A distilled drafter from data to files: read, compare, answer, learn, measure, write.

The folder of a run holds the drafter (config.json, tokenizer files, weights, README.md) and
`training/` with the checkpoint, the curves, and the answers that the target wrote.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specrun.bindings.errors import OptionError
from specrun.runtime.planning import expected_tokens
from specrun.train.data.corpus import TokenBatch, TokenCorpus, encode_corpus
from specrun.train.data.documents import read_documents
from specrun.train.data.tokens import TargetTokenizer
from specrun.train.distillation.acceptance import (
    AcceptanceGain,
    MeasuredAcceptance,
    acceptance_gain,
)
from specrun.train.distillation.answers import (
    SampledAnswers,
    answered_by_target,
    with_room_for_answers,
)
from specrun.train.distillation.coverage import (
    ExistingDrafters,
    check_same_vocabulary,
    folder_vocabulary,
)
from specrun.train.distillation.learner import Comparison, DistillationLearner, DistillationLoss
from specrun.train.target.hf_model import load_hf_model, read_config, write_model_folder
from specrun.train.target.sampling import end_tokens
from specrun.train.target.shape import checkpoint_size, source_digest, source_identity
from specrun.train.trainer.learner import RunListener
from specrun.train.trainer.memory import MemoryNeed
from specrun.train.trainer.model_folder import model_card, table_lines, training_lines
from specrun.train.trainer.run import Training, TrainingReport, TrainingRun
from specrun.train.trainer.settings import TrainerSettings, TrainingDefaults

ANSWER_SOURCES = ("given", "target")
"""Sources of answers before training: the data, or the target, which samples them."""

_LENGTH = 5


@dataclass(frozen=True, slots=True)
class DrafterReport(TrainingReport):
    """`acceptance` is alpha before and after on the same texts; the others are all measures."""

    acceptance: AcceptanceGain
    before: Comparison
    after: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRecipe:
    """A drafter that learns its target's distributions (DistillSpec).

    `draft` is a Hugging Face folder as the run's target is. Training learns on `answers`, of which
    the drafter writes a share of its own (`loss.on_policy`); alpha is measured on `measured_on`, at
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

    def training(self, run: TrainingRun, listener: RunListener | None) -> DrafterTraining:
        """Return the training of a run, begun."""
        return DrafterTraining(self, run, listener)


class DrafterTraining(Training[DrafterReport]):
    """A run that distils a drafter, begun.

    Raises PairError if its vocabulary, or that of a drafter in `not_covered_by`, is not the
    target's.
    """

    # DistillSpec's rate, of its larger drafters.
    usual = TrainingDefaults(learning_rate=3e-4, clip_norm=1.0)

    def __init__(
        self, recipe: DrafterRecipe, run: TrainingRun, listener: RunListener | None
    ) -> None:
        super().__init__(run, listener, (run.target, recipe.draft))
        self.recipe = recipe
        self._vocabulary = folder_vocabulary(run.target)
        self._n_shared = check_same_vocabulary(self._vocabulary, folder_vocabulary(recipe.draft))
        self._tokenizer = TargetTokenizer(run.target)

    def texts(self) -> TokenCorpus:
        """Return the data's texts, with answers of the target's own as far as these are wanted."""
        run, recipe = self.run, self.recipe
        corpus = self._given()
        self.note_texts(corpus)
        self.settings(corpus)  # raises for a rate or a number of steps that cannot be
        self.require_memory(self._need(corpus))
        # Before anything is written: their vocabulary may not be the target's.
        self._drafters = self.resources.enter_context(
            ExistingDrafters(
                recipe.not_covered_by,
                self._vocabulary,
                n_ctx=run.max_length,
                n_threads=run.n_threads,
            )
        )
        self.open_output()
        self._target = load_hf_model(run.target, self.device, self.precision)
        # Not in `precision`: small updates would be rounded away.
        self._draft = load_hf_model(recipe.draft, self.device)
        self._answers = SampledAnswers(
            temperature=recipe.loss.temperature,
            n_longest=recipe.longest_answer,
            max_length=run.max_length,
            end_ids=end_tokens(self._target, self._tokenizer.eos),
            vocab_size=self._n_shared,
        )
        corpus = self._answered(corpus)
        return with_room_for_answers(corpus, self._answers, recipe.loss.on_policy)

    def identity(self, corpus: TokenCorpus, settings: TrainerSettings) -> dict[str, Any]:
        """Return the facts that a resumed run must share: data, answers, loss and weights."""
        run, recipe = self.run, self.recipe
        # Answers that the drafter writes are cut there; the data's digest covers other texts.
        cut = {"max length": run.max_length} if recipe.loss.on_policy else {}
        sources = {
            "target": (run.target,),
            "drafter": (recipe.draft,),
            "covered by": recipe.not_covered_by,
        }
        return {
            "kind": "drafter",
            "data": corpus.digest[:16],
            "answers": recipe.answers,
            "longest answer": recipe.longest_answer,
            **cut,
            **{f"loss {name}": value for name, value in dataclasses.asdict(recipe.loss).items()},
            **{name: [source_digest(path) for path in paths] for name, paths in sources.items()},
        }

    def learner(self, corpus: TokenCorpus, settings: TrainerSettings) -> DistillationLearner:
        """Return the learner; the drafter is measured as it begins."""
        recipe = self.recipe
        learner = DistillationLearner(
            self._target,
            self._draft,
            recipe.loss,
            self._answers,
            n_shared=self._n_shared,
            measured_at=recipe.measured_at,
            drafters=self._drafters if recipe.not_covered_by else None,
        )
        self._before = learner.compare(self._held_out(corpus))
        self.listener.note(f"before: {self._before}")
        return learner

    def finished(
        self, learner: DistillationLearner, corpus: TokenCorpus, report: TrainingReport
    ) -> DrafterReport:
        """Measure the drafter again and write its folder."""
        before, after = self._before, learner.compare(self._held_out(corpus))
        gain = acceptance_gain(before.texts, after.texts)
        whole = report.extended(DrafterReport, acceptance=gain, before=before, after=after)
        card = _card(self.recipe, self.run, whole)
        write_model_folder(learner.draft, self.recipe.draft, self.run.output, card)
        return whole

    def _held_out(self, corpus: TokenCorpus) -> list[TokenBatch]:
        return corpus.held_out_batches(self.run.tokens_per_batch, self.device)

    def _given(self) -> TokenCorpus:
        """Return the data as tokens; prompts alone will do if no given answer is read."""
        run, recipe = self.run, self.recipe
        answers_written = recipe.answers == "target" or recipe.loss.on_policy == 1.0
        need_answers = not (recipe.measured_on == "target" and answers_written)
        documents = read_documents(run.data, need_answers=need_answers)
        return encode_corpus(
            documents,
            self._tokenizer,
            max_length=run.max_length,
            held_out=min(run.held_out, recipe.most_held_out / len(documents)),
            seed=run.seed,
            need_answers=need_answers,
        )

    def _answered(self, corpus: TokenCorpus) -> TokenCorpus:
        """Let the target write the answers that are to be its own: measured on, or learnt."""
        run, recipe, answers = self.run, self.recipe, self._answers
        jobs: list[tuple[str, Sequence[int], SampledAnswers]] = []
        if recipe.measured_on == "target" and not corpus.measured_on_training:
            measured = dataclasses.replace(answers, temperature=recipe.measured_at)
            jobs.append(("the target answers held-out texts", corpus.held_out, measured))
        if recipe.answers == "target":
            jobs.append(("the target answers", corpus.training, answers))
        for what, numbers, settings in jobs:
            corpus = answered_by_target(
                corpus,
                self._target,
                numbers,
                settings,
                seed=run.seed,
                tokens_per_batch=run.tokens_per_batch,
                store=run.state_path.parent / "answers",
                identity=json.dumps(source_identity(run.target)),
                progress=functools.partial(self.listener.stage, what),
            )
        return corpus

    def _need(self, corpus: TokenCorpus) -> MemoryNeed:
        recipe, run = self.recipe, self.run
        # Answers written anew may be longer than those given; no batch has more than all there is.
        anew = recipe.answers == "target" or recipe.loss.on_policy > 0
        room = recipe.longest_answer if anew else 0
        most = sum(len(text) + room for text in corpus.sequences)
        tokens = min(max(run.tokens_per_batch, corpus.longest + room), most)
        return drafter_memory(run.target, recipe.draft, self.precision, tokens_per_batch=tokens)


# == Memory, by the sizes in the folders' files alone ==============================================

_FLOAT = 4
# Of each position the distributions of two models, their logarithms, a divergence's parts, and
# gradients.
_ROWS_PER_POSITION = 12
# Of each position and layer the gradient's inputs, in widths of states and of the feed-forward.
_HIDDEN_PER_LAYER, _FEED_FORWARD_PER_LAYER = 16, 4
# Of each position the numbers of a pass without gradients, in addition to keys and values.
_HIDDEN_IN_PASSING, _FEED_FORWARD_IN_PASSING = 8, 3


def drafter_memory(
    target: Path, draft: Path, target_dtype: torch.dtype, *, tokens_per_batch: int
) -> MemoryNeed:
    """Return the memory of the widest step, if every position of a batch is an answer's."""
    target_vocab, target_layers, hidden, inner = _sizes(target)
    passing = _HIDDEN_IN_PASSING * hidden + _FEED_FORWARD_IN_PASSING * inner
    # The target's keys and values are kept while it writes answers; other passes do without.
    per_target_position = passing + 2 * target_layers * hidden
    target_numbers = checkpoint_size(target) + tokens_per_batch * per_target_position
    vocab, layers, hidden, inner = _sizes(draft)
    kept = _HIDDEN_PER_LAYER * hidden + _FEED_FORWARD_PER_LAYER * inner
    rows = tokens_per_batch * max(target_vocab, vocab)
    parts = {
        "target": target_numbers * target_dtype.itemsize,
        # Itself, its gradient, and the two averages of AdamW.
        "drafter and optimizer": checkpoint_size(draft) * _FLOAT * 4,
        "laws": rows * _FLOAT * _ROWS_PER_POSITION,
        "activations": tokens_per_batch * layers * kept * _FLOAT,
    }
    return MemoryNeed(parts, dict.fromkeys(parts, "lower --batch-tokens, or use smaller models"))


def _sizes(folder: Path) -> tuple[int, int, int, int]:
    """Return vocabulary, layers, width and feed-forward by a config.json; missing ones are 0."""
    config = read_config(folder)
    names = ("vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size")
    found = (config.get(name) for name in names)
    vocab, layers, hidden, inner = (size if isinstance(size, int) else 0 for size in found)
    return vocab, layers, hidden, inner or 4 * hidden


# == The model card ================================================================================


def _card(recipe: DrafterRecipe, run: TrainingRun, report: DrafterReport) -> str:
    """Return the card in Markdown."""
    target, draft = run.target.resolve().name, recipe.draft.resolve().name
    loss = {
        name.replace("_", " "): value for name, value in dataclasses.asdict(recipe.loss).items()
    }
    own = f"{100 * recipe.loss.on_policy:.0f} % written by the drafter"
    settings = {
        "answers learnt on": f"{recipe.answers}, {own}",
        **loss,
        "longest answer": recipe.longest_answer,
        "longest text": run.max_length,
        "tokens per batch": run.tokens_per_batch,
        "seed": run.seed,
        "precision": report.precision,
    }
    losses = report.result.curves.losses
    fell = f"{recipe.loss.divergence} {losses[0]:.4f} at first, {losses[-1]:.4f} at last."
    return model_card(
        f"{draft}, a drafter for {target}",
        tags="draft-model, distillation",
        base_model=draft,
        made="Made by `specrun train drafter` (DistillSpec, Zhou et al. 2023): "
        f"{report.n_trained:,} parameters that learnt the distributions of {target}. Verification "
        "keeps the target's own tokens or distribution whatever it drafts.",
        sections={
            "Data": [
                f"{', '.join(path.name for path in run.data)}: {report.n_sequences:,} sequences. "
                "The licences of the data and of both models apply."
            ],
            "Training": training_lines(report, fell, settings),
            "Acceptance rate": _acceptance(recipe, report),
        },
        commands=(
            "specrun convert FOLDER -o drafter.gguf --outtype q8_0",
            "specrun chat -m TARGET.gguf -md drafter.gguf",
        ),
    )


def _acceptance(recipe: DrafterRecipe, report: DrafterReport) -> list[str]:
    gain, before, after = report.acceptance, report.before, report.after
    texts = "held-out texts"
    if report.measured_on_training:
        texts = "the training texts (too few to hold any out)"
    answers = "sampled from the target" if recipe.measured_on == "target" else "as given"
    rows = {
        "alpha": f"{gain.before} | {gain.after}",
        "same first token": f"{before.same_top:.4f} | {after.same_top:.4f}",
        "expected tokens a round": f"{_tokens(gain.before)} | {_tokens(gain.after)}",
    }
    if recipe.not_covered_by:
        others = ", ".join(path.name for path in recipe.not_covered_by)
        together = f"{before.covered_together:.4f} | {after.covered_together:.4f}"
        rows[f"known by {others}"] = f"{before.covered:.4f} | {after.covered:.4f}"
        rows["known by one of all"] = together
    return [
        "Alpha, the mean over positions of 1 - TV(target, drafter), at temperature "
        f"{recipe.measured_at:g} on {texts}, answers {answers}. Standard errors are over "
        f"{gain.before.n_texts:,} texts; expected tokens a round are (1 - alpha^{_LENGTH + 1}) / "
        f"(1 - alpha) (Leviathan et al. 2023, equation 1) for chains of {_LENGTH}.",
        "",
        *table_lines("| | before | after |", rows),
        "",
        f"Alpha rose by {gain.gain:.4f} +- {gain.error:.4f} (paired over texts).",
    ]


def _tokens(found: MeasuredAcceptance) -> str:
    return f"{expected_tokens(min(1.0, found.rate), _LENGTH):.2f}"
