"""Distils a drafter from data to files: read, compare, ask the target, learn, measure, write.

The folder of a run holds the drafter (config.json, tokenizer files, weights, README.md) and
`training/` with the checkpoint, the curves, and the answers that the target wrote.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from specrun.train.data.data_file import read_documents
from specrun.train.data.target_tokens import TargetTokenizer
from specrun.train.data.token_corpus import TokenCorpus, encode_corpus
from specrun.train.distillation.acceptance import acceptance_gain
from specrun.train.distillation.answers import (
    AnswerSettings,
    answered_by_target,
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
from specrun.train.target.hf_model import HFModel, load_hf_model
from specrun.train.target.sampling import end_tokens
from specrun.train.target.target_shape import source_identity
from specrun.train.trainer.listener import RunListener
from specrun.train.trainer.memory import MemoryNeed
from specrun.train.trainer.run import StartedRun


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
