"""Answers on the screen: streamed, stopped by Ctrl-C without loss, with statistics below."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specrun.cli.terminal.terminal import Terminal
from specrun.runtime import Runtime
from specrun.runtime.chat import Content, Part, Reasoning, TokenReader
from specrun.runtime.engine import GenerationStream
from specrun.runtime.round import GenerationResult, TokenEvent


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished or stopped answer."""

    result: GenerationResult
    interrupted: bool


class AnswerWriter(Protocol):
    """Shows an answer while it comes."""

    def write(self, event: TokenEvent) -> None:
        """Take the text that became certain with a token."""

    def finish(self, text: str) -> None:
        """Show the rest of the whole `text`, and end the line."""


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

    def finish(self, text: str) -> None:
        """Write the rest of the whole `text` after an interruption, and end the line."""
        rest = text[self._written :]
        self._terminal.answer(rest)
        if (rest[-1:] or self._last) != "\n":
            self._terminal.answer("\n")


class ReplyWriter:
    """Shows an answer without its marks: the reasoning dim, then the content by another writer.

    `content` is what the answer says to the user.
    """

    def __init__(self, terminal: Terminal, reader: TokenReader, content: AnswerWriter) -> None:
        self.content = ""
        self._terminal, self._reader, self._writer = terminal, reader, content
        self._taken = 0
        self._thought = ""

    def write(self, event: TokenEvent) -> None:
        """Show the parts that became certain with a token."""
        self._taken += len(event.text)
        for part in self._reader.read([event]):
            self._show(part, event)

    def finish(self, text: str) -> None:
        """Show the rest of the whole `text`, and end the line."""
        for part in self._reader.finish(text[self._taken :]):
            self._show(part, None)
        self._end_thought()
        self._writer.finish(self.content)

    def _show(self, part: Part, event: TokenEvent | None) -> None:
        if isinstance(part, Reasoning):
            self._thought += part.text
            self._terminal.answer(part.text, "dim")
        elif isinstance(part, Content):
            self._end_thought()
            self.content += part.text
            if event is not None:
                shown = TokenEvent(part.text, event.token_id, event.origin, event.round, None)
                self._writer.write(shown)

    def _end_thought(self) -> None:
        if self._thought:
            self._terminal.answer("\n\n" if not self._thought.endswith("\n") else "\n")
            self._thought = ""


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
            writer.finish(stream.result.text)
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
    if not stats.exact:
        parts.append(f"not exact: {stats.rule}")
        if stats.total_variation is not None and stats.changed_share is not None:
            distance = f"TV {stats.total_variation:.3f} from the target's law"
            parts[-1] += f", {distance}, {stats.changed_share:.1%} of tokens changed"
    if trained is not None and usage.prompt_tokens + usage.completion_tokens > trained:
        parts.append(f"beyond the {trained:,} tokens it was trained for")
    return " | ".join(parts)


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
