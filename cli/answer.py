"""Shows an answer while it is made, and stops it on Ctrl-C without losing what was said."""

from __future__ import annotations

from dataclasses import dataclass

from specrun.cli.terminal import Terminal
from specrun.runtime import Runtime
from specrun.runtime.results import GenerationResult, TokenEvent
from specrun.runtime.session import GenerationStream

__all__ = ["Answer", "AnswerWriter", "context_full", "run_stream"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished or stopped answer."""

    result: GenerationResult
    interrupted: bool


class AnswerWriter:
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
        """Write what an interruption kept back of the whole `text`, and end the line."""
        rest = text[self._written :]
        self._terminal.answer(rest)
        if (rest[-1:] or self._last) != "\n":
            self._terminal.answer("\n")


def run_stream(stream: GenerationStream, writer: AnswerWriter | None = None) -> Answer:
    """Run a stream to its end, or until Ctrl-C, which leaves the runtime usable."""
    interrupted = False
    try:
        for event in stream:
            if writer is not None:
                writer.write(event)
            del event  # an event that somebody holds costs the stream a copy of its logits
    except KeyboardInterrupt:
        interrupted = True
    finally:
        stream.close()
        if writer is not None:
            writer.finish(stream.result.text)
    return Answer(stream.result, interrupted)


def context_full(answer: Answer, max_tokens: int | None, runtime: Runtime) -> str | None:
    """Return what to say if the end of the context cut the answer short, otherwise None."""
    result = answer.result
    if result.finish_reason != "length" or result.usage.completion_tokens == max_tokens:
        return None
    if runtime.n_ctx < runtime.model.n_ctx_train or runtime.options.context.rope.stretches:
        advice = "a larger -c gives more room"
    else:
        advice = "the model was trained for no more (--rope-scaling yarn --rope-scale 2 stretches it)"
    return f"The context of {runtime.n_ctx:,} tokens is full, so the answer ends here; {advice}."
