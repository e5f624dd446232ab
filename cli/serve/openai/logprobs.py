"""Log-probabilities as OpenAI writes them: the target's own, whatever drafted the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrun.bindings.vocabulary import Vocabulary
from specrun.runtime.results import TokenEvent


def chat_logprobs(events: Sequence[TokenEvent], vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the `logprobs` of a chat completion's tokens; one that ends the answer has none."""
    ends = vocabulary.end_of_generation
    content = [
        {
            **_entry(event.token_id, event.logprob, vocabulary),
            "top_logprobs": [_entry(*likely, vocabulary) for likely in event.top_logprobs()],
        }
        for event in events
        if event.token_id not in ends
    ]
    return {"content": content, "refusal": None}


def _entry(token: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "token": vocabulary.label(token),
        "logprob": logprob,
        "bytes": list(vocabulary.piece(token)),
    }


def completion_logprobs(
    events: Sequence[TokenEvent], vocabulary: Vocabulary, start: int
) -> dict[str, Any]:
    """Return the `logprobs` of a completion's tokens, whose text begins at character `start`."""
    kept = [event for event in events if event.token_id not in vocabulary.end_of_generation]
    offsets: list[int] = []
    for event in kept:
        offsets.append(start)
        start += len(event.text)
    return {
        "tokens": [vocabulary.label(event.token_id) for event in kept],
        "token_logprobs": [event.logprob for event in kept],
        "top_logprobs": [
            {vocabulary.label(token): value for token, value in event.top_logprobs()}
            for event in kept
        ],
        "text_offset": offsets,
    }
