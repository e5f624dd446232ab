"""How much of the corpus a model knows by heart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from specrun.train.batches import collate, encode
from specrun.train.conversations import canonical_question, turn
from specrun.train.corpus import Entry
from specrun.train.llama import Llama


@dataclass(frozen=True, slots=True)
class Recall:
    """`exact`: share of answers right to the letter; `tokens`: share of tokens right given those before."""

    exact: float
    tokens: float


@torch.no_grad()
def measure_recall(model: Llama, entries: list[Entry], tokenizer: Tokenizer, batch_size: int = 64) -> Recall:
    """Greedy recall of the canonical questions.

    One forward pass over the right answer is enough: greedy decoding gives it exactly when every token of it
    is the most probable one after those before it.
    """
    device = next(model.parameters()).device
    samples = [encode(turn(canonical_question(entry), entry.sentence), tokenizer) for entry in entries]
    samples.sort(key=lambda sample: len(sample.ids))
    exact = right = total = 0
    for start in range(0, len(samples), batch_size):
        batch = collate(samples[start : start + batch_size])
        wanted = batch.labels >= 0
        hits = (model(batch.ids.to(device)).argmax(-1).cpu() == batch.labels) & wanted
        exact += int((hits == wanted).all(dim=1).sum())
        right += int(hits.sum())
        total += int(wanted.sum())
    return Recall(exact / len(samples), right / total)
