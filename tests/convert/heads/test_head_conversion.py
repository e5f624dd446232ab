"""Conversion of heads of any kind: their kind, the target they fit, and refusals of bad
input."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_checkpoints import llama_config, safetensors_bytes

from specrun.bindings.errors import (
    FileMissingError,
    MalformedFileError,
    OptionError,
    PairError,
    UnsupportedModelError,
)
from specrun.bindings.gguf import read_header
from specrun.bindings.models import Model
from specrun.bindings.quantizer import dequantize_rows, quantize_rows
from specrun.convert import convert_head, plan_head, target_facts
from specrun.convert.heads.head_conversion import HEAD_KINDS, detect_kind, quantized_pieces
from specrun.runtime.drafters.medusa import MedusaHead

torch = pytest.importorskip("torch")
from support.torch_heads import MEDUSA_FILE, TorchEagle, TorchMedusa, medusa_config, named, publish  # noqa: E402

HIDDEN, VOCAB = 32, 320
PICKLE, SAFE = f"{MEDUSA_FILE}.pt", f"{MEDUSA_FILE}.safetensors"


class Canary:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def medusa(folder: Path, file: str = SAFE, hidden: int = HIDDEN, vocab_size: int = VOCAB) -> Path:
    return publish(folder, medusa_config(), named(TorchMedusa(hidden, vocab_size, 2)), file)


def eagle(
    folder: Path, file: str = "model.safetensors", hidden: int = HIDDEN, vocab_size: int = VOCAB
) -> Path:
    head = TorchEagle(hidden, vocab_size)
    return publish(folder, head.config, named(head), file)


def kind_name(folder: Path, **options: Any) -> str | None:
    found = detect_kind(folder, **options)
    return None if found is None else found.name


def test_kinds_are_recognised(tmp_path: Path, write_checkpoint) -> None:
    assert kind_name(medusa(tmp_path / "safe")) == "medusa"
    assert (
        kind_name(medusa(tmp_path / "pickled", PICKLE)) == "medusa"
    )  # by the name of the file alone
    assert kind_name(eagle(tmp_path / "eagle")) == "eagle"
    bare = publish(tmp_path / "bare", {}, named(TorchMedusa(HIDDEN, VOCAB, 2)), "model.safetensors")
    assert kind_name(bare) == "medusa"  # by the names of its tensors
    pickled = eagle(tmp_path / "eagle pickled", "pytorch_model.bin")
    assert kind_name(pickled) is None  # nothing is opened that may not be
    assert kind_name(pickled, allow_pickle=True) == "eagle"
    assert kind_name(write_checkpoint()) is None
    assert kind_name(tmp_path / "nowhere") is None
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    assert kind_name(tmp_path / "broken") is None


def test_kinds_do_not_claim_each_others_checkpoints(tmp_path: Path) -> None:
    names = {
        "medusa": {*named(TorchMedusa(4, 8))},
        "eagle": {*named(TorchEagle(8, 8, embedding=True))},
    }
    names["model"] = {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "lm_head.weight",
    }
    for name, held in names.items():
        assert [kind.name for kind in HEAD_KINDS if kind.in_tensors(held)] == (
            [name] if name != "model" else []
        )


def test_another_layout_is_refused_with_what_is_there(
    tmp_path: Path, tiny_model: Path, write_checkpoint
) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"no head of a known layout \(.*\): .* model\.embed_tokens\.weight",
    ):
        convert_head(write_checkpoint(), tmp_path / "h.gguf", target=tiny_model)
    with pytest.raises(OptionError, match=r"kind is 'medussa': .*\(did you mean medusa\?\)"):
        convert_head(
            medusa(tmp_path / "heads"), tmp_path / "h.gguf", target=tiny_model, kind="medussa"
        )
    with pytest.raises(MalformedFileError, match=r"no tensor fc\.weight: .* another kind of head"):
        convert_head(
            medusa(tmp_path / "heads"), tmp_path / "h.gguf", target=tiny_model, kind="eagle"
        )
    with pytest.raises(FileMissingError, match="no folder"):
        convert_head(tmp_path / "nowhere", tmp_path / "h.gguf", target=tiny_model)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"hidden": 64}, "hidden states of 64 numbers, and the target's have 32"),
        ({"vocab_size": 300}, "predicts 300 tokens, and the target has 320"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_with_both_numbers(
    tmp_path: Path, tiny_model: Path, sizes: dict[str, int], problem: str
) -> None:
    folder = medusa(tmp_path / "heads", **sizes)
    with pytest.raises(PairError, match=problem):
        convert_head(folder, tmp_path / "h.gguf", target=tiny_model)
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]


def test_a_file_for_one_target_is_refused_by_another(
    tmp_path: Path, tiny_model: Path, write_checkpoint
) -> None:
    """Of equal sizes but of another vocabulary: made for the checkpoint's model, it does not load
    with another."""
    folder = write_checkpoint(llama_config(vocab_size=VOCAB))
    report = convert_head(medusa(tmp_path / "heads"), tmp_path / "h.gguf", target=folder)
    assert report.n_words == VOCAB
    with Model(tiny_model) as model, pytest.raises(PairError, match="another vocabulary"):
        MedusaHead(report.output, model, n_threads=1)


def test_a_folder_and_its_file_give_the_same_head(tmp_path: Path, write_checkpoint) -> None:
    from specrun.convert import convert_checkpoint

    folder = write_checkpoint(llama_config(vocab_size=VOCAB))
    file = convert_checkpoint(folder, tmp_path / "m.gguf").output
    heads = medusa(tmp_path / "heads")
    written = [
        convert_head(heads, tmp_path / f"{n}.gguf", target=target).output.read_bytes()
        for n, target in enumerate((folder, file, target_facts(file)))
    ]
    assert written[0] == written[1] == written[2]


@pytest.mark.parametrize("make", [medusa, eagle])
def test_pickles_only_where_they_are_allowed(tmp_path: Path, tiny_model: Path, make: Any) -> None:
    name = PICKLE if make is medusa else "pytorch_model.bin"
    folder = make(tmp_path / "heads", name)
    with pytest.raises(UnsupportedModelError, match=rf"{name}, a pickle, .* --allow-pickle"):
        convert_head(folder, tmp_path / "h.gguf", target=tiny_model)
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]
    pickled = convert_head(folder, tmp_path / "p.gguf", target=tiny_model, allow_pickle=True)
    assert {tensor.name for tensor in read_header(pickled.output).tensors}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("allowed", [False, True])
def test_code_in_a_pickle_never_runs(
    tmp_path: Path, tiny_model: Path, zipped: bool, allowed: bool
) -> None:
    folder = medusa(tmp_path / "heads", PICKLE)
    canary = Canary(tmp_path / "canary")
    if zipped:
        torch.save(
            {**named(TorchMedusa(HIDDEN, VOCAB, 2)), "0.0.linear.bias": canary}, folder / PICKLE
        )
    else:
        (folder / PICKLE).write_bytes(pickle.dumps(canary))
    assert kind_name(folder, allow_pickle=allowed) in ("medusa", None)
    with pytest.raises(
        UnsupportedModelError, match=r"a pickle|could run code|not a file that torch"
    ):
        convert_head(folder, tmp_path / "h.gguf", target=tiny_model, allow_pickle=allowed)
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]
    pickle.loads(pickle.dumps(canary))  # it would have sung
    assert (tmp_path / "canary").is_dir()


def test_safetensors_come_before_a_pickle_of_the_same_name(
    tmp_path: Path, tiny_model: Path
) -> None:
    folder = medusa(tmp_path / "heads")
    (folder / PICKLE).write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    convert_head(folder, tmp_path / "h.gguf", target=tiny_model, allow_pickle=True)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(("outtype", "number"), [("f32", np.nan), ("q8_0", np.inf)])
def test_numbers_that_are_not_finite_leave_nothing_behind(
    tmp_path: Path, tiny_model: Path, outtype: str, number: float
) -> None:
    tensors = named(TorchMedusa(HIDDEN, VOCAB, 2))
    tensors["1.1.weight"][-1, -1] = number
    folder = publish(tmp_path / "heads", medusa_config(), tensors, SAFE)
    with pytest.raises(MalformedFileError, match=r"1\.1\.weight holds numbers that are not finite"):
        convert_head(folder, tmp_path / "h.gguf", target=tiny_model, outtype=outtype)
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]


def test_a_number_too_large_for_a_quantized_type_names_the_tensor(
    tmp_path: Path, tiny_model: Path
) -> None:
    tensors = named(TorchMedusa(HIDDEN, VOCAB, 1))
    tensors["0.1.weight"][7, 3] = 1e30  # its block's scale is a float16
    folder = publish(tmp_path / "heads", medusa_config(), tensors, SAFE)
    with pytest.raises(
        MalformedFileError, match=r"medusa\.0\.output\.weight: the numbers cannot be stored as Q8_0"
    ):
        convert_head(folder, tmp_path / "h.gguf", target=tiny_model)
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]


def test_a_file_in_the_way(tmp_path: Path, tiny_model: Path) -> None:
    folder, output = medusa(tmp_path / "heads"), tmp_path / "h.gguf"
    output.write_text("mine")
    with pytest.raises(OptionError, match="already exists"):
        convert_head(folder, output, target=tiny_model)
    assert output.read_text() == "mine"
    done: list[tuple[int, int]] = []
    convert_head(
        folder, output, target=tiny_model, force=True, progress=lambda *at: done.append(at)
    )
    assert done[-1][0] == done[-1][1] > 0


def test_an_unknown_type(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(OptionError, match=r"outtype is 'q8_O'.*did you mean q8_0"):
        plan_head(medusa(tmp_path / "heads"), target=tiny_model, outtype="q8_O")


@pytest.mark.parametrize("cuts", [(), (1,), (31, 32, 33), (320, 5000), (7, 8, 9, 10000)])
def test_rows_are_quantized_however_they_are_cut(cuts: tuple[int, ...]) -> None:
    rows = np.random.default_rng(0).normal(size=(320, 32)).astype(np.float32)
    pieces = np.split(rows.reshape(-1), cuts)
    found = np.concatenate(list(quantized_pieces(pieces, 32, "Q8_0", n_threads=1)))
    np.testing.assert_array_equal(found, quantize_rows(rows, "Q8_0", n_threads=1))
    assert np.abs(dequantize_rows(found, "Q8_0", 32) - rows).max() < 0.02


def test_pieces_of_a_large_matrix_meet_within_rows(tmp_path: Path, tiny_model: Path) -> None:
    """More numbers than one piece holds, in rows that pieces do not end with."""
    vocab_size, wide = 700_000, 3
    tensors = {"a": np.random.default_rng(0).normal(size=(vocab_size, wide)).astype(np.float32)}
    (tmp_path / "big.safetensors").write_bytes(safetensors_bytes(tensors))
    from specrun.convert.checkpoint import PIECE_BYTES, SourceDigest, read_safetensors
    from specrun.convert.families.family import TensorRule
    from specrun.convert.tensor_stream import MappedTensor, TensorStream

    assert PIECE_BYTES // 4 % wide
    assert tensors["a"].nbytes > 2 * PIECE_BYTES
    source = read_safetensors(tmp_path / "big.safetensors")["a"]
    mapped = MappedTensor(TensorRule("a", ("a",), (vocab_size, wide)), (source,), "F32")
    with TensorStream(SourceDigest(tmp_path)) as stream:
        pieces = list(quantized_pieces(stream.pieces(mapped), wide, "F16", n_threads=1))
    found = np.concatenate(pieces).view(np.float16).reshape(vocab_size, wide)
    np.testing.assert_array_equal(found, tensors["a"].astype(np.float16))
