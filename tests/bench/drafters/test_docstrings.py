"""First sentences of docstrings, tricky ones included."""

import pytest

from specrun.bench.drafters.corpus import MAX_SENTENCE, first_sentence


@pytest.mark.parametrize(
    ("doc", "sentence"),
    [
        ("Return x.", "Return x."),
        ("Return x. Then y.", "Return x."),
        ("Copy a\n    tree and\n    return it.\n\nMore.", "Copy a tree and return it."),
        ("Split on e.g. commas or i.e. this. Done.", "Split on e.g. commas or i.e. this."),
        ("Return 3.14 exactly.", "Return 3.14 exactly."),
        ('Say "stop." Then go.', 'Say "stop."'),
        ("Count from start (inclusive).  range(3) gives 0.", "Count from start (inclusive)."),
        ("Make a mapping.\ndialect = register(name)", "Make a mapping."),
        ("No full stop here", "No full stop here"),
        ("sleep(seconds)\n\nDelay execution for a time.", "Delay execution for a time."),
        ("f(x) -> int\nf(x, y) -> int\n\nAdd the numbers.", "Add the numbers."),
        (
            "localtime([seconds]) -> (tm_year,tm_mon,\n       tm_isdst)\n\nConvert seconds.",
            "Convert seconds.",
        ),
        ("dict() -> new empty dictionary", "new empty dictionary"),
        ("D.items() -> a set-like object providing a view", "a set-like object providing a view"),
        ("A fine title\n============\n\nText.", "A fine title"),
        ("Do it:\n\nThen rest.", None),
        ("Run this.\n>>> run()", "Run this."),
        (">>> run()", None),
        ("reader = csv.reader(file) for row in reader", None),
        ("Internal.", None),
        ("", None),
        (None, None),
    ],
)
def test_the_first_sentence(doc, sentence):
    assert first_sentence(doc) == sentence


def test_sentences_that_are_too_long_are_left_out():
    assert first_sentence("word " * MAX_SENTENCE + "end.") is None
