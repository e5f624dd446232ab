"""Make the embedded demo family: corpus, tokenizer, target, drafter, GGUF files, scores and model card.

    python -m specrun.train.demo_family --work runs/demo --target-steps 4500 --drafter-steps 3000

Every stage is skipped when its output is there, and training continues from its last checkpoint, so the same
command may be stopped and started at will.
"""

from __future__ import annotations

import argparse
import logging
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from specrun.train.batches import Batch, epoch_batches
from specrun.train.checkpoint import save_folder
from specrun.train.conversations import epoch_conversations
from specrun.train.corpus import Entry, build_corpus, read_corpus, sample_entries, write_corpus
from specrun.train.llama import Llama, LlamaShape
from specrun.train.loop import LoopSettings, train
from specrun.train.recall import measure_recall
from specrun.train.tokenizer import save_tokenizer_files, train_tokenizer
from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

SEED = 0
TOKENS_PER_BATCH = 3072
TARGET_SHAPE = LlamaShape(num_layers=6, intermediate_size=1024)
DRAFTER_SHAPE = LlamaShape(num_layers=2, intermediate_size=1024)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the family is made and how long its models are trained."""

    work: Path
    target_steps: int
    drafter_steps: int
    device: str
    precision: torch.dtype


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
    path = plan.work / "tokenizer" / "tokenizer.json"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        conversations = [c for epoch in range(2) for c in epoch_conversations(entries, random.Random(epoch))]
        tokenizer = train_tokenizer(message["content"] for c in conversations for message in c)
        save_tokenizer_files(tokenizer, path.parent, TARGET_SHAPE.max_positions)
    return Tokenizer.from_file(str(path))


def model_stage(
    plan: Plan, name: str, shape: LlamaShape, steps: int, entries: list[Entry], tokenizer: Tokenizer
) -> Path:
    """Train one model and save its folder."""
    folder = plan.work / name
    if (folder / "model.safetensors").exists():
        return folder
    torch.manual_seed(SEED)
    model = Llama(shape, SEED).to(plan.device)
    probe = sample_entries(entries, 400, seed=1)

    def batches(epoch: int) -> list[Batch]:
        return epoch_batches(entries, tokenizer, epoch, SEED, TOKENS_PER_BATCH)

    def report(epoch: int) -> None:
        if epoch % 5 == 4:
            recall = measure_recall(model, probe, tokenizer)
            logger.info("%s: epoch %d, exact %.3f, tokens %.3f", name, epoch + 1, recall.exact, recall.tokens)

    settings = LoopSettings(steps=steps, precision=plan.precision)
    train(model, batches, settings, plan.work / f"{name}.pt", report)
    save_folder(model, tokenizer, folder)
    return folder


def make_family(plan: Plan) -> None:
    """Run every stage that has not been run."""
    entries = corpus_stage(plan)
    tokenizer = tokenizer_stage(plan, entries)
    model_stage(plan, "target", TARGET_SHAPE, plan.target_steps, entries, tokenizer)
    model_stage(plan, "drafter", DRAFTER_SHAPE, plan.drafter_steps, entries, tokenizer)


def parse_plan(arguments: list[str] | None = None) -> Plan:
    """The plan of a command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("runs/demo"))
    parser.add_argument("--target-steps", type=int, default=4500)
    parser.add_argument("--drafter-steps", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Plan(
        options.work, options.target_steps, options.drafter_steps, device, getattr(torch, options.precision)
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    make_family(parse_plan())
