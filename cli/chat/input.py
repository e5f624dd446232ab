"""Reads messages: with line editing and history on a terminal, plain lines from a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

PROMPT = ">>> "
CONTINUATION = "... "
_QUOTES = '"""'

LineReader = Callable[[str], str]


def read_message(read_line: LineReader) -> str:
    """Return the next message: a line, or all between two `\"\"\"`; EOFError ends the input.

    An input that ends inside the quotes ends the message.
    """
    text = read_line(PROMPT)
    opened = text.strip()
    if not opened.startswith(_QUOTES):
        return text
    lines = [opened.removeprefix(_QUOTES)]
    while not lines[-1].rstrip().endswith(_QUOTES):
        try:
            lines.append(read_line(CONTINUATION))
        except EOFError:
            return "\n".join(lines).strip("\n")
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    return "\n".join(lines).strip("\n")


def make_line_reader(commands: Iterable[str]) -> LineReader:
    """Return what reads a line: prompt_toolkit where the user sees it, standard input otherwise."""
    screen = next((stream for stream in (sys.stdout, sys.stderr) if stream.isatty()), None)
    if not sys.stdin.isatty() or screen is None:
        return _read_plain_line
    return _editing_reader(list(commands), screen)


def history_path() -> Path:
    """Return the file that keeps what was typed, in the user's state folder."""
    if os.name == "nt":
        return Path(click.get_app_dir("specrun", roaming=False)) / "history"
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "specrun" / "history"


def _read_plain_line(_prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _editing_reader(commands: list[str], screen: TextIO) -> LineReader:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.output import create_output

    session: PromptSession[str] = PromptSession(
        history=_history(),
        completer=WordCompleter(commands, sentence=True),
        complete_while_typing=False,
        enable_history_search=True,
        key_bindings=_line_break_keys(),
        prompt_continuation=CONTINUATION,
        output=create_output(stdout=screen),
    )
    return session.prompt


def _line_break_keys() -> KeyBindings:
    """Alt-Enter puts a line break into the message; Enter sends it."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history() -> History:
    """Return the history file, readable by the user only; in memory where it cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = history_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))
