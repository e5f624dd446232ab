"""Distils a drafter from data to files: read, compare, ask the target, learn, measure, write, in
this order.

The folder of a run holds the drafter (config.json, tokenizer files, weights, README.md) and
`training/` with the checkpoint, the curves, and the answers that the target wrote.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import torch

from specrun.train.data.data_file import read_documents
from specrun.train.data.target_tokens import TargetTokenizer
from specrun.train.data.token_corpus import TokenCorpus, encode_corpus
from specrun.train.distillation.acceptance import acceptance_gain
from specrun.train.distillation.answers import (
    AnswerSettings,
    answered_by_target,
    end_tokens,
    with_room_for_answers,
)
from specrun.train.distillation.coverage import ExistingDrafters
from specrun.train.distillation.drafter_folder import drafter_card, write_drafter_folder
from specrun.train.distillation.drafter_run import (
    DEFAULTS,
    WEIGHTS_NAME,
    DrafterReport,
    DrafterRun,
    drafter_memory,
    run_identity,
)
from specrun.train.distillation.learner import DistillationLearner
from specrun.train.distillation.vocabularies import check_same_vocabulary, folder_vocabulary
from specrun.train.heads.folder import check_output, open_output
from specrun.train.target.hf_model import HFModel, load_hf_model
from specrun.train.target.target_shape import source_identity
from specrun.train.trainer.listener import NobodyListens, RunListener
from specrun.train.trainer.memory import require_memory
from specrun.train.trainer.precision import device_name, usable_device, usable_precision
from specrun.train.trainer.run_checkpoint import earlier_run
from specrun.train.trainer.settings import TrainerSettings
from specrun.train.trainer.trainer import train_learner


def train_drafter(run: DrafterRun, listener: RunListener | None = None) -> DrafterReport:
    """Distil a drafter and write its folder.

    Raises PairError if its vocabulary, or that of a drafter in `not_covered_by`, is not the
    target's; OutOfMemoryError with an estimate before anything is loaded; and as reading data,
    models and checkpoints does.
    """
    listener = listener or NobodyListens()
    if run.n_threads:
        torch.set_num_threads(run.n_threads)
    check_output(run, holds=WEIGHTS_NAME, reads=(run.target, run.draft))
    target_vocabulary = folder_vocabulary(run.target)
    n_shared = check_same_vocabulary(target_vocabulary, folder_vocabulary(run.draft))
    tokenizer = TargetTokenizer(run.target)
    corpus = _read_corpus(run, tokenizer, listener)
    device = usable_device(run.device)
    earlier = earlier_run(run.state_path, resume=run.resume)
    settings = run.trainer_settings(
        DEFAULTS, corpus, usable_precision(run.precision, device, earlier.precision)
    )
    _require_memory(run, corpus, settings, device, listener)
    # Before anything is written: their vocabulary may not be the target's.
    with ExistingDrafters(
        run.not_covered_by, target_vocabulary, n_ctx=run.max_length, n_threads=run.n_threads
    ) as drafters:
        open_output(run, holds=WEIGHTS_NAME)
        target, draft = (
            load_hf_model(run.target, device, settings.precision),
            load_hf_model(run.draft, device),
        )
        answers = AnswerSettings(
            temperature=run.loss.temperature,
            n_longest=run.longest_answer,
            max_length=run.max_length,
            end_ids=end_tokens(target, tokenizer.eos),
            vocab_size=n_shared,
        )
        corpus = _ask_target(run, corpus, target, answers, listener)
        corpus = with_room_for_answers(corpus, answers, run.loss.on_policy)
        # Again, for the texts as they will be learnt: their lengths decide how many batches an
        # epoch has.
        settings = run.trainer_settings(DEFAULTS, corpus, settings.precision)
        learner = DistillationLearner(
            target,
            draft,
            run.loss,
            answers,
            n_shared=n_shared,
            measured_at=run.measured_at,
            drafters=drafters if run.not_covered_by else None,
        )
        return _train(run, learner, corpus, settings, listener)


def _train(
    run: DrafterRun,
    learner: DistillationLearner,
    corpus: TokenCorpus,
    settings: TrainerSettings,
    listener: RunListener,
) -> DrafterReport:
    """Measure, learn, measure again, and write."""
    held_out = corpus.held_out_batches(run.tokens_per_batch, learner.device)
    before = learner.compare(held_out)
    listener.note(f"before: {before}")
    result = train_learner(
        learner,
        corpus,
        settings,
        run.state_path,
        resume=run.resume,
        identity=run_identity(run, corpus),
        report=listener.status,
    )
    after = learner.compare(held_out)
    report = DrafterReport(
        output=run.output,
        acceptance=acceptance_gain(before.texts, after.texts),
        before=before,
        after=after,
        result=result,
        n_trained=learner.n_trained,
        n_sequences=len(corpus.training),
        measured_on_training=corpus.measured_on_training,
        precision=settings.precision_name,
        device=device_name(learner.device),
    )
    write_drafter_folder(learner.draft, run.draft, run.output, drafter_card(run, report))
    return report


# -- data ------------------------------------------------------------------------------------------


def _read_corpus(run: DrafterRun, tokenizer: TargetTokenizer, listener: RunListener) -> TokenCorpus:
    """Return the data as tokens; prompts without answers will do where none of the given answers is
    read."""
    need_answers = not (
        run.measured_on == "target" and (run.answers == "target" or run.loss.on_policy == 1.0)
    )
    documents = read_documents(run.data, need_answers=need_answers)
    corpus = encode_corpus(
        documents,
        tokenizer,
        max_length=run.max_length,
        held_out=min(run.held_out, run.most_held_out / len(documents)),
        seed=run.seed,
        need_answers=need_answers,
    )
    aside = "none" if corpus.measured_on_training else f"{len(corpus.held_out):,}"
    listener.note(
        f"{len(corpus.training):,} sequences of {corpus.n_tokens:,} tokens to train on, {aside} "
        "held out"
    )
    return corpus


def _ask_target(
    run: DrafterRun,
    corpus: TokenCorpus,
    target: HFModel,
    answers: AnswerSettings,
    listener: RunListener,
) -> TokenCorpus:
    """Let the target write the answers that are to be its own: those measured on, those learnt
    on."""
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
            store=run.output / "training" / "answers",
            identity=json.dumps(source_identity(run.target)),
            progress=lambda done, total, what=what: listener.stage(what, done, total),  # type: ignore[misc]
        )
    return corpus


# -- the run ---------------------------------------------------------------------------------------


def _require_memory(
    run: DrafterRun,
    corpus: TokenCorpus,
    settings: TrainerSettings,
    device: torch.device,
    listener: RunListener,
) -> None:
    # Answers written anew may be longer than those given; and no batch has more than all there is.
    room = run.longest_answer if run.answers == "target" or run.loss.on_policy > 0 else 0
    most = sum(len(text) + room for text in corpus.sequences)
    tokens = min(max(settings.tokens_per_batch, corpus.longest + room), most)
    need = drafter_memory(run.target, run.draft, settings.precision, tokens_per_batch=tokens)
    listener.note(f"memory: about {need}")
    require_memory(need, device, advice="lower --batch-tokens, or use smaller models")
