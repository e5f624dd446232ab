"""GBNF has no lexer: left recursion, rules that may be empty, ambiguity, and what is refused."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Sequence

import pytest
from support.tiny_grammars import Words

from specrun.bindings.models.model import Model
from specrun.runtime import Grammar, GrammarError
from specrun.runtime.demo import demo_target
from specrun.runtime.grammar import GrammarState
from specrun.runtime.grammar.compiled import GrammarCompiler
from specrun.runtime.grammar.gbnf import rules_of
from specrun.runtime.grammar.pushdown import Pushdown
from specrun.runtime.grammar.token_tree import TokenTree

WORDS = Words("a", "b", "x", "+", "(", ")", "ab", "+x", "\n")


def start(source: str, words: Words = WORDS) -> GrammarState:
    return GrammarCompiler(words).compile(Grammar.gbnf(source)).start(0)  # type: ignore[arg-type]


def is_whole(place: GrammarState, tokens: Sequence[int]) -> bool:
    return place.after(tokens).allows(WORDS.end)


RECURSIVE = {
    'root ::= root "+" part | part\npart ::= "x" | "(" root ")"': r"(x|\(x(\+x)?\))(\+(x|\(x\)))*",
    'root ::= root root | "x"': "x+",
    'root ::= one "a" | "b"\none ::= root "x" | "a"': "(b|aa)(xa)*",
    'root ::= root | "a"': "a",
    'root ::= root ws | "x"\nws ::= "a"?': "xa*",
    'root ::= ws root | "x"\nws ::= "a"?': "a*x",
    'root ::= (ws)* "x"\nws ::= "a"* "b"*': "[ab]*x",
    'root ::= ("a"? "b"?)* | "x"\n': "[ab]*|x",
    'root ::= ("a" | "ab"){2,3} "b"?': "(a|ab){2,3}b?",
    'root ::= "x"\n   | "a" root\n   | "b"': "a*(x|b)",
}


@pytest.mark.parametrize("source", RECURSIVE)
def test_all_texts_of_a_grammar_are_its_texts(source: str) -> None:
    """Every sequence of a few tokens is tried."""
    place, wanted = start(source), re.compile(RECURSIVE[source])
    found = 0
    for length in range(5):
        for tokens in itertools.product(range(WORDS.end), repeat=length):
            text = WORDS.spelled(tokens)
            if text.count("(") < 2:
                assert is_whole(place, tokens) is bool(wanted.fullmatch(text)), text
                found += bool(wanted.fullmatch(text))
    assert found


@pytest.mark.parametrize(
    "source",
    [
        'root ::= "x" root "a" | "x" root "b" | ""',
        "root ::= r0\n"
        + "".join(f'r{n} ::= r{n + 1} "a" | r{n + 1} "b"\n' for n in range(60))
        + 'r60 ::= "x"+',
        "root ::= " + "(" * 40 + '"x"' + ")*" * 40,
    ],
)
def test_ambiguity_costs_no_time(source: str) -> None:
    """The stacks of these are 2 to the power of what was read; they share what they have below."""
    begun, place = time.monotonic(), start(source)
    place = place.after([2] * 60)
    assert place.allows(2)
    assert time.monotonic() - begun < 20


def test_what_is_forced_is_drafted() -> None:
    assert start('root ::= "ab+x" ("a" | "b")').forced(9) == [6, 7]
    assert start('root ::= "a" <[3]> "x" "b"?').forced(9) == [0, 3, 2]
    assert start('root ::= "a"? "b"').forced(9) == []


def test_a_text_that_is_whole_is_over() -> None:
    place = start('root ::= "ab" "x"?')
    assert not place.after([6]).is_over
    assert place.after([6]).allows(WORDS.end)
    assert place.after([6, 2]).is_over
    assert place.after([0]).allows(1)
    assert not place.after([0]).allows(WORDS.end)


def test_characters_in_parts_are_followed() -> None:
    words = Words("é", "\u2028", "x")
    words.texts[:3] = ["é".encode(), b"\xe2", b"\x80\xa8"]
    words.texts += [b"\x80\xa9", b"\xc3", b"\xa9"]
    words.size = len(words.texts)
    place = start("root ::= [é\u2028]+", words)
    assert place.allows(0)
    assert place.after([1]).allows(2)
    assert not place.after([1]).allows(4)
    assert not place.after([1]).allows(words.end)
    assert place.after([5, 6, 1, 2]).allows(words.end)
    assert start("root ::= [^x\u2028]", words).after([1, 4]).allows(words.end)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('root ::= "a', "Unexpected end of input at line 1"),
        ('root ::= "\\q"', r"Invalid escape sequence \\q at line 1"),
        ('root ::= "\\u12"', "Invalid escape sequence"),
        ('root ::= ("a"', r"Expected '\)'"),
        ('root ::= "a" )', "Expected newline or end at line 1, before '\\)'"),
        ('root ::= "a"\n*', "Expected name at line 2"),
        ('root ::= "a"{x}', "Expected {least}"),
        ('root ::= "a"{3,2}', "repeats less than nothing"),
        ('root ::= "a"{1000}{1000} "b"{2000000}', "too large: repeat less"),
        ("root ::= <none>", "'<none>' is no token of this model"),
        ('root ::= ws root "b" | "x"\nws ::= "a"?', "begins with itself, behind rules that may be"),
        ('a ::= "a"', "'root' not found"),
        ('root ::= "a" []', None),
    ],
)
def test_what_is_no_grammar_is_said_in_a_sentence(source: str, message: str | None) -> None:
    if message is None:
        start(source)
        return
    with pytest.raises(GrammarError, match=f"^the GBNF grammar cannot be compiled: .*{message}"):
        start(source)


WIDE = {
    "strings": 'root ::= ("\\"" ([^"\\\\\\x00-\\x1F] | "\\\\" [nt"])* "\\"" " "?)+',
    "lines": 'root ::= (.{0,3} | [^\\n]+ | [a-z0-9 ]+ "é")+',
    "letters": "root ::= [a-zA-Zà-ÿぁ-ゟ ]+ [.!]",
    "not all": "root ::= [^aé\\U0001F600]+",
}


@pytest.mark.parametrize("name", WIDE)
def test_masks_are_what_each_token_says(name: str) -> None:
    """Whole branches of the tree of tokens are passed over; token by token it is the same."""
    with Model(demo_target(), vocab_only=True) as model:
        vocabulary = model.vocabulary
        spelled = [vocabulary.named(token) for token in range(vocabulary.size)]
        control = [token for token in range(vocabulary.size) if vocabulary.is_control(token)]
    grammar = Pushdown(rules_of(WIDE[name], lambda _: None), TokenTree(spelled, control), spelled)
    state, chance = grammar.start, random.Random(name)
    for _ in range(12):
        mask = grammar.mask(state)
        assert [token for token in range(len(spelled)) if grammar.after(state, token)] == (
            mask.nonzero()[0].tolist()
        )
        state = grammar.after(state, chance.choice(mask.nonzero()[0].tolist()))
