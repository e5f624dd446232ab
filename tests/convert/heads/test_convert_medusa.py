"""Medusa checkpoints, as they are published, become files whose heads compute the same as a torch
reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrun.bindings.errors import MalformedFileError, ModelError, UnsupportedModelError
from specrun.bindings.ggml import F32, GraphBuilder
from specrun.bindings.gguf import read_header
from specrun.bindings.models import Model
from specrun.convert import convert_checkpoint, convert_head
from specrun.runtime.drafters.medusa import MedusaHead

torch = pytest.importorskip("torch")
from support.torch_heads import MEDUSA_FILE, TorchMedusa, medusa_config, named, publish  # noqa: E402

HIDDEN, VOCAB = 32, 320
PICKLE, SAFE = f"{MEDUSA_FILE}.pt", f"{MEDUSA_FILE}.safetensors"
FEATURES = np.random.default_rng(0).normal(size=(4, HIDDEN)).astype(np.float32)


@pytest.fixture
def target(tiny_model: Path):
    with Model(tiny_model) as model:
        yield model


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def output_matrix(path: Path) -> np.ndarray:
    from gguf import GGUFReader, quants

    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    return quants.dequantize(tensors["output.weight"].data, tensors["output.weight"].tensor_type)


def logits_of(path: Path, target: Model, heads: int) -> np.ndarray:
    """Logits [head, n, vocab] after FEATURES, from the operations of the runtime's own graph."""
    head = MedusaHead(path, target, n_threads=1, ranks=[VOCAB] * heads)
    builder = GraphBuilder(head.device, 256)
    try:
        states = builder.input("features", F32, FEATURES.shape[1], len(FEATURES))
        for k in range(heads):
            builder.output(f"logits{k}", head.logits(builder, k, states))
        graph = builder.build()
        found = graph.run({"features": FEATURES})
        graph.close()
    finally:
        builder.close()
        head.close()
    return np.stack([found[f"logits{k}"] for k in range(heads)])


def off_by(path: Path, target: Model, reference: TorchMedusa) -> float:
    """The largest difference of logits over the largest logit."""
    wanted = reference.logits(
        torch.from_numpy(FEATURES), torch.tensor(output_matrix(target.path))
    ).numpy()
    found = logits_of(path, target, len(reference))
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize(
    ("blocks", "own_output", "file"), [(1, True, PICKLE), (3, True, SAFE), (3, False, SAFE)]
)
def test_medusa_1_computes_what_torch_does(
    target: Model, tmp_path: Path, blocks: int, own_output: bool, file: str
) -> None:
    """Four heads and so many blocks, with a config.json of two heads of one block, as old
    uploads have."""
    reference = TorchMedusa(HIDDEN, VOCAB, 4, blocks, own_output=own_output, shared=False)
    folder = publish(tmp_path / "medusa-tiny", medusa_config(), named(reference), file)
    report = convert_head(
        folder, tmp_path / "h.gguf", target=target.path, outtype="f32", allow_pickle=True
    )
    assert (report.architecture, report.type_name) == ("medusa", "F32")
    assert off_by(report.output, target, reference) < 1e-4


def test_blocks_that_the_reference_shares(target: Model, tmp_path: Path) -> None:
    """`[ResBlock] * n` is one block: saved under each name, or once if equal tensors are left
    out."""
    reference = TorchMedusa(HIDDEN, VOCAB, 2, 3)
    tensors = named(reference)
    once = {
        name: tensor
        for name, tensor in tensors.items()
        if ".1.linear" not in name and ".2.linear" not in name
    }
    assert len(once) == len(tensors) - 8
    for place, held in (("all", tensors), ("once", once)):
        folder = publish(tmp_path / place, medusa_config(medusa_num_layers=3), held, SAFE)
        report = convert_head(folder, tmp_path / f"{place}.gguf", target=target.path, outtype="f32")
        assert off_by(report.output, target, reference) < 1e-4
    assert tensors_of(tmp_path / "all.gguf") == tensors_of(tmp_path / "once.gguf")


def test_medusa_2_lies_beside_its_model(target: Model, tmp_path: Path, write_checkpoint) -> None:
    """Only the heads are taken; the model in the same file is converted by itself."""
    from support.tiny_checkpoints import llama_config, llama_tensors, safetensors_bytes

    reference = TorchMedusa(HIDDEN, VOCAB, 2)
    tensors = llama_tensors(llama_config()) | {
        name: tensor.numpy() for name, tensor in named(reference, prefix="medusa_head.").items()
    }
    folder = write_checkpoint(**{"model.safetensors": safetensors_bytes(tensors)})
    report = convert_head(folder, tmp_path / "h.gguf", target=target.path, outtype="f32")
    assert report.n_parameters == sum(tensor.numel() for tensor in named(reference).values())
    assert off_by(report.output, target, reference) < 1e-4
    backbone = convert_checkpoint(folder, tmp_path / "m.gguf")
    assert backbone.n_tensors == len(llama_tensors(llama_config()))


@pytest.mark.parametrize(
    ("outtype", "kind", "allowed"),
    [("bf16", "BF16", 1e-2), ("q5_1", "Q5_1", 0.08)],
)
def test_smaller_types_stay_within_their_error(
    target: Model, tmp_path: Path, outtype: str, kind: str, allowed: float
) -> None:
    reference = TorchMedusa(HIDDEN, VOCAB)
    folder = publish(tmp_path / "heads", medusa_config(), named(reference), SAFE)
    report = convert_head(folder, tmp_path / "h.gguf", target=target.path, outtype=outtype)
    assert report.tensor_types == {kind: 6, "F32": 3}
    assert read_header(report.output).file_type_name == kind
    assert 0.0 < off_by(report.output, target, reference) < allowed


def test_rows_too_narrow_for_a_type_get_a_wider_one(target: Model, tmp_path: Path) -> None:
    folder = publish(tmp_path / "heads", medusa_config(), named(TorchMedusa(HIDDEN, VOCAB)), SAFE)
    report = convert_head(folder, tmp_path / "h.gguf", target=target.path, outtype="q4_k_m")
    assert report.tensor_types == {"Q5_0": 6, "F32": 3}


def test_sixteen_bits_are_kept_by_auto(target: Model, tmp_path: Path) -> None:
    reference = TorchMedusa(HIDDEN, VOCAB, 2)
    tensors = named(reference, torch.bfloat16)
    folder = publish(tmp_path / "heads", medusa_config(), tensors, PICKLE)
    report = convert_head(
        folder, tmp_path / "h.gguf", target=target.path, outtype="auto", allow_pickle=True
    )
    assert report.type_name == "BF16"
    reference.load_state_dict(tensors)
    assert off_by(report.output, target, reference.float()) < 1e-2


def test_the_default_is_q8_0_and_metadata_are_complete(target: Model, tmp_path: Path) -> None:
    folder = publish(
        tmp_path / "tiny-chat-v1", medusa_config(), named(TorchMedusa(HIDDEN, VOCAB)), SAFE
    )
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    report = convert_head(folder, tmp_path, target=target.path)
    assert report.output.name == "medusa-tiny-chat-v1-Q8_0.gguf"
    metadata = read_header(report.output).metadata
    assert report.source_sha256 == metadata["specrun.source.sha256"] != "0" * 64
    wanted = {
        "general.architecture": "medusa",
        "general.type": "model",
        "general.name": "medusa-tiny-chat-v1",
        "general.basename": "medusa-tiny",
        "general.finetune": "chat",
        "general.version": "v1",
        "general.size_label": "34K",
        "general.license": "apache-2.0",
        "general.file_type": 7,
        "general.quantization_version": 2,
        "general.base_model.count": 1,
        "general.base_model.0.name": "tiny-chat",
        "general.base_model.0.organization": "someone",
        "medusa.embedding_length": HIDDEN,
        "medusa.vocab_size": VOCAB,
        "medusa.head_count": 3,
        "medusa.block_count": 1,
        "specrun.target.architecture": "llama",
        "specrun.target.embedding_length": HIDDEN,
        "specrun.target.block_count": 2,
        "specrun.target.vocab_size": VOCAB,
        "specrun.target.vocabulary_sha256": target.vocabulary.fingerprint.hex(),
    }
    assert {key: metadata.get(key) for key in wanted} == wanted


def test_another_checkpoint_has_another_digest(target: Model, tmp_path: Path) -> None:
    digests = set()
    for number in range(2):
        folder = publish(
            tmp_path / str(number), medusa_config(), named(TorchMedusa(HIDDEN, VOCAB, 1)), SAFE
        )
        digests |= {
            convert_head(
                folder, tmp_path / f"{number}{kind}.gguf", target=target.path, outtype=kind
            ).source_sha256
            for kind in ("f32", "q8_0")
        }
    assert len(digests) == 2


MALFORMED = [
    ({"1.0.linear.bias": None}, r"no tensor 1\.0\.linear\.bias"),
    ({"0.0.linear.weight": None}, r"no tensor 0\.0\.linear\.weight"),
    (
        {"1.0.linear.weight": None, "1.0.linear.bias": None, "1.1.weight": None},
        r"1\.0\.linear\.weight",
    ),
    ({"2.1.weight": (VOCAB, HIDDEN + 1)}, r"2\.1\.weight of shape \(320, 33\)"),
    ({"0.0.linear.weight": (HIDDEN,)}, r"shape \(32,\), no matrix"),
    ({"2.1.weight": None}, r"no tensor 2\.1\.weight, and other heads have theirs"),
]
UNSUPPORTED = [
    ({"0.2.weight": (VOCAB, HIDDEN)}, "two output matrices of one head"),
    ({"extra.weight": (2, 2)}, r"extra\.weight"),
]


@pytest.mark.parametrize(
    ("change", "problem", "error"),
    [
        *((*case, MalformedFileError) for case in MALFORMED),
        *((*case, UnsupportedModelError) for case in UNSUPPORTED),
    ],
)
def test_what_is_missing_or_unknown_is_named(
    target: Model, tmp_path: Path, change: dict[str, Any], error: type[Exception], problem: str
) -> None:
    tensors = named(TorchMedusa(HIDDEN, VOCAB))
    for name, shape in change.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.zeros(shape)
    folder = publish(tmp_path / "heads", medusa_config(), tensors, SAFE)
    with pytest.raises(error, match=problem):
        convert_head(folder, tmp_path / "h.gguf", target=target.path)
    assert {path.name for path in tmp_path.iterdir()} == {"heads"}


@pytest.mark.parametrize(("heads", "blocks"), [(33, 1), (1, 17), (2, 0)])
def test_more_than_the_runtime_runs_is_refused_with_the_number(
    target: Model, tmp_path: Path, heads: int, blocks: int
) -> None:
    folder = publish(
        tmp_path / "heads", medusa_config(), named(TorchMedusa(HIDDEN, 8, heads, blocks)), SAFE
    )
    with pytest.raises(
        ModelError, match=rf"{heads} heads of {blocks} residual|no tensor 0\.0\.linear"
    ):
        convert_head(folder, tmp_path / "h.gguf", target=target.path)


def tensors_of(path: Path) -> dict[str, bytes]:
    data = path.read_bytes()
    return {
        info.name: data[info.offset : info.offset + info.n_bytes]
        for info in read_header(path).tensors
    }


def in_vllm(name: str) -> str:
    head, block, *rest = name.split(".")
    if rest == ["weight"] or not rest[1:]:
        return f"lm_heads.{head}.weight"
    return f"blocks.{head}.layers.{block}.{rest[-1]}"


def in_model_opt(name: str) -> str:
    head, block, *rest = name.split(".")
    if not rest[1:]:
        return f"medusa_heads.{head}.lm_head.weight"
    return f"medusa_heads.{head}.medusa_layers.{block}.{'.'.join(rest)}"


@pytest.mark.parametrize("own_output", [True, False])
@pytest.mark.parametrize("name_of", [in_vllm, in_model_opt], ids=["vllm", "modelopt"])
def test_the_names_of_others_are_the_same_head(
    target: Model, tmp_path: Path, own_output: bool, name_of: Any
) -> None:
    reference = TorchMedusa(HIDDEN, VOCAB, 3, 2, own_output=own_output, shared=False)
    tensors = named(reference)
    files = []
    for place, held in (
        ("usual", tensors),
        ("others", {name_of(name): tensor for name, tensor in tensors.items()}),
        ("compiled", {f"_orig_mod.{name_of(name)}": tensor for name, tensor in tensors.items()}),
    ):
        # vLLM's config has other keys; what kind it is must follow from the names.
        folder = publish(
            tmp_path / place, {"architectures": ["MedusaModel"]}, held, "model.safetensors"
        )
        output = tmp_path / f"{place}.gguf"
        report = convert_head(folder, output, target=target.path, outtype="f32")
        assert report.architecture == "medusa"
        files.append(logits_of(output, target, 3))
    np.testing.assert_array_equal(files[0], files[1])
    np.testing.assert_array_equal(files[0], files[2])
