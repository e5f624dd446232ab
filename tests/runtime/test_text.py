"""Text assembly: characters split over tokens, stop strings split over pushes, and nothing of a
stop leaks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.runtime.round.text import TextAssembler

SAMPLE = "aé中😀é👩‍👧\ufffd!"


def assembled(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> tuple[list[str], str | None]:
    """The texts as a session asks for them: pushes until a stop, then the rest."""
    assembler = TextAssembler(stop)
    texts = []
    for piece in pieces:
        texts.append(assembler.push(piece))
        if assembler.stopped_by is not None:
            break
    else:
        texts.append(assembler.finish())
    return texts, assembler.stopped_by


def reference(text: str, stop: Sequence[str]) -> str:
    """Character by character: the answer ends where the first stop string becomes complete."""
    for end in range(len(text) + 1):
        complete = [len(string) for string in stop if text[:end].endswith(string)]
        if complete:
            return text[: end - max(complete)]
    return text


@pytest.mark.parametrize("cut", range(len(SAMPLE.encode()) + 1))
def test_a_character_split_anywhere_is_put_together(cut):
    data = SAMPLE.encode()
    assert "".join(assembled([data[:cut], data[cut:]])[0]) == SAMPLE


def test_bytes_one_by_one_come_out_as_whole_characters():
    texts, _ = assembled([bytes([byte]) for byte in SAMPLE.encode()])
    assert "".join(texts) == SAMPLE
    assert all(text == "" or text in SAMPLE for text in texts)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xff", "\ufffd"),
        (b"a\xf0\x9f\x98", "a\ufffd"),
        (b"\xe4\xb8a", "\ufffda"),
        (b"\x80\x80", "\ufffd\ufffd"),
        (b"\xc3", "\ufffd"),
    ],
)
def test_invalid_bytes_become_the_replacement_character(data, expected):
    assert "".join(assembled([data])[0]) == expected
    assert "".join(assembled([bytes([byte]) for byte in data])[0]) == expected


@pytest.mark.parametrize("first", range(13))
@pytest.mark.parametrize("second", range(13))
def test_a_stop_string_split_anywhere_never_leaks(first, second):
    text = "hello</s>more"
    cuts = sorted((first, second))
    pieces = [text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]]
    texts, stopped_by = assembled([piece.encode() for piece in pieces], ["</s>"])
    assert "".join(texts) == "hello"
    assert stopped_by == "</s>"


def test_text_is_held_back_only_while_it_may_be_a_stop():
    assembler = TextAssembler(["</s>"])
    assert [assembler.push(piece) for piece in (b"a<", b"/", b"b", b"<<", b"x")] == [
        "a",
        "",
        "</b",
        "<",
        "<x",
    ]


def test_finish_releases_what_never_became_a_stop():
    assembler = TextAssembler(["</s>"])
    assert assembler.push(b"a</") == "a"
    assert assembler.finish() == "</"
    assert assembler.stopped_by is None


def test_finish_completes_a_broken_character():
    assembler = TextAssembler()
    assert assembler.push("😀".encode()[:2]) == ""
    assert assembler.finish() == "\ufffd"


def test_nothing_is_released_after_a_stop():
    assembler = TextAssembler(["x"])
    assert assembler.push(b"axb") == "a"
    assert assembler.push(b"c") == ""
    assert assembler.finish() == ""


@pytest.mark.parametrize(
    ("text", "stop", "expected", "by"),
    [
        ("say STOP now END", ["END", "STOP"], "say ", "STOP"),
        ("abcd", ["bc", "abcd"], "a", "bc"),  # complete first, though another began before
        ("abcd", ["cd", "bcd"], "a", "bcd"),  # complete together: the longer one
        ("aaab", ["aab"], "a", "aab"),  # the beginning overlaps itself
        ("ababac", ["abac"], "ab", "abac"),
        ("abab", ["ab"], "", "ab"),
        ("ab", ["abc", "b"], "a", "b"),
        ("é中x", ["中"], "é", "中"),
        ("no stop", ["STOP"], "no stop", None),
        ("a\n\nb", ["\n\n"], "a", "\n\n"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100], ids=["byte-by-byte", "two-bytes", "at-once"])
def test_which_stop_ends_the_answer_does_not_depend_on_the_split(text, stop, expected, by, size):
    data = text.encode()
    texts, stopped_by = assembled(
        [data[start : start + size] for start in range(0, len(data), size)], stop
    )
    assert "".join(texts) == expected
    assert stopped_by == by


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.text("ab<é😀", max_size=20),
    st.lists(st.text("ab<é😀", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 60), max_size=10),
)
def test_the_texts_add_up_to_the_truncated_text(text, stop, cuts):
    data = text.encode()
    bounds = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    pieces = [data[a:b] for a, b in itertools.pairwise(bounds)]
    texts, stopped_by = assembled(pieces, stop)
    assert "".join(texts) == reference(text, stop)
    assert (stopped_by is not None) == any(string in text for string in stop)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.text("ab<é😀", max_size=16),
    st.lists(st.text("ab<é", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 50), max_size=8),
    st.integers(1, 4),
)
def test_pieces_at_once_are_the_same_as_one_by_one(text, stop, cuts, size):
    """The same text, the same stop string after the same piece, and the same text held back."""
    data = text.encode()
    bounds = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    pieces = [data[a:b] for a, b in itertools.pairwise(bounds)]
    together, apart = TextAssembler(stop), TextAssembler(stop)
    for start in range(0, len(pieces), size):
        group = pieces[start : start + size]
        texts = []
        for piece in group:
            texts.append(apart.push(piece))
            if apart.stopped_by is not None:
                break
        assert together.push_all(group) == ("".join(texts), len(texts))
        assert together.stopped_by == apart.stopped_by
        if apart.stopped_by is not None:
            break
    assert together.finish() == apart.finish()
