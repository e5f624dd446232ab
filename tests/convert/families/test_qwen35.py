"""Qwen 3.5's NextN block: out of a checkpoint into the file, where `mtp` drafts with it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_families
from support.tiny_families import FAMILIES, Built

from specrun.bindings.contexts import ContextOptions, MtpContext, StateBatch
from specrun.bindings.errors import MalformedFileError
from specrun.bindings.models import Model
from specrun.convert import convert_checkpoint
from specrun.runtime import Runtime, SamplingParams

TOKENS = [(7 * i * i + 3 * i + 11) % 600 for i in range(12)]
F32: dict[str, Any] = {"flash_attention": "off", "cache_type_k": "f32", "cache_type_v": "f32"}


@pytest.fixture(scope="module", params=["qwen3.5", "qwen3.5 moe"])
def built(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, Any]:
    """A checkpoint with a block behind its layers, and that block: a layer, three norms, a
    matrix."""
    family = next(each for each in FAMILIES if each.name == request.param)
    made = tiny_families.build(family, tmp_path_factory.mktemp("qwen35") / "checkpoint")
    layer = copy.deepcopy(made.model.model.layers[3])  # one with attention
    width = made.model.config.hidden_size
    names = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
    block = torch.nn.ModuleDict({name: copy.deepcopy(made.model.model.norm) for name in names})
    block["fc"] = torch.nn.Linear(2 * width, width, bias=False)
    block["layers"] = torch.nn.ModuleList([layer])
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weights in block.parameters():
            spread = weights.shape[-1] ** -0.5 if weights.dim() > 1 else 0.125
            weights.copy_(torch.randn(weights.shape, generator=source) * spread)
    tensors = load_file(made.folder / "model.safetensors")
    tensors |= {f"mtp.{name}": tensor for name, tensor in block.state_dict().items()}
    if any("experts.gate_up_proj" in name for name in block.state_dict()):
        tensors = fused(tensors)
    save_file(tensors, made.folder / "model.safetensors", {"format": "pt"})
    return made, block


def fused(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors with all experts of a layer in one, as they are published."""
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    kept |= {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    for layer in range(4):
        start, parts = f"model.layers.{layer}.mlp.experts.", ("gate", "up", "down")
        gate, up, down = (
            torch.stack([tensors[f"{start}{expert}.{part}_proj.weight"] for expert in range(4)])
            for part in parts
        )
        kept[f"{start}gate_up_proj"] = torch.cat([gate, up], dim=1)
        kept[f"{start}down_proj"] = down
    return kept


def test_the_block_predicts_what_its_checkpoint_does(
    built: tuple[Built, Any], tmp_path: Path
) -> None:
    """Logits after tokens with given states, by transformers' own layer."""
    made, block = built
    output = tmp_path / "target.gguf"
    convert_checkpoint(made.folder, output, outtype="f32", pre="qwen2")
    states = np.random.default_rng(0).standard_normal((len(TOKENS), 64)).astype(np.float32)
    inner = made.model.model
    with torch.no_grad():
        embedded = inner.embed_tokens(torch.tensor([TOKENS]))
        known = block["pre_fc_norm_hidden"](torch.from_numpy(states)[None])
        both = torch.cat([block["pre_fc_norm_embedding"](embedded), known], dim=-1)
        hidden, n = block["fc"](both), len(TOKENS)
        positions = torch.arange(n)[None]
        mask = torch.full((1, 1, n, n), -torch.inf).triu(1)
        rope = inner.rotary_emb(hidden, positions)
        hidden = block["layers"][0](hidden, position_embeddings=rope, attention_mask=mask)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        wanted = made.model.lm_head(block["norm"](hidden))[0].numpy()
    with Model(output, load_nextn=True) as model:
        assert model.nextn.count == 1
        options = ContextOptions(n_ctx=256, n_threads=1, n_outputs=n, **F32)
        with MtpContext(model, options) as context:
            batch = StateBatch(16, 64)
            batch.fill_chain(TOKENS, 0, (0,), n)
            batch.states[:n] = states
            rows = context.decode(batch)
            found = np.stack([rows.logits(row) for row in range(n)])
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
    greedy = SamplingParams(temperature=0.0)
    texts = []
    for drafter in ("none", "mtp(n=2)"):
        with Runtime(output, drafter=drafter, n_ctx=256, **F32) as runtime:
            texts.append(runtime.generate(TOKENS, greedy, max_tokens=20).token_ids)
    assert texts[0] == texts[1]


def test_a_block_that_is_not_whole_is_named(built: tuple[Built, Any], tmp_path: Path) -> None:
    made, _ = built
    for file in made.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["mtp.fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(MalformedFileError, match=r"no tensor mtp\.fc\.weight"):
        convert_checkpoint(tmp_path, tmp_path / "never.gguf", outtype="f32", pre="qwen2")


def test_a_config_that_promises_a_block_may_have_none(
    built: tuple[Built, Any], tmp_path: Path
) -> None:
    made, _ = built
    for file in made.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))
    convert_checkpoint(tmp_path, tmp_path / "none.gguf", outtype="f32", pre="qwen2")
    with Model(tmp_path / "none.gguf") as model:
        assert model.nextn.count == 0
