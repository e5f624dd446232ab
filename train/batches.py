"""Token ids, loss masks and batches of nearly equal length."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from specrun.train.conversations import Conversation, epoch_conversations
from specrun.train.corpus import Entry
from specrun.train.tokenizer import END, token_id


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation as `ids`; `answered[i]` says whether token i is the assistant's, END included."""

    ids: list[int]
    answered: list[bool]


@dataclass(frozen=True, slots=True)
class Batch:
    """`ids` [B, T] to read; `labels` [B, T]: the next token where it is the assistant's, -1 elsewhere."""

    ids: Tensor
    labels: Tensor


def encode(conversation: Conversation, tokenizer: Tokenizer) -> Sample:
    """Apply the chat template; only the assistant's own words and its END are to be learnt."""
    end = token_id(tokenizer, END)
    ids: list[int] = []
    answered: list[bool] = []
    for message in conversation:
        content = [*tokenizer.encode(message["content"], add_special_tokens=False).ids, end]
        ids += [token_id(tokenizer, f"<|{message['role']}|>"), *content]
        answered += [False] + [message["role"] == "assistant"] * len(content)
    return Sample(ids, answered)


def collate(samples: Sequence[Sample]) -> Batch:
    """Pad on the right; causal attention never looks there, and padded labels are -1."""
    length = max(len(sample.ids) for sample in samples) - 1
    ids = torch.zeros(len(samples), length, dtype=torch.long)
    labels = torch.full((len(samples), length), -1, dtype=torch.long)
    for row, sample in enumerate(samples):
        tokens = torch.tensor(sample.ids)
        count = len(tokens) - 1
        ids[row, :count] = tokens[:-1]
        labels[row, :count] = torch.where(torch.tensor(sample.answered[1:]), tokens[1:], -1)
    return Batch(ids, labels)


def epoch_batches(
    entries: list[Entry], tokenizer: Tokenizer, epoch: int, seed: int, tokens_per_batch: int
) -> list[Batch]:
    """All batches of one epoch, in order: a function of the arguments alone, so that training can resume."""
    rng = random.Random(f"{seed}/{epoch}")
    samples = [encode(conversation, tokenizer) for conversation in epoch_conversations(entries, rng)]
    samples.sort(key=lambda sample: len(sample.ids) + rng.random() * 3)  # mixed neighbours, little padding
    groups: list[list[Sample]] = [[]]
    longest = 0
    for sample in samples:
        longest = max(longest, len(sample.ids))
        if groups[-1] and (len(groups[-1]) + 1) * longest > tokens_per_batch:
            groups.append([])
            longest = len(sample.ids)
        groups[-1].append(sample)
    rng.shuffle(groups)
    return [collate(group) for group in groups]
