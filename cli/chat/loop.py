"""A chat: its models, its lines of input, and the loop that reads and answers."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from specrun.bindings.errors import ClosedError, ContextFullError, SpecrunError
from specrun.cli.chat.conversation import Conversation
from specrun.cli.chat.learning import ChatLearning, open_learning
from specrun.cli.options.drafting import LearnSettings
from specrun.cli.options.model import DraftSettings, LoadSettings, TemplateSettings
from specrun.cli.options.opening import PLAIN_TEMPLATE, open_models
from specrun.cli.options.output import AnswerDisplay
from specrun.cli.options.types import located
from specrun.cli.terminal.answer import (
    AnswerWriter,
    PlainWriter,
    context_full,
    gain_line,
    reply_writer,
    run_stream,
)
from specrun.cli.terminal.terminal import Terminal, noted
from specrun.runtime import GenerationResult, Runtime, SamplingParams
from specrun.runtime.language import METHODS, parse_expression
from specrun.runtime.planning import CostCurve, load_curve

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyPressEvent


# == Input: line editing and history on a terminal, plain lines from a pipe ========================


PROMPT = ">>> "
CONTINUATION = "... "
_QUOTES = '"""'

LineReader = Callable[[str], str]


def read_message(read_line: LineReader) -> str:
    """Return the next message: a line, or all between two `\"\"\"`; EOFError ends the input.

    An input that ends inside the quotes ends the message.
    """
    text = read_line(PROMPT)
    while _is_open(text):
        try:
            text += "\n" + read_line(CONTINUATION)
        except EOFError:
            break
    opened = text.strip()
    if not opened.startswith(_QUOTES):
        return text
    return opened.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")


def _is_open(text: str) -> bool:
    """Whether a text begins with quotes that are not closed yet."""
    opened = text.strip()
    within = opened.removeprefix(_QUOTES)
    return opened.startswith(_QUOTES) and not within.endswith(_QUOTES)


def make_line_reader(commands: Iterable[str]) -> LineReader:
    """Return a function that reads a line: by prompt_toolkit on a screen, else from stdin.

    On a screen, Alt-Enter puts a line break into the message, and Enter sends it, but for quotes
    that are open: a message in quotes is one entry of the history.
    """
    screen = next((stream for stream in (sys.stdout, sys.stderr) if stream.isatty()), None)
    if not sys.stdin.isatty() or screen is None:
        return _read_plain_line
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        history=_history(),
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
        enable_history_search=True,
        key_bindings=keys,
        multiline=Condition(lambda: _is_open(get_app().current_buffer.text)),
        prompt_continuation=CONTINUATION,
        output=create_output(stdout=screen),
    )
    return session.prompt


def history_path() -> Path:
    """Return the file with the history of input, in the user's state folder."""
    if os.name == "nt":
        return Path(click.get_app_dir("specrun", roaming=False)) / "history"
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "specrun" / "history"


def _read_plain_line(_prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _history() -> History:
    """Return the history file, readable by the user only; in memory if it cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = history_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


# == The models of a chat, switched while the conversation stays ===================================


_Chosen: TypeAlias = tuple[LoadSettings, DraftSettings, tuple[str, ...]]  # and adapters


class ChatModels:
    """The runtime of a chat; `switch_*` replace it, or leave it as it was and raise.

    Only one runtime is open at a time: two would need the memory of both. The text after a switch
    is evaluated again, as the cache belongs to model and drafter.
    """

    def __init__(
        self,
        load: LoadSettings,
        draft: DraftSettings,
        template: TemplateSettings,
        terminal: Terminal,
        lora: tuple[str, ...],
        learn: LearnSettings,
    ) -> None:
        self._chosen = load, draft, lora
        self._template, self._terminal, self._learn = template, terminal, learn
        self.learning: ChatLearning | None = None  # without --learn
        self.curve: CostCurve | None = None  # of the open target, if it was measured
        self._opened = ExitStack()
        self._runtime: Runtime | None = None

    @property
    def runtime(self) -> Runtime:
        """The open runtime; raises ClosedError if a switch and the way back both failed."""
        if self._runtime is None:
            raise ClosedError("no model is open: /model NAME opens one")
        return self._runtime

    def open(self, params: SamplingParams) -> Runtime:
        """Open the models of the options; `params` choose among tuned plans."""
        load, draft, lora = self._chosen
        settings = (load, draft, self._template, params, self._terminal)
        with ExitStack() as opened:
            closed_last = opened.enter_context(ExitStack())
            runtime = opened.enter_context(
                open_models(Runtime, *settings, lora=lora, learn=self._learn.place)
            )
            model = runtime.model
            self.curve = load_curve(model.path, runtime.options.context, model.n_gpu_layers)
            self._take_template(runtime)
            self.learning = open_learning(closed_last, runtime, self._learn, self._terminal)
            self._opened, self._runtime = opened.pop_all(), runtime
        return runtime

    def _take_template(self, runtime: Runtime) -> None:
        """Let a model without a chat template continue the text; raises if its template is bad."""
        if runtime.options.chat_template is None and runtime.model.chat_template is None:
            runtime.set_chat_template(PLAIN_TEMPLATE)
            self._terminal.note(
                f"{runtime.model.path.name} has no chat template: it continues the text "
                "(--chat-template-file FILE gives it one)"
            )
        _ = runtime.chat_template  # a bad one is refused before the first message

    def close(self) -> None:
        """Close the runtime, if one is open."""
        self._runtime = self.learning = None
        self._opened.close()

    def switch_model(self, name: str, params: SamplingParams) -> None:
        """Open another target, with the same drafter."""
        load, draft, _ = self._chosen
        load = dataclasses.replace(load, model=located(name), demo=False)
        self._switch((load, draft, ()), params)

    def switch_drafter(self, text: str, params: SamplingParams) -> None:
        """Draft by an expression, or with a file or a model of a store, as -md does."""
        expression = parse_expression(text)
        is_method = expression.is_call or expression.atom in METHODS
        file = None if is_method or not _is_model(expression.atom) else located(expression.atom)
        load, draft, lora = self._chosen
        unset: dict[str, Any] = dict.fromkeys(("spec_type", "spec_draft_n_max", "spec_draft_p_min"))
        draft = dataclasses.replace(
            draft, drafter=None if file else text, model_draft=file, **unset
        )
        self._switch((load, draft, lora), params)

    def switch_rule(self, rule: str, params: SamplingParams) -> None:
        """Accept by another rule."""
        load, draft, lora = self._chosen
        self._switch((load, dataclasses.replace(draft, accept=rule), lora), params)

    def _switch(self, chosen: _Chosen, params: SamplingParams) -> None:
        before = self._chosen
        self.close()
        self._chosen = chosen
        try:
            self.open(params)
        except BaseException:
            self._chosen = before
            self.open(params)
            raise


def _is_model(name: str) -> bool:
    """Whether a name without arguments is a model's rather than a misspelt drafter."""
    if name.startswith("hf:") or "/" in name or name.endswith(".gguf") or Path(name).exists():
        return True
    from specrun.runtime.models import matching, stored_models

    return bool(matching(name, stored_models().models))


# == The loop: Ctrl-C and errors leave the conversation whole ======================================


CommandHandler: TypeAlias = "Callable[[Chat, str], bool]"  # returns whether the chat goes on
_START_OVER = "/clear starts over (/save FILE keeps a copy first)"


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
        self.results: list[GenerationResult] = []
        self.index = 0
        self.shows_thinking = display.show_thinking
        self._display = display
        self._markdown = markdown and terminal.color_answers and terminal.answers_on_screen
        self._told_colors = False

    @property
    def runtime(self) -> Runtime:
        """The runtime that answers; commands switch it."""
        return self.models.runtime

    @property
    def last(self) -> GenerationResult | None:
        """The last answer, None before the first."""
        return self.results[-1] if self.results else None

    def run(self, read_line: LineReader, handle_command: CommandHandler) -> int:
        """Read and answer until the input ends or a command leaves; return the exit code.

        It is the code of the last message that could not be answered: a pipe must notice.
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
                self.terminal.say("Ctrl-C again, Ctrl-D or /quit leaves.", "dim")
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
        """Answer the last message; if there is no text, take it back and return False."""
        conversation, terminal = self.conversation, self.terminal
        try:
            runtime = self.runtime
            stream = runtime.stream_chat(
                conversation.for_template(),
                params,
                max_tokens=conversation.max_tokens,
                # A random seed is new for every answer, and `-s SEED` alone then repeats it.
                index=0 if params.seed is None else self.index,
                logprobs=False,
            )
            writer = reply_writer(terminal, self._text_writer(), fold=not self.shows_thinking)
            answer = run_stream(stream, writer)
        except BaseException as error:
            conversation.messages.pop()
            if isinstance(error, ContextFullError):
                raise ContextFullError(
                    f"{error}. The message was taken back: {_START_OVER}"
                ) from error
            raise
        if answer.interrupted and not answer.result.text:
            conversation.messages.pop()
            what = "answer" if answer.result.token_ids else "first token"
            terminal.say(f"stopped before the {what}; the message was taken back", "dim")
            return False
        conversation.reply(answer.result.text)
        self.results.append(answer.result)
        if self._display.show_timings:
            terminal.note(gain_line(answer.result, self.models.curve))
        if answer.interrupted:
            terminal.note("stopped; the text so far is part of the conversation")
        full = context_full(answer, conversation.max_tokens, self.runtime)
        if full:
            terminal.say(f"{full} {_START_OVER}.", "yellow")
        if self.models.learning is not None:
            self.models.learning.after_answer(answer.result)
        if terminal.notes_on_screen:
            terminal.note("")
        return True

    def _text_writer(self) -> AnswerWriter:
        """Return the writer of a text; explain the colours of drafts once."""
        show_draft = self._display.show_draft
        if show_draft and self.terminal.color_answers and not self._told_colors:
            self._told_colors = True
            self.terminal.note("(cyan: drafted and accepted; plain: the target's own)")
        if self._markdown and not show_draft:
            from specrun.cli.terminal.markdown import MarkdownWriter

            return MarkdownWriter(self.terminal)
        return PlainWriter(self.terminal, show_draft=show_draft)
