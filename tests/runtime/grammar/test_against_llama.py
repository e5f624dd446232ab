"""What may follow a text under a GBNF grammar is what llama.cpp allows.

Compared are tokens of whole characters, and the end: llama.cpp takes the name of a control token
for text, lets bytes follow that are no UTF-8, and of `[^é]` forbids the first byte of "é" alone.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp

from specrun.bindings.models.model import Model
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime import Grammar
from specrun.runtime.demo import demo_target
from specrun.runtime.grammar.compiled import compiled

GRAMMARS = {
    "sums": 'root ::= (sum "\\n")+\nsum ::= part ([-+] part)*\npart ::= [0-9]+ | "(" sum ")"',
    "recursion": 'root ::= "[" (root ("," root)*)? "]"',
    "lines": 'root ::= few |\n  more\nfew ::= "ab" few | "c"\nmore ::= (\n  "x" |\n  "yy"\n){2,3}',
    "not these": 'root ::= "\\"" ([^"\\\\\\x7F\\x00-\\x1F] | "\\\\" ["nt])* "\\""',
    "comments": '# first\nroot ::= any{1,4} "!"? # last\nany ::= [a-zA-Z_] [a-zA-Z_0-9-]*',
    "any": 'root ::= "a." .{1,3} [.b]? # a dot.',
    "optional": 'root ::= ("yes" | "no") (" " why)?\nwhy ::= ws "as" ws [a-z ]+\nws ::= | " "\n',
    "letters": "root ::= [ぁ-ゟ]+ ([ \\t] [一-鿿]+)*\n",
    # Rules that share characters: no lexer can tell where one of them ends.
    "spaces before a line break": 'root ::= [0-9]+ ws "\\n"\nws ::= [ \\t\\n]*',
    "words and a word": 'root ::= [a-zA-Z ]+ " is " [a-z]+ "."',
    "assignments": (
        'root ::= (sum "=" ws part "\\n")+\nsum ::= part ([-+*/] part)*\n'
        'part ::= name | number | "(" ws sum ")" ws\nname ::= [a-z] [a-z0-9_]* ws\n'
        "number ::= [0-9]+ ws\nws ::= [ \\t\\n]*"
    ),
    "statements": (
        'root ::= function*\nfunction ::= type name "(" (type name)? ")" "{" line* "}"\n'
        'type ::= ("int" | "float") ws\nname ::= [a-z_] [a-z_0-9]*\nws ::= [ \\n]+\n'
        'line ::= type name ws "=" ws value ";" | "return" ws value ";" | name ws "(" ")" ";"\n'
        'value ::= name | [0-9]+ | "-" value | "(" ws value ws ")"'
    ),
    "any object": (
        'root ::= object\nvalue ::= object | array | text | "true" | "null" | [0-9]+\n'
        'object ::= "{" ws (pair ("," ws pair)*)? "}" ws\npair ::= text ":" ws value\n'
        'array ::= "[" ws (value ("," ws value)*)? "]" ws\nws ::= | " " | "\\n" [ \\t]{0,20}\n'
        'text ::= "\\"" ([^"\\\\\\x7F\\x00-\\x1F] | "\\\\" ["\\\\bfnrt] | code)* "\\"" ws\n'
        'code ::= "\\\\u" [0-9a-fA-F]{4}'
    ),
    "lines without line breaks": 'root ::= ("- " [^\\r\\n\\x0b\\x85\\u2028]+ "\\n")+',
    "escapes": (
        'root ::= "\\u00e9" [\\U0001F600-\\U0001F64Fa]? "\\x41\\[" rest\n'
        'rest ::= [\\]\\-\\[^]+ ("\\\\" | "\\"" | "\\t")*'
    ),
    "moves": (
        'root ::= "1. " move " " move "\\n" ([1-9] [0-9]? ". " move "\\n")+\n'
        'move ::= ([NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8] | "O-O" "-O"?) [+#]?'
    ),
    "counted": 'root ::= ("ab"{2} | [a-c]{1,3} | "abc"+ "d"?){2,} "" [] "!"',
    "tokens": "root ::= <[70]> (<[71]> | !<[72]> <[73]>){1,2} !<[70]> [a-z]+",
}
TEXTS, LENGTH = 6, 16
PUBLISHED = "SPECRUN_GBNF_FOLDER"
"""A folder of published grammars, to be compared in addition."""


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[Vocabulary]:
    with Model(demo_target(), vocab_only=True) as model:
        yield model.vocabulary


@pytest.fixture(scope="module")
def compared(vocabulary: Vocabulary) -> np.ndarray:
    """Which tokens are compared."""
    ends = vocabulary.end_of_generation
    return np.array(
        [
            token in ends or (not vocabulary.is_control(token) and is_text(vocabulary.named(token)))
            for token in range(vocabulary.size)
        ]
    )


def is_text(spelled: bytes) -> bool:
    """Whether a token's bytes are whole characters."""
    return spelled.decode(errors="ignore").encode() == spelled


class LlamaGrammar:
    """llama.cpp's own grammar, freed at the end of a `with`."""

    def __init__(self, vocabulary: Vocabulary, source: str) -> None:
        handle = vocabulary._handle
        self._sampler = llama_cpp.llama_sampler_init_grammar(handle, source.encode(), b"root")
        self._size = vocabulary.size
        assert self._sampler

    def __enter__(self) -> LlamaGrammar:
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_sampler_free(self._sampler)

    def mask(self) -> np.ndarray:
        data = (llama_cpp.llama_token_data * self._size)()
        cells = np.frombuffer(data, dtype=[("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
        cells["id"], cells["logit"] = np.arange(self._size), 0.0
        array = llama_cpp.llama_token_data_array(data, self._size, -1, False)
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(array))
        return cells["logit"] > -np.inf

    def accept(self, token: int) -> None:
        llama_cpp.llama_sampler_accept(self._sampler, token)


@pytest.mark.parametrize("name", GRAMMARS)
def test_what_may_follow_is_what_llama_allows(
    vocabulary: Vocabulary, compared: np.ndarray, name: str
) -> None:
    compare(vocabulary, compared, GRAMMARS[name], random.Random(name))


def test_published_grammars_allow_what_llama_allows(
    vocabulary: Vocabulary, compared: np.ndarray
) -> None:
    folder = os.environ.get(PUBLISHED)
    if not folder:
        pytest.skip(f"{PUBLISHED} names no folder of grammars")
    files = sorted(Path(folder).glob("*.gbnf"))
    assert files
    for file in files:
        compare(vocabulary, compared, file.read_text(), random.Random(file.name))


def compare(
    vocabulary: Vocabulary, compared: np.ndarray, source: str, chance: random.Random
) -> None:
    """Compare what may follow along random texts."""
    row = np.zeros(vocabulary.size, np.float32)
    for _ in range(TEXTS):
        place, text = compiled(Grammar.gbnf(source), vocabulary).start(0), list[int]()
        with LlamaGrammar(vocabulary, source) as llama:
            while len(text) < LENGTH and not place.is_over:
                ours, theirs = np.isfinite(place.masked(row, ())), llama.mask()
                assert (ours == theirs)[compared].all(), vocabulary.detokenize(text)
                both = {*np.flatnonzero(ours & theirs).tolist()} - vocabulary.end_of_generation
                text.append(chance.choice(sorted(both)))
                llama.accept(text[-1])
                place = place.after(text[-1:])
        place.close()


def test_another_grammar_would_be_seen(vocabulary: Vocabulary, compared: np.ndarray) -> None:
    place = compiled(Grammar.gbnf(GRAMMARS["sums"]), vocabulary).start(0)
    ours = np.isfinite(place.masked(np.zeros(vocabulary.size, np.float32), ()))
    with LlamaGrammar(vocabulary, GRAMMARS["recursion"]) as llama:
        assert (ours != llama.mask())[compared].any()
