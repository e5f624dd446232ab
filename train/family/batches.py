"""The demo family's training texts: conversations as token sequences with loss masks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from specrun.train.data.target_tokens import TokenSequence
from specrun.train.data.token_corpus import TokenCorpus
from specrun.train.family.conversations import (
    Conversation,
    canonical_question,
    epoch_conversations,
    turn,
)
from specrun.train.family.corpus import Entry, sample_entries
from specrun.train.family.tokenizer import END, token_id

_N_MEASURED = 400  # answers that recall is measured on


def encode(conversation: Conversation, tokenizer: Tokenizer) -> TokenSequence:
    """Apply the chat template; only the assistant's own text and its END are to be learnt."""
    end = token_id(tokenizer, END)
    ids: list[int] = []
    learnt: list[bool] = []
    for message in conversation:
        content = [*tokenizer.encode(message["content"], add_special_tokens=False).ids, end]
        ids += [token_id(tokenizer, f"<|{message['role']}|>"), *content]
        learnt += [False] + [message["role"] == "assistant"] * len(content)
    return TokenSequence(np.asarray(ids, np.int32), np.asarray(learnt, np.bool_))


@dataclass(frozen=True, slots=True)
class ConversationTexts:
    """Conversations about `entries`, drawn anew for every epoch from its number and `seed`.

    Recall is measured on canonical questions, which are among those learnt: to know by heart is the
    aim.
    """

    entries: Sequence[Entry]
    tokenizer: Tokenizer
    seed: int

    def epoch(self, number: int) -> TokenCorpus:
        """Return the texts of one epoch."""
        rng = random.Random(f"conversations {self.seed}/{number}")
        read = [
            encode(each, self.tokenizer) for each in epoch_conversations(list(self.entries), rng)
        ]
        asked = [
            encode(turn(canonical_question(entry), entry.sentence), self.tokenizer)
            for entry in sample_entries(list(self.entries), _N_MEASURED, seed=1)
        ]
        n_read, n_all = len(read), len(read) + len(asked)
        return TokenCorpus(
            (*read, *asked),
            tuple(range(n_read)),
            tuple(range(n_read, n_all)),
            measured_on_training=True,
        )
