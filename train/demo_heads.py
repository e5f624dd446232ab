"""Train what drafts for the embedded target: Medusa, EAGLE and EAGLE-3 heads, and a distilled
drafter.

    python -m specrun.train.demo_heads --work runs/demo-heads --publish runtime/demo

The target is read back from its GGUF file, so that heads learn from what is run. Every stage is
skipped when its output is there, and training goes on from its last checkpoint, so the same command
may be stopped and started at will. Beside other work set OMP_WAIT_POLICY=PASSIVE: threads that spin
at every barrier take twice the processor time.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.bindings.atomic import atomic_path
from specrun.bindings.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.model import Model
from specrun.convert import convert_checkpoint
from specrun.convert.heads.head_accuracy import store_accuracy
from specrun.convert.heads.head_conversion import convert_head
from specrun.runtime.chat_template import prompt_tokens
from specrun.runtime.demo import demo_drafters, demo_questions, demo_target
from specrun.runtime.tuning import CalibrationText, HeadCalibrationOptions, calibrate_heads
from specrun.train.distillation.drafter_run import DrafterRun
from specrun.train.distillation.learner import DistillationLoss
from specrun.train.distillation.train_drafter import train_drafter
from specrun.train.family.conversations import epoch_conversations
from specrun.train.family.corpus import Entry, build_corpus
from specrun.train.family.demo_card import N_SPECULATIVE, Question, measure_drafter, read_questions
from specrun.train.heads.eagle import EagleRecipe
from specrun.train.heads.eagle3 import Eagle3Recipe
from specrun.train.heads.medusa import MedusaRecipe
from specrun.train.heads.recipe import HeadRecipe
from specrun.train.heads.run import HeadRun
from specrun.train.heads.training import train_head
from specrun.train.target.from_gguf import folder_from_gguf
from specrun.train.trainer.listener import NobodyListens, TrainingStatus

logger = logging.getLogger(
    "specrun.train.demo_heads"
)  # not "__main__", which `main` would not show

SEED = 0
TOKENS_PER_BATCH = 1024
RATES = {"medusa": 1e-2, "eagle": 4e-3, "eagle3": 4e-3, "drafter": 1e-3}
"""Learning rates that suit a width of 256; the usual ones, made for wide models, are four to ten
times too slow."""

EPOCHS = {"medusa": 12, "eagle": 5, "eagle3": 8, "drafter": 1}
"""How often all conversations are read: with that a kind takes 13 to 43 minutes on two cores."""

MOST_BYTES = 25_000_000
"""What the embedded family may weigh in all."""

RECIPES: dict[str, HeadRecipe] = {
    "medusa": MedusaRecipe(heads=4, layers=2),
    "eagle": EagleRecipe(steps=3),
    "eagle3": Eagle3Recipe(steps=3, draft_tokens=4096),
}
DRAFTER = "drafter"
KINDS = (*RECIPES, DRAFTER)
_EXPRESSIONS = {
    DRAFTER: "draft({}, n=5)",
    "medusa": "medusa({})",
    "eagle": "eagle({})",
    "eagle3": "eagle3({})",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, how long, and where its files go in the end.

    Each of `epochs` (None: the kind's own number) reads all conversations, of which there are
    `phrasings` sets. With `hold_out` the entries that the embedded questions ask about are not
    learnt: scores are of what was not seen.
    """

    work: Path
    kinds: tuple[str, ...]
    epochs: int | None
    phrasings: int
    hold_out: bool
    device: str
    precision: str
    threads: int
    publish: Path | None


class LoggedRun(NobodyListens):
    """Writes how a run goes into the log, now and then."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._told = -1

    def note(self, text: str) -> None:
        """Log a fact."""
        logger.info("%s: %s", self._kind, text)

    def status(self, status: TrainingStatus) -> None:
        """Log twenty lines a run; the trainer itself logs what it measures."""
        share = 20 * status.step // status.steps
        if share != self._told:
            self._told = share
            left = status.seconds_left / 60
            logger.info(
                "%s: step %d of %d, %.0f min left, loss %.4f",
                self._kind,
                status.step,
                status.steps,
                left,
                status.loss,
            )


def make_heads(plan: Plan) -> dict[str, float]:
    """Run every stage that has not been run; return each kind's tokens per target evaluation on the
    questions."""
    plan.work.mkdir(parents=True, exist_ok=True)
    data = data_stage(plan)
    target = folder_stage(plan, "target", demo_target())
    questions = read_questions(demo_questions())
    lengths: dict[str, float] = {}
    for kind in plan.kinds:
        train_stage(plan, kind, target, data)
        gguf_stage(plan, kind)
        lengths[kind] = score_stage(plan, kind, questions)
    lengths["embedded drafter"] = score_stage(plan, "embedded drafter", questions)
    for kind, length in lengths.items():
        logger.info("%s: %.3f tokens per target evaluation", kind, length)
    if plan.publish is not None:
        publish(plan, plan.publish)
    return lengths


def data_stage(plan: Plan) -> Path:
    """Write the conversations once; `phrasings` times every entry, in words drawn anew."""
    path = plan.work / "data.jsonl"
    if not path.exists():
        questions = read_questions(demo_questions()) if plan.hold_out else []
        entries = learnt_entries(build_corpus(), questions)
        conversations = [
            conversation
            for number in range(plan.phrasings)
            for conversation in epoch_conversations(
                entries, random.Random(f"{SEED}/heads/{number}")
            )
        ]
        with atomic_path(path) as aside:
            lines = (
                json.dumps({"messages": conversation}) + "\n" for conversation in conversations
            )
            aside.write_text("".join(lines), encoding="utf-8")
        logger.info("%d conversations about %d entries", len(conversations), len(entries))
    return path


def learnt_entries(entries: list[Entry], held_out: Sequence[Question]) -> list[Entry]:
    """Return the entries whose sentence answers none of the questions held out."""
    answers = {question.answer for question in held_out}
    return [entry for entry in entries if entry.sentence not in answers]


def folder_stage(plan: Plan, name: str, source: Path) -> Path:
    """Read an embedded GGUF file back into a folder."""
    folder = plan.work / name
    if not (folder / "model.safetensors").exists():
        folder_from_gguf(source, folder)
    return folder


def train_stage(plan: Plan, kind: str, target: Path, data: Path) -> None:
    """Train one kind from where it stands."""
    folder = plan.work / kind
    if (folder / (RECIPES[kind].files_name if kind in RECIPES else "model.safetensors")).exists():
        return
    settings: dict[str, Any] = {
        "target": target,
        "data": (data,),
        "output": folder,
        "epochs": EPOCHS[kind] if plan.epochs is None else plan.epochs,
        "tokens_per_batch": TOKENS_PER_BATCH,
        "max_length": 512,
        "held_out": 0.02,
        "seed": SEED,
        "learning_rate": RATES.get(kind),
        "device": plan.device,
        "precision": plan.precision,
        "n_threads": plan.threads,
        "resume": (folder / "training" / "state.pt").exists(),
    }
    if kind in RECIPES:
        # Medusa and EAGLE read the same states, which are computed once; EAGLE-3 reads others.
        features = None if kind == "eagle3" else plan.work / "states"
        train_head(
            RECIPES[kind], HeadRun(**settings, cache="yes", features=features), LoggedRun(kind)
        )
        return
    start = folder_stage(plan, "drafter-start", demo_drafters()["draft"])
    loss = DistillationLoss(on_policy=0.25)
    run = DrafterRun(**settings, draft=start, loss=loss, longest_answer=96)
    report = train_drafter(run, LoggedRun(kind))
    gain = report.acceptance
    logger.info("drafter: alpha %.4f before, %.4f after", gain.before.rate, gain.after.rate)


def gguf_path(plan: Plan, kind: str) -> Path:
    """Return the GGUF file of a kind."""
    return demo_drafters()["draft"] if kind == "embedded drafter" else plan.work / f"{kind}.gguf"


def gguf_stage(plan: Plan, kind: str) -> None:
    """Convert what was trained, in Q8_0, and calibrate heads."""
    path = gguf_path(plan, kind)
    if path.exists():
        return
    if kind == DRAFTER:
        convert_checkpoint(plan.work / kind, path, outtype="q8_0")
        return
    raw = plan.work / f"{kind}-uncalibrated.gguf"
    raw.unlink(missing_ok=True)
    convert_head(plan.work / kind, raw, target=demo_target(), outtype="q8_0")
    calibrate(raw, plan.threads)
    raw.replace(path)


def calibrate(heads: Path, threads: int) -> None:
    """Write into a head's file how often its guesses are right, on questions that scores do not
    ask."""
    questions = [item.question for item in read_questions(demo_questions())]
    spared = questions[N_SPECULATIVE:] or questions

    def texts(model: Model) -> list[CalibrationText]:
        return [
            CalibrationText(tuple(tokens), len(tokens)) for tokens in prompt_tokens(model, spared)
        ]

    context = ContextOptions(n_threads=threads, n_threads_batch=threads)
    options = HeadCalibrationOptions(
        demo_target(), heads, n_tokens=2048, seconds=0.0, context=context
    )
    found = calibrate_heads(options, texts)
    store_accuracy(heads, found.accuracy, n_positions=found.n_positions)


def score_stage(plan: Plan, kind: str, questions: list[Question]) -> float:
    """Return the tokens per target evaluation on the embedded questions, at temperature 0; measured
    once."""
    path = plan.work / f"{kind}.json"
    if not path.exists():
        expression = _EXPRESSIONS["drafter" if kind == "embedded drafter" else kind].format(
            gguf_path(plan, kind)
        )
        found = measure_drafter(demo_target(), expression, questions, plan.threads)
        path.write_text(
            json.dumps({"drafter": kind, "mean_accepted_length": found}) + "\n", encoding="utf-8"
        )
    return float(json.loads(path.read_text(encoding="utf-8"))["mean_accepted_length"])


def publish(plan: Plan, folder: Path) -> None:
    """Copy the finished files, each whole or not at all; the drafter only if it drafts more than
    the embedded one."""
    kinds = [kind for kind in plan.kinds if kind != DRAFTER or _beats_the_first(plan)]
    new = {f"{kind}.gguf": gguf_path(plan, kind) for kind in kinds}
    kept = [
        path
        for path in (demo_target(), *demo_drafters().values())
        if path.name not in new and path.exists()
    ]
    size = sum(path.stat().st_size for path in (*new.values(), *kept))
    if size > MOST_BYTES:
        raise OptionError(
            f"the family would weigh {size / 1e6:.1f} MB, and {MOST_BYTES / 1e6:.0f} MB are allowed"
        )
    for name, path in new.items():
        with atomic_path(folder / name, force=True) as aside:
            shutil.copyfile(path, aside)


def _beats_the_first(plan: Plan) -> bool:
    ours, first = (
        json.loads((plan.work / f"{kind}.json").read_text(encoding="utf-8"))["mean_accepted_length"]
        for kind in (DRAFTER, "embedded drafter")
    )
    return bool(ours > first)


def parse_plan(arguments: list[str] | None = None) -> Plan:
    """The plan of a command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--work", type=Path, default=Path("runs/demo-heads"), help="folder of all stages' outputs"
    )
    parser.add_argument("--publish", type=Path, help="folder to copy the finished files into")
    parser.add_argument(
        "--only", choices=KINDS, action="append", help="train this kind only; repeatable"
    )
    parser.add_argument(
        "--epochs", type=int, help=f"how often all conversations are read [default: {EPOCHS}]"
    )
    parser.add_argument(
        "--phrasings", type=int, default=4, help="how many sets of conversations are made"
    )
    parser.add_argument(
        "--hold-out", action="store_true", help="do not learn what the embedded questions ask"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    options = parser.parse_args(arguments)
    return Plan(
        work=options.work,
        kinds=tuple(dict.fromkeys(options.only or KINDS)),
        epochs=options.epochs,
        phrasings=options.phrasings,
        hold_out=options.hold_out,
        device=options.device,
        precision=options.precision,
        threads=options.threads,
        publish=options.publish,
    )


def main() -> None:
    """Train the heads from the command line."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("specrun.train").setLevel(
        logging.INFO
    )  # llama.cpp's own lines would drown the losses
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    plan = parse_plan()
    try:
        make_heads(plan)
    except KeyboardInterrupt:
        logger.info("stopped: the same command goes on from the last checkpoint")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
