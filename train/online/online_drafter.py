"""The drafter of an open runtime that learns between answers, and is swapped in whole.

An update trains a copy in torch, measures it on texts that it never learns from, writes a new GGUF
file aside and lets the runtime open it: the old drafter serves until the new one is ready. If it
accepts less, by more than the measure's error, nothing is swapped.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.runtime.engine.core import EngineCore
from specrun.runtime.language import Expression, parse_expression
from specrun.runtime.models import check_pair
from specrun.runtime.planning import describe_file
from specrun.train.distillation.acceptance import MeasuredAcceptance, acceptance_gain
from specrun.train.online.learner import (
    OnlineLearner,
    check_drafter,
    load_drafter,
    online_corpus,
    online_memory,
    usual_rate,
    write_drafter,
)
from specrun.train.target.hf_model import HFModel
from specrun.train.trainer.memory import require_memory
from specrun.train.trainer.settings import TrainerSettings
from specrun.train.trainer.trainer import Report, train_learner


@dataclass(frozen=True, slots=True)
class OnlineSettings:
    """How an update learns: `epochs` over the buffer, at most `steps`; the rest as a distillation.

    `learning_rate` None is 3e-5 at a width of 4096 and more for narrower drafters. Of a text the
    last `max_length` tokens are read. An update needs `least_places` rejected drafts.
    """

    divergence: str = "forward-kl"
    epochs: int = 8
    steps: int = 200
    learning_rate: float | None = None
    tokens_per_batch: int = 256
    max_length: int = 1024
    least_places: int = 32
    seed: int = 0


@dataclass(frozen=True, slots=True)
class OnlineUpdate:
    """The result of an update: alpha at rejected places of held-out texts, and whether it is used.

    `measured_on_training`: there were too few texts to hold any out.
    """

    before: MeasuredAcceptance
    after: MeasuredAcceptance
    swapped: bool
    n_answers: int
    n_places: int
    n_steps: int
    path: Path | None
    measured_on_training: bool


class OnlineDrafter(contextlib.ExitStack[None]):
    """The draft model of a `Runtime` or `Engine`, which was opened with `learn`, and learns here.

    New files are written into `folder` (None: one that is gone after `close()`), named
    `NAME-1.gguf`, `NAME-2.gguf`, ...; an older one goes once the next is in use. Close it after the
    runtime. Raises OptionError for a runtime that keeps nothing or drafts with something else than
    `draft(FILE)`, UnsupportedModelError for a drafter that cannot be read back.
    """

    def __init__(
        self,
        runtime: EngineCore,
        settings: OnlineSettings | None = None,
        *,
        folder: Path | None = None,
        name: str = "drafter",
        device: str = "cpu",
    ) -> None:
        super().__init__()
        if runtime.rejections is None:
            raise OptionError("this runtime keeps no rejected drafts: open it with learn=True")
        self.runtime, self.settings = runtime, settings or OnlineSettings()
        self.device = torch.device(device)
        self._source = runtime.draft_file
        check_drafter(self._source)
        with Model(self._source, vocab_only=True) as model:
            check_pair(runtime.model, model)  # drafters that pass texts have other token ids
        if folder is None:  # gone after `close()`
            temporary = tempfile.TemporaryDirectory(
                prefix="specrun-learn-", ignore_cleanup_errors=True
            )
            folder = Path(self.enter_context(temporary))
        self._folder, self._name = folder, name
        self._current = self._source if self._source.parent == folder else None
        self.updates: list[OnlineUpdate] = []

    @property
    def can_update(self) -> bool:
        """Whether enough drafts were rejected."""
        store = self.runtime.rejections
        return store is not None and store.buffer.n_places >= self.settings.least_places

    def update(self, report: Report | None = None) -> OnlineUpdate:
        """Learn from the buffer, and swap the drafter unless it accepts less on held-out texts.

        Ctrl-C leaves the drafter as it was. Raises BusyError in the middle of an answer,
        OptionError for a buffer that holds too little, OutOfMemoryError if it does not fit.
        """
        self.runtime.require_idle()
        store, settings = self.runtime.rejections, self.settings
        assert store is not None
        places = store.buffer.n_places
        if places < settings.least_places:
            raise OptionError(
                f"{places} drafts were rejected so far: an update needs {settings.least_places}"
            )
        corpus, laws = online_corpus(list(store.buffer), max_length=settings.max_length)
        draft = self._draft
        learner = OnlineLearner(draft, laws, settings.divergence)
        size, advice = settings.tokens_per_batch, "use a smaller drafter"
        require_memory(online_memory(learner, laws, size, advice), self.device)
        held_out = corpus.held_out_batches(settings.tokens_per_batch, self.device)
        before = learner.compare(held_out)
        batches = len(corpus.training_batches(0, settings.seed, settings.tokens_per_batch))
        steps = min(settings.steps, settings.epochs * batches)
        kept, in_use = copy.deepcopy(draft.module.state_dict()), self.runtime.draft_file
        path: Path | None = None
        try:
            train_learner(learner, corpus, self._trainer(steps), report=report)
            gain = acceptance_gain(before, learner.compare(held_out))
            if gain.gain > -gain.error:
                path = self._swap_in(draft)
        finally:
            # Also after Ctrl-C: the drafter in use goes on learning.
            if not self.runtime.closed and self.runtime.draft_file == in_use:
                draft.module.load_state_dict(kept)
        store.save()
        update = OnlineUpdate(
            gain.before,
            gain.after,
            path is not None,
            len(corpus.sequences),
            places,
            steps,
            path,
            corpus.measured_on_training,
        )
        self.updates.append(update)
        return update

    @functools.cached_property
    def _draft(self) -> HFModel:
        return load_drafter(self._source, self.device)

    def _trainer(self, steps: int) -> TrainerSettings:
        rate = self.settings.learning_rate or usual_rate(self._draft.config)
        return TrainerSettings(
            steps,
            rate,
            tokens_per_batch=self.settings.tokens_per_batch,
            warmup_steps=max(1, steps // 20),
            betas=(0.9, 0.95),
            seed=self.settings.seed + len(self.updates),
        )

    def _swap_in(self, draft: HFModel) -> Path:
        """Write the drafter as a new file, let the runtime open it, and drop the file before."""
        numbers = itertools.count(1 + sum(update.swapped for update in self.updates))
        paths = (self._folder / f"{self._name}-{number}.gguf" for number in numbers)
        path = next(path for path in paths if path != self._current and not path.exists())
        write_drafter(draft, self._source, path)
        try:
            draft_with(self.runtime, path)
        except BaseException:
            if self.runtime.draft_file != path:
                path.unlink(missing_ok=True)
            raise
        before, self._current, self._source = self._current, path, path
        if before is not None:
            with contextlib.suppress(OSError):  # Windows, while something still reads it
                before.unlink()
        return path


def open_online_drafter(
    runtime: EngineCore, settings: OnlineSettings, *, keep: bool
) -> OnlineDrafter:
    """Return the learning drafter of a runtime; with `keep` it goes on from the one kept before.

    That lies beside the buffer, under the name and the hash of the file that the runtime drafts
    with, which stays as it is. Raises as `OnlineDrafter`.
    """
    store = runtime.rejections
    if not keep or store is None or store.path is None:
        return OnlineDrafter(runtime, settings)
    folder, source = store.path.parent, runtime.draft_file
    digest = hashlib.sha256(json.dumps(describe_file(source), sort_keys=True).encode()).hexdigest()
    name = f"{source.stem[:40]}-{digest[:8]}"
    latest = max(folder.glob(f"{glob.escape(name)}-*.gguf"), key=_number_of, default=None)
    if latest is not None:
        draft_with(runtime, latest)
    return OnlineDrafter(runtime, settings, folder=folder, name=name)


def _number_of(path: Path) -> int:
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def draft_with(runtime: EngineCore, path: Path) -> None:
    """Let the runtime's `draft(...)` read another file, with all its options as they are."""
    expression = parse_expression(runtime.drafter)
    if expression.arguments:
        named = dataclasses.replace(expression, arguments=(Expression(str(path)),))
        runtime.swap_drafter(str(named))
    else:
        runtime.swap_drafter(runtime.drafter, {expression.atom: path})
