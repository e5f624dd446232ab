"""GLM's NextN block, a layer behind the last one in its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_families
from support.tiny_families import FAMILIES

from specrun.bindings.gguf import read_header
from specrun.convert import convert_checkpoint
from specrun.runtime import Runtime, SamplingParams

F32: dict[str, Any] = {"flash_attention": "off", "cache_type_k": "f32", "cache_type_v": "f32"}


@pytest.mark.parametrize("has_tokens", [True, False])
def test_the_block_behind_the_layers_drafts(tmp_path: Path, has_tokens: bool) -> None:
    """It keeps embeddings and an output matrix of its own, if it has any."""
    family = next(each for each in FAMILIES if each.name == "glm4 moe")
    made = tiny_families.build(family, tmp_path / "checkpoint")
    tensors, start = load_file(made.folder / "model.safetensors"), "model.layers.3."
    tensors |= {
        name.replace("layers.2.", "layers.3."): tensor.clone()
        for name, tensor in tensors.items()
        if "layers.2." in name
    }
    tensors |= {f"{start}{name}.weight": torch.ones(64) for name in ("enorm", "hnorm")}
    tensors[f"{start}shared_head.norm.weight"] = torch.ones(64)
    tensors[f"{start}eh_proj.weight"] = torch.cat([torch.eye(64), torch.zeros(64, 64)], dim=1)
    if has_tokens:
        tensors[f"{start}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{start}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, made.folder / "model.safetensors", {"format": "pt"})
    config = json.loads((made.folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (made.folder / "config.json").write_text(json.dumps(config))
    output = tmp_path / "target.gguf"
    convert_checkpoint(made.folder, output, outtype="f32", pre="qwen2")
    names = {tensor.name for tensor in read_header(output).tensors}
    assert ("blk.3.nextn.shared_head_head.weight" in names) is has_tokens
    texts, greedy = [], SamplingParams(temperature=0.0)
    for drafter in ("none", "mtp(n=2)"):
        with Runtime(output, drafter=drafter, n_ctx=256, **F32) as runtime:
            result = runtime.generate([5, 200, 7, 31], greedy, max_tokens=20)
            texts.append(result.token_ids)
    assert texts[0] == texts[1]
    assert result.stats.drafted > 0
