"""A drafter that learns the target's distributions at its rejected drafts (Liu et al. 2023)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specrun.bindings.errors import FileMissingError, OptionError, PairError, UnsupportedModelError
from specrun.bindings.models.model import Model
from specrun.convert.gguf import GGUFSource
from specrun.convert.gguf.gguf_source import write_renumbered
from specrun.runtime.online import BufferKey, RejectedAnswer, load_rejections
from specrun.train.data.corpus import TokenBatch, TokenCorpus
from specrun.train.data.tokens import TokenSequence
from specrun.train.distillation.acceptance import (
    MeasuredAcceptance,
    TextAcceptance,
    mean_acceptance,
)
from specrun.train.distillation.learner import DIVERGENCES, check_divergence
from specrun.train.target.from_gguf import gguf_numbers, llama_config, load_llama_file
from specrun.train.target.hf_model import HFModel, load_hf_model, read_config, write_model_folder
from specrun.train.target.shape import source_digest
from specrun.train.trainer.learner import Learner, LossPart, RunListener
from specrun.train.trainer.memory import MemoryNeed, trained_bytes
from specrun.train.trainer.model_folder import model_card, table_lines, training_lines
from specrun.train.trainer.run import Training, TrainingReport, TrainingRun
from specrun.train.trainer.settings import TrainerSettings, TrainingDefaults

# == Distributions over kept tokens ================================================================
#
# Of a distribution only the most likely tokens are known by name, and the mass of all others
# together. So both distributions are compared as distributions over these K + 1 outcomes, by the
# divergences of distillation: none of them is larger there than between the whole distributions.


_NOTHING = -30.0  # the log-probability of a token that the drafter lacks
_PAPER_RATE, _PAPER_WIDTH = 3e-5, 4096
_ROWS_PER_PLACE = 6  # of whole distributions: logits, logarithms, the others' mass, and gradients
_HELD_OUT = 10  # one text in so many is measured on


@dataclass(frozen=True, slots=True)
class AnswerPlaces:
    """The places of one text that are learnt, within the piece of it that is read."""

    positions: Tensor
    ids: Tensor
    log_probs: Tensor


def usual_rate(config: Mapping[str, Any]) -> float:
    """Return 3e-5 for drafters of 4096 numbers a state, and more for narrower ones."""
    return _PAPER_RATE * max(1.0, _PAPER_WIDTH / int(config["hidden_size"]))


def coarse_log_probs(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Return log-probabilities [n, K + 1] of the tokens `ids` [n, K] and of all others together.

    `log_probs` [n, V] are whole distributions. If K is V there are no others: [n, K].
    """
    missing = int(ids.max()) + 1 - log_probs.shape[-1] if ids.numel() else 0
    if missing > 0:  # of vocabularies rounded up to different sizes
        log_probs = F.pad(log_probs, (0, missing), value=_NOTHING)
    named = log_probs.gather(-1, ids)
    if ids.shape[-1] == log_probs.shape[-1]:
        return named
    others = log_probs.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat((named, others), -1)


def online_corpus(
    answers: Sequence[RejectedAnswer], *, max_length: int
) -> tuple[TokenCorpus, list[AnswerPlaces]]:
    """Return the buffer's texts to learn from, with their places and distributions, by number.

    Of a text longer than `max_length` the end is read. One text in ten, chosen by a hash of it, is
    measured on and never learnt, in this update or a later one. Raises OptionError for a buffer
    without a text.
    """
    if not answers:
        raise OptionError(
            "no draft was rejected yet: there is nothing to learn from; answer something first"
        )
    texts, places = [], []
    for answer in answers:
        start = max(0, len(answer.tokens) - max_length)
        kept = answer.positions >= start
        positions = torch.from_numpy((answer.positions[kept] - start).astype(np.int64))
        marks = np.zeros(len(answer.tokens) - start, np.bool_)
        marks[positions.numpy()] = True
        texts.append(TokenSequence(np.array(answer.tokens[start:], np.int32), marks))
        ids = torch.from_numpy(answer.ids[kept].astype(np.int64))
        logs = torch.from_numpy(answer.log_probs[kept].astype(np.float32))
        if float(logs[:, -1].max()) < -25 and ids.shape[1] == int(ids.max()) + 1:
            logs = logs[:, :-1]  # a vocabulary so small that all of it is named
        places.append(AnswerPlaces(positions, ids, torch.log_softmax(logs, -1)))
    held_out = [n for n, answer in enumerate(answers) if answer.digest[0] % _HELD_OUT == 0]
    training = [n for n in range(len(answers)) if n not in set(held_out)]
    if not held_out or not training:
        everything = tuple(range(len(answers)))
        return TokenCorpus(tuple(texts), everything, everything, True), places
    return TokenCorpus(tuple(texts), tuple(training), tuple(held_out), False), places


def online_memory(
    learner: OnlineLearner, places: Sequence[AnswerPlaces], tokens_per_batch: int, advice: str
) -> MemoryNeed:
    """Return the memory of an update at its widest step, with `advice` if it is too much."""
    draft, config = learner.draft, learner.draft.config
    hidden, layers = (int(config[name]) for name in ("hidden_size", "num_hidden_layers"))
    inner = int(config.get("intermediate_size") or 4 * hidden)
    most = max(len(each.positions) for each in places)
    rows = max(most, min(tokens_per_batch, sum(len(each.positions) for each in places)))
    parts = {
        "drafter and optimizer": trained_bytes(learner.module),
        "laws": 4 * _ROWS_PER_PLACE * rows * draft.output.shape[0],
        "activations": 4 * tokens_per_batch * layers * (16 * hidden + 4 * inner),
    }
    return MemoryNeed(parts, dict.fromkeys(parts, advice))


class OnlineLearner(Learner):
    """`draft` learns by `divergence` from the places of texts, known by their numbers."""

    def __init__(self, draft: HFModel, places: Sequence[AnswerPlaces], divergence: str) -> None:
        check_divergence(divergence)
        self.module = draft.module.requires_grad_()
        self.device = draft.device
        self.draft, self._places, self._divergence = draft, places, divergence

    def losses(self, batch: TokenBatch, noise: torch.Generator, step: int) -> Iterator[LossPart]:
        """Yield the mean divergence of the drafter's distributions from the kept ones."""
        target, draft, _ = self._laws(batch)
        mean = DIVERGENCES[self._divergence](target, draft).mean()
        yield LossPart(self._divergence, mean, float(mean.detach()))

    def _laws(self, batch: TokenBatch) -> tuple[Tensor, Tensor, list[int]]:
        """Return kept and drafter's distributions [n, K + 1], and each text's number of places."""
        hidden, _ = self.draft.hidden_states(batch.ids)
        chosen = [self._places[number] for number in batch.numbers]
        counts = [len(places.positions) for places in chosen]
        rows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        positions = torch.cat([places.positions for places in chosen])
        ids = torch.cat([places.ids for places in chosen]).to(self.device)
        target = torch.cat([places.log_probs for places in chosen]).to(self.device)
        logits = self.draft.logits(hidden[rows.to(self.device), positions.to(self.device)])
        return target, coarse_log_probs(torch.log_softmax(logits, -1), ids), counts

    def measure(self, batches: Sequence[TokenBatch]) -> dict[str, float]:
        """Return alpha at rejected places, on texts that are not learnt."""
        return {"alpha": self.acceptance(batches).rate}

    def acceptance(self, batches: Sequence[TokenBatch]) -> MeasuredAcceptance:
        """Return the mean of sum min(P, Q) over the places of these texts.

        Tokens that are kept together count as accepted together, so it is a little too high.
        """
        return mean_acceptance(self.compare(batches))

    @torch.no_grad()
    def compare(self, batches: Sequence[TokenBatch]) -> list[TextAcceptance]:
        """Return the sum of acceptance probabilities over the places of each text."""
        texts: list[TextAcceptance] = []
        for batch in batches:
            target, draft, counts = self._laws(batch)
            found = torch.minimum(target.exp(), draft.exp()).sum(-1).double()
            for part, count in zip(torch.split(found, counts), counts, strict=True):
                texts.append(TextAcceptance(float(part.sum()), count))
        return texts


# == A drafter's GGUF file in torch and back =======================================================
#
# Only plain Llamas can be read back from GGUF; of any other architecture the Hugging Face folder
# that the file was converted from learns.


def check_drafter(path: Path) -> None:
    """Raise UnsupportedModelError, with advice, unless a drafter's file can learn."""
    try:
        llama_config(GGUFSource(path))
    except UnsupportedModelError as error:
        advice = "train its Hugging Face folder: specrun train drafter --online BUFFER --draft DIR"
        raise UnsupportedModelError(f"{error}; {advice}") from error


def load_drafter(path: Path, device: torch.device) -> HFModel:
    """Return the model in a GGUF file, float32; raises as `check_drafter` and `load_llama_file`."""
    check_drafter(path)
    return load_llama_file(path, device)


def write_drafter(draft: HFModel, source: Path, output: Path) -> int:
    """Write a drafter in the form of `source`, each tensor in its type; return the bytes.

    The file appears whole or not at all.
    """
    file = GGUFSource(source)
    weights = dict(draft.module.state_dict())
    return write_renumbered(file, output, gguf_numbers(file, weights), force=True)


# == A run from files to files =====================================================================
#
# The learning of `specrun chat --learn` between answers, as a training run: with a checkpoint,
# curves, and as many steps as wanted. The target is not needed: the buffer has its distributions.


GGUF_NAME = "drafter.gguf"
"""The file that a finished run leaves of a GGUF file; of a folder it leaves a folder."""

_MOST_MISSING = 128  # tokens by which vocabularies of a family may differ
_ALL = 1 << 30


@dataclass(frozen=True, slots=True)
class OnlineReport(TrainingReport):
    """`before` and `after`: alpha at the rejected places of texts that were not learnt.

    `n_places` is how many rejected drafts there were in all; `gguf` is the file that was written,
    if the drafter is one.
    """

    before: MeasuredAcceptance
    after: MeasuredAcceptance
    n_places: int
    gguf: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineRecipe:
    """A drafter, `draft`, a GGUF file or a Hugging Face folder, that learns from a `buffer`.

    The run's `target` is only the name of the buffer's model, and its `data` are
    none. A GGUF file is also written as `gguf`, if that is given.
    """

    draft: Path
    buffer: Path
    divergence: str = "forward-kl"
    gguf: Path | None = None

    def training(self, run: TrainingRun, listener: RunListener | None) -> OnlineTraining:
        """Return the training of a run, begun."""
        return OnlineTraining(self, run, listener)


class OnlineTraining(Training[OnlineReport]):
    """A run that lets a drafter learn from a buffer, begun.

    Raises as `load_rejections`, PairError for a drafter of another vocabulary than the buffer's,
    UnsupportedModelError for a GGUF file that cannot be read back.
    """

    def __init__(
        self, recipe: OnlineRecipe, run: TrainingRun, listener: RunListener | None
    ) -> None:
        self.recipe, self._is_file = recipe, recipe.draft.is_file()
        if self._is_file:
            super().__init__(run, listener, (), GGUF_NAME)
        else:
            super().__init__(run, listener, (recipe.draft,))

    def texts(self) -> TokenCorpus:
        """Return the buffer's answers; the drafter is loaded."""
        draft = self.recipe.draft
        self._key, self._buffer = load_rejections(self.recipe.buffer, most_bytes=_ALL)
        _check_vocabulary(draft, self._key)
        answers = list(self._buffer)
        corpus, self._places = online_corpus(answers, max_length=self.run.max_length)
        rejected = f"{self._buffer.n_places:,} rejected drafts"
        self.listener.note(f"{len(corpus.sequences):,} answers of {self._key.name} with {rejected}")
        load = load_drafter if self._is_file else load_hf_model
        self._draft = load(draft, self.device)
        self._learner = OnlineLearner(self._draft, self._places, self.recipe.divergence)
        return corpus

    def defaults(self) -> TrainingDefaults:
        """Return a rate for the drafter's width."""
        rate = usual_rate(self._draft.config)
        return TrainingDefaults(rate, betas=(0.9, 0.95), clip_norm=1.0)

    def identity(self, corpus: TokenCorpus, settings: TrainerSettings) -> dict[str, Any]:
        """Return the facts that a resumed run must share: loss, texts, distributions, drafter."""
        laws = hashlib.sha256()
        for answer in self._buffer:
            laws.update(answer.ids.tobytes() + answer.log_probs.tobytes())
        return {
            "kind": "online drafter",
            "divergence": self.recipe.divergence,
            "data": corpus.digest[:16],
            "laws": laws.hexdigest()[:16],
            "drafter": source_digest(self.recipe.draft),
        }

    def need(self, corpus: TokenCorpus, settings: TrainerSettings) -> MemoryNeed:
        """Return the memory of the drafter and of a step."""
        advice = "lower --batch-tokens, or use a smaller drafter"
        return online_memory(self._learner, self._places, self.run.tokens_per_batch, advice)

    def learner(self, corpus: TokenCorpus, settings: TrainerSettings) -> OnlineLearner:
        """Return the learner; the drafter is measured as it begins."""
        self._before = self._acceptance(corpus)
        rate = f"{self._before.rate:.4f}"
        self.listener.note(f"before: alpha {rate} where drafts were rejected")
        return self._learner

    def _acceptance(self, corpus: TokenCorpus) -> MeasuredAcceptance:
        held_out = corpus.held_out_batches(self.run.tokens_per_batch, self.device)
        return self._learner.acceptance(held_out)

    def finished(
        self, learner: OnlineLearner, corpus: TokenCorpus, report: TrainingReport
    ) -> OnlineReport:
        """Measure the drafter again, and write it in the form that it had."""
        recipe, run, draft = self.recipe, self.run, self._draft
        whole = report.extended(
            OnlineReport,
            before=self._before,
            after=self._acceptance(corpus),
            n_places=self._buffer.n_places,
            gguf=run.output / GGUF_NAME if self._is_file else None,
        )
        card = _card(recipe, run, whole, self._key)
        if whole.gguf is None:
            write_model_folder(draft, recipe.draft, run.output, card)
            return whole
        (run.output / "README.md").write_text(card, encoding="utf-8")
        write_drafter(draft, recipe.draft, whole.gguf)
        if recipe.gguf is not None:
            write_drafter(draft, recipe.draft, recipe.gguf)
        return whole


def _check_vocabulary(draft: Path, key: BufferKey) -> None:
    """Raise PairError if the buffer's token ids mean nothing to the drafter."""
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


def _card(recipe: OnlineRecipe, run: TrainingRun, report: OnlineReport, key: BufferKey) -> str:
    draft, losses = recipe.draft.resolve().name, report.result.curves.losses
    settings: dict[str, Any] = {
        "divergence": recipe.divergence,
        "tokens per batch": run.tokens_per_batch,
        "longest text": run.max_length,
        "seed": run.seed,
    }
    texts = "the texts learnt" if report.measured_on_training else "texts that were not learnt"
    fell = f"{recipe.divergence} {losses[0]:.4f} at first, {losses[-1]:.4f} at last."
    rates = f"{report.before.rate:.4f} | {report.after.rate:.4f}"
    return model_card(
        f"{draft}, which learnt from the drafts that {key.name} rejected",
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
