"""Grammars compiled by llguidance for one vocabulary.

llguidance is imported by the first grammar, and reads a vocabulary once (a second for 150,000
tokens). It tokenizes by the vocabulary's own methods, so that a closed model is an error here and
no access to freed memory there.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from specrun.bindings.errors import SpecrunError
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime.grammar.grammar import Grammar, GrammarError
from specrun.runtime.grammar.state import Cursor, GrammarState, Lexicon

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LONGEST_MESSAGE = 400
# Ten times llguidance's own, which a schema of a thousand optional fields exceeds: a mask may then
# take tens of milliseconds, and none that takes less does so.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 20_000,
    "step_max_items": 500_000,
    "initial_lexer_fuel": 10_000_000,
    "step_lexer_fuel": 2_000_000,
    "max_grammar_size": 5_000_000,
    "verbose_errors": False,
}
_UNFORCED = {"no_forcing": True}
_SHOWN = re.compile(r"\s*(\d+ \||\^\s*$)")
_PLACE = re.compile(r"^at (\d+)\(\d+\): ")
# A dot of GBNF, and what may hold one that is none: texts, sets of characters and comments.
_GBNF_DOT = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|(\.)', re.DOTALL)
_OPTIONS = re.compile(r"(?:\s|(?:#|//)[^\n]*\n)*%llguidance\s*")
_KEPT = 64  # compiled grammars: clients repeat theirs
# As llama.cpp's grammars of schemas: without a bound, small models fill answers with spaces.
_SPACES = r" |\n{1,2}[ \t]{0,20}"


class CompiledGrammar:
    """A grammar for one vocabulary, from which any number of answers start."""

    def __init__(self, grammar: Grammar, lexicon: Lexicon, matcher: LLMatcher) -> None:
        self._grammar, self._lexicon, self._matcher = grammar, lexicon, matcher

    def start(self, length: int) -> GrammarState:
        """Return the place after a prompt of so many tokens, with a matcher of its own."""
        cursor = Cursor(self._matcher.deep_copy(), self._grammar, self._lexicon)
        return GrammarState(cursor, length, tail=b"" if self._grammar.after else None)


class GrammarCompiler:
    """Compiles for one vocabulary; it keeps the last grammars. For any number of threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        spelled = [vocabulary.named(token) for token in range(vocabulary.size)]
        self.lexicon = _Lexicon(vocabulary, spelled)
        self._tokenizer = _tokenizer(vocabulary, spelled)
        self.lexicon.tokenizer = self._tokenizer
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Return the compiled grammar; raises `GrammarError` with the compiler's message."""
        with self._lock:
            known = self._compiled.get(grammar)
        if known is None:  # without the lock: others are not to wait for a large one
            known = CompiledGrammar(grammar, self.lexicon, _matcher(grammar, self._tokenizer))
        with self._lock:
            known = self._compiled.setdefault(grammar, known)
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return known


_COMPILERS: weakref.WeakKeyDictionary[Vocabulary, GrammarCompiler] = weakref.WeakKeyDictionary()
_OPENING = threading.Lock()


def compiled(grammar: Grammar, vocabulary: Vocabulary) -> CompiledGrammar:
    """Return a grammar compiled for a vocabulary, quickly where it was before.

    Raises `GrammarError` for one that llguidance cannot compile.
    """
    with _OPENING:
        compiler = _COMPILERS.get(vocabulary)
        if compiler is None:
            compiler = _COMPILERS[vocabulary] = GrammarCompiler(vocabulary)
    return compiler.compile(grammar)


class _Lexicon:
    """Implements `state.Lexicon`; it must not keep the vocabulary, whose life its own follows."""

    tokenizer: LLTokenizer

    def __init__(self, vocabulary: Vocabulary, spelled: list[bytes]) -> None:
        self.size, self.end_tokens = vocabulary.size, vocabulary.end_of_generation
        self._spelled = spelled
        # By marker: for each beginning of it that a text may end with, the tokens that then have
        # its rest and more.
        self._completing: dict[bytes, list[list[int]]] = {}

    def spelling(self, token: int) -> bytes:
        """Return a token's bytes; control tokens are shown by name."""
        return self._spelled[token] if token < self.size else b""

    def tokens_of(self, text: bytes) -> tuple[int, ...] | None:
        """Return tokens that spell these bytes; None where there are none."""
        tokens = tuple(self.tokenizer.tokenize_bytes(text)) if text else ()
        return tokens if b"".join(map(self.spelling, tokens)) == text else None

    def unambiguous_tokens_of(self, text: bytes) -> list[int]:
        """Return tokens that spell these bytes, but for an end that may depend on what follows."""
        tokens: list[int] = self.tokenizer.tokenize_partial(text)[0]
        return tokens

    def completing(self, tail: bytes, marker: bytes) -> Iterator[tuple[int, bytes]]:
        """Return the tokens that complete a marker after a tail and go on, and with what."""
        table = self._completing.get(marker)
        if table is None:
            table = self._completing[marker] = self._completing_any(marker)
        for begun, tokens in enumerate(table):
            if not tail.endswith(marker[:begun]):
                continue
            for token in tokens:
                text = tail + self._spelled[token]
                yield token, text[text.find(marker) + len(marker) :]

    def _completing_any(self, marker: bytes) -> list[list[int]]:
        table: list[list[int]] = [[] for _ in marker]
        rests = [marker[begun:] for begun in range(1, len(marker))]
        beginnings = tuple(rests)
        for token, text in enumerate(self._spelled):
            if -1 < text.find(marker) < len(text) - len(marker):
                table[0].append(token)
            if text.startswith(beginnings):  # few are, and those are looked at
                for begun, rest in enumerate(rests, 1):
                    if text.startswith(rest) and len(text) > len(rest):
                        table[begun].append(token)
        return table


class _Tokenizer:
    """A vocabulary as llguidance's `TokenizerWrapper` reads it."""

    def __init__(self, vocabulary: Vocabulary, spelled: list[bytes], end: int) -> None:
        self._vocabulary = weakref.ref(vocabulary)
        self.eos_token_id, self.bos_token_id, self.tokens = end, vocabulary.bos, spelled
        ends = vocabulary.end_of_generation
        # Control tokens are no text; nor is what ends an answer, however the file has it.
        self.special_token_ids = [
            token
            for token in range(vocabulary.size)
            if token in ends or vocabulary.is_control(token)
        ]

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the tokens of a text in the middle of another."""
        vocabulary = self._vocabulary()
        data = text.encode() if isinstance(text, str) else text
        try:
            return [] if vocabulary is None else vocabulary.tokenize_within(data)
        except SpecrunError:  # a closed model: native code must not meet an error
            return []


def _tokenizer(vocabulary: Vocabulary, spelled: list[bytes]) -> LLTokenizer:
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as problem:
        advice = "install it, or give no grammar"
        raise GrammarError(f"grammars need llguidance, which {problem}: {advice}") from None
    ends = sorted(vocabulary.end_of_generation)
    if not ends:  # llguidance needs one: beyond the vocabulary, where no text has it
        spelled, ends = [*spelled, b"<end of text>"], [vocabulary.size]
    tokenizer = TokenizerWrapper(_Tokenizer(vocabulary, spelled, ends[0]))
    return LLTokenizer(tokenizer, n_vocab=len(spelled), eos_token=ends)


def _matcher(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Return the matcher at the beginning of a grammar."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**_LIMITS)
    matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=limits)
    if matcher.is_error():
        raise _refusal(grammar, matcher.get_error())
    return matcher


def _source(grammar: Grammar) -> str:
    """Return a grammar in llguidance's Lark, which leaves free how a forced text is spelled.

    Otherwise its masks would allow the tokenizer's own spelling alone where the text is forced, and
    the law would not be the target's given that the text follows the grammar.
    """
    from llguidance import regex_to_lark
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if grammar.kind == "json-schema":
        source = f"start: %json {json.dumps(_with_spaces(json.loads(grammar.source)))}"
    elif grammar.kind == "regex":
        source = f"start: /{regex_to_lark(grammar.source)}/"
    elif grammar.kind == "lark":
        source = grammar.source
    else:
        try:
            source = gbnf_to_lark(_GBNF_DOT.sub(_any_character, grammar.source))
        except Exception as problem:  # it raises plain ones, and what its parser runs into
            raise _refusal(grammar, str(problem)) from None
    return _unforced(grammar, source)


def _any_character(found: re.Match[str]) -> str:
    """Return what a dot of GBNF stands for: line breaks, too, which those of Lark leave out."""
    return found[0] if found[1] is None else r"[^\x00]"


def _with_spaces(schema: bool | dict[str, Any]) -> dict[str, Any]:
    """Return a schema that says where spaces may stand, unless it does itself."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    options = schema.get("x-guidance")
    known = options if isinstance(options, dict) else {}
    if any(name.startswith("whitespace") for name in known):
        return schema
    return {**schema, "x-guidance": {**known, "whitespace_pattern": _SPACES}}


def _unforced(grammar: Grammar, source: str) -> str:
    """Return a Lark source whose options, its `%llguidance {...}`, have `no_forcing`."""
    found = _OPTIONS.match(source)
    if found is None:
        return f"%llguidance {json.dumps(_UNFORCED)}\n{source}"
    try:
        options, end = json.JSONDecoder().raw_decode(source, found.end())
    except ValueError as problem:
        raise _refusal(grammar, f"its %llguidance options are no JSON ({problem})") from None
    if not isinstance(options, dict):
        raise _refusal(grammar, "its %llguidance options are no JSON object")
    before, after = source[: found.end()], source[end:]
    return f"\n{before}{json.dumps({**options, **_UNFORCED})}{after}"


def _refusal(grammar: Grammar, message: str) -> GrammarError:
    """Return one sentence of a compiler's message, which shows the place on further lines.

    The places of all but Lark grammars are in the text that was made of them: nobody knows that.
    """
    lines = [line for line in message.splitlines() if not _SHOWN.match(line)]
    why = " ".join(" ".join(lines).split())
    if grammar.kind == "lark":
        why = _PLACE.sub(lambda found: f"line {int(found[1]) - 1}: ", why)
    else:
        why = _PLACE.sub("", why)
    why = why[:_LONGEST_MESSAGE] or "no reason is given"
    return GrammarError(f"the {grammar.noun} cannot be compiled: {why}")
