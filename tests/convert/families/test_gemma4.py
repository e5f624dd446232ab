"""Gemma 4 out of its wrapper, and its assistants: drafts are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import tiny_families
from support.tiny_families import FAMILIES, Built, TableGelu, transformers_logits

from specrun.bindings.contexts import AssistantContext, Batch, Context, ContextOptions
from specrun.bindings.models import Model
from specrun.convert import convert_checkpoint

TOKENS = [(7 * i * i + 3 * i + 11) % 600 for i in range(40)]
F32: dict[str, Any] = {"flash_attention": "off", "cache_type_k": "f32", "cache_type_v": "f32"}


@pytest.fixture(scope="module", params=["gemma4", "gemma4 experts"])
def target(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Built:
    family = next(each for each in FAMILIES if each.name == request.param)
    return tiny_families.build(family, tmp_path_factory.mktemp("gemma4") / "target")


def wrapped(made: Built, folder: Path) -> Path:
    """The checkpoint as it is published, beside a part for pictures."""
    folder.mkdir()
    for file in made.folder.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((made.folder / "config.json").read_text())
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"}
    (folder / "config.json").write_text(json.dumps({**outer, "text_config": config}))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(made.folder / "model.safetensors").items()
    }
    tensors["model.vision_tower.patch_embedder.weight"] = torch.ones(4, 4)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_the_text_part_of_a_wrapper_is_the_same(target: Built, tmp_path: Path, logits) -> None:
    output = tmp_path / "wrapped.gguf"
    convert_checkpoint(wrapped(target, tmp_path / "wrapper"), output, outtype="f32")
    found, wanted = logits(output, TOKENS), transformers_logits(target, TOKENS)
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


def assistant_of(target: Built, folder: Path) -> Any:
    """Save an assistant with random weights for a target."""
    inner = dict(target.model.config.to_dict())
    inner.update(hidden_size=48, num_hidden_layers=2, num_kv_shared_layers=2, pad_token_id=None)
    inner.update(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
    inner.update(use_double_wide_mlp=False, enable_moe_block=False, final_logit_softcapping=None)
    inner["layer_types"] = ["sliding_attention", "full_attention"]
    of_full_layers = {str(key): value for key, value in inner["per_layer_config"].items()}
    inner["per_layer_config"] = {1: of_full_layers["2"]}
    config = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**inner), backbone_hidden_size=64
    )
    config._attn_implementation = "eager"
    model = transformers.Gemma4AssistantForCausalLM(config).eval()
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            spread = weights.shape[-1] ** -0.5 if weights.dim() > 1 else 0.125
            mean = 0.0 if "norm" not in name else 0.05 if "post_feedforward" in name else 1.0
            weights.copy_(torch.randn(weights.shape, generator=source) * spread + mean)
    model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = TableGelu()
    return model


def all_shared(config: Any) -> list[str | None]:
    """What transformers 5.23 raises for, though it is what an assistant's layers are."""
    if config.num_hidden_layers == config.num_kv_shared_layers:
        return ["reuse"] * config.num_hidden_layers
    found: list[str | None] = SHARING.fget(config)
    return found


SHARING: Any = transformers.Gemma4TextConfig.kv_sharing_modes


def test_an_assistant_drafts_what_transformers_does(
    target: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft after a text, by the target's state and keys, and one after that.

    The text is shorter than the window, whose end transformers has a token further back.
    """
    monkeypatch.setattr(transformers.Gemma4TextConfig, "kv_sharing_modes", property(all_shared))
    small, text, token = assistant_of(target, tmp_path / "assistant"), TOKENS[:12], TOKENS[12]
    paths = [tmp_path / "target.gguf", tmp_path / "assistant.gguf"]
    for folder, path in zip((target.folder, tmp_path / "assistant"), paths, strict=True):
        convert_checkpoint(folder, path, outtype="f32")
    if not target.model.config.num_kv_shared_layers:  # it keeps none, as it needs none itself
        for layer in target.model.model.layers[-2:]:
            monkeypatch.setattr(layer.self_attn, "store_full_length_kv", True)
    with torch.no_grad():
        inner = target.model.model(torch.tensor([text]), return_shared_kv_states=True)
        state, wanted = inner.last_hidden_state[:, -1:], []
        for drafted in (token, 77):
            embedded = target.model.model.embed_tokens(torch.tensor([[drafted]]))
            said = small(
                inputs_embeds=torch.cat([embedded, state], dim=-1),
                shared_kv_states=inner.shared_kv_states,
                position_ids=torch.tensor([[len(text)]]),
            )
            state = said.last_hidden_state
            wanted.append((said.logits[0, 0].numpy(), state[0, 0].numpy()))
    options = ContextOptions(n_ctx=256, n_threads=1, nextn_states=True, **F32)
    with (
        Model(paths[0]) as model,
        Model(paths[1], load_nextn=True) as drafter,
        Context(model, options) as context,
        AssistantContext(drafter, context) as assistant,
    ):
        batch = Batch(64, 1)
        batch.fill_chain(text, 0, [0], 0)
        given = context.decode(batch).nextn_state(len(text) - 1).copy()
        for drafted, (logits, after) in zip((token, 77), wanted, strict=True):
            rows = assistant.evaluate([drafted], given[None], [0])
            assert np.abs(rows.logits(0) - logits).max() < 1e-4 * np.abs(logits).max()
            given = rows.nextn_state(0).copy()
            assert np.abs(given - after).max() < 1e-4 * np.abs(after).max()
