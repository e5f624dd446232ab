"""Hugging Face models for training: loaded by transformers from a local folder, without its code or the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specrun.bindings.errors import MalformedFileError, MissingPackageError, ModelError, OutOfMemoryError
from specrun.train.target_words import require_folder

__all__ = ["HFModel", "load_hf_model", "read_config"]


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a model folder; of a model with several parts, that of its text model."""
    path = require_folder(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise MalformedFileError(f"{path} is not JSON ({error}): download the model again") from error
    if not isinstance(config, dict):
        raise MalformedFileError(f"{path} is not a JSON object: download the model again")
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


class HFModel:
    """A causal language model: final hidden states, inputs of layers, logits.

    `model` is transformers' module; it is frozen and in evaluation mode unless the caller changes that.
    """

    def __init__(self, model: Any, config: dict[str, Any]) -> None:  # noqa: ANN401 - transformers is untyped
        self.model = model
        self.config = config
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.output: Tensor = model.get_output_embeddings().weight
        cap = config.get("final_logit_softcapping")
        self.softcap: float | None = float(cap) if cap else None

    @property
    def module(self) -> nn.Module:
        """The module, typed."""
        found: nn.Module = self.model
        return found

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.output.device

    @property
    def n_layers(self) -> int:
        """The number of layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def n_params(self) -> int:
        """The number of parameters."""
        return sum(one.numel() for one in self.module.parameters())

    def hidden_states(self, ids: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Return the final normed states [B, T, h] and, for `taps`, the inputs of those layers [B, T, len(taps) h].

        Sequences are padded on the right, which causal attention never sees. Tap L is what enters layer L, counted
        from 0, as EAGLE-3's reference and llama.cpp number them.
        """
        found = self.model.base_model(input_ids=ids, use_cache=False, output_hidden_states=bool(taps))
        tapped = torch.cat([found.hidden_states[tap] for tap in taps], -1) if taps else None
        return found.last_hidden_state, tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of final states, [..., words], in float32."""
        raw = nn.functional.linear(hidden.to(self.output.dtype), self.output).float()
        return raw if self.softcap is None else self.softcap * torch.tanh(raw / self.softcap)


def load_hf_model(folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> HFModel:
    """Return the model of a folder, frozen. Raises ModelError where transformers cannot read it."""
    config = read_config(folder)
    try:
        import transformers
    except ImportError as error:
        raise MissingPackageError("training", "transformers", "train") from error
    auto: Any = transformers.AutoModelForCausalLM
    quiet: Any = transformers.utils.logging
    level, bar = quiet.get_verbosity(), quiet.is_progress_bar_enabled()
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    try:
        model = auto.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
        model = model.to(device).eval()
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise OutOfMemoryError(
            f"no memory on {device} to load {folder}: use a smaller target or a --teacher"
        ) from error
    except Exception as error:  # whatever its code for this one architecture may raise
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelError(f"transformers cannot read the model in {folder}: {reason[:200]}") from error
    finally:
        quiet.set_verbosity(level)
        if bar:
            quiet.enable_progress_bar()
    model.requires_grad_(False)
    return HFModel(model, config)
