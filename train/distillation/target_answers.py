"""Answers that the target samples before training, kept on disk: an interrupted run does not ask twice."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np

from specrun.runtime.atomic import atomic_path
from specrun.train.distillation.answers import AnswerSettings, answer_anew
from specrun.train.distillation.sampling import uniform_numbers
from specrun.train.hf_model import HFModel
from specrun.train.target_words import TokenSequence
from specrun.train.token_corpus import TokenCorpus, plan_batches

__all__ = ["AnswersProgress", "answered_by_target"]

AnswersProgress = Callable[[int, int], None]
"""Called with the texts answered and those to answer."""


def answered_by_target(
    corpus: TokenCorpus,
    target: HFModel,
    numbers: Collection[int],
    settings: AnswerSettings,
    *,
    seed: int,
    tokens_per_batch: int,
    store: Path,
    identity: str,
    progress: AnswersProgress | None = None,
) -> TokenCorpus:
    """Return the corpus with the answers of the texts `numbers` written anew by the target.

    Each answer is a function of target, text, settings and seed. Batches of answers are kept in the folder `store`
    as they are made, under a name that depends on all of these; `identity` stands for the target.
    """
    sequences = list(corpus.sequences)
    lengths = {number: len(sequences[number]) + settings.n_longest for number in numbers}
    batches = sorted(plan_batches(lengths, random.Random(seed), tokens_per_batch)) if lengths else []
    name = _digest(corpus, settings, seed, tokens_per_batch, identity)
    store.mkdir(parents=True, exist_ok=True)
    done = 0
    for batch in batches:
        texts = [corpus.sequences[number] for number in batch]
        path = store / f"{name}-{_digest_of(batch)}.json"
        answered = _read(path, len(batch))
        if answered is None:
            uniforms = uniform_numbers([(seed, number) for number in batch], 1 + settings.n_longest)
            answered = answer_anew(target, texts, uniforms, settings)
            _write(path, answered)
        for number, text in zip(batch, answered, strict=True):
            sequences[number] = text
        done += len(batch)
        if progress is not None:
            progress(done, len(lengths))
    return dataclasses.replace(corpus, sequences=tuple(sequences))


def _digest(corpus: TokenCorpus, settings: AnswerSettings, seed: int, tokens_per_batch: int, identity: str) -> str:
    stated = [
        corpus.digest,
        settings.temperature,
        settings.n_longest,
        settings.max_length,
        sorted(settings.end_ids),
        settings.n_words,
        seed,
        tokens_per_batch,
        identity,
    ]
    return hashlib.sha256(json.dumps(stated).encode()).hexdigest()[:16]


def _digest_of(batch: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(batch)).encode()).hexdigest()[:16]


def _write(path: Path, texts: Sequence[TokenSequence]) -> None:
    """Keep a batch: of each text its words, and where what is to be learnt begins."""
    kept = [[int(np.argmax(text.learnt)) if text.learnt.any() else len(text), text.ids.tolist()] for text in texts]
    with atomic_path(path, force=True) as aside:
        aside.write_text(json.dumps(kept), encoding="utf-8")


def _read(path: Path, n_texts: int) -> list[TokenSequence] | None:
    """Return a batch that was kept, None where there is none or not a whole one."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        texts = [TokenSequence(np.asarray(ids, np.int32), np.arange(len(ids)) >= int(start)) for start, ids in kept]
    except (OSError, ValueError, TypeError):
        return None
    return texts if len(texts) == n_texts else None
