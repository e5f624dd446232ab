"""The corpus: its entries, and that it is the same every time."""

import shutil
import sysconfig
from pathlib import Path

import pytest

from specrun.bench.drafters import corpus
from specrun.bench.drafters.corpus import build_corpus

KEPT = ("shutil.py", "os.py", "posixpath.py", "ntpath.py", "json", "collections", "idlelib")


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    """Those of a few files, and of all that is written in C: the whole library takes seconds."""
    library, folder = Path(sysconfig.get_path("stdlib")), tmp_path_factory.mktemp("library")
    for name in KEPT:
        if (library / name).is_dir():
            shutil.copytree(library / name, folder / name)
        elif (library / name).exists():
            shutil.copy(library / name, folder)
    (folder / "test").mkdir()
    (folder / "test" / "bad.py").write_text("no Python (")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus.sysconfig, "get_path", lambda _name: str(folder))
        return build_corpus()


@pytest.fixture(scope="module")
def by_name(entries):
    return {entry.name: entry for entry in entries}


@pytest.mark.parametrize(
    ("name", "kind", "sentence"),
    [
        (
            "shutil.copytree",
            "function",
            "Recursively copy a directory tree and return the destination directory.",
        ),
        (
            "os.getcwd",
            "function",
            "Return a unicode string representing the current working directory.",
        ),
        ("len", "function", "Return the number of items in a container."),
        ("list.append", "method", "Append object to the end of the list."),
        ("json.dumps", "function", "Serialize ``obj`` to a JSON formatted ``str``."),
        (
            "shutil",
            "module",
            "Utility functions for copying and archiving files and directory trees.",
        ),
        (
            "collections.deque",
            "class",
            "A list-like sequence optimized for data accesses near its endpoints.",
        ),
        (
            "os.path.join",
            "function",
            "Join two or more pathname components, inserting '/' as needed.",
        ),
    ],
)
def test_well_known_names(by_name, name, kind, sentence):
    assert (by_name[name].kind, by_name[name].sentence) == (kind, sentence)


def test_names_are_those_people_use(by_name):
    assert "json.JSONDecoder" in by_name
    assert "json.decoder.JSONDecoder" not in by_name
    assert "socket.socket.bind" in by_name
    assert not any(name.startswith(("posixpath", "ntpath", "test.", "idlelib")) for name in by_name)
    assert not any(part.startswith("_") for name in by_name for part in name.split("."))


def test_it_is_large_sorted_and_without_duplicates(entries):
    names = [entry.name for entry in entries]
    assert len(names) > 1500
    assert names == sorted(set(names))
    assert all(entry.sentence == " ".join(entry.sentence.split()) for entry in entries)


def test_it_is_the_same_every_time(monkeypatch, tmp_path):
    shutil.copy(shutil.__file__, tmp_path)
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _name: str(tmp_path))
    first, second = build_corpus(), build_corpus()
    assert first == second
    assert "shutil.copytree" in {entry.name for entry in first}
