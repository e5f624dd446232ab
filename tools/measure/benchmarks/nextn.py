"""The embedded target with a NextN block that is trained here: multi-token prediction, counted.

Small published models have no NextN block. So the layers of the embedded target are written as
those of a GLM 4 with experts: its first layers may be dense, and then they are a Llama's. Behind
them comes one block (DeepSeek-V3, section 2.2): h' = norm(layer(W [norm(embedding); norm(h)])),
trained as EAGLE's head is. llama.cpp wants experts in it: one that adds nothing, and the block's
own network as the one that is always used.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from specrun.bindings.models import trusting_files
from specrun.convert import convert_checkpoint
from specrun.runtime.demo import demo_target
from specrun.train.data import AnswerSettings
from specrun.train.heads import EagleRecipe, HeadRun
from specrun.train.heads.layers import Attention, FeedForward, KeysValues, RMSNorm, added_at
from specrun.train.heads.run import HeadFiles
from specrun.train.target.from_gguf import folder_from_gguf
from specrun.train.target.shape import ModelShape
from specrun.train.trainer.learner import Learner, SilentListener
from specrun.train.trainer.model_folder import copy_tokenizer, write_json, write_weights
from specrun.train.trainer.run import train

_EXPERT = 32
"""The width of an expert: rows of Q8_0 have a multiple of it."""


class NextnBlock(nn.Module):
    """Predicts the next normed final state from the one before and the token in between.

    Tensors have the names of a GLM 4 checkpoint's last layer.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.enorm, self.hnorm = RMSNorm(shape), RMSNorm(shape)
        self.eh_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(shape), RMSNorm(shape)
        self.self_attn = Attention(shape)
        self.mlp = nn.ModuleDict({"shared_experts": FeedForward(shape)})
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(shape)})

    def forward(
        self,
        embeddings: Tensor,
        states: Tensor,
        earlier: Sequence[KeysValues] = (),
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Return the next states and this step's keys, as of `ChainHead`."""
        joined = self.eh_proj(torch.cat((self.enorm(embeddings), self.hnorm(states)), -1))
        mixed, own = self.self_attn(self.input_layernorm(joined), earlier)

        def fed(rows: Tensor) -> Tensor:
            found: Tensor = self.mlp["shared_experts"](self.post_attention_layernorm(rows))
            return found

        return self.shared_head["norm"](added_at(wanted, joined + mixed, fed)), own


@dataclass(frozen=True, slots=True)
class NextnRecipe(EagleRecipe):
    """An EAGLE recipe whose head is a NextN block, trained on the states that follow."""

    kind = "nextn"

    def new_head(self, shape: ModelShape) -> NextnBlock:  # type: ignore[override]
        """Return an untrained block."""
        return NextnBlock(shape)

    def files(self, learner: Learner, shape: ModelShape) -> HeadFiles:
        """Return the block's tensors."""
        return HeadFiles({}, dict(learner.module.state_dict()))


class _Shown(SilentListener):
    """Prints what a training notes."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr)


def train_block(output: Path, questions: Path, steps: int) -> Path:
    """Train a block on the embedded target's own answers, and return its weights."""
    weights = output / "model.safetensors"
    if not weights.exists():
        run = HeadRun(
            target=demo_target(),
            data=(),
            output=output,
            steps=steps,
            tokens_per_batch=1024,
            max_length=512,
            prompts=questions,
            own_answers=AnswerSettings(longest=48),
        )
        train(NextnRecipe(steps=3, start="random"), run, _Shown())
    return weights


def write_target(block: Path, path: Path) -> None:
    """Write the embedded target and a block's weights as one GGUF file, in F16."""
    with tempfile.TemporaryDirectory(prefix="specrun-") as name:
        llama = folder_from_gguf(demo_target(), Path(name, "llama"))
        glm = Path(name, "glm")
        glm.mkdir()
        copy_tokenizer(llama, glm)
        config: dict[str, Any] = json.loads((llama / "config.json").read_text(encoding="utf-8"))
        write_json(glm / "config.json", _config(config))
        tensors = load_file(llama / "model.safetensors")
        write_weights(glm / "model.safetensors", {**tensors, **_block(load_file(block), config)})
        with trusting_files():
            convert_checkpoint(glm, path, outtype="f16", force=True)


def _config(llama: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a GLM 4 that computes the Llama, with a NextN block behind."""
    return {
        **llama,
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "partial_rotary_factor": 1.0,
        "first_k_dense_replace": llama["num_hidden_layers"],
        "num_nextn_predict_layers": 1,
        "n_routed_experts": 1,
        "num_experts_per_tok": 1,
        "n_shared_experts": llama["intermediate_size"] // _EXPERT,
        "moe_intermediate_size": _EXPERT,
        "use_qk_norm": False,
    }


def _block(trained: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return a block's tensors by their names in a checkpoint, with an expert that adds nothing."""
    hidden, prefix = config["hidden_size"], f"model.layers.{config['num_hidden_layers']}."
    nothing = {
        "mlp.gate.weight": torch.zeros(1, hidden),
        "mlp.gate.e_score_correction_bias": torch.zeros(1),
        "mlp.experts.0.gate_proj.weight": torch.zeros(_EXPERT, hidden),
        "mlp.experts.0.up_proj.weight": torch.zeros(_EXPERT, hidden),
        "mlp.experts.0.down_proj.weight": torch.zeros(hidden, _EXPERT),
    }
    return {f"{prefix}{name}": tensor for name, tensor in {**trained, **nothing}.items()}
