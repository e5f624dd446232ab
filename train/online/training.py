"""A drafter that learns from a buffer of rejected drafts, from files to files.

What `specrun chat --learn` does between answers, as a training run: with a checkpoint, curves, and
as many steps as wanted. The target is not needed: the buffer has its laws.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.bindings.errors import FileMissingError, PairError
from specrun.bindings.models.model import Model
from specrun.runtime.online import BufferKey, RejectionBuffer, load_rejections
from specrun.train.distillation.acceptance import MeasuredAcceptance
from specrun.train.distillation.drafter_folder import write_drafter_folder
from specrun.train.online.drafter_file import check_drafter, load_drafter, write_drafter
from specrun.train.online.learner import OnlineLearner, online_corpus, online_memory, usual_rate
from specrun.train.target.hf_model import HFModel, load_hf_model, read_config
from specrun.train.target.target_shape import source_digest
from specrun.train.trainer.listener import RunListener
from specrun.train.trainer.model_folder import model_card, table_lines, training_lines
from specrun.train.trainer.run import StartedRun, TrainingReport, TrainingRun
from specrun.train.trainer.settings import TrainingDefaults

GGUF_NAME, WEIGHTS_NAME = "drafter.gguf", "model.safetensors"
"""What a finished run leaves: of a GGUF file one of the same form, of a folder a folder."""

_MOST_MISSING = 128  # tokens by which vocabularies of a family may differ
_ALL = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineRun(TrainingRun):
    """A run that teaches `draft`, a GGUF file or a Hugging Face folder, what `buffer` holds.

    `target` is only the name of the model that the buffer tells of, and `data` are none. A GGUF
    file is also written as `gguf`, where that is given.
    """

    draft: Path
    buffer: Path
    divergence: str = "forward-kl"
    gguf: Path | None = None


@dataclass(frozen=True, slots=True)
class OnlineReport(TrainingReport):
    """`before` and `after`: alpha at the rejected places of texts that were not learnt.

    `n_places` is how many rejected drafts there were in all; `gguf` is the file that was written,
    where the drafter is one.
    """

    before: MeasuredAcceptance
    after: MeasuredAcceptance
    n_places: int
    gguf: Path | None


def train_online(run: OnlineRun, listener: RunListener | None = None) -> OnlineReport:
    """Let a drafter learn from a buffer, and write it into the run's folder.

    Raises as `load_rejections`, PairError for a drafter of another vocabulary than the buffer's,
    UnsupportedModelError for a GGUF file that cannot be read back, OutOfMemoryError, and as
    checkpoints do.
    """
    is_file = run.draft.is_file()
    holds = GGUF_NAME if is_file else WEIGHTS_NAME
    started = StartedRun(run, holds, listener, () if is_file else (run.draft,))
    buffer = RejectionBuffer(most_bytes=_ALL)
    key = load_rejections(run.buffer, None, buffer)
    _check_vocabulary(run.draft, key)
    corpus, places = online_corpus(list(buffer), max_length=run.max_length)
    started.listener.note(
        f"{len(corpus.sequences):,} answers of {key.name} with {buffer.n_places:,} rejected drafts"
    )
    if is_file:
        check_drafter(run.draft)
        draft = load_drafter(run.draft, started.device)
    else:
        draft = load_hf_model(run.draft, started.device)
    usual = TrainingDefaults(usual_rate(draft.config), betas=(0.9, 0.95), clip_norm=1.0)
    settings = started.settings(usual, corpus)
    identity = {
        "kind": "online drafter",
        "divergence": run.divergence,
        "data": corpus.digest[:16],
        "laws": _laws_digest(buffer),
        "drafter": source_digest(run.draft),
    }
    started.check_same(settings, identity)
    learner = OnlineLearner(draft, places, run.divergence)
    need = online_memory(learner, places, run.tokens_per_batch)
    started.require_memory(need, advice="lower --batch-tokens, or use a smaller drafter")
    started.open_output()
    held_out = corpus.held_out_batches(run.tokens_per_batch, started.device)
    before = learner.acceptance(held_out)
    started.listener.note(f"before: alpha {before.rate:.4f} where drafts were rejected")
    trained = started.train(learner, corpus, settings, identity)
    after = learner.acceptance(held_out)
    values = {field.name: getattr(trained, field.name) for field in dataclasses.fields(trained)}
    gguf = run.output / GGUF_NAME if is_file else None
    report = OnlineReport(**values, before=before, after=after, n_places=buffer.n_places, gguf=gguf)
    _write(run, draft, report, key)
    return report


def _write(run: OnlineRun, draft: HFModel, report: OnlineReport, key: BufferKey) -> None:
    card = _card(run, report, key)
    if report.gguf is None:
        write_drafter_folder(draft, run.draft, run.output, card)
        return
    (run.output / "README.md").write_text(card, encoding="utf-8")
    write_drafter(draft, run.draft, report.gguf)
    if run.gguf is not None:
        write_drafter(draft, run.draft, run.gguf)


def _check_vocabulary(draft: Path, key: BufferKey) -> None:
    """Raise PairError where the buffer's token ids mean nothing to the drafter."""
    if not draft.exists():
        raise FileMissingError(f"there is no file or folder {draft}")
    fingerprint: str | None = None
    if draft.is_file():
        with Model(draft, vocab_only=True) as model:
            size, fingerprint = model.vocabulary.size, model.vocabulary.fingerprint.hex()
    else:
        size = int(read_config(draft).get("vocab_size", 0))
    same_size = size == key.n_tokens
    if abs(size - key.n_tokens) > _MOST_MISSING or (
        same_size and fingerprint not in (None, key.vocabulary)
    ):
        raise PairError(
            f"{draft} has another vocabulary ({size} tokens) than {key.name} ({key.n_tokens}), "
            "whose rejected drafts these are: give a drafter of the same family"
        )


def _laws_digest(buffer: RejectionBuffer) -> str:
    found = hashlib.sha256()
    for answer in buffer:
        found.update(answer.laws.ids.tobytes() + answer.laws.log_probs.tobytes())
    return found.hexdigest()[:16]


def _card(run: OnlineRun, report: OnlineReport, key: BufferKey) -> str:
    draft, losses = run.draft.resolve().name, report.result.curves.losses
    settings: dict[str, Any] = {
        "divergence": run.divergence,
        "tokens per batch": run.tokens_per_batch,
        "longest text": run.max_length,
        "seed": run.seed,
    }
    texts = "the texts learnt" if report.measured_on_training else "texts that were not learnt"
    fell = f"{run.divergence} {losses[0]:.4f} at first, {losses[-1]:.4f} at last."
    rates = f"{report.before.rate:.4f} | {report.after.rate:.4f}"
    return model_card(
        f"{draft}, which learnt from what {key.name} rejected",
        tags="draft-model, online-speculative-decoding",
        base_model=draft,
        made="Made by `specrun train drafter --online` (online speculative decoding, Liu et al. "
        f"2023): {report.n_trained:,} parameters. Verification keeps the target's own tokens or "
        "distribution whatever it drafts.",
        sections={
            "Data": [
                f"{report.n_places:,} rejected drafts of {key.name} (hash {key.model[:12]}). They "
                "are of a user's own texts."
            ],
            "Training": training_lines(report, fell, settings),
            "Acceptance rate": [
                f"Alpha at temperature 1 at rejected places of {texts}:",
                "",
                *table_lines("| | before | after |", {"alpha": rates}),
            ],
        },
        commands=(f"specrun chat -m {key.name} -md {GGUF_NAME}",),
    )
