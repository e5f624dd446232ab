"""A real terminal (pty): Ctrl-C in the middle of an answer, line editing, and no escape codes from
models."""

from __future__ import annotations

import os
import re
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.commands import PROGRAM
from support.ctrl_c import hearing_ctrl_c

from specrun.cli.terminal.screen import Pace
from specrun.cli.terminal.terminal import Terminal, one_line, printable

from ..conftest import READABLE, Models

pty = pytest.importorskip("pty", reason="pseudo-terminals are POSIX only")
fcntl, termios = map(pytest.importorskip, ("fcntl", "termios"))

pytestmark = pytest.mark.long
NARROW = 30  # columns


class Screen:
    """A program behind a pseudo-terminal, and everything it wrote."""

    def __init__(self, arguments: list[object], environment: dict[str, str]) -> None:
        ours, theirs = pty.openpty()
        self._ours = ours
        # A session of its own makes the pty its controlling terminal, so that ^C becomes SIGINT.
        with hearing_ctrl_c():
            self.process = subprocess.Popen(
                [sys.executable, "-c", _LOGIN, *PROGRAM, *map(str, arguments)],
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                env=environment,
                start_new_session=True,
            )
        os.close(theirs)
        self.seen = ""

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: str, *, seconds: float = 30.0, after: int = 0) -> int:
        """Read until `text` is on the screen beyond position `after`; return where it ends."""
        deadline = time.monotonic() + seconds
        while (found := self.seen.find(text, after)) < 0:
            if not self._read(deadline):
                raise AssertionError(f"{text!r} did not appear in {self.seen[after:]!r}")
        return found + len(text)

    def wait_for_more(self, *, than: int, seconds: float = 30.0) -> None:
        """Read until more than so many characters were written."""
        deadline = time.monotonic() + seconds
        while len(self.seen) <= than:
            assert self._read(deadline), self.seen

    def finish(self, *, seconds: float = 30.0) -> int:
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            pass
        return self.process.wait(timeout=seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self._ours, 65536) if ready else b""
        except OSError:  # Linux: the other side is closed
            data = b""
        self.seen += data.decode("utf-8", "replace")
        return bool(data)


# Makes the pty the controlling terminal of the new session, then becomes the program.
_LOGIN = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("SPECRUN_")
    }
    own = {
        "SPECRUN_THREADS": "1",
        "XDG_STATE_HOME": str(tmp_path),
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "TERM": "xterm",
    }
    return {**inherited, **own, "NO_COLOR": "1"}


@pytest.fixture
def chat(models: Models, environment: dict[str, str]) -> Iterator[Screen]:
    with closing(Screen(["chat", "-m", models.long, "-c", 0, *READABLE], environment)) as screen:
        yield screen


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(chat: Screen, tmp_path: Path) -> None:
    ready = chat.wait_for(">>>")
    chat.type("hello\r")
    asked = chat.wait_for("\n", after=ready)
    chat.wait_for_more(than=asked + 200)  # so that some of the answer is there
    chat.type("\x03")
    stopped = chat.wait_for("stopped; the text so far is part of the conversation", after=asked)
    chat.wait_for(">>>", after=stopped)
    chat.type("/show\r")
    shown = chat.wait_for("max_tokens", after=stopped)
    assert "messages               2" in chat.seen[stopped:shown]
    chat.wait_for(">>>", after=shown)
    chat.type("/set max_tokens 5\r")
    limited = chat.wait_for("max_tokens             5", after=shown)
    chat.wait_for(">>>", after=limited)
    chat.type("again\r")
    answered = chat.wait_for("tok/s", after=limited)
    chat.wait_for(">>>", after=answered)
    chat.type("\x03")
    hinted = chat.wait_for("Ctrl-D or /quit leaves", after=answered)
    chat.wait_for(">>>", after=hinted)
    chat.type("\x04")
    assert chat.finish() == 0
    assert "Traceback" not in chat.seen
    history = tmp_path / "specrun" / "history"
    assert "+hello" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_a_quoted_message_comes_back_from_the_history_whole(chat: Screen, tmp_path: Path) -> None:
    ready = chat.wait_for(">>>")
    chat.type("/set max_tokens 3\r")
    ready = chat.wait_for("max_tokens             3", after=ready)
    chat.wait_for(">>>", after=ready)
    chat.type('"""one\r')
    chat.wait_for("...", after=ready)
    chat.type('two"""\r')
    answered = chat.wait_for("tok/s", after=ready)
    chat.wait_for(">>>", after=answered)
    chat.type("\x1b[A\r")  # the last entry, again
    again = chat.wait_for("tok/s", after=answered)
    chat.wait_for(">>>", after=again)
    chat.type("/show\r")
    shown = chat.wait_for("messages               4", after=again)
    chat.wait_for(">>>", after=shown)
    chat.type("\x04")
    assert chat.finish() == 0
    history = (tmp_path / "specrun" / "history").read_text()
    assert history.count('+"""one\n+two"""\n') == 1


def test_notes_and_errors_wrap_at_words(models: Models, environment: dict[str, str]) -> None:
    arguments = ["chat", "-m", models.long, "-c", 0, "-n", 3, *READABLE]
    with closing(Screen(arguments, environment)) as screen:
        screen.resize(NARROW)
        ready = screen.wait_for(">>>")
        screen.type("hello\r")
        answered = screen.wait_for("tok/s", after=ready)
        screen.wait_for(">>>", after=answered)
        screen.type("/drafter nothing-of-this-name(n=3)\r")
        refused = screen.wait_for("Error:", after=answered)
        screen.wait_for(">>>", after=refused)
        screen.type("\x04")
        assert screen.finish() == 0
    banner = screen.seen[screen.seen.index("specrun 0") : ready].splitlines()[:-1]
    problem = screen.seen[refused - len("Error:") :].partition(">>>")[0].rstrip().splitlines()
    for line in [*banner, *problem]:
        assert len(re.sub(r"\x1b\[[?\d;]*[A-Za-z]|\r", "", line)) < NARROW
    whole = " ".join(" ".join(problem).split())
    assert whole.startswith("Error: there is no drafter 'nothing-of-this-name'")
    assert "/help for commands" in " ".join(" ".join(banner).split())


def test_ctrl_c_twice_at_the_prompt_leaves(chat: Screen) -> None:
    ready = chat.wait_for(">>>")
    chat.type("\x03")
    hinted = chat.wait_for("leaves", after=ready)
    chat.wait_for(">>>", after=hinted)
    chat.type("\x03")
    assert chat.finish() == 0


def test_model_text_cannot_control_the_terminal(
    models: Models, environment: dict[str, str]
) -> None:
    arguments = ["generate", "-m", models.target, "-p", "x", "-n", 6, "--temp", 0, "-l", "27+1000"]
    # ESC (27) and the C1 control CSI, which is U+009B: bytes C2 9B
    with closing(Screen(arguments, environment)) as screen:
        assert screen.finish() == 0
    assert "gen 6 tok" in screen.seen
    # The line that shows the loading is ours: carriage return and "erase to the end of the line".
    assert "\x1b" not in screen.seen.replace("\r\x1b[K", "")


def test_tables_are_framed_on_a_screen(models: Models, environment: dict[str, str]) -> None:
    hostile = models.target.with_name("hostile.gguf")
    hostile.write_bytes(models.target.read_bytes().replace(b"random llama 0", b"\x1b[2J[red]abcde"))
    with closing(Screen(["inspect", hostile], environment)) as screen:
        assert screen.finish() == 0
    # A long path fills several lines, whose first cell is empty.
    rows = [line.split("│")[1:-1] for line in screen.seen.splitlines() if line.startswith("│")]
    facts = {row[0].strip(): row[1].strip() for row in rows}
    assert facts["context length"] == "512"
    assert facts["name"] == "[2J[red]abcde"
    assert "\x1b[2J" not in screen.seen


def test_printable_keeps_text_and_drops_controls() -> None:
    every = "".join(map(chr, range(0x100)))
    kept = printable(every)
    assert kept == "\t\n" + "".join(map(chr, [*range(0x20, 0x7F), *range(0xA0, 0x100)]))
    assert printable("\x1b]0;title\x07 naïve \x9b31m 漢字 🙂") == "]0;title naïve 31m 漢字 🙂"
    assert one_line(" a\nb\t c\x00", 4) == "a b…"


@pytest.mark.parametrize(
    ("variables", "choice", "expected"),
    [
        ({}, "auto", False),
        ({}, "on", True),
        ({"FORCE_COLOR": "1"}, "auto", True),
        ({"FORCE_COLOR": "1"}, "off", False),
        ({"FORCE_COLOR": "0"}, "auto", False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, "auto", False),
        ({"NO_COLOR": "1"}, "on", True),
        ({"NO_COLOR": ""}, "auto", False),
    ],
)
def test_colour_choice(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], choice: str, expected: bool
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Terminal(choice).color_answers is expected  # type: ignore[arg-type]


def test_the_bar_runs_with_the_clock_and_never_back() -> None:
    """Between reports, and behind a report of less; only the last one fills it."""
    now = 0.0
    pace, seen = Pace(lambda: now), []
    for now, told in ((0.0, (0.0, 100.0)), (30.0, (0.3, 70.0)), (50.0, (0.4, 60.0))):
        pace.tell(*told)
        for _ in range(10):
            seen.append((pace.share, pace.left))
            now += 2.0
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert seen[5] == pytest.approx((0.1, 90.0))
    now = 1000.0
    assert (pace.share, pace.left) == (pytest.approx(0.99), 0.0)
    pace.tell(1.0, 0.0)
    assert pace.share == 1.0


def test_errors_of_click_wrap_at_words(models: Models, environment: dict[str, str]) -> None:
    wrong = ["generate", "-m", models.long, "--spec-draft-n-max", 3, "--drafter", "lookahead"]
    sentence = "Error: --spec-draft-n-max and --drafter have the same meaning: put it into the"
    with closing(Screen([*wrong, "-p", "x"], environment)) as screen:
        screen.resize(NARROW)
        assert screen.finish() == 2
    shown = screen.seen[screen.seen.index("Error:") :].replace("\r", "")
    assert shown.replace("\n", " ").startswith(sentence)
    assert all(len(line) < NARROW for line in shown.splitlines())
