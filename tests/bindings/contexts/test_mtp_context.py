"""Contexts over NextN blocks: their results, and their refusals before llama.cpp would
assert."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from support.tiny_models import F32
from support.tiny_nextn import TinyNextN, variant, write_tiny_qwen35

from specrun.bindings.contexts import (
    Batch,
    Context,
    ContextOptions,
    MtpContext,
    StateBatch,
    check_nextn,
)
from specrun.bindings.errors import (
    ModelLoadError,
    OptionError,
    StaleViewError,
    UnsupportedModelError,
)
from specrun.bindings.gguf import read_header
from specrun.bindings.models import Model, read_nextn

TEXT = [5, 200, 7, 7, 31, 90, 2, 5]
PLAIN = TinyNextN()
TWO = variant(PLAIN, blocks=2, seed=1)
WINDOWED = variant(PLAIN, blocks=2, layers=3, window=4, seed=2)
SPECS = {"one": PLAIN, "two": TWO, "windowed": WINDOWED}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("nextn")
    return {
        **{name: spec.write(folder / f"{name}.gguf") for name, spec in SPECS.items()},
        "none": variant(PLAIN, blocks=0).write(folder / "none.gguf"),
        "stripped": PLAIN.write(folder / "stripped.gguf", without=["blk.2."]),
        "apart": PLAIN.write_blocks_only(folder / "apart.gguf"),
        "qwen": write_tiny_qwen35(folder / "qwen.gguf", blocks=2),
    }


def states_of(model: Model, tokens: list[int], *, rows: int = 0) -> np.ndarray:
    """The inputs of NextN blocks for a text, from one evaluation whose last `rows` tokens have
    logits."""
    with Context(
        model, ContextOptions(**F32, n_outputs=max(rows, 1), nextn_states=True)
    ) as context:
        batch = Batch(len(tokens), 1)
        batch.fill_chain(tokens, 0, [0], rows)
        found = context.decode(batch)
        return np.array([found.nextn_state(token) for token in range(len(tokens))])


def evaluate(
    context: MtpContext, tokens: list[int], states: np.ndarray, start: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    batch = StateBatch(len(tokens), states.shape[1])
    n = len(tokens)
    batch.fill(tokens, range(start, start + n), [1] * n, [0] * n, [1] * n)
    batch.states[:] = states
    rows = context.decode(batch)
    return tuple(
        np.array([get(row) for row in range(n)]) for get in (rows.logits, rows.nextn_state)
    )  # type: ignore[return-value]


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, len(TEXT)])
@pytest.mark.parametrize("name", ["one", "windowed"])
def test_the_trunks_states_are_the_references_whether_or_not_rows_are_asked_for(
    files: dict[str, Path], name: str, rows: int
) -> None:
    with Model(files[name]) as model:
        np.testing.assert_allclose(
            states_of(model, TEXT, rows=rows), SPECS[name].trunk(TEXT), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    ("name", "block"), [("one", 0), ("two", 0), ("two", 1), ("windowed", 0), ("windowed", 1)]
)
def test_logits_and_states_of_a_block_equal_the_reference(
    files: dict[str, Path], name: str, block: int
) -> None:
    spec = SPECS[name]
    states = np.random.default_rng(0).standard_normal((len(TEXT), spec.width)).astype(np.float32)
    wanted = spec.block(block, TEXT, states)
    with (
        Model(files[name], load_nextn=True) as model,
        MtpContext(model, ContextOptions(**F32, n_outputs=8)) as context,
    ):
        context.select(block)
        at_once = evaluate(context, TEXT, states)
        context.memory.clear()
        # Piece by piece, as rounds do it.
        parts = [
            evaluate(context, TEXT[a:b], states[a:b], start=a)
            for a, b in ((0, 3), (3, 4), (4, 5), (5, len(TEXT)))
        ]
    for found in (at_once, tuple(np.concatenate(column) for column in zip(*parts, strict=True))):
        for got, right in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)
    # The comparison would notice a state too early or too late, a token left out, another block.
    for wrong in (np.roll(states, 1, axis=0), np.zeros_like(states)):
        assert np.abs(spec.block(block, TEXT, wrong)[0] - wanted[0]).max() > 0.1
    other = [*TEXT[:-2], 0, TEXT[-1]]
    assert np.abs(spec.block(block, other, states)[0][-1] - wanted[0][-1]).max() > 1e-3


def test_blocks_in_a_file_of_their_own_compute_the_same(files: dict[str, Path]) -> None:
    states = PLAIN.trunk(TEXT).astype(np.float32)
    with (
        Model(files["apart"], load_nextn=True) as model,
        MtpContext(model, ContextOptions(**F32, n_outputs=8)) as whole,
    ):
        np.testing.assert_allclose(
            evaluate(whole, TEXT, states)[0], PLAIN.block(0, TEXT, states)[0], rtol=1e-4, atol=1e-4
        )


def test_loading_the_blocks_does_not_change_the_trunk(files: dict[str, Path]) -> None:
    found = []
    for load in (False, True):
        with Model(files["one"], load_nextn=load) as model:
            assert model.has_loaded_nextn is load
            assert (model.n_layer, model.nextn.count) == (2, 1)
            found.append(states_of(model, TEXT))
    np.testing.assert_array_equal(*found)


# -- declarations of files -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "blocks", "apart"),
    [
        ("one", 1, False),
        ("two", 2, False),
        ("none", 0, False),
        ("stripped", 0, False),
        ("apart", 1, True),
    ],
)
def test_headers_tell_which_files_have_blocks(
    files: dict[str, Path], name: str, blocks: int, apart: bool
) -> None:
    found = read_nextn(files[name], read_header(files[name]))
    assert (found.count, found.alone) == (blocks, apart)
    spec = TWO if name == "two" else PLAIN
    own = sum(
        array.size
        for tensor, array in spec.tensors().items()
        if tensor.startswith(("blk.2.", "blk.3."))
    )
    assert found.n_parameters == (own if blocks else 0)


def test_a_model_split_into_files_has_its_blocks_in_the_last(
    files: dict[str, Path], tmp_path: Path
) -> None:
    first = split(PLAIN, files["one"], tmp_path, most=12)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > 2
    assert not any("nextn" in tensor.name for tensor in read_header(first).tensors)
    states = PLAIN.trunk(TEXT).astype(np.float32)
    with (
        Model(first, load_nextn=True) as model,
        MtpContext(model, ContextOptions(**F32, n_outputs=8)) as context,
    ):
        np.testing.assert_allclose(
            evaluate(context, TEXT, states)[0],
            PLAIN.block(0, TEXT, states)[0],
            rtol=1e-4,
            atol=1e-4,
        )
    parts[-1].unlink()
    assert read_nextn(first, read_header(first)).count == 0
    with pytest.raises(ModelLoadError):
        Model(first, load_nextn=True)


def split(spec: TinyNextN, whole: Path, folder: Path, *, most: int) -> Path:
    """Write a model again as files of up to `most` tensors; return the first."""
    writer = gguf.GGUFWriter(folder / "m.gguf", spec.architecture, split_max_tensors=most)
    for name, field in gguf.GGUFReader(whole).fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], element)
    for name, array in spec.tensors().items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(folder.iterdir())


@pytest.mark.parametrize("name", ["none", "stripped"])
def test_files_without_blocks_are_refused(files: dict[str, Path], name: str) -> None:
    with (
        Model(files[name], load_nextn=True) as model,
        pytest.raises(UnsupportedModelError) as caught,
    ):
        MtpContext(model, ContextOptions(**F32))
    assert "no NextN blocks: many GGUFs are made without them" in str(caught.value)
    assert "glm4moe" in str(caught.value)
    assert caught.value.exit_code == 3


def test_an_architecture_without_a_graph_is_refused(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = "specrun.bindings.contexts.context.NEXTN_ARCHITECTURES"
    monkeypatch.setattr(known, ("glm4moe", "qwen35"))
    with Model(files["one"], load_nextn=True) as model:
        with pytest.raises(
            UnsupportedModelError,
            match=r"is a hy_v3 model, and llama\.cpp .* of these only: glm4moe, qwen35",
        ):
            check_nextn(model)


def test_more_blocks_than_llama_cpp_evaluates_are_refused(files: dict[str, Path]) -> None:
    with Model(files["qwen"], load_nextn=True) as model:
        with pytest.raises(
            UnsupportedModelError,
            match=r"2 NextN blocks, and llama\.cpp evaluates one block of qwen35",
        ):
            MtpContext(model, ContextOptions(**F32))


def test_blocks_that_were_not_loaded_are_refused(files: dict[str, Path]) -> None:
    with (
        Model(files["one"]) as model,
        pytest.raises(UnsupportedModelError, match="loaded without its NextN blocks"),
    ):
        MtpContext(model, ContextOptions(**F32))


@pytest.mark.parametrize("load", [False, True])
def test_blocks_without_their_model_cannot_be_a_target(files: dict[str, Path], load: bool) -> None:
    with Model(files["apart"], load_nextn=load) as model:
        with pytest.raises(
            UnsupportedModelError, match=r"without the model they belong to: it can only draft"
        ):
            Context(model, ContextOptions(**F32))


# -- batches that would end the process ------------------------------------------------------------


def test_batches_that_llama_cpp_would_misread_are_refused(files: dict[str, Path]) -> None:
    with (
        Model(files["one"], load_nextn=True) as model,
        MtpContext(model, ContextOptions(**F32, n_outputs=4)) as context,
    ):
        plain = Batch(4, 1)
        plain.fill_one(1, 0)
        narrow = StateBatch(4, model.n_embd_out // 2)
        narrow.fill_one(1, 0)
        for batch in (plain, narrow):
            with pytest.raises(OptionError, match="read hidden states of 32 numbers"):
                context.decode(batch)
        part = StateBatch(4, model.n_embd_out)
        part.fill([1, 2], [0, 1], [1, 1], [0, 0], [0, 1])
        with pytest.raises(OptionError, match="1 of 2 tokens need rows: all must, or none"):
            context.decode(part)
        with pytest.raises(OptionError, match="NextN block 1 of a model that has 1"):
            context.select(1)


def test_states_die_with_the_next_evaluation_and_are_there_only_if_asked_for(
    files: dict[str, Path],
) -> None:
    batch = Batch(4, 1)
    batch.fill_chain([1, 2], 0, [0], 0)
    with Model(files["one"]) as model:
        with Context(model, ContextOptions(**F32, nextn_states=True)) as context:
            rows = context.decode(batch)
            with pytest.raises(OptionError, match="token 2, of an evaluation that gave 2 states"):
                rows.nextn_state(2)
            context.memory.clear()
            context.decode(batch)
            with pytest.raises(StaleViewError):
                rows.nextn_state(0)
        with (
            Context(model, ContextOptions(**F32)) as context,
            pytest.raises(OptionError, match="without NextN states"),
        ):
            context.decode(batch).nextn_state(0)
