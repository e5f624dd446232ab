"""A distilled drafter from data to files: read, compare, answer, learn, measure, write.

The folder of a run holds the drafter (config.json, tokenizer files, weights, README.md) and
`training/` with the checkpoint, the curves, and the answers that the target wrote.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from specrun.bindings.errors import OptionError
from specrun.bindings.files import require_free_space, sync_folder
from specrun.convert.checkpoint import open_checkpoint
from specrun.runtime.planning import expected_tokens
from specrun.train.data.corpus import TokenCorpus, encode_corpus
from specrun.train.data.documents import read_documents
from specrun.train.data.tokens import TargetTokenizer
from specrun.train.distillation.acceptance import (
    AcceptanceGain,
    MeasuredAcceptance,
    acceptance_gain,
)
from specrun.train.distillation.answers import (
    AnswerSettings,
    answered_by_target,
    with_room_for_answers,
)
from specrun.train.distillation.coverage import (
    ExistingDrafters,
    check_same_vocabulary,
    folder_vocabulary,
)
from specrun.train.distillation.learner import Comparison, DistillationLearner, DistillationLoss
from specrun.train.target.hf_model import HFModel, load_hf_model, quiet_transformers, read_config
from specrun.train.target.sampling import end_tokens
from specrun.train.target.shape import source_digest, source_identity
from specrun.train.trainer.learner import RunListener
from specrun.train.trainer.memory import MemoryNeed
from specrun.train.trainer.model_folder import (
    copy_tokenizer,
    model_card,
    table_lines,
    training_lines,
    write_json,
    write_text,
)
from specrun.train.trainer.run import StartedRun, TrainingReport, TrainingRun
from specrun.train.trainer.settings import TrainingDefaults, dtype_name

# == The run, its identity and its memory ==========================================================
#
# Memory is estimated from the sizes in the folders' files alone.


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


# == The folder and the model card, which other tools can read, too ================================


_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_LENGTH = 5


def write_drafter_folder(draft: HFModel, source: Path, output: Path, card: str) -> None:
    """Write the drafter into `output`; config and tokenizer are those of the folder `source`.

    Weights are written in the numbers they were trained in. Files are written aside and renamed,
    weights last, so that an interrupted call leaves either the old model or none that loads half.
    """
    parameters = list(draft.module.parameters())
    require_free_space(output, sum(each.numel() * each.element_size() for each in parameters))
    with _aside(output) as aside:
        with quiet_transformers():
            draft.model.save_pretrained(aside)
        copy_tokenizer(source, aside)
        # As published, where transformers writes what its own version says; only the numbers' type
        # is another now.
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config.pop("dtype", None)
        write_json(
            aside / "config.json", {**config, "torch_dtype": dtype_name(parameters[0].dtype)}
        )
        write_text(aside / "README.md", card)
        written = sorted(
            aside.iterdir(), key=lambda path: (path.suffix == ".safetensors", path.name in _WEIGHTS)
        )
        for path in written:
            # By a rename each file is the old one or the new one, whole.
            path.replace(output / path.name)
    sync_folder(output)


@contextmanager
def _aside(output: Path) -> Iterator[Path]:
    """Yield a hidden folder within `output`, which is gone afterwards."""
    folder = output / f".{secrets.token_hex(8)}.partial"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def drafter_card(run: DrafterRun, report: DrafterReport) -> str:
    """Return the card in Markdown."""
    target, draft = run.target.resolve().name, run.draft.resolve().name
    loss = {name.replace("_", " "): value for name, value in dataclasses.asdict(run.loss).items()}
    own = f"{100 * run.loss.on_policy:.0f} % written by the drafter"
    settings = {
        "answers learnt on": f"{run.answers}, {own}",
        **loss,
        "longest answer": run.longest_answer,
        "longest text": run.max_length,
        "tokens per batch": run.tokens_per_batch,
        "seed": run.seed,
        "precision": report.precision,
    }
    losses = report.result.curves.losses
    fell = f"{run.loss.divergence} {losses[0]:.4f} at first, {losses[-1]:.4f} at last."
    return model_card(
        f"{draft}, a drafter for {target}",
        tags="draft-model, distillation",
        base_model=draft,
        made="Made by `specrun train drafter` (DistillSpec, Zhou et al. 2023): "
        f"{report.n_trained:,} parameters that learnt the laws of {target}. Verification keeps the "
        "target's own tokens or distribution whatever it drafts.",
        sections={
            "Data": [
                f"{', '.join(path.name for path in run.data)}: {report.n_sequences:,} sequences. "
                "The licences of the data and of both models apply."
            ],
            "Training": training_lines(report, fell, settings),
            "Acceptance rate": _acceptance(run, report),
        },
        commands=(
            "specrun convert FOLDER -o drafter.gguf --outtype q8_0",
            "specrun chat -m TARGET.gguf -md drafter.gguf",
        ),
    )


def _acceptance(run: DrafterRun, report: DrafterReport) -> list[str]:
    gain, before, after = report.acceptance, report.before, report.after
    texts = "held-out texts"
    if report.measured_on_training:
        texts = "the training texts (too few to hold any out)"
    answers = "sampled from the target" if run.measured_on == "target" else "as given"
    rows = {
        "alpha": f"{_stated(gain.before)} | {_stated(gain.after)}",
        "same first token": f"{before.same_top:.4f} | {after.same_top:.4f}",
        "expected tokens a round": f"{_tokens(gain.before)} | {_tokens(gain.after)}",
    }
    if run.not_covered_by:
        others = ", ".join(path.name for path in run.not_covered_by)
        together = f"{before.covered_together:.4f} | {after.covered_together:.4f}"
        rows[f"known by {others}"] = f"{before.covered:.4f} | {after.covered:.4f}"
        rows["known by one of all"] = together
    return [
        "Alpha, the mean over positions of 1 - TV(target, drafter), at temperature "
        f"{run.measured_at:g} on {texts}, answers {answers}. Standard errors are over "
        f"{gain.before.n_texts:,} texts; expected tokens a round are (1 - alpha^{_LENGTH + 1}) / "
        f"(1 - alpha) (Leviathan et al. 2023, equation 1) for chains of {_LENGTH}.",
        "",
        *table_lines("| | before | after |", rows),
        "",
        f"Alpha rose by {gain.gain:.4f} +- {gain.error:.4f} (paired over texts).",
    ]


def _stated(found: MeasuredAcceptance) -> str:
    return f"{found.rate:.4f} +- {found.error:.4f}"


def _tokens(found: MeasuredAcceptance) -> str:
    return f"{expected_tokens(min(1.0, found.rate), _LENGTH):.2f}"


# == Training ======================================================================================


def train_drafter(run: DrafterRun, listener: RunListener | None = None) -> DrafterReport:
    """Distil a drafter and write its folder.

    Raises PairError if its vocabulary, or that of a drafter in `not_covered_by`, is not the
    target's; OutOfMemoryError with an estimate before anything is loaded; and as reading data,
    models and checkpoints does.
    """
    started = StartedRun(run, WEIGHTS_NAME, listener, (run.target, run.draft))
    device, precision = started.device, started.precision
    target_vocabulary = folder_vocabulary(run.target)
    n_shared = check_same_vocabulary(target_vocabulary, folder_vocabulary(run.draft))
    tokenizer = TargetTokenizer(run.target)
    corpus = _read_corpus(run, tokenizer)
    started.note_texts(corpus)
    started.settings(DEFAULTS, corpus)  # raises for a rate or a number of steps that cannot be
    advice = "lower --batch-tokens, or use smaller models"
    started.require_memory(_need(run, corpus, started), advice=advice)
    # Before anything is written: their vocabulary may not be the target's.
    with ExistingDrafters(
        run.not_covered_by, target_vocabulary, n_ctx=run.max_length, n_threads=run.n_threads
    ) as drafters:
        started.open_output()
        target = load_hf_model(run.target, device, precision)
        # Not in `precision`: small updates would be rounded away.
        draft = load_hf_model(run.draft, device)
        answers = AnswerSettings(
            temperature=run.loss.temperature,
            n_longest=run.longest_answer,
            max_length=run.max_length,
            end_ids=end_tokens(target, tokenizer.eos),
            vocab_size=n_shared,
        )
        corpus = _ask_target(run, corpus, target, answers, started.listener)
        corpus = with_room_for_answers(corpus, answers, run.loss.on_policy)
        learner = DistillationLearner(
            target,
            draft,
            run.loss,
            answers,
            n_shared=n_shared,
            measured_at=run.measured_at,
            drafters=drafters if run.not_covered_by else None,
        )
        return _train(run, started, learner, corpus)


def _train(
    run: DrafterRun, started: StartedRun, learner: DistillationLearner, corpus: TokenCorpus
) -> DrafterReport:
    """Measure, learn, measure again, and write."""
    held_out = corpus.held_out_batches(run.tokens_per_batch, learner.device)
    before = learner.compare(held_out)
    started.listener.note(f"before: {before}")
    # For the texts as they are learnt: their lengths decide how many batches an epoch has.
    settings = started.settings(DEFAULTS, corpus)
    trained = started.train(learner, corpus, settings, run_identity(run, corpus))
    after = learner.compare(held_out)
    gain = acceptance_gain(before.texts, after.texts)
    values = {field.name: getattr(trained, field.name) for field in dataclasses.fields(trained)}
    report = DrafterReport(**values, acceptance=gain, before=before, after=after)
    write_drafter_folder(learner.draft, run.draft, run.output, drafter_card(run, report))
    return report


def _read_corpus(run: DrafterRun, tokenizer: TargetTokenizer) -> TokenCorpus:
    """Return the data as tokens; prompts alone will do where no given answer is read."""
    answers_written = run.answers == "target" or run.loss.on_policy == 1.0
    need_answers = not (run.measured_on == "target" and answers_written)
    documents = read_documents(run.data, need_answers=need_answers)
    return encode_corpus(
        documents,
        tokenizer,
        max_length=run.max_length,
        held_out=min(run.held_out, run.most_held_out / len(documents)),
        seed=run.seed,
        need_answers=need_answers,
    )


def _ask_target(
    run: DrafterRun,
    corpus: TokenCorpus,
    target: HFModel,
    answers: AnswerSettings,
    listener: RunListener,
) -> TokenCorpus:
    """Let the target write the answers that are to be its own: those measured on, those learnt."""
    jobs: list[tuple[str, Sequence[int], AnswerSettings]] = []
    if run.measured_on == "target" and not corpus.measured_on_training:
        measured = dataclasses.replace(answers, temperature=run.measured_at)
        jobs.append(("the target answers held-out texts", corpus.held_out, measured))
    if run.answers == "target":
        jobs.append(("the target answers", corpus.training, answers))
    for what, numbers, settings in jobs:
        corpus = answered_by_target(
            corpus,
            target,
            numbers,
            settings,
            seed=run.seed,
            tokens_per_batch=run.tokens_per_batch,
            store=run.state_path.parent / "answers",
            identity=json.dumps(source_identity(run.target)),
            progress=lambda done, total, what=what: listener.stage(what, done, total),  # type: ignore[misc]
        )
    return corpus


def _need(run: DrafterRun, corpus: TokenCorpus, started: StartedRun) -> MemoryNeed:
    # Answers written anew may be longer than those given; and no batch has more than all there is.
    room = run.longest_answer if run.answers == "target" or run.loss.on_policy > 0 else 0
    most = sum(len(text) + room for text in corpus.sequences)
    tokens = min(max(run.tokens_per_batch, corpus.longest + room), most)
    return drafter_memory(run.target, run.draft, started.precision, tokens_per_batch=tokens)
