"""EAGLE-1, EAGLE-2 and HASS checkpoints become files whose head computes the same as a torch
reference."""

from __future__ import annotations

import functools
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrun.bindings.errors import MalformedFileError, PairError, UnsupportedModelError
from specrun.bindings.gguf import read_header
from specrun.bindings.models import Model
from specrun.convert import convert_head
from specrun.runtime.drafters.eagle import EagleHead
from specrun.runtime.drafters.eagle.versions import draft_vocabulary
from specrun.runtime.heads import HeadFile

torch = pytest.importorskip("torch")
from support.torch_heads import TorchEagle, named, publish  # noqa: E402

HIDDEN, VOCAB = 32, 320
SAFE, PICKLE = "model.safetensors", "pytorch_model.bin"
TOKENS = [3, 1, 4, 1, 5, 9]
FEATURES = np.random.default_rng(0).normal(size=(6, HIDDEN)).astype(np.float32)
# A tree below two real pairs: 2 and 3 are siblings, 4 and 5 are children of 2.
PARENTS = [-1, 0, 1, 1, 2, 2]
POSITIONS = [0, 11, 12, 12, 13, 13]  # far enough apart for the rotation to matter


@functools.cache
def ancestors() -> np.ndarray:
    sees = np.eye(6, dtype=bool)
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            sees[node] |= sees[parent]
    return sees


@pytest.fixture
def target(tiny_model: Path):
    with Model(tiny_model) as model:
        yield model


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def matrices(path: Path) -> tuple[np.ndarray, np.ndarray]:
    from gguf import GGUFReader, quants

    tensors = {
        tensor.name: quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in GGUFReader(path).tensors
    }
    return tensors["token_embd.weight"], tensors["output.weight"]


def off_by(path: Path, target: Model, reference: TorchEagle) -> tuple[float, float]:
    """The largest differences of predicted states and of log-probabilities, over the largest state
    and logit."""
    embedding, output = matrices(target.path)
    sees = ancestors()
    wanted = reference.states(
        TOKENS, torch.from_numpy(FEATURES), POSITIONS, torch.from_numpy(sees), embedding
    ).numpy()
    logits = wanted @ output.T.astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    with (
        closing(EagleHead(path, target, ranks=VOCAB, n_threads=1)) as head,
        closing(head.cells(16)) as pairs,
    ):
        rows = pairs.evaluate(TOKENS, FEATURES, (POSITIONS, range(6), 0, sees))
    found = np.take_along_axis(log_probs, rows.tokens.astype(np.intp), 1)
    states = np.abs(rows.states - wanted).max() / np.abs(wanted).max()
    return float(states), float(np.abs(rows.log_probs - found).max() / np.abs(logits).max())


@pytest.mark.parametrize(
    "made",
    [
        {},
        {"bias": False},
        {"embedding": True},
        {"qkv_bias": True},
        {"kv_heads": 4},
        {"kv_heads": 1, "heads": 2},
    ],
    ids=str,
)
def test_the_head_computes_what_torch_does(
    target: Model, tmp_path: Path, made: dict[str, Any]
) -> None:
    reference = TorchEagle(HIDDEN, VOCAB, **made)
    folder = publish(
        tmp_path / "EAGLE-tiny", reference.config, named(reference), SAFE if made else PICKLE
    )
    report = convert_head(
        folder, tmp_path / "e.gguf", target=target.path, outtype="f32", allow_pickle=True
    )
    assert report.architecture == "eagle"
    assert max(off_by(report.output, target, reference)) < 1e-4


def test_draft_tokens_stay_as_they_are_listed(target: Model, tmp_path: Path) -> None:
    """And the head that drafts them is the one that was converted."""
    reference, ids = TorchEagle(HIDDEN, VOCAB), torch.randperm(VOCAB)[:20]
    folder = publish(
        tmp_path / "t", reference.config, {**named(reference), "draft_tokens": ids}, SAFE
    )
    report = convert_head(folder, tmp_path / "e.gguf", target=target.path, outtype="f32")
    file = HeadFile(report.output, "eagle")
    assert file.type_name("draft_tokens") == "I64"
    for most in (None, 17):
        found = draft_vocabulary(file, target, most)
        assert found is not None
        assert found.tolist() == sorted(ids[:most].tolist())


@pytest.mark.parametrize(
    ("ids", "error", "said"),
    [
        (torch.full((20,), 5), MalformedFileError, "token 5 twice in its draft_tokens"),
        (torch.arange(VOCAB - 5, VOCAB + 20), PairError, f"draft_tokens names token {VOCAB}"),
        (torch.zeros(20), MalformedFileError, "draft_tokens of F32"),
    ],
)
def test_lists_of_draft_tokens_that_are_none(
    target: Model, tmp_path: Path, ids: Any, error: type, said: str
) -> None:
    reference = TorchEagle(HIDDEN, VOCAB)
    folder = publish(
        tmp_path / "t", reference.config, {**named(reference), "draft_tokens": ids}, SAFE
    )
    with pytest.raises(error, match=said):
        convert_head(folder, tmp_path / "e.gguf", target=target.path)


def test_the_comparison_can_fail(target: Model, tmp_path: Path) -> None:
    """Controls: another rope base, another bias and another order of fc's input are off by far more
    than rounding."""
    reference = TorchEagle(HIDDEN, VOCAB)
    tensors = named(reference)
    first, second = tensors["fc.weight"].chunk(2, 1)
    wrong: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "base": ({"rope_theta": 10000.0}, {}),
        "bias": ({}, {"fc.bias": torch.zeros(HIDDEN)}),
        "order": ({}, {"fc.weight": torch.cat([second, first], 1)}),
        "heads": ({"num_attention_heads": 2, "num_key_value_heads": 1}, {}),
    }
    for name, (config, changed) in wrong.items():
        folder = publish(tmp_path / name, reference.config | config, tensors | changed, SAFE)
        report = convert_head(folder, tmp_path / f"{name}.gguf", target=target.path, outtype="f32")
        assert off_by(report.output, target, reference)[0] > 1e-3, name


def test_a_config_that_says_little_means_the_references_defaults(
    target: Model, tmp_path: Path
) -> None:
    reference = TorchEagle(HIDDEN, VOCAB, kv_heads=4)
    reference.base, reference.epsilon = 10000.0, 1e-6
    config = {name: reference.config[name] for name in ("num_attention_heads", "intermediate_size")}
    folder = publish(tmp_path / "head", config, named(reference), SAFE)
    report = convert_head(folder, tmp_path / "e.gguf", target=target.path, outtype="f32")
    assert max(off_by(report.output, target, reference)) < 1e-4


@pytest.mark.parametrize(("outtype", "allowed"), [("f16", 5e-3), ("q8_0", 3e-2)])
def test_smaller_types_stay_within_their_error(
    target: Model, tmp_path: Path, outtype: str, allowed: float
) -> None:
    reference = TorchEagle(HIDDEN, VOCAB, embedding=True, qkv_bias=True)
    folder = publish(tmp_path / "head", reference.config, named(reference), SAFE)
    report = convert_head(folder, tmp_path / "e.gguf", target=target.path, outtype=outtype)
    assert report.tensor_types == {outtype.upper(): 9, "F32": 5}
    assert 0.0 < off_by(report.output, target, reference)[0] < allowed


def test_metadata(target: Model, tmp_path: Path) -> None:
    reference = TorchEagle(HIDDEN, VOCAB)
    folder = publish(tmp_path / "EAGLE-Tiny-7B", reference.config, named(reference), SAFE)
    report = convert_head(folder, tmp_path, target=target.path)
    assert report.output.name == "EAGLE-Tiny-7B-Q8_0.gguf"
    metadata = read_header(report.output).metadata
    wanted = {
        "general.architecture": "eagle",
        "general.name": "EAGLE-Tiny-7B",
        "eagle.embedding_length": HIDDEN,
        "eagle.vocab_size": VOCAB,
        "eagle.block_count": 1,
        "eagle.feed_forward_length": 64,
        "eagle.attention.head_count": 4,
        "eagle.attention.head_count_kv": 2,
        "eagle.rope.freq_base": 5000.0,
        "specrun.target.vocabulary_sha256": target.vocabulary.fingerprint.hex(),
    }
    assert {key: metadata.get(key) for key in wanted} == wanted
    assert metadata["eagle.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)


MALFORMED = [
    ({}, {"layers.0.mlp.up_proj.weight": None}, r"no tensor layers\.0\.mlp\.up_proj\.weight"),
    ({"bias": True}, {"fc.bias": None}, r"no tensor fc\.bias"),
    ({"bias": False}, {}, r"has fc\.bias, and .* bias = false"),
    ({"qkv_bias": True}, {}, r"no tensor .*q_proj\.bias"),
    ({}, {"fc.weight": (HIDDEN,)}, r"fc\.weight of shape \(32,\)"),
    ({}, {"layers.0.self_attn.k_proj.weight": (HIDDEN, HIDDEN)}, r"v_proj\.weight of shape"),
    ({"num_attention_heads": 5}, {}, "5 heads"),
    ({"num_attention_heads": None}, {}, "num_attention_heads"),
]
UNSUPPORTED = [
    ({}, {"fc.weight": (HIDDEN, 3 * HIDDEN)}, r"fc\.weight of shape \(32, 96\)"),
    ({"eagle_inputs": "unshifted"}, {}, "tokens that are not shifted"),
    ({}, {"layers.1.mlp.up_proj.weight": (64, HIDDEN)}, "2 layers: an EAGLE head has one"),
    ({}, {"layers.0.input_layernorm.weight": (HIDDEN,)}, "input_layernorm"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {}, "linear"),
    ({"hidden_act": "gelu"}, {}, "'gelu'"),
]


@pytest.mark.parametrize(
    ("config", "tensors", "problem", "error"),
    [
        *((*case, MalformedFileError) for case in MALFORMED),
        *((*case, UnsupportedModelError) for case in UNSUPPORTED),
    ],
)
def test_what_is_missing_or_unknown_is_named(
    target: Model,
    tmp_path: Path,
    config: dict[str, Any],
    tensors: dict[str, Any],
    error: type[Exception],
    problem: str,
) -> None:
    reference = TorchEagle(HIDDEN, VOCAB)
    held = named(reference)
    for name, shape in tensors.items():
        held.pop(name, None)
        if shape is not None:
            held[name] = torch.zeros(shape)
    folder = publish(tmp_path / "head", reference.config | config, held, SAFE)
    with pytest.raises(error, match=problem):
        convert_head(folder, tmp_path / "e.gguf", target=target.path, kind="eagle")
    assert {path.name for path in tmp_path.iterdir()} == {"head"}


def test_sizes_are_the_tensors_and_not_those_of_a_copied_config(
    target: Model, tmp_path: Path
) -> None:
    """Uploads often hold the target's own config.json: its layers and widths."""
    reference = TorchEagle(HIDDEN, VOCAB)
    files = []
    copied = {"num_hidden_layers": 40, "intermediate_size": 11008, "hidden_size": 4096}
    for place, changes in (("own", {}), ("copied", copied)):
        folder = publish(tmp_path / place, {**reference.config, **changes}, named(reference), SAFE)
        output = tmp_path / f"{place}.gguf"
        convert_head(folder, output, target=target.path, outtype="f32")
        metadata = read_header(output).metadata
        files.append({key: metadata[key] for key in metadata if key.startswith("eagle.")})
    assert files[0] == files[1]
    assert files[1]["eagle.block_count"] == 1
