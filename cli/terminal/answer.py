"""Answers on the screen: streamed, stopped by Ctrl-C without loss, with statistics below."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from specrun.cli.terminal.terminal import Terminal
from specrun.runtime import Runtime
from specrun.runtime.engine import GenerationStream
from specrun.runtime.planning import CostCurve
from specrun.runtime.round import ChatResult, GenerationResult, TokenEvent

_LINE_PAUSE_S = 0.1  # between two drawings of a passing line


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished or stopped answer."""

    result: GenerationResult
    interrupted: bool


class AnswerWriter(Protocol):
    """Shows an answer while it comes."""

    def write(self, event: TokenEvent) -> None:
        """Take the text that became certain with a token."""

    def finish(self, result: GenerationResult) -> None:
        """Show the rest of a whole result, and end the line."""


class PlainWriter:
    """Writes the text of token events to stdout; accepted drafts in cyan if `show_draft`."""

    def __init__(self, terminal: Terminal, *, show_draft: bool = False) -> None:
        self._terminal = terminal
        self._show_draft = show_draft and terminal.color_answers
        self._written = 0
        self._last = ""

    def write(self, event: TokenEvent) -> None:
        """Write the text that became certain with a token."""
        if event.text:
            drafted = self._show_draft and event.origin == "drafted"
            self._terminal.answer(event.text, "cyan" if drafted else "plain")
            self._written += len(event.text)
            self._last = event.text[-1]

    def finish(self, result: GenerationResult) -> None:
        """Write the rest of a whole result after an interruption, and end the line."""
        rest = result.text[self._written :]
        self._terminal.answer(rest)
        if (rest[-1:] or self._last) != "\n":
            self._terminal.answer("\n")


class ReplyWriter:
    """Shows the reasoning of a chat's answer, then the answer by another writer.

    Reasoning is shown dim as it comes, or folded: a passing line shows its end, and then one line
    shows its time.
    """

    def __init__(
        self,
        terminal: Terminal,
        answer: AnswerWriter,
        *,
        fold: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terminal, self._answer, self._fold, self._clock = terminal, answer, fold, clock
        self._taken = 0
        self._thought = ""  # since the last piece of the answer
        self._began, self._n_tokens = clock(), 0  # of that thought
        self._next_line = 0.0

    def write(self, event: TokenEvent) -> None:
        """Show the text that became certain with a token."""
        self._n_tokens += 1
        self._think(event.reasoning)
        if event.text:
            self._end_thought()
            self._answer.write(event)

    def finish(self, result: GenerationResult) -> None:
        """Show the rest of a whole result, and end the line."""
        if isinstance(result, ChatResult):
            self._think(result.reasoning[self._taken :])
        self._end_thought()
        self._answer.finish(result)

    def _think(self, text: str) -> None:
        if not text:
            return
        self._taken += len(text)
        self._thought += text
        if not self._fold:
            self._terminal.answer(text, "dim")
        elif self._clock() >= self._next_line:
            self._next_line = self._clock() + _LINE_PAUSE_S
            self._terminal.passing_end(f"thinking for {self._duration()}: ", self._thought)

    def _end_thought(self) -> None:
        if self._thought and self._fold:
            self._terminal.passing("")
            self._terminal.answer(f"thought for {self._duration()}\n", "dim")
        elif self._thought:
            self._terminal.answer("\n\n" if not self._thought.endswith("\n") else "\n")
        self._thought, self._began, self._n_tokens = "", self._clock(), 0

    def _duration(self) -> str:
        return f"{self._clock() - self._began:.0f} s ({self._n_tokens:,} tokens)"


def reply_writer(terminal: Terminal, answer: AnswerWriter, *, fold: bool) -> AnswerWriter:
    """Return the writer of a chat's answer: a screen shows the reasoning, too, a pipe does not."""
    return ReplyWriter(terminal, answer, fold=fold) if terminal.answers_on_screen else answer


def run_stream(stream: GenerationStream, writer: AnswerWriter | None = None) -> Answer:
    """Run a stream to its end, or until Ctrl-C, which leaves the runtime usable."""
    interrupted = False
    try:
        if writer is None:
            stream.drain()
        else:
            stream.hand_to(writer.write)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        stream.close()
        if writer is not None:
            writer.finish(stream.result)
    return Answer(stream.result, interrupted)


def context_full(answer: Answer, max_tokens: int | None, runtime: Runtime) -> str | None:
    """Return the note for an answer that the end of the context cut short, otherwise None."""
    result = answer.result
    if result.finish_reason != "length" or result.usage.completion_tokens == max_tokens:
        return None
    advice = "the model was trained for no more (--rope-scaling yarn --rope-scale 2 stretches it)"
    if runtime.n_ctx < runtime.model.n_ctx_train or runtime.options.context.rope.stretches:
        advice = "a larger -c gives more room"
    return f"The context of {runtime.n_ctx:,} tokens is full, so the answer ends here; {advice}."


def gain_line(result: GenerationResult, curve: CostCurve | None) -> str:
    """Return the gain of drafting in a line: speed, times plain decoding's, and kept guesses.

    `curve` is the measured cost of evaluations, by which plain decoding's speed is known. If it
    would allow no such gain with these tokens a round, the machine has changed: nothing is shown.
    """
    stats = result.stats
    parts = [f"{_figure(stats.tokens_per_second, '.1f')} tok/s"]
    if curve is not None and stats.tokens_per_second and stats.mean_accepted_length:
        gain = stats.tokens_per_second * curve.seconds(1)
        cheapest = min(curve.seconds(1), *curve.reused)
        if stats.drafted and gain <= stats.mean_accepted_length * curve.seconds(1) / cheapest:
            parts.append(f"{gain:.1f}x plain")
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.acceptance_rate:.0%} of guesses kept".replace("%", " %"))
    return ", ".join(parts) + _not_exact(result, " | ")


def statistics_line(result: GenerationResult, trained: int | None = None) -> str:
    """Return prompt, generation and drafting of an answer in one line; "-" stands for no figure.

    The prompt's rate counts the tokens that were evaluated (not the cached ones), the generation's
    leaves out the time of the prompt. `trained` is the context that the model was trained for: the
    line names it if the answer goes beyond it.
    """
    usage, stats = result.usage, result.stats
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    accepted = ""
    if stats.acceptance_rate is not None:
        accepted = f"{stats.accepted}/{stats.drafted} accepted {stats.acceptance_rate:.1%}"
    read_rate = _figure(stats.prompt_tokens_per_second, ".1f")
    parts = [
        f"prompt {usage.prompt_tokens} tok{cached} {read_rate} tok/s",
        f"gen {usage.completion_tokens} tok {_figure(stats.tokens_per_second, '.1f')} tok/s",
        f"draft {accepted or '-'}",
        f"{_figure(stats.mean_accepted_length, '.2f')} tok/round",
        f"TTFT {_figure(stats.time_to_first_token_s, '.2f', ' s')}",
        f"seed {result.seed}",
    ]
    if "choices" in stats.drafting:  # those of `auto`, the most used drafter first
        used = [arm for arm in stats.drafting["arms"] if arm["rounds"]]
        total = sum(arm["rounds"] for arm in used)
        shares = [
            f"{arm['drafter']} {arm['rounds'] / total:.0%}"
            for arm in sorted(used, key=lambda arm: -int(arm["rounds"]))
        ]
        parts.append(f"auto {', '.join(shares) or '-'}")
    parts += filter(None, [_not_exact(result)])
    if trained is not None and usage.prompt_tokens + usage.completion_tokens > trained:
        parts.append(f"beyond the {trained:,} tokens it was trained for")
    return " | ".join(parts)


def _not_exact(result: GenerationResult, before: str = "") -> str:
    """Return that the rule is not exact, and how far it led; "" for an exact rule."""
    stats = result.stats
    if stats.exact:
        return ""
    text = f"{before}not exact: {stats.rule}"
    if stats.total_variation is None or stats.changed_share is None:
        return text
    distance = f"TV {stats.total_variation:.3f} from the target's distribution"
    return f"{text}, {distance}, {stats.changed_share:.1%} of tokens changed"


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
