"""Train the embedded target's drafters: Medusa, EAGLE, EAGLE-3, PaSS and a distilled model.

    python tools/family heads --work runs/demo-heads --publish runtime/demo

The target is read back from its GGUF file, so that heads learn from what is run. Every stage is
skipped when its output is there, and training goes on from its last checkpoint, so the same command
may be stopped and started at will. Beside other work set OMP_WAIT_POLICY=PASSIVE: threads that spin
at every barrier take twice the processor time.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from family.conversations import epoch_conversations
from family.demo_card import N_SPECULATIVE, Question, measure_drafter, read_questions
from family.models import log_to_terminal, plan_parser, publish
from specrun.bench.drafters.corpus import Entry, build_corpus
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.convert import convert_checkpoint
from specrun.convert.heads.head_conversion import convert_head, store_accuracy
from specrun.runtime.chat import prompt_tokens
from specrun.runtime.demo import demo_drafters, demo_questions, demo_target
from specrun.runtime.memory import LoadOptions
from specrun.runtime.tuning import CalibrationText, HeadCalibrationOptions, calibrate_heads
from specrun.train.distillation import DistillationLoss, DrafterRecipe
from specrun.train.heads import (
    Eagle3Recipe,
    EagleRecipe,
    HeadRecipe,
    HeadRun,
    MedusaRecipe,
)
from specrun.train.lookahead import EMBEDDINGS, PassRecipe
from specrun.train.target.from_gguf import folder_from_gguf
from specrun.train.trainer import TrainingRun, TrainingStatus, train
from specrun.train.trainer.learner import SilentListener
from specrun.train.trainer.model_folder import write_json, write_text

logger = logging.getLogger(__name__)

SEED = 0
TOKENS_PER_BATCH = 1024
RATES = {"medusa": 1e-2, "eagle": 4e-3, "eagle3": 4e-3, "drafter": 1e-3, "pass": 2e-2}
"""Learning rates for a width of 256; the usual ones, for wide models, are too slow by 4 to 10."""

EPOCHS = {"medusa": 12, "eagle": 5, "eagle3": 8, "drafter": 1, "pass": 1}
"""How often all conversations are read: with that a kind takes 4 to 43 minutes on two cores."""

MOST_BYTES = 25_000_000
"""What the embedded family may weigh in all."""

RECIPES: dict[str, HeadRecipe] = {
    "medusa": MedusaRecipe(heads=4, layers=2),
    "eagle": EagleRecipe(steps=3, start="random"),  # as the published head was
    "eagle3": Eagle3Recipe(steps=3, draft_tokens=4096),
}
PASS, DRAFTER, EMBEDDED = "pass", "drafter", "embedded drafter"
LOOKAHEAD = PassRecipe(count=2, from_law=True)
KINDS = (*RECIPES, PASS, DRAFTER)


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


class LoggedRun(SilentListener):
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
            place = f"step {status.step} of {status.steps}"
            left = f"{status.seconds_left / 60:.0f} min left"
            logger.info("%s: %s, %s, loss %.4f", self._kind, place, left, status.loss)


def make_heads(plan: Plan) -> dict[str, float]:
    """Run every stage that has not been run; return each kind's tokens per target evaluation."""
    plan.work.mkdir(parents=True, exist_ok=True)
    data = data_stage(plan)
    target = folder_stage(plan, "target", demo_target())
    questions = read_questions(demo_questions())
    lengths: dict[str, float] = {}
    for kind in plan.kinds:
        train_stage(plan, kind, target, data)
        gguf_stage(plan, kind)
        lengths[kind] = score_stage(plan, kind, questions)
    lengths[EMBEDDED] = score_stage(plan, EMBEDDED, questions)
    for kind, length in lengths.items():
        logger.info("%s: %.3f tokens per target evaluation", kind, length)
    if plan.publish is not None:
        publish_heads(plan, plan.publish)
    return lengths


def data_stage(plan: Plan) -> Path:
    """Write the conversations once; `phrasings` times every entry, in words drawn anew."""
    path = plan.work / "data.jsonl"
    if not path.exists():
        questions = read_questions(demo_questions()) if plan.hold_out else []
        entries = learnt_entries(build_corpus(), questions)
        sources = [random.Random(f"{SEED}/heads/{number}") for number in range(plan.phrasings)]
        chats = [chat for source in sources for chat in epoch_conversations(entries, source)]
        write_text(path, "".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
        logger.info("%d conversations about %d entries", len(chats), len(entries))
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
    weights = {PASS: EMBEDDINGS, DRAFTER: "model.safetensors"}
    if (folder / (weights.get(kind) or RECIPES[kind].files_name)).exists():
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
        run = HeadRun(**settings, cache="yes", features=features)
        train(RECIPES[kind], run, LoggedRun(kind))
        return
    if kind == PASS:
        train(LOOKAHEAD, HeadRun(**settings), LoggedRun(kind))
        return
    start = folder_stage(plan, "drafter-start", demo_drafters()["draft"])
    loss = DistillationLoss(on_policy=0.25)
    distilled = DrafterRecipe(draft=start, loss=loss, longest_answer=96)
    report = train(distilled, TrainingRun(**settings), LoggedRun(kind))
    gain = report.acceptance
    logger.info("drafter: alpha %.4f before, %.4f after", gain.before.rate, gain.after.rate)


def gguf_path(plan: Plan, kind: str) -> Path:
    """Return the GGUF file of a kind."""
    return demo_drafters()["draft"] if kind == EMBEDDED else plan.work / f"{kind}.gguf"


def gguf_stage(plan: Plan, kind: str) -> None:
    """Convert what was trained, in Q8_0, and calibrate heads."""
    path = gguf_path(plan, kind)
    if path.exists():
        return
    if kind == DRAFTER:
        convert_checkpoint(plan.work / kind, path, outtype="q8_0")
        return
    if kind == PASS:  # embeddings say nothing of accuracy
        convert_head(plan.work / kind, path, target=demo_target())
        return
    raw = plan.work / f"{kind}-uncalibrated.gguf"
    raw.unlink(missing_ok=True)
    convert_head(plan.work / kind, raw, target=demo_target(), outtype="q8_0")
    calibrate(raw, plan.threads)
    raw.replace(path)


def calibrate(heads: Path, threads: int) -> None:
    """Write a head's accuracy into its file, on questions that scores do not ask."""
    questions = [item.question for item in read_questions(demo_questions())]
    spared = questions[N_SPECULATIVE:] or questions

    def texts(model: Model) -> list[CalibrationText]:
        asked = prompt_tokens(model, spared)
        return [CalibrationText(tuple(tokens), len(tokens)) for tokens in asked]

    loading = LoadOptions(ContextOptions(n_threads=threads, n_threads_batch=threads))
    options = HeadCalibrationOptions(
        demo_target(), heads, n_tokens=2048, seconds=0.0, loading=loading
    )
    found = calibrate_heads(options, texts)
    store_accuracy(heads, found.counts.accuracy, n_positions=found.counts.n_positions)


def score_stage(plan: Plan, kind: str, questions: list[Question]) -> float:
    """Return the tokens per target evaluation on the questions, at temperature 0; measured once."""
    path = plan.work / f"{kind}.json"
    if not path.exists():
        file = gguf_path(plan, kind)
        # Of a given size: how much of a tree pays hangs on the machine, and says nothing of a head.
        shapes = {PASS: ", n=1, topk=8", DRAFTER: ", n=5", EMBEDDED: ", n=5"}
        options = shapes.get(kind, ", nodes=16")
        method = "draft" if kind in (DRAFTER, EMBEDDED) else kind
        expression = f"{method}({file}{options})"
        found = measure_drafter(demo_target(), expression, questions, plan.threads)
        write_json(path, {"drafter": kind, "mean_accepted_length": found})
    return _stored_score(plan, kind)


def _stored_score(plan: Plan, kind: str) -> float:
    text = (plan.work / f"{kind}.json").read_text(encoding="utf-8")
    return float(json.loads(text)["mean_accepted_length"])


def publish_heads(plan: Plan, folder: Path) -> None:
    """Copy the finished files; the drafter only if it drafts more than the embedded one."""
    kinds = [kind for kind in plan.kinds if kind != DRAFTER or _beats_the_first(plan)]
    new = {f"{kind}.gguf": gguf_path(plan, kind) for kind in kinds}
    embedded = (demo_target(), *demo_drafters().values())
    kept = [path for path in embedded if path.name not in new and path.exists()]
    size = sum(path.stat().st_size for path in (*new.values(), *kept))
    if size > MOST_BYTES:
        raise OptionError(
            f"the family would weigh {size / 1e6:.1f} MB, and {MOST_BYTES / 1e6:.0f} MB are allowed"
        )
    publish(new, folder)


def _beats_the_first(plan: Plan) -> bool:
    return _stored_score(plan, DRAFTER) > _stored_score(plan, EMBEDDED)


def parse_plan(arguments: list[str]) -> Plan:
    """The plan of a command line."""
    parser = plan_parser("heads", __doc__, "runs/demo-heads")
    add = parser.add_argument
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--only", choices=KINDS, action="append", help="train this kind only; repeatable")
    add("--epochs", type=int, help=f"how often all conversations are read [default: {EPOCHS}]")
    add("--phrasings", type=int, default=4, help="how many sets of conversations are made")
    add("--hold-out", action="store_true", help="do not learn what the embedded questions ask")
    add("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    options = vars(parser.parse_args(arguments))
    return Plan(kinds=tuple(dict.fromkeys(options.pop("only") or KINDS)), **options)


def main(arguments: list[str]) -> None:
    """Train the heads from the command line."""
    log_to_terminal()
    try:
        make_heads(parse_plan(arguments))
    except KeyboardInterrupt:
        logger.info("stopped: the same command goes on from the last checkpoint")
        raise SystemExit(130) from None
