"""Make the embedded demo family: corpus, tokenizer, models, GGUF files, scores and model card.

    python tools/family models --work runs/demo --publish runtime/demo

Every stage is skipped when its output is there, and training continues from its last checkpoint, so
the same command may be stopped and started at will. Beside other work set OMP_WAIT_POLICY=PASSIVE:
threads that spin at every barrier take twice the processor time when the cores are shared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from family.conversations import ConversationTexts, epoch_conversations
from family.demo_card import (
    ModelFacts,
    Scores,
    draw_questions,
    measure_family,
    model_card,
    write_questions,
)
from family.llama import Llama, LlamaLearner
from family.tokenizer import (
    load_tokenizer,
    save_folder,
    save_tokenizer_files,
    train_tokenizer,
)
from specrun.bench.drafters.corpus import Entry, build_corpus
from specrun.bindings.files import atomic_path
from specrun.convert import convert_checkpoint, quantize_model
from specrun.train.target.shape import ModelShape
from specrun.train.trainer import TrainingStatus, usable_device
from specrun.train.trainer.model_folder import write_json, write_text
from specrun.train.trainer.settings import TrainerSettings
from specrun.train.trainer.trainer import train_learner

logger = logging.getLogger(__name__)

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
# Widths must be divisible by 256 for K-quants.
_WIDTHS = {"hidden": 256, "n_heads": 4, "n_kv_heads": 4, "feed_forward": 1024, "vocab_size": 4096}
TARGET_SHAPE = ModelShape(n_layers=6, **_WIDTHS)
DRAFTER_SHAPE = ModelShape(n_layers=2, **_WIDTHS)
SHIPPED = ("target.gguf", "drafter.gguf", "questions.jsonl", "MODEL_CARD.md")


@dataclass(frozen=True, slots=True)
class Plan:
    """The folder where the family is made, the steps of its models, and where its files go."""

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
    target = ("target", TARGET_SHAPE, plan.target_steps)
    drafter = ("drafter", DRAFTER_SHAPE, plan.drafter_steps)
    facts = []
    for name, shape, steps in (target, drafter):
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
    write_text(plan.work / "MODEL_CARD.md", card)
    if plan.publish is not None:
        publish({name: plan.work / name for name in SHIPPED}, plan.publish)
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


def write_corpus(entries: list[Entry], path: Path) -> None:
    """Write one JSON object a line."""
    lines = [json.dumps(asdict(entry)) + "\n" for entry in entries]
    path.write_text("".join(lines), encoding="utf-8")


def read_corpus(path: Path) -> list[Entry]:
    """Read what `write_corpus` wrote."""
    return [Entry(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def tokenizer_stage(plan: Plan, entries: list[Entry]) -> Tokenizer:
    """Train the tokenizer on what two epochs say."""
    folder = plan.work / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(exist_ok=True)
        epochs = [epoch_conversations(entries, random.Random(epoch)) for epoch in range(2)]
        chats = itertools.chain.from_iterable(epochs)
        tokenizer = train_tokenizer(message["content"] for chat in chats for message in chat)
        save_tokenizer_files(tokenizer, folder, TARGET_SHAPE.max_positions)
    return load_tokenizer(folder)


def model_stage(
    plan: Plan, name: str, shape: ModelShape, steps: int, entries: list[Entry], tokenizer: Tokenizer
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
    steps_done = len(result.curves.losses)
    progress = {"step": steps_done, "tokens": result.tokens, "seconds": result.seconds}
    write_json(plan.work / f"{name}.json", progress)
    save_folder(model, tokenizer, folder)


def report(status: TrainingStatus) -> None:
    """Log the smoothed loss, now and then."""
    if status.step % 50 == 0:
        logger.info("step %d of %d, loss %.4f", status.step, status.steps, status.loss)


def gguf_stage(plan: Plan, name: str, shape: ModelShape) -> ModelFacts:
    """Convert one model's folder and quantize it to Q8_0."""
    path = plan.work / f"{name}.gguf"
    if not path.exists():
        full = plan.work / f"{name}-f32.gguf"
        convert_checkpoint(plan.work / name, full, outtype="f32", force=True)
        quantize_model(full, path, "Q8_0", force=True)
    progress = json.loads((plan.work / f"{name}.json").read_text(encoding="utf-8"))
    spent = (progress["step"], progress["tokens"], progress["seconds"])
    return ModelFacts(name, shape, *spent, n_bytes=path.stat().st_size)


def score_stage(plan: Plan, entries: list[Entry]) -> Scores:
    """Write the questions and measure the finished pair on them."""
    questions = draw_questions(entries)
    write_questions(questions, plan.work / "questions.jsonl")
    target, drafter = (plan.work / f"{name}.gguf" for name in ("target", "drafter"))
    scores = measure_family(target, drafter, questions, plan.threads)
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


def publish(files: Mapping[str, Path], folder: Path) -> None:
    """Copy finished files under their names, each whole or not at all."""
    for name, path in files.items():
        with atomic_path(folder / name, force=True) as aside:
            shutil.copyfile(path, aside)


def plan_parser(name: str, description: str | None, work: str) -> argparse.ArgumentParser:
    """Return a parser of the options that families and heads share."""
    parser = argparse.ArgumentParser(
        prog=f"python tools/family {name}", description=(description or "").partition("\n")[0]
    )
    parser.add_argument("--work", type=Path, default=Path(work), help="folder of all outputs")
    parser.add_argument("--publish", type=Path, help="folder to copy the finished files into")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser


def log_to_terminal() -> None:
    """Show what training logs; llama.cpp's own lines would drown the losses."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    for name in ("specrun.train", "family"):
        logging.getLogger(name).setLevel(logging.INFO)
    # Batches come in hundreds of sizes; oneDNN keeps megabytes for each of the last thousand.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")


def parse_plan(arguments: list[str]) -> Plan:
    """The plan of a command line."""
    parser = plan_parser("models", __doc__, "runs/demo")
    notes = "text for the model card on what was particular this time"
    parser.add_argument("--notes", type=Path, help=notes)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--target-steps", type=int, default=4050)
    parser.add_argument("--drafter-steps", type=int, default=2500)
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="bfloat16 is twice as fast where the processor has it, and kills Python where it "
        "only claims to",
    )
    options = vars(parser.parse_args(arguments))
    return Plan(**{**options, "device": str(usable_device(options["device"]))})


def main(arguments: list[str]) -> None:
    """Make the family from the command line."""
    log_to_terminal()
    make_family(parse_plan(arguments))
