"""The sums are those of an independent forward pass; a run that was cut short ends with the same
numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.llama_reference import reference_logits
from support.tiny_checkpoints import llama_config, llama_tensors

from specrun.bindings.contexts import InputObserver, expert_sums
from specrun.bindings.errors import OptionError, PairError
from specrun.bindings.models import Model
from specrun.convert import (
    ImportanceOptions,
    RandomLlama,
    convert_checkpoint,
    measure_importance,
    read_importance,
    write_random_llama,
)

TEXT = "the quick brown fox jumps over the lazy dog and says nothing. " * 40
OPTIONS = ImportanceOptions(n_ctx=32, n_batch=32, n_threads=1, output_frequency=2)
NATIVE_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("imatrix") / "model.gguf"
    write_random_llama(
        path, RandomLlama(vocab_size=320, width=32, layers=2, context=128, scale=2.0)
    )
    return path


class Watched(np.ndarray):
    """A weight matrix that sums the squares of its inputs."""

    sums: dict[str, np.ndarray]
    label = ""

    def __array_finalize__(self, source):
        self.label = getattr(source, "label", "")
        self.sums = getattr(source, "sums", {})

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        if ufunc is np.matmul and isinstance(inputs[1], Watched):
            squares = np.square(np.asarray(inputs[0])).sum(0)
            self.sums[inputs[1].label] = self.sums.get(inputs[1].label, 0) + squares
        plain = [
            array.view(np.ndarray) if isinstance(array, Watched) else array for array in inputs
        ]
        return getattr(ufunc, method)(*plain, **options)


def test_sums_are_those_of_an_independent_forward_pass(write_checkpoint, tmp_path: Path) -> None:
    config = llama_config()
    tensors = llama_tensors(config)
    convert_checkpoint(write_checkpoint(config, tensors), tmp_path / "m.gguf", outtype="f32")
    report = measure_importance(
        tmp_path / "m.gguf", TEXT, tmp_path / "i.gguf", OPTIONS, dataset="tokens"
    )
    matrix = read_importance(tmp_path / "i.gguf")
    with Model(tmp_path / "m.gguf") as loaded:
        tokens = loaded.vocabulary.tokenize(TEXT)
        starts = loaded.vocabulary.bos if loaded.vocabulary.adds_bos else None
    sums: dict[str, np.ndarray] = {}
    watched = {}
    for name, array in tensors.items():
        watched[name] = np.asarray(array, np.float64).view(Watched)
        watched[name].label, watched[name].sums = name, sums
    n_chunks = len(tokens) // 32
    for number in range(n_chunks):
        chunk = tokens[32 * number : 32 * number + 32]
        reference_logits(config, watched, chunk if starts is None else [starts, *chunk[1:]])
    expected = {}
    for name, squares in sums.items():
        parts = name.split(".")
        if len(parts) > 4 and ".".join(parts[3:5]) in NATIVE_NAMES:
            expected[f"blk.{parts[2]}.{NATIVE_NAMES['.'.join(parts[3:5])]}.weight"] = squares
    assert set(matrix.entries) == set(expected)
    for name, squares in expected.items():
        # The context keeps keys and values in half precision.
        np.testing.assert_allclose(matrix.entries[name].sums[0], squares, rtol=5e-3)
        assert matrix.entries[name].counts.tolist() == [32 * n_chunks]
    assert (report.chunks, matrix.chunk_count, matrix.chunk_size, matrix.datasets) == (
        n_chunks,
        n_chunks,
        32,
        ("tokens",),
    )


def test_a_chunk_may_be_read_in_several_batches(model: Path, tmp_path: Path) -> None:
    whole = ImportanceOptions(n_ctx=64, n_batch=64, n_threads=1, chunks=2)
    parts = ImportanceOptions(n_ctx=64, n_batch=16, n_threads=1, chunks=2)
    for name, options in (("whole", whole), ("parts", parts)):
        measure_importance(model, TEXT, tmp_path / name, options)
    a, b = read_importance(tmp_path / "whole"), read_importance(tmp_path / "parts")
    for name, entry in a.entries.items():
        np.testing.assert_allclose(b.entries[name].sums, entry.sums, rtol=5e-3)
        assert b.entries[name].counts.tolist() == entry.counts.tolist() == [128]


def test_the_output_matrix_is_included_when_asked(model: Path, tmp_path: Path) -> None:
    options = ImportanceOptions(n_ctx=32, n_threads=1, chunks=1, process_output=True)
    measure_importance(model, TEXT, tmp_path / "m", options)
    assert len(read_importance(tmp_path / "m").entries) == 2 * 7 + 1


def test_a_run_that_was_interrupted_goes_on_to_the_same_numbers(
    model: Path, tmp_path: Path, monkeypatch
) -> None:
    measure_importance(model, TEXT, tmp_path / "whole", OPTIONS, dataset="text")
    take, n_taken = InputObserver.take, 0

    def interrupted(self: InputObserver):
        nonlocal n_taken
        n_taken += 1
        if n_taken == 4:
            raise KeyboardInterrupt
        return take(self)

    monkeypatch.setattr(InputObserver, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_importance(model, TEXT, tmp_path / "parts", OPTIONS, dataset="text")
    monkeypatch.undo()
    assert read_importance(tmp_path / "parts").next_chunk == 3
    report = measure_importance(
        model, TEXT, tmp_path / "parts", OPTIONS, dataset="text", resume=True
    )
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    assert report.chunks == report.chunk_count - 3
    # Once more there is nothing left to do.
    assert measure_importance(model, TEXT, tmp_path / "parts", OPTIONS, resume=True).chunks == 0
    with pytest.raises(OptionError, match="another text"):
        measure_importance(model, TEXT + "more", tmp_path / "parts", OPTIONS, resume=True)


def test_an_interrupt_inside_the_callback_is_raised_after_the_evaluation(
    model: Path, tmp_path: Path
) -> None:
    options = ImportanceOptions(n_ctx=32, n_threads=1)

    def interrupt(_name: str) -> bool:
        raise KeyboardInterrupt

    from specrun.convert.quantize import imatrix

    class Interrupting(InputObserver):
        def __init__(self, _wants) -> None:
            super().__init__(interrupt)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(imatrix, "InputObserver", Interrupting)
        with pytest.raises(KeyboardInterrupt):
            measure_importance(model, TEXT, tmp_path / "m", options)
    assert not list(tmp_path.iterdir())


def test_copies_are_kept_every_so_many_chunks(model: Path, tmp_path: Path) -> None:
    options = ImportanceOptions(n_ctx=32, n_threads=1, chunks=5, save_frequency=2)
    measure_importance(model, TEXT, tmp_path / "m", options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m.at_2", "m.at_4"]
    assert read_importance(tmp_path / "m.at_2").chunk_count == 2


def test_starting_later_and_adding_gives_the_whole(model: Path, tmp_path: Path) -> None:
    first = ImportanceOptions(n_ctx=32, n_threads=1, chunks=3)
    rest = ImportanceOptions(n_ctx=32, n_threads=1, first_chunk=3, chunks=4)
    measure_importance(model, TEXT, tmp_path / "first", first)
    measure_importance(model, TEXT, tmp_path / "both", rest, in_files=[tmp_path / "first"])
    measure_importance(
        model, TEXT, tmp_path / "whole", ImportanceOptions(n_ctx=32, n_threads=1, chunks=7)
    )
    a, b = read_importance(tmp_path / "whole"), read_importance(tmp_path / "both")
    assert a.chunk_count == b.chunk_count == 7
    for name, entry in a.entries.items():
        np.testing.assert_array_equal(b.entries[name].sums, entry.sums)


def test_what_cannot_be_measured_is_refused(model: Path, tmp_path: Path) -> None:
    for text, options, message in (
        ("short", OPTIONS, r"the text has \d tokens, 0 chunks of 32, and one is needed"),
        (TEXT, ImportanceOptions(n_ctx=32, first_chunk=10_000), "reading starts with chunk 10000"),
        (TEXT, ImportanceOptions(n_ctx=4096), "chunks of 4096 tokens are more than the 128"),
    ):
        with pytest.raises(OptionError, match=message):
            measure_importance(model, text, tmp_path / "m", options)
    assert not list(tmp_path.iterdir())
    write_random_llama(
        tmp_path / "other.gguf", RandomLlama(vocab_size=320, width=64, layers=2, context=128)
    )
    measure_importance(tmp_path / "other.gguf", TEXT, tmp_path / "m", OPTIONS)
    with pytest.raises(OptionError, match="already exists"):
        measure_importance(model, TEXT, tmp_path / "m", OPTIONS)
    with pytest.raises(PairError, match="of another model"):
        measure_importance(model, TEXT, tmp_path / "n", OPTIONS, in_files=[tmp_path / "m"])


def test_experts_are_summed_over_the_tokens_sent_to_them() -> None:
    draw = np.random.default_rng(0)
    for inputs_per_token in (1, 3):
        inputs = draw.standard_normal((20, inputs_per_token, 6)).astype(np.float32)
        chosen = draw.integers(0, 4, (20, 3)).astype(np.int32)  # expert 4 gets nothing
        sums, counts = expert_sums(inputs, chosen, 5)
        expected = np.zeros((5, 6))
        for token in range(20):
            for place in range(3):
                expected[chosen[token, place]] += inputs[token, place % inputs_per_token] ** 2
        np.testing.assert_allclose(sums, expected, rtol=1e-5)
        assert counts.tolist() == [int((chosen == expert).sum()) for expert in range(5)]
        assert counts[4] == 0
