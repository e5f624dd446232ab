"""GBNF becomes another notation on its way: what may follow a text is what llama.cpp allows.

Compared are tokens of ASCII text, and the end: llama.cpp takes the name of a control token for
text, and reads bytes that are no UTF-8 in its own way.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator

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
}
TEXTS, LENGTH = 6, 16


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
            token in ends
            or (not vocabulary.is_control(token) and vocabulary.named(token).isascii())
            for token in range(vocabulary.size)
        ]
    )


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
    source, chance = GRAMMARS[name], random.Random(name)
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


def test_another_grammar_would_be_seen(vocabulary: Vocabulary, compared: np.ndarray) -> None:
    place = compiled(Grammar.gbnf(GRAMMARS["sums"]), vocabulary).start(0)
    ours = np.isfinite(place.masked(np.zeros(vocabulary.size, np.float32), ()))
    with LlamaGrammar(vocabulary, GRAMMARS["recursion"]) as llama:
        assert (ours != llama.mask())[compared].any()
