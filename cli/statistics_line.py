"""The line of statistics below an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specrun.runtime.results import GenerationResult

__all__ = ["statistics_line"]


def statistics_line(result: GenerationResult, trained: int | None = None) -> str:
    """Return prompt, generation and drafting of one answer in one line; "-" where nothing was counted.

    The prompt's rate counts the tokens that were evaluated (not the cached ones), the generation's leaves
    out the time of the prompt. `trained` is the context that the model was trained for: more of it is said.
    """
    usage, stats = result.usage, result.stats
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    parts = [
        f"prompt {usage.prompt_tokens} tok{cached} {_rate(stats.prompt_tokens_per_second)}",
        f"gen {usage.completion_tokens} tok {_rate(stats.tokens_per_second)}",
        f"draft {stats.accepted}/{stats.drafted} accepted {stats.acceptance_rate:.1%}"
        if stats.acceptance_rate is not None
        else "draft -",
        "- tok/round" if stats.mean_accepted_length is None else f"{stats.mean_accepted_length:.2f} tok/round",
        "TTFT -" if stats.time_to_first_token_s is None else f"TTFT {stats.time_to_first_token_s:.2f} s",
    ]
    if "choices" in stats.drafting:
        parts.append(_choices(stats.drafting))
    if not stats.exact:
        parts.append(f"rule {stats.rule}, not exact")
    if trained is not None and usage.prompt_tokens + usage.completion_tokens > trained:
        parts.append(f"beyond the {trained:,} tokens it was trained for")
    return " | ".join(parts)


def _rate(value: float | None) -> str:
    return "- tok/s" if value is None else f"{value:.1f} tok/s"


def _choices(drafting: Mapping[str, Any]) -> str:
    """Return how the rounds were shared out by `auto`, the most used drafter first."""
    arms = sorted((arm for arm in drafting["arms"] if arm["rounds"]), key=lambda arm: -int(arm["rounds"]))
    total = sum(arm["rounds"] for arm in arms)
    return "auto " + (", ".join(f"{arm['drafter']} {arm['rounds'] / total:.0%}" for arm in arms) or "-")
