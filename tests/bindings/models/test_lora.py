"""LoRA adapters: the same logits as weights with the adapter merged into them."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.tiny_models import F32

from specrun.bindings.errors import FileMissingError, MalformedFileError, OptionError, PairError
from specrun.bindings.gguf import read_header
from specrun.bindings.models import LoraFile, remember_written
from specrun.runtime import Runtime, SamplingParams

MATRICES = ("blk.0.attn_q.weight", "blk.0.ffn_down.weight")
RANK, ALPHA, SCALE = 2, 6.0, 0.5
GREEDY = SamplingParams(temperature=0.0)
PROMPT = list(range(97, 117))


def parts(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return A [r, n_in] and B [n_out, r] for each matrix."""
    rng = np.random.default_rng(5)
    shapes = {tensor.name: tensor.shape for tensor in read_header(path).tensors}
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return {
        name: (normal(RANK, shapes[name][0]), normal(shapes[name][1], RANK)) for name in MATRICES
    }


def write_lora(path: Path, model: Path, **changes: object) -> Path:
    writer = gguf.GGUFWriter(path, str(changes.get("architecture", "llama")))
    writer.add_type(str(changes.get("type", "adapter")))
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(changes.get("alpha", ALPHA)))  # type: ignore[arg-type]
    for name, (a, b) in parts(model).items():
        name = str(changes.get("name", name))
        writer.add_tensor(f"{name}.lora_a", a)
        writer.add_tensor(f"{name}.lora_b", b[:, :1].copy() if "rank" in changes else b)
        if "name" in changes:
            break
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def lora(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lora(tmp_path_factory.mktemp("lora") / "adapter.gguf", tiny_model)


@pytest.fixture(scope="module")
def merged(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with W + scale alpha / r B A in the place of W."""
    path = tmp_path_factory.mktemp("merged") / "merged.gguf"
    shutil.copy(tiny_model, path)
    data = np.memmap(path, np.uint8, "r+")
    for tensor in read_header(path).tensors:
        if tensor.name in MATRICES:
            assert tensor.type_name == "F32"
            a, b = parts(tiny_model)[tensor.name]
            span = data[tensor.offset : tensor.offset + tensor.n_bytes].view(np.float32)
            span += (SCALE * ALPHA / RANK * b @ a).astype(np.float32).ravel()
    data.flush()
    remember_written(path)
    return path


def logprobs(model: Path, drafter: str = "none", **options: object) -> list[float]:
    with Runtime(model, drafter, **{**F32, **options}) as runtime:
        return [event.logprob for event in runtime.stream(PROMPT, GREEDY, max_tokens=8)]


@pytest.mark.parametrize("drafter", ["none", "draft(FILE, tree=2x2)"])
def test_an_adapter_is_what_it_would_be_merged(
    tiny_model: Path, tiny_flat_twin: Path, lora: Path, merged: Path, drafter: str
) -> None:
    expression = drafter.replace("FILE", f'"{tiny_flat_twin}"')
    wanted = logprobs(merged)
    found = logprobs(tiny_model, expression, lora=[f"{lora}:{SCALE}"])
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    twice = logprobs(tiny_model, expression, lora=[f"{lora}:{SCALE / 2}"] * 2)
    np.testing.assert_allclose(twice, wanted, atol=1e-4)
    # The controls: without it, and with another scale, the answers differ.
    assert np.abs(np.subtract(logprobs(tiny_model), wanted)).max() > 1e-2
    assert np.abs(np.subtract(logprobs(tiny_model, lora=[str(lora)]), wanted)).max() > 1e-2


def test_scale_zero_changes_nothing(tiny_model: Path, lora: Path) -> None:
    np.testing.assert_allclose(
        logprobs(tiny_model, lora=[f"{lora}:0"]), logprobs(tiny_model), atol=1e-6
    )


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"architecture": "qwen2"}, PairError, "made for qwen2"),
        ({"type": "model"}, MalformedFileError, "no LoRA adapter"),
        ({"rank": 1}, MalformedFileError, "do not fit"),
        ({"alpha": float("nan")}, MalformedFileError, "alpha"),
        ({"name": "blk.9.attn_q.weight"}, MalformedFileError, "is no adapter for"),
        ({"name": "blk.0.ffn_down.bias"}, MalformedFileError, "is no adapter for"),
    ],
)
def test_what_is_no_adapter_for_the_model_is_refused(
    tiny_model: Path, tmp_path: Path, changes: dict[str, object], kind: type[Exception], said: str
) -> None:
    path = write_lora(tmp_path / "adapter.gguf", tiny_model, **changes)
    with pytest.raises(kind, match=said):
        Runtime(tiny_model, "none", lora=[str(path)], **F32)


def test_the_names_of_adapters(tiny_model: Path, lora: Path, tmp_path: Path) -> None:
    assert LoraFile.parse("a.gguf:0.5") == LoraFile(Path("a.gguf"), 0.5)
    assert LoraFile.parse("a.gguf") == LoraFile(Path("a.gguf"))
    odd = tmp_path / "a:2"
    odd.write_bytes(b"GGUF")
    assert LoraFile.parse(str(odd)) == LoraFile(odd)
    for scale in ("much", "inf", "nan"):
        with pytest.raises(OptionError, match="scale"):
            LoraFile.parse(f"{lora}:{scale}")
    with pytest.raises(FileMissingError):
        Runtime(tiny_model, "none", lora=[str(tmp_path / "absent.gguf")], **F32)
    with pytest.raises(OptionError, match="give a list"):
        Runtime(tiny_model, "none", lora=str(lora), **F32)
    with pytest.raises(MalformedFileError):
        Runtime(tiny_model, "none", lora=[str(odd)], **F32)


def test_a_session_is_not_taken_up_without_its_adapter(
    tiny_model: Path, lora: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.session"
    with Runtime(tiny_model, "none", lora=[str(lora)], **F32) as runtime:
        runtime.generate(PROMPT, GREEDY, max_tokens=2)
        runtime.save_session(path)
    with Runtime(tiny_model, "none", lora=[str(lora)], **F32) as runtime:
        assert runtime.load_session(path) == len(PROMPT) + 1
    for other in ([], [f"{lora}:0.5"]):
        with Runtime(tiny_model, "none", lora=other, **F32) as runtime:
            with pytest.raises(PairError, match="adapters"):
                runtime.load_session(path)
