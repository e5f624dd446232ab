"""Scores of answers by a suite's references: a number, texts, or tests of a program."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, Literal

Metric = Literal["exact match", "F1", "pass@1"]

# == Numbers (GSM8K) ===============================================================================

FINAL_MARK = "####"
"""GSM8K's text before the final number."""

_NUMBER = re.compile(r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def final_number(text: str) -> Decimal | None:
    """Return the number after the last mark, or else the last number of a text; None: no number."""
    marked = text.replace("\N{MINUS SIGN}", "-").rpartition(FINAL_MARK)
    after = _NUMBER.search(marked[2]) if marked[1] else None
    found = [after.group()] if after else _NUMBER.findall(marked[0] or marked[2])
    return Decimal(re.sub(r"[$,]", "", found[-1])) if found else None


@dataclass(frozen=True, slots=True)
class FinalNumber:
    """The number that an answer ends with."""

    number: Decimal
    metric: Metric = "exact match"

    def score(self, answer: str) -> float:
        """Return 1 if the answer's final number is this one, else 0."""
        # A text that goes on writes the next question itself.
        return float(final_number(answer.partition("\nQuestion:")[0]) == self.number)


# == Texts =========================================================================================

_ARTICLES = frozenset(("a", "an", "the"))
# Words; characters of scripts that are written without spaces stand alone.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


def _words(text: str) -> Counter[str]:
    return Counter(word for word in _WORD.findall(text.casefold()) if word not in _ARTICLES)


@dataclass(frozen=True, slots=True)
class Texts:
    """Answers that are right; the one that is nearest counts."""

    texts: tuple[str, ...]
    metric: Metric = "F1"

    def score(self, answer: str) -> float:
        """Return the F1 of the words that are shared, as SQuAD counts them (without articles)."""
        said = _words(answer)
        return max(_f1(said, _words(text)) for text in self.texts)


def _f1(said: Counter[str], wanted: Counter[str]) -> float:
    if not said or not wanted:
        return float(said == wanted)
    return 2 * (said & wanted).total() / (said.total() + wanted.total())


# == Programs (HumanEval, MBPP) ====================================================================
#
# The processor time, memory and files of the process are limited, and its group is ended after a
# wall time. It is no sandbox: the program may read all that the user may read.

_SECONDS = 10
_LIMITS: Final = {
    "RLIMIT_CPU": _SECONDS,
    "RLIMIT_DATA": 2**30,
    "RLIMIT_FSIZE": 2**20,
    "RLIMIT_CORE": 0,
    "RLIMIT_NPROC": 0,
}
_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_ENDS = ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\nassert ", '\n"""', "\n@", "\n# ")
"""Continuations of a model without a chat template after the requested function."""


@dataclass(frozen=True, slots=True)
class Tests:
    """Tests of a program: `begin` is the part that the prompt gave, such as a function's head.

    `function` is the name that the tests call, "" if any function may be it.
    """

    __test__ = False  # a name that pytest would collect

    tests: str
    begin: str = ""
    function: str = ""
    metric: Metric = "pass@1"

    def program(self, answer: str) -> str:
        """Return the program: the beginning, the code of the answer, the tests."""
        head = re.compile(rf"^(?:async )?def {self.function or '[^(]*'}\b", re.MULTILINE)
        before, fence, _ = answer.partition("```")
        if fence and (head.search(before) or (self.begin and before[:1] == " ")):
            answer, blocks = before, []  # the fence closes the code, and none opens it
        else:
            blocks = _FENCE.findall(answer)
        code = next((block for block in blocks if head.search(block)), (blocks or [answer])[0])
        found = head.search(code)
        if found is None and self.begin:  # the rest of the function
            code = self.begin + (code if blocks else _first_part(code))
        else:
            if found is not None and not blocks:
                code = code[found.start() :]  # prose stands before it
            code = f"{self.begin}\n{code}" if self.begin else code
        return f"{_that_parses(code)}\n\n{self.tests}\n"

    def score(self, answer: str) -> float:
        """Return 1 if the program passes, run in a process of its own; else 0."""
        return float(passes(self.program(answer)))


def _first_part(code: str) -> str:
    return code[: min([len(code), *(at for end in _ENDS if (at := code.find(end, 1)) >= 0)])]


def _that_parses(code: str) -> str:
    """Return code without the last lines that keep it from being Python; all of it if all do."""
    lines = code.splitlines()
    for end in range(len(lines), 0, -1):
        part = "\n".join(lines[:end])
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            ast.parse(part)
            return part
    return code


def passes(program: str, seconds: float = _SECONDS) -> bool:
    """Return whether a program comes to its end without an error, within the limits."""
    token = secrets.token_hex(16)
    request = json.dumps({"program": program, "limits": _LIMITS, "token": token})
    command = [sys.executable, "-I", "-m", "specrun.bench.drafters.code_worker"]
    with (
        tempfile.TemporaryDirectory(prefix="specrun-code-") as folder,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        ) as process,
    ):
        try:
            said, _ = process.communicate(request.encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end_group(process)
    return said.decode() == token


def _end_group(process: subprocess.Popen[Any]) -> None:
    """End a process and those that it started, whether or not it still runs."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


Reference = FinalNumber | Texts | Tests


class Scorer:
    """Scores of answers; equal answers are scored once. Code runs only with `run_code`."""

    def __init__(self, run_code: bool) -> None:
        self._run_code = run_code
        self._known: dict[tuple[Reference, str], float] = {}

    def score(self, reference: Reference | None, answer: str) -> float | None:
        """Return the score of an answer, 0 to 1; None if it has none."""
        if reference is None or (isinstance(reference, Tests) and not self._run_code):
            return None
        key = reference, answer
        if key not in self._known:
            self._known[key] = reference.score(answer)
        return self._known[key]
