"""Small ggml graphs against numpy: every operation, quantized weights, caches, and sizes that do
not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from specrun.bindings.errors import ClosedError, MalformedFileError, UnsupportedModelError
from specrun.bindings.functions import call
from specrun.bindings.ggml import (
    F16,
    F32,
    I32,
    I64,
    ComputeDevice,
    GraphBuilder,
    Rope,
    Tensor,
    TensorStore,
    load_tensors,
)
from specrun.bindings.ggml import device as device_module
from specrun.bindings.ggml import graph as graph_module

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 8)).astype(np.float32)
Y = RNG.normal(size=(3, 8)).astype(np.float32)
W = RNG.normal(size=(5, 8)).astype(np.float32)


@pytest.fixture
def device() -> Iterator[ComputeDevice]:
    device = ComputeDevice(n_threads=1)
    yield device
    device.close()


def computed(
    device: ComputeDevice,
    build: Callable[..., Tensor],
    *arrays: np.ndarray,
    types: tuple[int, ...] = (),
) -> np.ndarray:
    """The result of a graph of these inputs, run twice so that reuse is tested too."""
    builder = GraphBuilder(device)
    kinds = types or (F32,) * len(arrays)
    inputs = [
        builder.input(str(i), kinds[i], *reversed(array.shape)) for i, array in enumerate(arrays)
    ]
    builder.output("result", build(builder, *inputs))
    graph = builder.build()
    try:
        named = {str(i): array for i, array in enumerate(arrays)}
        graph.run({name: np.zeros_like(array) for name, array in named.items()})
        return graph.run(named)["result"]
    finally:
        graph.close()


def soft_max(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("build", "arrays", "expected"),
    [
        (GraphBuilder.add, (X, Y), X + Y),
        (GraphBuilder.add, (X, Y[:1]), X + Y[:1]),
        (GraphBuilder.sub, (X, Y), X - Y),
        (GraphBuilder.mul, (X, Y[:1]), X * Y[:1]),
        (GraphBuilder.mul_mat, (W, X), X @ W.T),
        (GraphBuilder.silu, (X,), X / (1 + np.exp(-X))),
        (GraphBuilder.swiglu, (X, Y), X / (1 + np.exp(-X)) * Y),
        (GraphBuilder.soft_max, (X,), soft_max(X)),
        (GraphBuilder.log_sum_exp, (X,), np.log(np.exp(X).sum(1, keepdims=True))),
        (
            lambda g, a: g.log_sum_exp(a, g.best(a, 3)),
            (X,),
            np.log(np.exp(X).sum(1, keepdims=True)),
        ),
        (GraphBuilder.argmax, (X,), X.argmax(1)[None]),
        (GraphBuilder.concat, (X, Y), np.concatenate([X, Y], 1)),
        (lambda g, a, b: g.concat(a, b, 1), (X, Y), np.concatenate([X, Y], 0)),
        (lambda g, a: g.scale(a, 0.5), (X,), X / 2),
        (lambda g, a: g.columns(a, 2, 5), (X,), X[:, 2:7]),
        (lambda g, a: g.rows(a, 0, 2), (X,), X[:2]),
        (lambda g, a: g.rows(a, 1, 2), (X,), X[1:]),
        (
            lambda g, a: g.rms_norm(a, None, 1e-6),
            (X,),
            X / np.sqrt((X**2).mean(1, keepdims=True) + 1e-6),
        ),
        (
            lambda g, a, b: g.rms_norm(a, b),
            (X, Y[:1]),
            X / np.sqrt((X**2).mean(1, keepdims=True) + 1e-5) * Y[:1],
        ),
        (
            lambda g, a: g.permute(g.reshape(a, 4, 2, 3), 0, 2, 1, 3),
            (X,),
            X.reshape(3, 2, 4).transpose(1, 0, 2),
        ),
        (lambda g, a, m: g.soft_max(a, m, 0.5), (X, Y), soft_max(0.5 * X + Y)),
    ],
)
def test_operations_are_numpys(device: ComputeDevice, build, arrays, expected) -> None:
    np.testing.assert_allclose(computed(device, build, *arrays), expected, rtol=2e-5, atol=2e-6)


def test_log_sum_exp_survives_large_logits(device: ComputeDevice) -> None:
    large = X + np.float32(500)
    expected = 500 + np.log(np.exp(X.astype(np.float64)).sum(1, keepdims=True))
    np.testing.assert_allclose(
        computed(device, GraphBuilder.log_sum_exp, large), expected, rtol=1e-6
    )


def test_the_best_tokens_and_their_logits_never_leave_with_the_row(device: ComputeDevice) -> None:
    logits = RNG.normal(size=(4, 1000)).astype(np.float32)
    builder = GraphBuilder(device)
    row = builder.input("logits", F32, 1000, 4)
    best = builder.top_k(row, 7)
    builder.output("ids", best)
    builder.output("values", builder.pick(row, best, 7))
    graph = builder.build()
    result = graph.run({"logits": logits})
    graph.close()
    order = np.argsort(-logits, 1)[:, :7]
    np.testing.assert_array_equal(np.sort(result["ids"], 1), np.sort(order, 1))
    np.testing.assert_array_equal(
        result["values"], np.take_along_axis(logits, result["ids"].astype(np.intp), 1)
    )


@pytest.mark.parametrize("k", [1, 2, 7])
def test_the_best_come_in_order(device: ComputeDevice, k: int) -> None:
    logits = RNG.normal(size=(4, 1000)).astype(np.float32)
    builder = GraphBuilder(device)
    ids, values = builder.best(builder.input("logits", F32, 1000, 4), k)
    builder.output("ids", ids)
    builder.output("values", values)
    graph = builder.build()
    result = graph.run({"logits": logits})
    graph.close()
    order = np.argsort(-logits, 1)[:, :k]
    np.testing.assert_array_equal(result["ids"], order)
    np.testing.assert_array_equal(result["values"], np.take_along_axis(logits, order, 1))


def test_rows_are_looked_up(device: ComputeDevice) -> None:
    rows = np.array([[2, 0, 2]], np.int32)
    result = computed(device, GraphBuilder.get_rows, W, rows, types=(F32, I32))
    np.testing.assert_array_equal(result, W[[2, 0, 2]])


@pytest.mark.parametrize("neox", [False, True])
def test_rope_rotates_pairs(device: ComputeDevice, neox: bool) -> None:
    """Pair j of a head of d numbers turns by position * base^(-2j/d)."""
    heads = RNG.normal(size=(3, 2, 8)).astype(np.float32)  # positions, heads, d
    positions = np.array([0, 5, 1000], np.int32)
    angles = positions[:, None] * 10000.0 ** (-np.arange(4) * 2 / 8)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = (
        (heads[..., :4], heads[..., 4:]) if neox else (heads[..., 0::2], heads[..., 1::2])
    )
    a, b = first * cos - second * sin, first * sin + second * cos
    expected = np.concatenate([a, b], -1) if neox else np.stack([a, b], -1).reshape(heads.shape)
    result = computed(
        device,
        lambda g, x, p: g.rope(x, p, Rope(8, neox=neox)),
        heads,
        positions[None],
        types=(F32, I32),
    )
    np.testing.assert_allclose(
        result, expected, atol=2e-4
    )  # the native angle is a product of floats
    np.testing.assert_allclose(result[:2], expected[:2], atol=1e-6)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "F16"])
def test_weights_of_quantized_types_multiply(
    device: ComputeDevice, tmp_path: Path, kind: str
) -> None:
    gguf = pytest.importorskip("gguf")
    from gguf import quants

    weight = RNG.normal(size=(64, 256)).astype(np.float32)
    number = gguf.GGMLQuantizationType[kind]
    if kind in (
        "Q4_K",
        "Q6_K",
    ):  # gguf's Python cannot make these: zero blocks are valid, and so is their product
        stored = np.zeros((64, quants.quant_shape_to_byte_shape((64, 256), number)[1]), np.uint8)
    else:
        stored = quants.quantize(weight, number)
    path = tmp_path / "w.gguf"
    writer = gguf.GGUFWriter(path, "medusa")
    writer.add_tensor("w", stored, raw_dtype=number)
    writer.add_tensor("norm", weight[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    store = load_tensors(path, device)
    assert store.shape("w") == (256, 64, 1, 1)
    assert "norm" in store
    x = RNG.normal(size=(2, 256)).astype(np.float32)
    result = computed(device, lambda g, a: g.mul_mat(Tensor(store["w"]), a), x)
    store.close()
    expected = x @ quants.dequantize(stored, number).reshape(64, 256).T
    # The activations are rounded to 8 bits (16 for F16): at most a half step of their block in
    # every product.
    np.testing.assert_allclose(result, expected, atol=0.02 * np.abs(x).max() * np.sqrt(256))
    with pytest.raises(MalformedFileError, match="no tensor gone"):
        load_tensors(path, device, ["gone"])


def test_a_cache_keeps_what_graphs_write(device: ComputeDevice) -> None:
    store = TensorStore(device, {"cache": ("F32", (8, 6))})
    builder = GraphBuilder(device)
    values, rows = builder.input("values", F32, 8, 3), builder.input("rows", I64, 3)
    builder.keep(builder.set_rows(Tensor(store["cache"]), values, rows))
    # Read after the write in the same graph: nodes run in the order in which they were kept.
    builder.output("sum", builder.add(Tensor(store["cache"]), Tensor(store["cache"])))
    graph = builder.build()
    result = graph.run({"values": X, "rows": np.array([4, 0, 2])})
    expected = np.zeros((6, 8), np.float32)
    expected[[4, 0, 2]] = X
    np.testing.assert_array_equal(store.read("cache", np.float32).reshape(6, 8), expected)
    np.testing.assert_array_equal(result["sum"], 2 * expected)
    graph.close()
    store.close()
    with pytest.raises(ClosedError):
        store["cache"]


def test_results_are_left_in_tables_that_outlive_the_graph(device: ComputeDevice) -> None:
    store = TensorStore(device, {"tokens": ("I32", (4,)), "values": ("F32", (4,))})
    builder = GraphBuilder(device)
    row = builder.input("row", F32, 8, 1)
    token = builder.argmax(row)
    builder.keep(builder.copy(token, builder.columns(Tensor(store["tokens"]), 2, 1)))
    builder.keep(
        builder.copy(builder.pick(row, token, 1), builder.columns(Tensor(store["values"]), 2, 1))
    )
    builder.output("tokens", builder.columns(Tensor(store["tokens"]), 1, 2))
    graph = builder.build()
    for x in X:
        assert graph.run({"row": x})["tokens"].tolist() == [[0, int(x.argmax())]]
        assert store.read("tokens", np.int32).tolist() == [0, 0, int(x.argmax()), 0]
        assert store.read("values", np.float32).tolist() == [0, 0, x.max(), 0]
    graph.close()
    store.close()


@pytest.mark.parametrize("mapped", [True, False])
def test_arrays_are_filled_in_place(
    device: ComputeDevice, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tensors' own memory, or in arrays that are copied to a device; reads are copies either
    way."""

    def elsewhere(name: str) -> Callable[..., object]:
        return (lambda buffer: False) if name == "ggml_backend_buffer_is_host" else call(name)

    if not mapped:
        monkeypatch.setattr(graph_module, "call", elsewhere)
    builder = GraphBuilder(device)
    builder.output("sum", builder.add(builder.input("a", F32, 8, 3), builder.input("b", F32, 8, 3)))
    graph = builder.build()
    found, seconds = [], [device.native_seconds]
    for other in (X, Y):
        graph.inputs["a"][...] = X
        graph.inputs["b"][:2], graph.inputs["b"][2:] = other[:2], 0.0
        graph.compute()
        found.append(graph.read("sum"))
        seconds.append(device.native_seconds)
    assert seconds[0] < seconds[1] < seconds[2]
    for other, result in zip((X, Y), found, strict=True):
        np.testing.assert_array_equal(
            result, X + np.concatenate([other[:2], np.zeros((1, 8), np.float32)])
        )
    graph.close()
    assert not graph.inputs
    for act in (graph.compute, lambda: graph.read("sum")):
        with pytest.raises(ClosedError):
            act()


def test_writes_into_weights_are_the_first_backends(
    device: ComputeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that the CPU behind a GPU could compute do not reach the GPU's memory."""
    store = TensorStore(device, {"t": ("F32", (8, 3))})
    gpu, cpu = 1, device.backends[0]
    monkeypatch.setattr(ComputeDevice, "backends", [gpu, cpu])
    monkeypatch.setattr(
        device_module,
        "call",
        lambda name: (
            (lambda backend, operation: backend == cpu)
            if name == "ggml_backend_supports_op"
            else call(name)
        ),
    )
    builder = GraphBuilder(device)
    doubled = builder.scale(builder.input("a", F32, 8, 3), 2.0)
    with pytest.raises(UnsupportedModelError, match="ggml_cpy"):
        builder.copy(doubled, Tensor(store["t"]))
    with pytest.raises(UnsupportedModelError, match="ggml_set_rows"):
        builder.set_rows(Tensor(store["t"]), doubled, builder.input("rows", I64, 3))
    builder.close()
    monkeypatch.undo()
    store.close()


@pytest.mark.parametrize(
    "build",
    [
        lambda g, a, b: g.mul_mat(a, g.columns(b, 0, 4)),
        lambda g, a, b: g.add(a, g.columns(b, 0, 3)),
        lambda g, a, b: g.concat(a, g.columns(b, 0, 3), 1),
        lambda g, a, b: g.reshape(a, 5, 5),
        lambda g, a, b: g.columns(a, 6, 5),
        lambda g, a, b: g.rows(a, 1, 3),
        lambda g, a, b: g.copy(a, g.rows(b, 0, 2)),
        lambda g, a, b: g.top_k(a, 9),
        lambda g, a, b: g.get_rows(a, b),
        lambda g, a, b: g.swiglu(a, g.columns(b, 0, 3)),
        lambda g, a, b: g.permute(a, 0, 0, 1, 2),
        lambda g, a, b: g.soft_max(a, g.columns(b, 0, 3)),
        lambda g, a, b: g.rope(a, b, Rope(8)),
    ],
)
def test_sizes_that_do_not_fit_raise_instead_of_ending_python(device: ComputeDevice, build) -> None:
    builder = GraphBuilder(device)
    with pytest.raises(ValueError, match="shapes"):
        build(builder, builder.input("a", F32, 8, 3), builder.input("b", F32, 8, 3))
    builder.close()


def test_faults_of_use_raise(device: ComputeDevice) -> None:
    builder = GraphBuilder(device, max_operations=2)
    a = builder.input("a", F32, 8, 3)
    builder.output("result", builder.silu(builder.silu(a)))
    with pytest.raises(ValueError, match="more operations"):
        builder.silu(a)
    graph = builder.build()
    with pytest.raises(ClosedError):
        builder.build()
    with pytest.raises(ValueError, match="takes"):
        graph.run({"a": X[:2]})
    graph.close()
    graph.close()
    with pytest.raises(ClosedError):
        graph.run({"a": X})
    with pytest.raises(ValueError, match="do not fit"):
        store = TensorStore(device, {"t": ("F16", (4,))})
        store.write("t", X)


def test_halves_are_cast(device: ComputeDevice) -> None:
    result = computed(device, lambda g, a: g.cast(g.cast(a, F16), F32), X)
    np.testing.assert_array_equal(result, X.astype(np.float16).astype(np.float32))
