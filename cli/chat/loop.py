"""The loop of a chat: read, answer, go on; Ctrl-C and errors leave the conversation whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from specrun.bindings.errors import ContextFullError, SpecrunError
from specrun.cli.chat.conversation import Conversation, Totals
from specrun.cli.chat.input import LineReader, read_message
from specrun.cli.chat.learning import ChatLearning
from specrun.cli.chat.models import ChatModels
from specrun.cli.options.output import AnswerDisplay
from specrun.cli.terminal.answer import (
    Answer,
    AnswerWriter,
    PlainWriter,
    context_full,
    run_stream,
    statistics_line,
)
from specrun.cli.terminal.errors import noted
from specrun.cli.terminal.terminal import Terminal
from specrun.runtime import GenerationResult, Runtime, SamplingParams

CommandHandler: TypeAlias = "Callable[[Chat, str], bool]"  # returns whether the chat goes on
_START_OVER = "/clear starts over (/save FILE keeps a copy first)"
_LEAVE_HINT = "Ctrl-C again, Ctrl-D or /quit leaves."


class Chat:
    """One conversation with one runtime, over a terminal."""

    def __init__(
        self,
        models: ChatModels,
        conversation: Conversation,
        terminal: Terminal,
        display: AnswerDisplay,
        *,
        markdown: bool = False,
    ) -> None:
        self.models = models
        self.conversation = conversation
        self.terminal = terminal
        self.totals = Totals()
        self.last: GenerationResult | None = None
        self.index = 0
        self._display = display
        self._markdown = markdown and terminal.color_answers and terminal.answers_on_screen
        self._told_colors = False

    @property
    def runtime(self) -> Runtime:
        """What answers now: commands switch it."""
        return self.models.runtime

    @property
    def learning(self) -> ChatLearning | None:
        """What lets its draft model learn; None: nobody asked."""
        return self.models.learning

    def run(self, read_line: LineReader, handle_command: CommandHandler) -> int:
        """Read and answer until the input ends or a command says so; return the exit code.

        It is that of the last message that could not be answered, so that a pipe notices.
        """
        exit_code = 0
        stopped_once = False
        while True:
            try:
                message = read_message(read_line)
                stopped_once = False
            except EOFError:
                return exit_code
            except KeyboardInterrupt:
                if stopped_once:
                    return exit_code
                stopped_once = True
                self.terminal.say(_LEAVE_HINT, "dim")
                continue
            try:
                if not self._take(message, handle_command):
                    return exit_code
            except SpecrunError as error:
                exit_code = error.exit_code
                self.terminal.error(noted(str(error), error))
            except KeyboardInterrupt:
                self.terminal.say("stopped", "dim")

    def _take(self, message: str, handle_command: CommandHandler) -> bool:
        """Answer a message or run a command; return whether the chat goes on."""
        if message.startswith("/") and not message.startswith("//"):
            return handle_command(self, message)
        text = message.removeprefix("/") if message.startswith("//") else message
        if text.strip():
            self.conversation.ask(text)
            self.index = 0
            self.answer(self.conversation.params)
        return True

    def answer(self, params: SamplingParams) -> bool:
        """Answer the last message; if nothing was said, take it back and return False."""
        conversation = self.conversation
        try:
            answer = self._stream(params)
        except BaseException as error:
            conversation.messages.pop()
            if isinstance(error, ContextFullError):
                raise ContextFullError(
                    f"{error}. The message was taken back: {_START_OVER}"
                ) from error
            raise
        if answer.interrupted and not answer.result.text:
            conversation.messages.pop()
            self.terminal.say("stopped before the first token; the message was taken back", "dim")
            return False
        conversation.reply(answer.result.text)
        self.last = answer.result
        self.totals.add(answer.result)
        self._conclude(answer)
        if self.learning is not None:
            self.learning.after_answer(answer.result)
        if self.terminal.notes_on_screen:
            self.terminal.note("")
        return True

    def _stream(self, params: SamplingParams) -> Answer:
        self._explain_colors()
        conversation = self.conversation
        stream = self.runtime.stream_chat(
            conversation.for_template(),
            params,
            max_tokens=conversation.max_tokens,
            # A random seed is new for every answer, and `-s SEED` alone then repeats it.
            index=0 if params.seed is None else self.index,
            logprobs=False,
        )
        return run_stream(stream, self._writer())

    def _writer(self) -> AnswerWriter:
        show_draft = self._display.show_draft
        if self._markdown and not show_draft:
            from specrun.cli.terminal.markdown import MarkdownWriter

            return MarkdownWriter(self.terminal)
        return PlainWriter(self.terminal, show_draft=show_draft)

    def _conclude(self, answer: Answer) -> None:
        if self._display.show_timings:
            self.terminal.note(statistics_line(answer.result, self.runtime.model.n_ctx_train))
        if answer.interrupted:
            self.terminal.note("stopped; what was said so far is part of the conversation")
        full = context_full(answer, self.conversation.max_tokens, self.runtime)
        if full:
            self.terminal.say(f"{full} {_START_OVER}.", "yellow")

    def _explain_colors(self) -> None:
        if self._display.show_draft and self.terminal.color_answers and not self._told_colors:
            self._told_colors = True
            self.terminal.note("(cyan: drafted and accepted; plain: the target's own)")
