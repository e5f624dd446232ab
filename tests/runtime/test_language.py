"""The drafter language: what parses into what, that it prints back, and errors that say where."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.bindings.errors import OptionError
from specrun.runtime.language import Expression, parse_expression, quoted


def name(atom: str) -> Expression:
    return Expression(atom)


PARSED = {
    "none": name("none"),
    "  none  ": name("none"),
    "prompt-lookup": name("prompt-lookup"),
    "medusa()": Expression("medusa", is_call=True),
    "draft(a.gguf)": Expression("draft", (name("a.gguf"),), is_call=True),
    "draft(a.gguf, n=5)": Expression("draft", (name("a.gguf"),), (("n", name("5")),), is_call=True),
    "draft( a.gguf ,n = 5 )": Expression(
        "draft", (name("a.gguf"),), (("n", name("5")),), is_call=True
    ),
    "draft(tree=4x2x2)": Expression("draft", (), (("tree", name("4x2x2")),), is_call=True),
    "a@3": Expression("a", count=3),
    "a() @ 3": Expression("a", count=3, is_call=True),
    "relay(a@2, b(x)@3)": Expression(
        "relay",
        (Expression("a", count=2), Expression("b", (name("x"),), count=3, is_call=True)),
        is_call=True,
    ),
    "cascade(draft(a.gguf), prompt-lookup)": Expression(
        "cascade",
        (Expression("draft", (name("a.gguf"),), is_call=True), name("prompt-lookup")),
        is_call=True,
    ),
    'draft("my models/a (1).gguf")': Expression(
        "draft", (name("my models/a (1).gguf"),), is_call=True
    ),
    "draft('my models/a, b=c.gguf')": Expression(
        "draft", (name("my models/a, b=c.gguf"),), is_call=True
    ),
    r'draft("C:\\models\\a.gguf")': Expression("draft", (name(r"C:\models\a.gguf"),), is_call=True),
    r"draft('C:\models\a.gguf')": Expression("draft", (name(r"C:\models\a.gguf"),), is_call=True),
    r"draft(C:\models\a.gguf)": Expression("draft", (name(r"C:\models\a.gguf"),), is_call=True),
    r'"say \"hi\""': name('say "hi"'),
    '""': name(""),
    "драфт(модель.gguf)": Expression("драфт", (name("модель.gguf"),), is_call=True),
    "a(x=b(y=c(z=1)))": Expression(
        "a",
        (),
        (
            (
                "x",
                Expression(
                    "b",
                    (),
                    (("y", Expression("c", (), (("z", name("1")),), is_call=True)),),
                    is_call=True,
                ),
            ),
        ),
        is_call=True,
    ),
}


@pytest.mark.parametrize(("text", "expected"), PARSED.items(), ids=PARSED)
def test_parses(text, expected):
    assert parse_expression(text) == expected


@pytest.mark.parametrize("text", PARSED, ids=PARSED)
def test_prints_what_parses_to_the_same(text):
    parsed = parse_expression(text)
    assert parse_expression(str(parsed)) == parsed


atoms = st.text(max_size=8)
expressions = st.recursive(
    st.builds(Expression, atoms, count=st.none() | st.integers(1, 99)),
    lambda inner: st.builds(
        Expression,
        atoms,
        st.lists(inner, max_size=2).map(tuple),
        st.lists(st.tuples(atoms, inner), max_size=2, unique_by=lambda option: option[0]).map(
            tuple
        ),
        st.none() | st.integers(1, 10**9 - 1),
        st.just(True),
    ),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(expressions)
def test_every_expression_survives_printing(expression):
    assert parse_expression(str(expression)) == expression


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text(max_size=40))
def test_quoted_text_is_that_text(text):
    assert parse_expression(quoted(text)) == name(text)
    assert parse_expression(f"draft({quoted(text)}, n=1)").arguments == (name(text),)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.text(alphabet=st.sampled_from(list("ab1(),@='\"\\ \n\t٣")), max_size=30)
    | st.text(max_size=30)
)
def test_garbage_raises_nothing_but_option_errors(text):
    try:
        parsed = parse_expression(text)
    except OptionError:
        return
    assert parse_expression(str(parsed)) == parsed


ERRORS = {
    "": (1, "missing"),
    "   ": (4, "missing"),
    "(": (1, "missing"),
    ")": (1, "missing"),
    "draft(": (7, "missing"),
    "draft(a": (8, "comma or a closing parenthesis"),
    "draft(a b)": (9, "comma or a closing parenthesis"),
    "draft(a,)": (9, "missing"),
    "draft(,a)": (7, "missing"),
    "draft(n=)": (9, "missing"),
    "draft(n=1, a)": (12, "without a name follows"),
    "draft(n=1, n=2)": (12, "given twice"),
    "draft(a) b": (10, "unexpected 'b'"),
    "a,b": (2, "unexpected ','"),
    'draft("a.gguf': (7, "quote is not closed"),
    "draft('a": (7, "quote is not closed"),
    "a@": (3, "number is missing"),
    "a@b": (3, "not a positive number"),
    "a@0": (3, "not a positive number"),
    "a@-1": (3, "not a positive number"),
    "a@1.5": (3, "not a positive number"),
    "a@" + "9" * 5000: (3, "not a positive number"),  # longer than int() reads
}


@pytest.mark.parametrize(
    ("text", "position", "problem"),
    [(text, *error) for text, error in ERRORS.items()],
    ids=[text[:20] for text in ERRORS],
)
def test_an_error_says_what_and_where(text, position, problem):
    with pytest.raises(OptionError, match=problem) as caught:
        parse_expression(text)
    assert f"at character {position})" in str(caught.value)
    assert caught.value.exit_code == 2


def test_depth_is_bounded():
    parse_expression("a(" * 16 + "a" + ")" * 16)
    for depth in (17, 100_000):
        with pytest.raises(OptionError, match="levels"):
            parse_expression("a(" * depth + "a" + ")" * depth)
