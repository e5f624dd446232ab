"""Make the embedded demo family: corpus, tokenizer, target, drafter, GGUF files, scores and model
card.

    python -m specrun.train.demo_family --work runs/demo --publish runtime/demo

Every stage is skipped when its output is there, and training continues from its last checkpoint, so
the same command may be stopped and started at will. Beside other work set OMP_WAIT_POLICY=PASSIVE:
threads that spin at every barrier take twice the processor time when the cores are shared.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from specrun.bindings.atomic import atomic_path
from specrun.convert import convert_checkpoint, quantize_model
from specrun.train.family.batches import ConversationTexts
from specrun.train.family.conversations import epoch_conversations
from specrun.train.family.corpus import Entry, build_corpus, read_corpus, write_corpus
from specrun.train.family.demo_card import (
    ModelFacts,
    Scores,
    draw_questions,
    measure_family,
    model_card,
    write_questions,
)
from specrun.train.family.llama import Llama, LlamaLearner, LlamaShape
from specrun.train.family.tokenizer import (
    load_tokenizer,
    save_folder,
    save_tokenizer_files,
    train_tokenizer,
)
from specrun.train.trainer.listener import TrainingStatus
from specrun.train.trainer.settings import TrainerSettings
from specrun.train.trainer.trainer import train_learner

logger = logging.getLogger(
    "specrun.train.demo_family"
)  # not "__main__", which `main` would not show

SEED = 0
SETTINGS = TrainerSettings(
    steps=1,  # each model has its own number
    learning_rate=0.01,
    tokens_per_batch=3072,
    warmup_steps=100,
    decay=0.5,
    betas=(0.9, 0.98),
    matrix_optimizer="muon",
    measure_every=500,
    seed=SEED,
)
TARGET_SHAPE = LlamaShape(num_layers=6, intermediate_size=1024)
DRAFTER_SHAPE = LlamaShape(num_layers=2, intermediate_size=1024)
SHIPPED = ("target.gguf", "drafter.gguf", "questions.jsonl", "MODEL_CARD.md")


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the family is made, how long its models are trained, and where its files go in the
    end."""

    work: Path
    target_steps: int
    drafter_steps: int
    device: str
    precision: str
    threads: int
    publish: Path | None
    notes: Path | None


def make_family(plan: Plan) -> Scores:
    """Run every stage that has not been run, and return the scores of the finished files."""
    torch.set_num_threads(plan.threads)
    entries = corpus_stage(plan)
    tokenizer = tokenizer_stage(plan, entries)
    models = [
        ("target", TARGET_SHAPE, plan.target_steps),
        ("drafter", DRAFTER_SHAPE, plan.drafter_steps),
    ]
    facts = []
    for name, shape, steps in models:
        model_stage(plan, name, shape, steps, entries, tokenizer)
        facts.append(gguf_stage(plan, name, shape))
    scores = score_stage(plan, entries)
    notes = "" if plan.notes is None else plan.notes.read_text(encoding="utf-8")
    card = model_card(
        entries,
        facts,
        scores,
        precision=plan.precision,
        device=plan.device,
        threads=plan.threads,
        notes=notes,
    )
    with atomic_path(plan.work / "MODEL_CARD.md", force=True) as aside:
        aside.write_text(card, encoding="utf-8")
    if plan.publish is not None:
        publish(plan.work, plan.publish)
    return scores


def corpus_stage(plan: Plan) -> list[Entry]:
    """Build the corpus once; a running family keeps its corpus even when Python is updated."""
    path = plan.work / "corpus.jsonl"
    if not path.exists():
        plan.work.mkdir(parents=True, exist_ok=True)
        write_corpus(build_corpus(), path)
    entries = read_corpus(path)
    logger.info("%d entries", len(entries))
    return entries


def tokenizer_stage(plan: Plan, entries: list[Entry]) -> Tokenizer:
    """Train the tokenizer on what two epochs say."""
    folder = plan.work / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(exist_ok=True)
        conversations = [
            c for epoch in range(2) for c in epoch_conversations(entries, random.Random(epoch))
        ]
        tokenizer = train_tokenizer(message["content"] for c in conversations for message in c)
        save_tokenizer_files(tokenizer, folder, TARGET_SHAPE.max_positions)
    return load_tokenizer(folder)


def model_stage(
    plan: Plan, name: str, shape: LlamaShape, steps: int, entries: list[Entry], tokenizer: Tokenizer
) -> None:
    """Train one model and save its folder."""
    folder = plan.work / name
    if (folder / "model.safetensors").exists():
        return
    model = Llama(shape, SEED).to(plan.device)
    texts = ConversationTexts(entries, tokenizer, SEED)
    settings = replace(SETTINGS, steps=steps, precision=getattr(torch, plan.precision))
    state_path = plan.work / f"{name}.pt"
    result = train_learner(
        LlamaLearner(model),
        texts,
        settings,
        state_path,
        resume=state_path.exists(),
        identity={"kind": f"demo {name}"},
        report=report,
    )
    progress = {
        "step": len(result.curves.losses),
        "tokens": result.tokens,
        "seconds": result.seconds,
    }
    (plan.work / f"{name}.json").write_text(json.dumps(progress) + "\n", encoding="utf-8")
    save_folder(model, tokenizer, folder)


def report(status: TrainingStatus) -> None:
    """Log the smoothed loss, now and then."""
    if status.step % 50 == 0:
        logger.info("step %d of %d, loss %.4f", status.step, status.steps, status.loss)


def gguf_stage(plan: Plan, name: str, shape: LlamaShape) -> ModelFacts:
    """Convert one model's folder and quantize it to Q8_0."""
    path = plan.work / f"{name}.gguf"
    if not path.exists():
        full = plan.work / f"{name}-f32.gguf"
        convert_checkpoint(plan.work / name, full, outtype="f32", force=True)
        quantize_model(full, path, "Q8_0", force=True)
    progress = json.loads((plan.work / f"{name}.json").read_text(encoding="utf-8"))
    return ModelFacts(
        name, shape, progress["step"], progress["tokens"], progress["seconds"], path.stat().st_size
    )


def score_stage(plan: Plan, entries: list[Entry]) -> Scores:
    """Write the questions and measure the finished pair on them."""
    questions = draw_questions(entries)
    write_questions(questions, plan.work / "questions.jsonl")
    scores = measure_family(
        plan.work / "target.gguf", plan.work / "drafter.gguf", questions, plan.threads
    )
    logger.info(
        "exact %.3f, mean accepted length %.3f, acceptance rate %.3f, same text %.3f",
        scores.exact,
        scores.mean_accepted_length,
        scores.acceptance_rate,
        scores.same_text,
    )
    for question, text in scores.wrong:
        logger.info("wrong: %s -> %s", question, text)
    return scores


def publish(work: Path, folder: Path) -> None:
    """Copy the finished files, each whole or not at all."""
    for name in SHIPPED:
        with atomic_path(folder / name, force=True) as aside:
            shutil.copyfile(work / name, aside)


def parse_plan(arguments: list[str] | None = None) -> Plan:
    """The plan of a command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--work", type=Path, default=Path("runs/demo"), help="folder of all stages' outputs"
    )
    parser.add_argument("--publish", type=Path, help="folder to copy the finished files into")
    parser.add_argument(
        "--notes", type=Path, help="text for the model card on what was particular this time"
    )
    parser.add_argument("--target-steps", type=int, default=4050)
    parser.add_argument("--drafter-steps", type=int, default=2500)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help=(
            "bfloat16 is twice as fast where the processor has it, and kills Python where it "
            "only claims to"
        ),
    )
    options = parser.parse_args(arguments)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Plan(
        work=options.work,
        target_steps=options.target_steps,
        drafter_steps=options.drafter_steps,
        device=device,
        precision=options.precision,
        threads=options.threads,
        publish=options.publish,
        notes=options.notes,
    )


def main() -> None:
    """Make the family from the command line."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("specrun.train").setLevel(
        logging.INFO
    )  # llama.cpp's own lines would drown the losses
    # Batches come in hundreds of sizes; oneDNN keeps megabytes for each of the last thousand it has
    # seen.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    plan = parse_plan()
    make_family(plan)


if __name__ == "__main__":
    main()
