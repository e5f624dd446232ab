"""Training data: the kinds of documents, and a sentence for what is none."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from specrun.bindings.errors import FileMissingError, MalformedFileError, ModelError
from specrun.train.data import Answered, documents
from specrun.train.data import documents as json_array
from specrun.train.data.documents import Chat, PlainText, read_documents


def written(folder: Path, text: str, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def lines(*records: object) -> str:
    return "\n".join(json.dumps(record) for record in records) + "\n\n"


def test_a_text_is_one_document(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeffSome words.\n\nMore {words}.\n", "text.txt")
    assert read_documents([path]) == [PlainText("Some words.\n\nMore {words}.\n")]


def test_all_kinds_of_records_are_read_in_order(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = lines(
        {"text": "plain"},
        {"prompt": "p", "answer": "a", "source": 3},
        {"question": "q", "answer": "a"},
        {"messages": chat},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    )
    found = read_documents([written(tmp_path, text), written(tmp_path, "end", "end.txt")])
    both = Chat(tuple(chat))
    assert found == [
        PlainText("plain"),
        Answered("p", "a"),
        Answered("q", "a"),
        both,
        both,
        PlainText("end"),
    ]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_an_array_is_read_as_lines_would_be(
    tmp_path: Path, monkeypatch, indent: int | None, size: int
) -> None:
    """ShareGPT's file as it was published is one; it is read in pieces, however they fall."""
    monkeypatch.setattr(json_array, "_PIECE", size)
    monkeypatch.setattr(documents, "_START", 12)
    chat = [{"from": "human", "value": 'a "}, {" ü'}, {"from": "gpt", "value": "b\n]"}]
    records = [
        {"id": "x", "conversations": chat},
        {"text": "t"},
        {"text": " "},
        {"prompt": "p", "answer": "a" * 50},
    ]
    text = json.dumps(records, indent=indent, ensure_ascii=False)
    path = written(tmp_path, ("\ufeff" + " " * 14 if indent else "") + text + "\n")
    found = read_documents([path])
    assert found == [
        Chat(({"role": "user", "content": 'a "}, {" ü'}, {"role": "assistant", "content": "b\n]"})),
        PlainText("t"),
        Answered("p", "a" * 50),
    ]
    assert [document.origin for document in found] == [
        f"element {number} of data.jsonl" for number in (1, 2, 4)
    ]


def test_an_array_is_not_in_memory_whole(tmp_path: Path) -> None:
    """5 MB of records whose texts are empty: as lines or as an array, less than half of that is
    held."""
    record = json.dumps({"text": "", "note": "x" * 1000})
    for text in ("[" + ",".join([record] * 5000) + "]", "\n".join([record] * 5000)):
        path = written(tmp_path, text)
        tracemalloc.start()
        with pytest.raises(ModelError, match="no usable text"):
            read_documents([path])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < path.stat().st_size / 2


@pytest.mark.parametrize(
    "text", ["[1] Introduction", "[", "[]", "[x](y) {", '["a", "b"]', "[[{}]]"]
)
def test_a_text_may_begin_with_a_bracket(tmp_path: Path, text: str) -> None:
    assert read_documents([written(tmp_path, text)]) == [PlainText(text)]


@pytest.mark.parametrize("before", [[], [{"from": "system", "value": "Be brief."}]])
def test_what_the_assistant_says_before_it_is_asked_is_left_out(
    tmp_path: Path, before: list
) -> None:
    chat = [{"from": "gpt", "value": "Hello!"}, {"from": "gpt", "value": "Well?"}]
    asked = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    path = written(
        tmp_path, lines({"conversations": before + chat + asked}, {"conversations": before + chat})
    )
    assert [
        [message["content"] for message in chat.messages] for chat in read_documents([path])
    ] == [[*(message["value"] for message in before), "a", "b"]]


def test_what_has_nothing_to_learn_is_left_out(tmp_path: Path) -> None:
    text = lines(
        {"text": " \n"},
        {"prompt": "p", "answer": ""},
        {"messages": [{"role": "user", "content": "only asks"}]},
        {"text": "kept"},
    )
    assert read_documents([written(tmp_path, text)]) == [PlainText("kept")]


def test_prompts_alone_are_enough_where_the_target_answers(tmp_path: Path) -> None:
    text = lines({"prompt": "p"}, {"messages": [{"role": "user", "content": "asks"}]})
    path = written(tmp_path, text)
    assert read_documents([path], need_answers=False) == [
        Answered("p", None),
        Chat(({"role": "user", "content": "asks"},)),
    ]
    with pytest.raises(MalformedFileError, match=r"line 1 of data\.jsonl has 'prompt'"):
        read_documents([path])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"text": "a"}\n{"text": ', "line 2 of data.jsonl is not JSON"),
        ('{"text": "a"}\n[1]', "line 2 of data.jsonl is not a JSON object"),
        ('{"txt": "a"}', "line 1 of data.jsonl has 'txt'"),
        ('{"text": 3}', "a 'text' that is not a text"),
        ('{"messages": "hello"}', "'messages' in line 1 of data.jsonl is not a list"),
        ('{"messages": [{"role": "user"}]}', "a message without a role and a content"),
        ("{" + '"a":[' * 100_000, "line 1 of data.jsonl is not JSON"),
        (
            '[{"text": "a"}, {"text": ',
            "the array in data.jsonl is damaged, element 2 is not JSON (Expecting value)",
        ),
        (
            '[{"text": "a"}, {"text" "b"}]',
            "damaged, element 2 is not JSON (Expecting ':' delimiter)",
        ),
        ('[{"text": "a"},]', "element 2 is not JSON"),
        ('[{"text": "a"}', "it ends after element 1"),
        ('[{"text": "a"} {"text": "b"}]', "after element 1 comes '{'"),
        ('[{"text": "a"}] more', "more follows its end, which is after element 1"),
        ('[{"text": "a"}, 7]', "element 2 of data.jsonl is not a JSON object"),
        ('[{"txt": "a"}]', "element 1 of data.jsonl has 'txt'"),
        ('[{"messages": "hello"}]', "'messages' in element 1 of data.jsonl is not a list"),
        ("[{" + '"a":{' * 100_000, "element 1 is nested too deeply"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(MalformedFileError) as caught:
        read_documents([written(tmp_path, text)])
    assert problem in str(caught.value)


@pytest.mark.parametrize("text", ["", " \n\n", '{"text": ""}'])
def test_nothing_usable_is_said(tmp_path: Path, text: str) -> None:
    with pytest.raises(ModelError, match=r"data\.jsonl has no usable text") as caught:
        read_documents([written(tmp_path, text)])
    assert caught.value.exit_code == 3


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileMissingError, match="there is no file"):
        read_documents([tmp_path / "absent"])
    with pytest.raises(FileMissingError, match="cannot be read"):
        read_documents([tmp_path])
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(MalformedFileError, match="byte 4"):
        read_documents([tmp_path / "latin"])
    lines = b'{"text": "a"}\n' * 20_000
    for start in (b"x" * 200_000, b"\xef\xbb\xbf" + lines, b"[" + b'{"text": "a"},\n' * 20_000):
        (tmp_path / "latin").write_bytes(start + b"\xc3\xa9 caf\xe9 and more" * 2)
        with pytest.raises(MalformedFileError, match=rf"byte {len(start) + 7}\)"):
            read_documents([tmp_path / "latin"])
