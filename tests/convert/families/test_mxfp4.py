"""Experts in MXFP4, as gpt-oss is published: the same numbers in the file, or their plain form."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_families
from support.tiny_families import FAMILIES, Built, transformers_logits
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specrun.bindings.errors import UnsupportedModelError
from specrun.convert import convert_checkpoint


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A checkpoint with random blocks, and transformers' model of the numbers that they mean."""
    family = next(each for each in FAMILIES if each.name == "gpt-oss")
    made = tiny_families.build(family, tmp_path_factory.mktemp("mxfp4") / "checkpoint")
    tensors, random = load_file(made.folder / "model.safetensors"), np.random.default_rng(0)
    plain = made.model.state_dict()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        n, width, rows = tensors.pop(name).shape
        blocks = torch.from_numpy(random.integers(0, 256, (n, rows, width // 32, 16), np.uint8))
        scales = torch.from_numpy(random.integers(121, 125, (n, rows, width // 32), np.uint8))
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    made.model.load_state_dict(plain)
    save_file(tensors, made.folder / "model.safetensors", {"format": "pt"})
    config = json.loads((made.folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (made.folder / "config.json").write_text(json.dumps(config))
    return made


def test_blocks_keep_their_numbers(packed: Built, tmp_path: Path, logits) -> None:
    """llama.cpp rounds the states that it multiplies with blocks, and may choose other experts."""
    output = tmp_path / "kept.gguf"
    convert_checkpoint(packed.folder, output, outtype="f32", pre="gpt-4o")
    written = {tensor.name: tensor for tensor in gguf.GGUFReader(output).tensors}
    both = packed.model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"].numpy()
    down = packed.model.state_dict()["model.layers.1.mlp.experts.down_proj"].numpy()
    for part, wanted in (("gate", both[..., ::2]), ("up", both[..., 1::2]), ("down", down)):
        tensor = written[f"blk.1.ffn_{part}_exps.weight"]
        assert tensor.tensor_type.name == "MXFP4"
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(found, wanted.swapaxes(1, 2))
    tokens = [(7 * i * i + 3 * i + 11) % 600 for i in range(24)]
    found, wanted = logits(output, tokens), transformers_logits(packed, tokens)
    assert np.median(np.abs(found - wanted)) < 0.005 * np.abs(wanted).max()


def test_a_quantizer_gets_plain_numbers(packed: Built, tmp_path: Path, logits) -> None:
    output = tmp_path / "small.gguf"
    convert_checkpoint(packed.folder, output, outtype="q8_0", pre="gpt-4o")
    types = {tensor.tensor_type.name for tensor in gguf.GGUFReader(output).tensors}
    assert types == {"F32", "Q8_0"}
    tokens = [(5 * i * i + 3) % 600 for i in range(24)]
    found, wanted = logits(output, tokens), transformers_logits(packed, tokens)
    assert np.median(np.abs(found - wanted)) < 0.01 * np.abs(wanted).max()


def test_other_families_in_mxfp4_are_refused(packed: Built, tmp_path: Path) -> None:
    config = json.loads((packed.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    (tmp_path / "model.safetensors").symlink_to(packed.folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"quantized already \(MXFP4\)"):
        convert_checkpoint(tmp_path, tmp_path / "never.gguf")
