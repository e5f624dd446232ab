"""What `auto` chose in one answer, as statistics and as a log that can be replayed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrun.bindings.errors import FileMissingError, OptionError

__all__ = ["ChoiceLog", "read_choice_logs"]

_MAX_ROUNDS = 1 << 24


@dataclass(slots=True)
class ChoiceLog:
    """Choices among `names` as runs of [index, rounds], with each one's rounds, tokens and seconds."""

    names: Sequence[str]
    runs: list[list[int]] = field(default_factory=list)
    n_rounds: int = 0
    totals: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.totals = [[0, 0, 0.0] for _ in self.names]

    def add(self, index: int, n_tokens: int, seconds: float) -> None:
        """Note a round."""
        if self.runs and self.runs[-1][0] == index:
            self.runs[-1][1] += 1
        else:
            self.runs.append([index, 1])
        self.n_rounds += 1
        total = self.totals[index]
        total[0] += 1
        total[1] += n_tokens
        total[2] += seconds

    def choices_for(self, names: Sequence[str]) -> list[int]:
        """Return the choice of each round; raises `OptionError` if it was made among other drafters."""
        if list(names) != list(self.names):
            raise OptionError(
                f"auto: the log was made with {', '.join(self.names)} and cannot be replayed with {', '.join(names)}"
            )
        return [index for index, rounds in self.runs for _ in range(rounds)]

    def to_dict(self) -> dict[str, Any]:
        """Return statistics and log, ready for JSON."""
        arms = [
            {
                "drafter": name,
                "rounds": int(rounds),
                "tokens": int(tokens),
                "seconds": seconds,
                "tokens_per_second": tokens / seconds if seconds > 0.0 else None,
            }
            for name, (rounds, tokens, seconds) in zip(self.names, self.totals, strict=True)
        ]
        return {"arms": arms, "choices": [list(run) for run in self.runs]}


def read_choice_logs(path: Path) -> list[ChoiceLog]:
    """Return the logs of a file: JSON objects as `generate --json` prints them, one an answer, in order.

    Raises `FileMissingError` or `OptionError` for files that hold none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileMissingError(f"{path} does not exist: give a file that generate --json wrote") from None
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} cannot be read as a log of choices: {error}") from None
    decoder, logs, position = json.JSONDecoder(), list[ChoiceLog](), 0
    while rest := text[position:].lstrip():
        try:
            value, length = decoder.raw_decode(rest)
            logs.append(_log_of(value))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise OptionError(
                f"{path} is not a log of choices: give what generate --json printed with --drafter auto"
            ) from None
        position = len(text) - len(rest) + length
    if not logs:
        raise OptionError(f"{path} is empty: give what generate --json printed with --drafter auto")
    return logs


def _log_of(value: Any) -> ChoiceLog:  # noqa: ANN401 - whatever a file holds
    """Return the log in a result, in its statistics, or by itself."""
    for name in ("stats", "drafting"):
        if not isinstance(value, Mapping):
            raise ValueError
        value = value.get(name, value)
    names, runs = [arm["drafter"] for arm in value["arms"]], value["choices"]
    valid = all(isinstance(name, str) for name in names) and all(
        isinstance(index, int) and isinstance(rounds, int) and 0 <= index < len(names) and rounds > 0
        for index, rounds in runs
    )
    if not valid or sum(rounds for _, rounds in runs) > _MAX_ROUNDS:
        raise ValueError
    return ChoiceLog(names, [list(run) for run in runs])
