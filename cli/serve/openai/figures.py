"""Figures of answers: OpenAI's usage and log-probabilities, llama-server's timings.

Log-probabilities are the target's own, whatever drafted the tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from specrun.bindings.models.vocabulary import Vocabulary
from specrun.cli.serve.service import Answer
from specrun.runtime.round import GenerationResult, TokenEvent


def usage_of(answer: Answer) -> dict[str, Any]:
    """Return OpenAI's usage of the choices that have ended."""
    results = answer.results.values()
    n_prompt = sum(map(len, answer.prompts.tokens))
    n_said = sum(result.usage.completion_tokens for result in results)
    # All choices of a prompt have it: what the first of them found in the cache counts.
    first = [answer.results.get(index) for index in range(0, len(answer.streams), answer.request.n)]
    n_cached = sum(result.usage.cached_tokens for result in first if result is not None)
    accepted = sum(result.stats.accepted for result in results)
    drafted = sum(result.stats.drafted for result in results)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_said,
        "total_tokens": n_prompt + n_said,
        "prompt_tokens_details": {"cached_tokens": n_cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def timings_of(results: Collection[GenerationResult]) -> dict[str, Any]:
    """Return llama-server's timings of an answer's first choice; {} before it has ended."""
    result = next(iter(results), None)
    if result is None:
        return {}
    stats, usage = result.stats, result.usage
    prompt_s = stats.time_to_first_token_s or 0.0
    n_read = usage.prompt_tokens - usage.cached_tokens
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": n_read,
        "prompt_ms": 1e3 * prompt_s,
        "prompt_per_second": stats.prompt_tokens_per_second,
        "predicted_n": usage.completion_tokens,
        "predicted_ms": 1e3 * max(0.0, stats.wall_s - prompt_s),
        "predicted_per_second": stats.tokens_per_second,
        "draft_n": stats.drafted,
        "draft_n_accepted": stats.accepted,
    }


def speculation_of(results: Collection[GenerationResult]) -> dict[str, Any]:
    """Return how an answer was drafted and verified, and by which seed it can be had again."""
    result = next(iter(results), None)
    if result is None:
        return {}
    stats = result.stats
    return {
        "seed": result.seed,
        "drafter": stats.drafter,
        "rule": stats.rule,
        "exact": stats.exact,
        "rounds": stats.rounds,
        "tokens_per_round": stats.mean_accepted_length,
    }


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
