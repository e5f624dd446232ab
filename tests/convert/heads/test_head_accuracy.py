"""Accuracies written into a head's own file: everything else stays bit by bit, and a failure leaves
the old file."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFReader
from support.tiny_heads import random_medusa

from specrun.bindings.errors import OptionError
from specrun.convert.gguf import gguf_source
from specrun.convert.heads.head_conversion import store_accuracy
from specrun.runtime.heads import HeadFile, stored_accuracy

HIDDEN, VOCAB = 32, 320
ACCURACY = ((0.5, 0.25), (0.125,), (0.0, 0.0))


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    made = random_medusa(HIDDEN, VOCAB)
    return made.write(
        tmp_path / "heads.gguf", VOCAB, "Q8_0", accuracy=[0.1] * 6, vocabulary="ab" * 32
    )


def tensors(path: Path) -> dict[str, bytes]:
    return {tensor.name: tensor.data.tobytes() for tensor in GGUFReader(path).tensors}


def keys(path: Path) -> dict[str, object]:
    fields = GGUFReader(path).fields.values()
    return {
        entry.name: entry.contents()
        for entry in fields
        if not entry.name.startswith("GGUF.") and "accuracy" not in entry.name
    }


def test_accuracies_are_replaced_and_the_rest_stays(heads: Path) -> None:
    before, known = tensors(heads), keys(heads)
    size = store_accuracy(heads, ACCURACY, n_positions=77)
    assert size == heads.stat().st_size
    assert (tensors(heads), keys(heads)) == (before, known)
    file = HeadFile(heads, "medusa")
    assert stored_accuracy(file, 3) == ((0.5, 0.25), (0.125, 0.0), (0.0, 0.0))
    assert file.header.metadata["medusa.node_accuracy_positions"] == 77
    assert [path.name for path in heads.parent.iterdir()] == ["heads.gguf"]


def test_a_link_stays_a_link(heads: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(heads)
    store_accuracy(link, ACCURACY, n_positions=1)
    assert link.is_symlink()
    assert stored_accuracy(HeadFile(heads, "medusa"), 3) is not None


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_failure_leaves_the_old_file(
    heads: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    before = heads.read_bytes()
    shipped = gguf_source.write_gguf

    def stops(*arguments, **options):  # type: ignore[no-untyped-def]
        def finish(_path: Path) -> None:
            raise error

        return shipped(*arguments, **options, finish=finish)

    monkeypatch.setattr(gguf_source, "write_gguf", stops)
    with pytest.raises(error):
        store_accuracy(heads, ACCURACY, n_positions=1)
    assert heads.read_bytes() == before
    assert [path.name for path in heads.parent.iterdir()] == ["heads.gguf"]


def test_heads_that_are_never_right_are_not_kept(heads: Path) -> None:
    before = heads.read_bytes()
    for nothing in ((), ((0.0, 0.0), (0.5,))):
        with pytest.raises(OptionError, match="ever right"):
            store_accuracy(heads, nothing, n_positions=1)
    assert heads.read_bytes() == before
