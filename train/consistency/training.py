"""Consistency training from data to a new target: ask, collect, learn, measure, write.

The folder of a run is a whole model: a *new* target, which says what it says itself, not what the
old one said. `training/` in it has the checkpoint and the trajectories.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.bindings.errors import OptionError
from specrun.convert.checkpoint import open_checkpoint
from specrun.train.consistency.learner import ConsistencyLearner, ConsistencyRecipe
from specrun.train.consistency.trajectories import (
    Trajectory,
    collect_trajectories,
    prompts_of,
    tokens_per_iteration,
)
from specrun.train.data.answers import runnable_target
from specrun.train.data.corpus import TokenCorpus, corpus_of
from specrun.train.data.documents import read_documents
from specrun.train.data.tokens import TargetTokenizer, TokenSequence
from specrun.train.distillation.drafter import write_drafter_folder
from specrun.train.target.hf_model import load_hf_model
from specrun.train.target.shape import ModelShape, source_digest, source_identity, target_shape
from specrun.train.trainer.learner import RunListener
from specrun.train.trainer.memory import MemoryNeed
from specrun.train.trainer.model_folder import model_card, training_lines
from specrun.train.trainer.run import StartedRun, TrainingReport, TrainingRun
from specrun.train.trainer.settings import TrainingDefaults

WEIGHTS_NAME = "model.safetensors"
"""The file that a finished run leaves."""

DEFAULTS = TrainingDefaults(learning_rate=2e-5, betas=(0.9, 0.999), clip_norm=1.0)
"""The rate is the paper's, for models of 7B; narrower ones bear more."""

_MOST_DECODED = 64  # held-out prompts that are answered anew, before and after


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsistencyRun(TrainingRun):
    """A run that trains a target along its Jacobi trajectories; the data's prompts are its own.

    Answers have at most `answer_length` tokens; those of the data are not read.
    """

    recipe: ConsistencyRecipe = dataclasses.field(default_factory=ConsistencyRecipe)
    answer_length: int = 256

    def __post_init__(self) -> None:
        TrainingRun.__post_init__(self)  # super() does not know a class with slots
        if self.answer_length < 2:
            raise OptionError(f"answers of {self.answer_length} tokens: give at least 2")


@dataclass(frozen=True, slots=True)
class ConsistencyReport(TrainingReport):
    """`before` and `after`: tokens of greedy answers per evaluation, with jacobi(n=block).

    They are of `n_decoded` held-out prompts, whose answers are now `same_answers` times the same
    tokens as before.
    """

    before: float
    after: float
    n_decoded: int
    same_answers: int


def train_consistency(
    run: ConsistencyRun, listener: RunListener | None = None
) -> ConsistencyReport:
    """Train a copy of the target along its trajectories and write it; the target's folder stays.

    Raises ModelError for data that ask nothing, OutOfMemoryError with an estimate before anything
    is loaded, and as reading data, models and checkpoints does.
    """
    started = StartedRun(run, WEIGHTS_NAME, listener, (run.target,))
    shape, tokenizer = target_shape(run.target), TargetTokenizer(run.target)
    documents = read_documents(run.data, need_answers=False)
    prompts = prompts_of(documents, tokenizer, run.max_length)
    advice = "lower --batch-tokens, or use a smaller target"
    started.require_memory(_need(run, shape), advice=advice)
    started.open_output()
    found = _collected(run, started, run.target, prompts, "trajectories")
    corpus = _corpus(run, found)
    started.note_texts(corpus)
    settings = started.settings(DEFAULTS, corpus)
    identity = _identity(run, corpus)
    started.check_same(settings, identity)
    decoded = [found[number] for number in corpus.held_out[:_MOST_DECODED]]
    before = tokens_per_iteration(decoded)
    started.listener.note(f"before: {before:.3f} tokens per iteration, {run.recipe.block} guessed")
    model = load_hf_model(run.target, started.device)
    learner = ConsistencyLearner(run.recipe, model, found)
    trained = started.train(learner, corpus, settings, identity)
    values = {field.name: getattr(trained, field.name) for field in dataclasses.fields(trained)}
    # Written first: what is measured is the folder that was made, and a long run is safe then.
    partial = ConsistencyReport(
        **values, before=before, after=math.nan, n_decoded=0, same_answers=0
    )
    write_drafter_folder(model, run.target, run.output, _card(run, partial))
    again = _collected(
        run, started, run.output, [each.ids[: each.n_prompt].tolist() for each in decoded], "after"
    )
    same = sum(
        new.ids.tolist() == old.ids.tolist() for new, old in zip(again, decoded, strict=True)
    )
    report = dataclasses.replace(
        partial, after=tokens_per_iteration(again), n_decoded=len(decoded), same_answers=same
    )
    (run.output / "README.md").write_text(_card(run, report), encoding="utf-8")
    return report


def _collected(
    run: ConsistencyRun,
    started: StartedRun,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    name: str,
) -> list[Trajectory]:
    """Let a folder's model answer prompts by Jacobi decoding; keep what came."""
    place = run.state_path.parent
    place.mkdir(parents=True, exist_ok=True)
    what = "the target answers" if name == "trajectories" else "the new target answers"
    return collect_trajectories(
        runnable_target(folder, place, started.listener.note),
        prompts,
        place / f"{name}.jsonl",
        identity=source_identity(folder),
        block=run.recipe.block,
        longest=run.answer_length,
        max_length=run.max_length,
        n_threads=run.n_threads,
        progress=lambda done, total: started.listener.stage(what, done, total),
    )


def _corpus(run: ConsistencyRun, found: Sequence[Trajectory]) -> TokenCorpus:
    """Return the answers as texts to learn; batches have room for the blocks behind them."""
    texts = [TokenSequence.of(each.ids.tolist(), each.n_prompt) for each in found]
    corpus = corpus_of(texts, held_out=run.held_out, seed=run.seed)
    recipe = run.recipe
    blocks = recipe.states * (2 if recipe.form == "local" else 1)
    widths = tuple(len(text) + blocks * recipe.block for text in texts)
    return dataclasses.replace(corpus, widths=widths)


def _identity(run: ConsistencyRun, corpus: TokenCorpus) -> dict[str, Any]:
    recipe = {f"consistency {k}": v for k, v in dataclasses.asdict(run.recipe).items()}
    return {
        "kind": "consistency",
        **recipe,
        "answer length": run.answer_length,
        "data": corpus.digest[:16],
        "target": source_digest(run.target),
    }


def _need(run: ConsistencyRun, shape: ModelShape) -> MemoryNeed:
    """Return what is needed: 16 bytes for a trained number, and what a step keeps."""
    tensors = open_checkpoint(run.target).tensors.values()
    tokens, longest = run.tokens_per_batch, run.max_length
    layers = shape.n_layers * (24 * shape.hidden + 6 * shape.feed_forward)
    attention = shape.n_layers * 2 * shape.n_heads * min(longest, tokens)
    return MemoryNeed(
        {
            "target": 16 * sum(math.prod(tensor.shape) for tensor in tensors),
            "a step": 4 * tokens * (layers + attention + 6 * shape.vocab_size),
        },
        {
            "target": "use a smaller target",
            "a step": "lower --batch-tokens or --max-length",
        },
    )


def _card(run: ConsistencyRun, report: ConsistencyReport) -> str:
    target, block = run.target.resolve().name, run.recipe.block
    losses = report.result.curves.losses
    settings = {
        **dataclasses.asdict(run.recipe),
        "longest answer": run.answer_length,
        "tokens per batch": run.tokens_per_batch,
        "seed": run.seed,
        "precision": report.precision,
    }
    speed = f"{report.before:.3f} before, {report.after:.3f} after"
    return model_card(
        f"{target}, trained for Jacobi decoding",
        tags="jacobi, consistency-llm",
        base_model=target,
        made=f"**A new model, not {target}.** Made by `specrun train consistency` (CLLM, Kou et "
        f"al. 2024): {report.n_trained:,} trained parameters. It says what it says itself: "
        f"verification keeps the tokens of this model, not those of {target}.",
        sections={
            "Data": [
                f"{', '.join(path.name for path in run.data)}: {report.n_sequences:,} prompts, "
                f"answered by {target}. The licences of the data and of {target} apply."
            ],
            "Training": training_lines(
                report, f"the loss fell from {losses[0]:.4f} to {losses[-1]:.4f}.", settings
            ),
            "Tokens per iteration": [
                f"{speed}, with jacobi(n={block}) at temperature 0 on {report.n_decoded} held-out "
                f"prompts, {report.same_answers} of which have the same answer as before."
            ],
        },
        commands=(
            "specrun convert FOLDER -o target.gguf",
            f'specrun chat -m target.gguf --drafter "jacobi(n={block})" --temp 0',
        ),
    )
