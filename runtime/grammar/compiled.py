"""Grammars compiled by llguidance for one vocabulary, in processes of their own (`process`).

The first grammar starts the one with the vocabulary, which llguidance reads once (a second
for 150,000 tokens); every grammar is a fork of it, and every answer a fork of its grammar's. No
grammar can harm whoever compiles it, however deep, large or ambiguous it is.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from specrun.bindings.errors import ClosedError
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime.grammar.grammar import Grammar, GrammarError
from specrun.runtime.grammar.process import MEMORY, STACK, GrammarProcess, ProcessEnded, start
from specrun.runtime.grammar.schema import SPACES, followed
from specrun.runtime.grammar.state import Cursor, GrammarState, Lexicon

COMPILE_SECONDS = 10.0
"""How long a grammar may take to compile: a schema of 2,000 optional fields takes one."""
_LONGEST_MESSAGE = 400
# Ten times llguidance's own, which a schema of a thousand optional fields exceeds.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 20_000,
    "step_max_items": 500_000,
    "initial_lexer_fuel": 10_000_000,
    "step_lexer_fuel": 2_000_000,
    "max_grammar_size": 5_000_000,
    "verbose_errors": False,
}
_SHOWN = re.compile(r"\s*(\d+ \||\^\s*$)")
_PLACE = re.compile(r"^at (\d+)\(\d+\): ")
_KEPT_BYTES = 256 << 20  # of compiled grammars: clients repeat theirs
_PROCESS_BYTES = 4 << 20  # the memory of a process beside its grammar
_WATCH_SECONDS = 0.1
_TOO_SLOW = f"that takes longer than {COMPILE_SECONDS:g} s: give a smaller or simpler one"
_TOO_DEEP = (
    f"that takes more stack than {STACK >> 20} MiB, or more memory than {MEMORY >> 30} GiB: "
    "let fewer rules, or $refs, lead from one to the next, or give a smaller one"
)


class CompiledGrammar:
    """A grammar for one vocabulary, from which any number of answers start."""

    def __init__(
        self, grammar: Grammar, lexicon: Lexicon, process: GrammarProcess, n_bytes: int
    ) -> None:
        self._grammar, self._lexicon, self._process = grammar, lexicon, process
        self.n_bytes = n_bytes

    @property
    def closed(self) -> bool:
        """Whether its process has ended."""
        return self._process.closed

    def start(self, length: int, patience: float | None = None) -> GrammarState:
        """Return the place after a prompt of so many tokens, with a matcher of its own.

        `patience`: the seconds that its user may wait, see `state.Cursor`.
        """
        try:
            matcher = self._process.fork()
        except ProcessEnded:
            raise _refusal(self._grammar, "its process was ended; send the request again") from None
        cursor = Cursor(matcher, self._grammar, self._lexicon, patience)
        return GrammarState(cursor, length, tail=b"" if self._grammar.after else None)


class GrammarCompiler:
    """Compiles for one vocabulary; it keeps the last grammars. For any number of threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        spelled = [vocabulary.named(token) for token in range(vocabulary.size)]
        self.lexicon = Lexicon(vocabulary, spelled)
        ends = sorted(vocabulary.end_of_generation)
        # Control tokens are no text; nor are end tokens, whatever their kind in the file.
        special = [each for each in range(len(spelled)) if vocabulary.is_control(each)]
        special = sorted({*special, *ends})
        if not ends:  # llguidance needs one: beyond the vocabulary, where no text has it
            spelled, ends = [*spelled, b"<end of text>"], [vocabulary.size]
        self._words = spelled, ends, special, vocabulary.bos
        self._process: GrammarProcess | None = None
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock, self._starting = threading.Lock(), threading.Lock()

    @property
    def kept_bytes(self) -> int:
        """How many bytes the grammars that it keeps take."""
        return sum(each.n_bytes for each in self._compiled.values())

    def compile(
        self, grammar: Grammar, is_wanted: Callable[[], bool] = lambda: True
    ) -> CompiledGrammar:
        """Return the compiled grammar; raises `GrammarError` with the compiler's message.

        Raises `ClosedError` if it is not wanted any more.
        """
        with self._lock:
            known = self._compiled.get(grammar)
        if known is None or known.closed:  # without the lock: others do not wait for a large one
            known = self._made(grammar, is_wanted)
        with self._lock:
            other = self._compiled.get(grammar)
            if other is None or other.closed:
                self._compiled[grammar] = known
            self._compiled.move_to_end(grammar)
            while self.kept_bytes > _KEPT_BYTES and len(self._compiled) > 1:
                self._compiled.popitem(last=False)
        return known

    def _made(self, grammar: Grammar, is_wanted: Callable[[], bool]) -> CompiledGrammar:
        process = self._forked(grammar.kind == "gbnf")
        made: CompiledGrammar | None = None
        try:
            source = grammar.source
            if grammar.kind == "json-schema":  # the part that a mask can follow
                source = json.dumps(followed(grammar.schema, grammar.noun, SPACES))
            process.ask("compile", COMPILE_SECONDS, STACK, grammar.kind, source, _LIMITS)
            while (reply := process.reply(_WATCH_SECONDS)) is None:
                if not is_wanted():
                    raise ClosedError("nobody waits for the grammar any more")
            problem, n_bytes = reply
            if problem:
                raise _refusal(grammar, problem)
            made = CompiledGrammar(grammar, self.lexicon, process, n_bytes + _PROCESS_BYTES)
        except RecursionError:
            raise _refusal(grammar, "its values are nested too deep") from None
        except ProcessEnded as ended:
            raise _refusal(grammar, _TOO_DEEP if ended.in_time else _TOO_SLOW) from None
        finally:
            if made is None:  # whatever it is doing, it ends
                process.close()
        return made

    def _forked(self, reads_bytes: bool) -> GrammarProcess:
        """Return a process for a grammar; the one with the vocabulary is started first.

        `reads_bytes`: it reads the vocabulary as bytes, too, which its forks then need not.
        """
        with self._starting:
            for is_last in (False, True):
                if self._process is None or self._process.closed:
                    self._process = start(*self._words)
                try:
                    if reads_bytes:
                        self._process.ask("read", COMPILE_SECONDS)
                        self._process.reply()
                    return self._process.fork()
                except ProcessEnded:  # somebody has ended it
                    if is_last:
                        raise
        raise AssertionError


_COMPILERS: weakref.WeakKeyDictionary[Vocabulary, GrammarCompiler] = weakref.WeakKeyDictionary()
_OPENING = threading.Lock()


def compiled(
    grammar: Grammar, vocabulary: Vocabulary, is_wanted: Callable[[], bool] = lambda: True
) -> CompiledGrammar:
    """Return a grammar compiled for a vocabulary, quickly if it was before.

    Raises `GrammarError` for one that llguidance cannot compile, or not within `COMPILE_SECONDS`;
    `ClosedError` if it is not wanted any more.
    """
    with _OPENING:
        compiler = _COMPILERS.get(vocabulary)
        if compiler is None:
            compiler = _COMPILERS[vocabulary] = GrammarCompiler(vocabulary)
    return compiler.compile(grammar, is_wanted)


def _refusal(grammar: Grammar, message: str) -> GrammarError:
    """Return one sentence of a compiler's message, which shows the place on further lines.

    The places of all but Lark grammars are in the text that was made of them: that is unknown.
    """
    shown = message.split("<backtrace>")[0].splitlines()
    lines = [line for line in shown if not _SHOWN.match(line)]
    why = " ".join(" ".join(lines).split())
    if grammar.kind == "lark":
        why = _PLACE.sub(lambda found: f"line {int(found[1]) - 1}: ", why)
    else:
        why = _PLACE.sub("", why)
    why = why[:_LONGEST_MESSAGE] or "no reason is given"
    return GrammarError(f"the {grammar.noun} cannot be compiled: {why}")
