"""Training data: the kinds of documents, and a sentence for what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specrun.bindings.errors import FileMissingError, MalformedFileError, ModelError
from specrun.train.data_file import Answered, Chat, PlainText, read_documents


def written(folder: Path, text: str, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def lines(*records: object) -> str:
    return "\n".join(json.dumps(one) for one in records) + "\n\n"


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
    assert found == [PlainText("plain"), Answered("p", "a"), Answered("q", "a"), both, both, PlainText("end")]


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
