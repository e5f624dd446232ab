"""The process in which grammars live: it compiles them, and says what may follow a text.

Whatever a client writes runs here, in llguidance: what needs too much stack, time or memory ends
this process and no other. `process` starts it as a script, so it imports nothing of specrun. It
reads a vocabulary once, and forks for every grammar, and from there for every answer: a fork has a
matcher of its own. Where a request takes longer than it may, its process ends; the system sees to
that, whatever llguidance does meanwhile.
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
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance.gbnf_to_lark import RuleNode

_UNFORCED = {"no_forcing": True}
# A dot of GBNF, and what may hold one that is none: texts, sets of characters and comments.
_GBNF_DOT = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|(\.)', re.DOTALL)
_OPTIONS = re.compile(r"(?:\s|(?:#|//)[^\n]*\n)*%llguidance\s*")
# As llama.cpp's grammars of schemas: without a bound, small models fill answers with spaces.
_SPACES = r" |\n{1,2}[ \t]{0,20}"
_MOST_FORCED = 4096  # bytes: more than a round drafts


def main() -> None:
    """Read a vocabulary from the connection that the command line names, and serve it.

    The other argument is how many bytes this process may take.
    """
    connection, memory = Connection(int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are waited for by nobody
    for kind, limit in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(kind, (limit, hard))
    spelled, ends, special, bos = connection.recv()
    try:
        tokenizer = _tokenizer(spelled, ends, special, bos)
    except ImportError as problem:
        connection.send(str(problem))
        return
    del spelled
    connection.send("")
    try:
        _serve(connection, tokenizer)
    except (EOFError, OSError):  # nobody is there any more
        os._exit(0)


def _tokenizer(
    spelled: list[bytes], ends: list[int], special: list[int], bos: int | None
) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    class Spelled(SimpleNamespace):
        def __call__(self, _text: bytes | str) -> list[int]:
            return []  # only who forces tokens asks: see `_unforced`

    words = Spelled(
        tokens=spelled, eos_token_id=ends[0], bos_token_id=bos, special_token_ids=special
    )
    return LLTokenizer(TokenizerWrapper(words), n_vocab=len(spelled), eos_token=ends)


def _serve(connection: Connection, tokenizer: LLTokenizer) -> None:
    """Answer requests; a fork goes on here with a connection of its own."""
    text: _Text | None = None
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
        if name == "compile":
            text, reply = _compiled(tokenizer, *arguments)
        else:
            assert text is not None
            reply = (text.look if name == "look" else text.follow)(*arguments)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(reply)


# -- what it answers -------------------------------------------------------------------------------


def _compiled(
    tokenizer: LLTokenizer, stack: int, kind: str, text: str, limits: dict[str, Any]
) -> tuple[_Text | None, tuple[str, int]]:
    """Return an empty text under a grammar; what is wrong with that, or its bytes."""
    before, made = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, list[Any]()
    threading.stack_size(stack)
    thread = threading.Thread(target=lambda: made.append(_matcher(tokenizer, kind, text, limits)))
    thread.start()
    thread.join()
    if not made:
        return None, ("no reason is given", 0)
    if isinstance(made[0], str):
        return None, (made[0], 0)
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return _Text(made[0]), ("", more if sys.platform == "darwin" else more << 10)


def _matcher(
    tokenizer: LLTokenizer, kind: str, text: str, limits: dict[str, Any]
) -> LLMatcher | str:
    from llguidance import LLMatcher, LLParserLimits

    try:
        source = _unforced(_source(kind, text))
    except Exception as problem:  # the converter raises plain ones, and what its parser runs into
        return str(problem) or "no reason is given"
    bounds = LLParserLimits(**limits)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=bounds)
    return matcher.get_error() or "no reason is given" if matcher.is_error() else matcher


class _Text:
    """A text under a grammar, and what may follow it."""

    def __init__(self, empty: LLMatcher) -> None:
        self._empty, self._matcher = empty, empty.deep_copy()
        self._tokens: list[int] = []

    def look(self, back: int, tokens: list[int]) -> str | tuple[Any, ...]:
        """Move, see `_move`; return the fields of `state.Seen`, or what is wrong there."""
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
        """Take back some tokens and consume others, with a fresh matcher where it gave up."""
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


# -- sources ---------------------------------------------------------------------------------------


def _source(kind: str, text: str) -> str:
    """Return a grammar in llguidance's Lark."""
    from llguidance import regex_to_lark

    if kind == "json-schema":
        return f"start: %json {json.dumps(_with_spaces(json.loads(text)))}"
    if kind == "regex":
        return f"start: /{regex_to_lark(text)}/"
    if kind == "lark":
        return text
    # A dot of GBNF stands for line breaks, too, which those of Lark leave out.
    dots = _GBNF_DOT.sub(lambda found: found[0] if found[1] is None else r"[^\x00]", text)
    return _lark_of(dots)


def _lark_of(text: str) -> str:
    """Return a GBNF grammar in Lark, by llguidance's converter.

    That looks at all rules once for every step in which one turns out to be a terminal, which is
    quadratic: here they are marked before.
    """
    from llguidance.gbnf_to_lark import GrammarParser, resolve

    rules: dict[str, RuleNode] = GrammarParser().parse(text)
    _mark_terminals(rules)
    resolve(rules)
    return "\n".join(str(rule) for rule in sorted(rules.values(), key=lambda rule: rule.order))


def _mark_terminals(rules: dict[str, RuleNode]) -> None:
    """Mark the rules that lead to terminals alone, each once, from the last ones up."""
    from llguidance.gbnf_to_lark import RuleRefNode

    using: dict[str, list[str]] = {}
    missing: dict[str, int] = {}
    for name, rule in rules.items():
        used: set[str] = set()
        below = rule.children()
        while below:
            node = below.pop()
            if isinstance(node, RuleRefNode):
                used.add(node.name)
            below.extend(node.children())
        missing[name] = len(used)
        for each in used:
            using.setdefault(each, []).append(name)
    ready = [name for name, number in missing.items() if not number]
    while ready:
        name = ready.pop()
        rules[name].rule_is_terminal = name != "root"
        for user in using.get(name, ()) if name != "root" else ():
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)


def _with_spaces(schema: bool | dict[str, Any]) -> dict[str, Any]:
    """Return a schema that says where spaces may stand, unless it does itself."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    options = schema.get("x-guidance")
    known = options if isinstance(options, dict) else {}
    if any(name.startswith("whitespace") for name in known):
        return schema
    return {**schema, "x-guidance": {**known, "whitespace_pattern": _SPACES}}


def _unforced(source: str) -> str:
    """Return a Lark source whose options, its `%llguidance {...}`, have `no_forcing`.

    That leaves free how a forced text is spelled. Otherwise masks would allow the tokenizer's own
    spelling alone where the text is forced, and the law would not be the target's given that the
    text follows the grammar.
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
