"""Answers that a drafter learns on: written by the data, the target, or the drafter itself.

DistillSpec (Zhou et al. 2023, section 3) takes the target's distributions along any text. Texts of
the data are free; acceptance is measured on texts that the target samples; texts that the drafter
samples are cheap, contain its own mistakes, and bound the loss (their theorem 3.2). Mixed data,
a share lambda of on-policy answers, are those of generalised knowledge distillation (Agarwal et al.
2023, algorithm 1), here drawn for each text anew.

Answers that the target samples before training are kept on disk for interrupted runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from specrun.bindings.files import DAMAGE
from specrun.train.data.corpus import TokenBatch, TokenCorpus, plan_batches
from specrun.train.data.store import Progress
from specrun.train.data.tokens import TokenSequence
from specrun.train.target.hf_model import HFModel
from specrun.train.target.sampling import answers_as_they_end, in_order, uniform_numbers
from specrun.train.trainer.model_folder import write_text


@dataclass(frozen=True, slots=True)
class SampledAnswers:
    """How answers are sampled: `temperature`, most tokens `n_longest`, of a text `max_length`.

    `end_ids` end an answer; tokens from `vocab_size` on are never sampled.
    """

    temperature: float
    n_longest: int
    max_length: int
    end_ids: Collection[int]
    vocab_size: int


def first_to_answer(learnt: Sequence[bool], uniform: float) -> int:
    """Return the start of a new answer in a text with marks `learnt`; `uniform` in [0, 1) chooses.

    Of several answers one is chosen. A text that is learnt from its first token on is cut in its
    first half, and one of which nothing is to be learnt, a prompt, is continued at its end.
    """
    # Framed by False, so that answers at either end have a beginning and an end.
    marks = np.concatenate(([False], np.asarray(learnt, np.bool_), [False]))
    starts = np.flatnonzero(~marks[:-1] & marks[1:])
    ends = np.flatnonzero(marks[:-1] & ~marks[1:])
    if not len(starts):
        return len(learnt)
    # One number decides twice: its whole part the answer, its fraction, uniform again, the cut.
    scaled = uniform * len(starts)
    chosen = int(scaled)
    start = int(starts[chosen])
    if start > 0:
        return start
    half = max(1, int(ends[chosen]) // 2)
    return 1 + int((scaled - chosen) * half)


def with_room_for_answers(
    corpus: TokenCorpus, settings: SampledAnswers, on_policy: float
) -> TokenCorpus:
    """Return the corpus with batches planned for a share `on_policy` of answers written anew."""
    if on_policy == 0.0:
        return corpus
    anew = (_longest_anew(text, settings) for text in corpus.sequences)
    # Texts as given need no room if none is learnt as given.
    given = (0 if on_policy == 1.0 else len(text) for text in corpus.sequences)
    return dataclasses.replace(corpus, widths=tuple(map(max, anew, given)))


def _longest_anew(text: TokenSequence, settings: SampledAnswers) -> int:
    """Return how long a text can be after `answer_anew`."""
    # The largest number below 1 chooses the last answer and the latest cut: the longest prompt.
    last = first_to_answer([bool(flag) for flag in text.learnt], math.nextafter(1.0, 0.0))
    if last < settings.max_length:
        return min(settings.max_length, last + settings.n_longest)
    return len(text)


def answer_anew(
    model: HFModel, texts: Sequence[TokenSequence], uniforms: Tensor, settings: SampledAnswers
) -> list[TokenSequence]:
    """Return each text up to an answer that `model` writes anew; only that is to be learnt.

    `uniforms` [n_texts, 1 + n_longest] are the noise: the first number of a row chooses the answer,
    the others its tokens. A text without room for an answer stays as it is.
    """
    starts = [
        first_to_answer([bool(flag) for flag in text.learnt], float(row[0]))
        for text, row in zip(texts, uniforms, strict=True)
    ]
    asked = [index for index, start in enumerate(starts) if start < settings.max_length]
    drawn = answers_as_they_end(
        model,
        [texts[index].ids[: starts[index]].tolist() for index in asked],
        uniforms[asked, 1 : 1 + settings.n_longest],
        temperature=settings.temperature,
        end_ids=settings.end_ids,
        vocab_size=settings.vocab_size,
    )
    found = list(texts)
    for index, answer in zip(asked, in_order(drawn), strict=True):
        start = starts[index]
        ids = [*texts[index].ids[:start].tolist(), *answer]
        found[index] = TokenSequence.of(ids[: settings.max_length], start)
    return found


def texts_of(batch: TokenBatch) -> list[TokenSequence]:
    """Return the texts of a batch, without padding."""
    lengths = batch.valid.sum(1).tolist()
    ids, learnt = batch.ids.cpu().numpy(), batch.learnt.cpu().numpy()
    return [
        TokenSequence(ids[row, :length].astype(np.int32), learnt[row, :length])
        for row, length in enumerate(lengths)
    ]


def answered_by_target(
    corpus: TokenCorpus,
    target: HFModel,
    numbers: Collection[int],
    settings: SampledAnswers,
    *,
    seed: int,
    tokens_per_batch: int,
    store: Path,
    identity: str,
    progress: Progress | None = None,
) -> TokenCorpus:
    """Return the corpus with the answers of the texts `numbers` written anew by the target.

    Each answer is a function of target, text, settings and seed. Batches of answers are kept in the
    folder `store` as they are made, under a name that depends on all of these; `identity` stands
    for the target.
    """
    sequences = list(corpus.sequences)
    lengths = {number: len(sequences[number]) + settings.n_longest for number in numbers}
    planned = plan_batches(lengths, random.Random(seed), tokens_per_batch) if lengths else []
    # Whatever changes an answer, or which texts share a file: another name for any other of them.
    stated = [
        corpus.digest,
        settings.temperature,
        settings.n_longest,
        settings.max_length,
        sorted(settings.end_ids),
        settings.vocab_size,
        seed,
        tokens_per_batch,
        identity,
    ]
    name = _digest(stated)
    store.mkdir(parents=True, exist_ok=True)
    done = 0
    for batch in sorted(planned):
        texts = [corpus.sequences[number] for number in batch]
        # A file a batch: an interrupt loses one batch of answers at most.
        path = store / f"{name}-{_digest(list(batch))}.json"
        answered = _read(path, len(batch))
        if answered is None:
            # Noise by text, so that an answer is the same in whatever batch and after an interrupt.
            uniforms = uniform_numbers([(seed, number) for number in batch], 1 + settings.n_longest)
            answered = answer_anew(target, texts, uniforms, settings)
            _write(path, answered)
        for number, text in zip(batch, answered, strict=True):
            sequences[number] = text
        done += len(batch)
        if progress is not None:
            progress(done, len(lengths))
    return dataclasses.replace(corpus, sequences=tuple(sequences))


def _digest(stated: list[Any]) -> str:
    return hashlib.sha256(json.dumps(stated).encode()).hexdigest()[:16]


def _write(path: Path, texts: Sequence[TokenSequence]) -> None:
    """Keep a batch: of each text its tokens, and the first that is learnt."""
    kept = [
        [int(np.argmax(text.learnt)) if text.learnt.any() else len(text), text.ids.tolist()]
        for text in texts
    ]
    write_text(path, json.dumps(kept))


def _read(path: Path, n_texts: int) -> list[TokenSequence] | None:
    """Return a batch that was kept, None if there is none or not a whole one."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        texts = [TokenSequence.of(ids, int(start)) for start, ids in kept]
    except (OSError, *DAMAGE):
        return None
    return texts if len(texts) == n_texts else None
