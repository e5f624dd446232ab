"""A conversation: its messages, the system prompt, and the settings its answers are made with."""

from __future__ import annotations

from dataclasses import dataclass, field

from specrun.runtime.results import GenerationResult
from specrun.runtime.sampling import SamplingParams

__all__ = ["Conversation", "Totals"]

ASSISTANT, USER, SYSTEM = "assistant", "user", "system"


@dataclass(slots=True)
class Totals:
    """What all answers of a chat took together."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    wall_s: float = 0.0

    def add(self, result: GenerationResult) -> None:
        """Count an answer."""
        self.answers += 1
        self.prompt_tokens += result.usage.prompt_tokens
        self.cached_tokens += result.usage.cached_tokens
        self.completion_tokens += result.usage.completion_tokens
        self.rounds += result.stats.rounds
        self.drafted += result.stats.drafted
        self.accepted += result.stats.accepted
        self.wall_s += result.stats.wall_s


@dataclass(slots=True)
class Conversation:
    """Messages of the user and the assistant in turns, behind an optional system prompt."""

    params: SamplingParams
    max_tokens: int | None = None
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> None:
        """Add the user's message."""
        self.messages.append({"role": USER, "content": text})

    def reply(self, text: str) -> None:
        """Add the assistant's answer."""
        self.messages.append({"role": ASSISTANT, "content": text})

    @property
    def ends_with_answer(self) -> bool:
        """Whether the last message is the assistant's."""
        return bool(self.messages) and self.messages[-1]["role"] == ASSISTANT

    def for_template(self) -> list[dict[str, str]]:
        """Return all messages, the system prompt first."""
        first = [{"role": SYSTEM, "content": self.system}] if self.system is not None else []
        return [*first, *self.messages]
