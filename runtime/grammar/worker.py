"""The process in which grammars live: it compiles them, and finds the next tokens of a text.

Whatever a client writes runs here, in llguidance: a grammar that needs too much stack, time or
memory ends this process and no other. `process` starts it as a script, so it imports nothing of
specrun. It reads a vocabulary once, and forks for every grammar, and from there for every answer: a
fork has a matcher of its own. If a request takes longer than it may, its process ends; the
system sees to that, whatever llguidance does meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import threading
import time
from functools import cached_property
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from specrun.runtime.grammar.gbnf import Rule
    from specrun.runtime.grammar.token_tree import TokenTree

_UNFORCED = {"no_forcing": True}
_OPTIONS = re.compile(r"(?:\s|(?:#|//)[^\n]*\n)*%llguidance\s*")
_MOST_FORCED = 4096  # bytes: more than a round drafts


def main() -> None:
    """Read a vocabulary from the connection that the command line names, and serve it.

    The other argument is how many bytes this process may take.
    """
    connection, memory = Connection(int(sys.argv[1])), int(sys.argv[2])
    sys.setrecursionlimit(1_000_000)  # calls of Python's own take no stack
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are waited for by nobody
    for kind, limit in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(kind, (limit, hard))
    spelled, ends, special, bos = connection.recv()
    try:
        words = _Words(spelled, ends, special, bos)
    except ImportError as problem:
        connection.send(str(problem))
        return
    connection.send("")
    try:
        _serve(connection, words)
    except (EOFError, OSError):  # nobody is there any more
        os._exit(0)


class _Words:
    """A vocabulary, as each of the two kinds of grammars reads it."""

    def __init__(
        self, spelled: list[bytes], ends: list[int], special: list[int], bos: int | None
    ) -> None:
        self.tokenizer = _tokenizer(spelled, ends, special, bos)
        self.spelled, self.ends, self.special = spelled, ends, special

    @cached_property
    def tree(self) -> TokenTree:
        """The bytes of the tokens as a tree, for GBNF alone."""
        from specrun.runtime.grammar.token_tree import TokenTree

        return TokenTree(self.spelled, self.special)

    def named(self, name: str) -> int | None:
        """Return the token with a name; control tokens go before others."""
        wanted = name.encode()
        for tokens in (self.special, range(len(self.spelled))):
            for token in tokens:
                if self.spelled[token] == wanted:
                    return token
        return None


def _tokenizer(
    spelled: list[bytes], ends: list[int], special: list[int], bos: int | None
) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    class Spelled(SimpleNamespace):
        def __call__(self, _text: bytes | str) -> list[int]:
            return []  # only needed to force tokens: see `_unforced`

    words = Spelled(
        tokens=spelled, eos_token_id=ends[0], bos_token_id=bos, special_token_ids=special
    )
    return LLTokenizer(TokenizerWrapper(words), n_vocab=len(spelled), eos_token=ends)


def _serve(connection: Connection, words: _Words) -> None:
    """Answer requests; a fork goes on here with a connection of its own."""
    text: _Text | _CharacterText | None = None
    while True:
        name, seconds, *arguments = connection.recv()
        if name == "fork":
            handle = recv_handle(connection)
            if os.fork():
                os.close(handle)
            else:
                connection.close()
                connection = Connection(handle)
                connection.send(os.getpid())
            continue
        signal.setitimer(signal.ITIMER_REAL, seconds)  # ends the process, whatever it is doing
        reply: object
        if name == "read":
            reply = len(words.tree.bytes)
        elif name == "compile":
            text, reply = _compiled(words, *arguments)
        else:
            assert text is not None
            reply = (text.look if name == "look" else text.follow)(*arguments)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(reply)


# -- answers ---------------------------------------------------------------------------------------


def _compiled(
    words: _Words, stack: int, kind: str, text: str, limits: dict[str, Any]
) -> tuple[_Text | _CharacterText | None, tuple[str, int]]:
    """Return an empty text under a grammar, and its error or its bytes."""
    before, made = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, list[Any]()
    threading.stack_size(stack)
    thread = threading.Thread(target=lambda: made.append(_empty(words, kind, text, limits)))
    thread.start()
    thread.join()
    if not made:
        return None, ("no reason is given", 0)
    if isinstance(made[0], str):
        return None, (made[0], 0)
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return made[0], ("", more if sys.platform == "darwin" else more << 10)


def _empty(
    words: _Words, kind: str, text: str, limits: dict[str, Any]
) -> _Text | _CharacterText | str:
    """Return an empty text under a grammar, or the error of that."""
    if kind != "gbnf":
        matcher = _matcher(words.tokenizer, kind, text, limits)
        return matcher if isinstance(matcher, str) else _Text(matcher)
    from specrun.runtime.grammar.gbnf import NotationError, rules_of

    try:
        return _CharacterText(words, rules_of(text, words.named))
    except NotationError as problem:
        return str(problem)


def _matcher(
    tokenizer: LLTokenizer, kind: str, text: str, limits: dict[str, Any]
) -> LLMatcher | str:
    from llguidance import LLMatcher, LLParserLimits, regex_to_lark

    try:
        if kind == "json-schema":
            text = f"start: %json {text}"
        elif kind == "regex":
            text = f"start: /{regex_to_lark(text)}/"
        source = _unforced(text)
    except Exception as problem:  # the converter raises plain ones, and its parser's errors
        return str(problem) or "no reason is given"
    bounds = LLParserLimits(**limits)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=bounds)
    return matcher.get_error() or "no reason is given" if matcher.is_error() else matcher


class _Text:
    """A text under a grammar, and its possible next tokens."""

    def __init__(self, empty: LLMatcher) -> None:
        self._empty, self._matcher = empty, empty.deep_copy()
        self._tokens: list[int] = []

    def look(self, back: int, tokens: list[int]) -> str | tuple[Any, ...]:
        """Move, see `_move`; return the fields of `state.Seen`, or the error there."""
        begun, matcher = time.perf_counter(), self._move(back, tokens)
        bits, is_over = matcher.compute_bitmask(), matcher.is_stopped()
        may_end = matcher.is_accepting()
        if matcher.is_error():
            return matcher.get_error() or "no reason is given"
        forced = b"" if is_over else matcher.compute_ff_bytes()[:_MOST_FORCED]
        if matcher.is_error():  # too long to follow as a whole: `_move` begins anew
            forced = b""
        if b"\xff" in forced:  # a token by its id: llguidance is not to go on with that begun
            last = self._tokens[-1:]
            self._move(1, last) if last else self._fresh()
        return bits, may_end, is_over, forced, time.perf_counter() - begun

    def follow(self, back: int, tokens: list[int], texts: list[list[int]]) -> str | list[bool]:
        """Move, see `_move`; return which of these texts may follow as a whole."""
        matcher = self._move(back, tokens)
        found = [matcher.validate_tokens(text) == len(text) for text in texts]
        return matcher.get_error() or found

    def _move(self, back: int, tokens: list[int]) -> LLMatcher:
        """Take back some tokens and consume others, with a fresh matcher if it gave up."""
        if back:
            del self._tokens[-back:]
        if self._matcher.is_error():
            tokens = [*self._tokens, *tokens]
            self._fresh()
        elif back:
            self._matcher.rollback(back)
        if tokens:
            self._matcher.consume_tokens(tokens)
        self._tokens += tokens
        return self._matcher

    def _fresh(self) -> LLMatcher:
        self._matcher, self._tokens = self._empty.deep_copy(), []
        return self._matcher


class _CharacterText:
    """A text under rules of characters (GBNF), and its possible next tokens: as `_Text`."""

    def __init__(self, words: _Words, rules: list[Rule]) -> None:
        from specrun.runtime.grammar.pushdown import Pushdown

        self._words = words
        self._grammar = Pushdown(rules, words.tree, words.spelled)
        self._states = [self._grammar.start]
        self._grammar.mask(self._grammar.start)  # forks need not find that again

    def look(self, back: int, tokens: list[int]) -> str | tuple[Any, ...]:
        """Move, and return the fields of `state.Seen`."""
        import numpy as np

        begun, state = time.perf_counter(), self._move(back, tokens)
        grammar, seen = self._grammar, self._grammar.state(state)
        allowed = grammar.mask(state).copy()
        allowed[self._words.ends] = seen.may_end
        if not allowed.any():
            return "NoExtensionBias"
        bits = np.packbits(allowed, bitorder="little").tobytes()
        is_over = seen.may_end and not (seen.characters or seen.tokens)
        forced = grammar.forced(state, _MOST_FORCED)
        return bits, seen.may_end, is_over, forced, time.perf_counter() - begun

    def follow(self, back: int, tokens: list[int], texts: list[list[int]]) -> str | list[bool]:
        """Move, and return which of these texts may follow as a whole."""
        state, found = self._move(back, tokens), list[bool]()
        for text in texts:
            behind = state
            for token in text:
                behind = self._grammar.after(behind, token)
            found.append(bool(behind))
        return found

    def _move(self, back: int, tokens: list[int]) -> int:
        if back:
            del self._states[-back:]
        for token in tokens:
            self._states.append(self._grammar.after(self._states[-1], token))
        return self._states[-1]


# -- sources ---------------------------------------------------------------------------------------


def _unforced(source: str) -> str:
    """Return a Lark source whose options, its `%llguidance {...}`, have `no_forcing`.

    That leaves free how a forced text is spelled. Otherwise masks would allow the tokenizer's own
    spelling alone if the text is forced, and the distribution would not be the target's given
    that the text follows the grammar.
    """
    found = _OPTIONS.match(source)
    if found is None:
        return f"%llguidance {json.dumps(_UNFORCED)}\n{source}"
    try:
        options, end = json.JSONDecoder().raw_decode(source, found.end())
    except ValueError as problem:
        raise ValueError(f"its %llguidance options are no JSON ({problem})") from None
    if not isinstance(options, dict):
        raise TypeError("its %llguidance options are no JSON object")
    before, after = source[: found.end()], source[end:]
    return f"\n{before}{json.dumps({**options, **_UNFORCED})}{after}"


if __name__ == "__main__":
    main()
