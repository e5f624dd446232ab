"""Hugging Face models for training, loaded by transformers from a local folder.

Neither the network nor code from the folder is used.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specrun.bindings.errors import (
    MalformedFileError,
    MissingPackageError,
    ModelError,
    OutOfMemoryError,
)
from specrun.bindings.files import require_free_space, sync_folder
from specrun.convert.checkpoint import open_checkpoint
from specrun.train.data.tokens import first_line, require_folder
from specrun.train.trainer.model_folder import copy_tokenizer, write_json, write_text
from specrun.train.trainer.settings import dtype_name

_PROBE_TOKENS = 8
_SUMMING = 1e-4  # of the largest logit: the order of a sum may change so much


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json; of a model with several parts, that of its text model."""
    path = require_folder(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise MalformedFileError(
            f"{path} is not JSON ({error}): download the model again"
        ) from error
    if not isinstance(config, dict):
        raise MalformedFileError(f"{path} is not a JSON object: download the model again")
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


@dataclass(frozen=True, slots=True)
class TargetMatrices:
    """A model's token embedding and output matrix, both [vocab, h]; `softcap` bounds its logits.

    Heads are given those of their target, which are frozen and shared by all that read them.
    """

    embedding: Tensor
    output: Tensor
    softcap: float | None

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [..., vocab] in float32 after final states."""
        raw = nn.functional.linear(states.to(self.output.dtype), self.output).float()
        return raw if self.softcap is None else self.softcap * torch.tanh(raw / self.softcap)

    def among(self, tokens: Tensor | None) -> TargetMatrices:
        """Return the matrices with the output rows of some tokens alone, None: of all."""
        return self if tokens is None else replace(self, output=self.output[tokens])

    def law(self, states: Tensor) -> Tensor:
        """Return the distribution [..., vocab] after final states, at temperature 1."""
        return self.logits(states).softmax(-1)


class HFModel:
    """A causal language model: final hidden states, inputs of layers, logits.

    `model` is transformers' module; it is frozen and in evaluation mode unless the caller changes
    that.
    """

    def __init__(self, model: Any, config: dict[str, Any]) -> None:  # noqa: ANN401 - transformers is untyped
        self.model, self.config = model, config
        self.module: nn.Module = model  # typed
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.output: Tensor = model.get_output_embeddings().weight
        cap = config.get("final_logit_softcapping")
        self.softcap: float | None = float(cap) if cap else None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.output.device

    @property
    def matrices(self) -> TargetMatrices:
        """The matrices without their gradients; they share the model's memory."""
        return TargetMatrices(self.embedding.detach(), self.output.detach(), self.softcap)

    def hidden_states(
        self, ids: Tensor, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Return the final normed states [B, T, h] and the inputs of `taps` [B, T, len(taps) h].

        Sequences are padded on the right, which causal attention never sees. Tap L is the input of
        layer L, counted from 0, as EAGLE-3's reference and llama.cpp number them.
        """
        model, tapping = self.model.base_model, bool(taps)
        found = model(input_ids=ids, use_cache=False, output_hidden_states=tapping)
        tapped = torch.cat([found.hidden_states[tap] for tap in taps], -1) if taps else None
        return found.last_hidden_state, tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of final states, [..., vocab], in float32."""
        return TargetMatrices(self.embedding, self.output, self.softcap).logits(hidden)


def load_hf_model(
    folder: Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> HFModel:
    """Return the model of a folder, frozen.

    Raises ModelError if transformers cannot read it, and if its logits are not its output
    matrix (and a soft cap) times its final states; OutOfMemoryError.
    """
    config = read_config(folder)
    try:
        import transformers
    except ImportError as error:
        raise MissingPackageError("training", "transformers", "train") from error
    auto: Any = transformers.AutoModelForCausalLM
    try:
        safely = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
        with quiet_transformers():
            model = auto.from_pretrained(str(folder), dtype=dtype, **safely).to(device).eval()
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise OutOfMemoryError(
            f"no memory on {device} to load {folder}: use a smaller target or a --teacher"
        ) from error
    except Exception as error:  # whatever its code for this one architecture may raise
        reason = first_line(error)
        raise ModelError(f"transformers cannot read the model in {folder}: {reason}") from error
    model.requires_grad_(False)
    found = HFModel(model, config)
    _check_logits(found, folder)
    return found


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from drawing progress bars and giving warnings of its own."""
    import transformers

    quiet: Any = transformers.utils.logging
    level, bar = quiet.get_verbosity(), quiet.is_progress_bar_enabled()
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    try:
        yield
    finally:
        quiet.set_verbosity(level)
        if bar:
            quiet.enable_progress_bar()


@torch.no_grad()
def _check_logits(found: HFModel, folder: Path) -> None:
    """Raise ModelError unless `HFModel.logits` makes the model's own logits of its final states.

    Everything that is learnt rests on that, and some families scale their logits (Granite, Cohere),
    scale the states below them (MiniCPM), or have a bias (Phi-2).
    """
    vocab_size = found.output.shape[0]
    ids = torch.linspace(0, vocab_size - 1, _PROBE_TOKENS).long().to(found.device)[None]
    states: list[Tensor] = []
    hook = found.model.base_model.register_forward_hook(
        lambda _module, _given, made: states.append(made.last_hidden_state)
    )
    try:
        own = found.model(input_ids=ids, use_cache=False).logits.float()
        ours = found.logits(states[-1])
    except Exception as error:  # whatever its code for this one architecture may raise
        raise ModelError(
            f"{_kind(found, folder)} cannot be computed on tokens alone: {first_line(error)}"
        ) from error
    finally:
        hook.remove()
    finite = own[own.isfinite()].abs()
    if not finite.numel():  # nothing to compare; the first loss shows it
        return
    # The same product of the same states: later steps, in the precision of the weights,
    # may differ.
    rounding, summing = 4 * torch.finfo(found.output.dtype).eps, _SUMMING * float(finite.max())
    near = {"rtol": rounding, "atol": summing}
    if own.shape != ours.shape or not own.isclose(ours, equal_nan=True, **near).all():
        raise ModelError(
            f"{_kind(found, folder)} changes its logits after its output matrix (by a factor or "
            "a bias), which training cannot do: use a target of another family"
        )


def _kind(found: HFModel, folder: Path) -> str:
    return f"{folder} is a model of the type {found.config.get('model_type')!r}, which"


_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def write_model_folder(found: HFModel, source: Path, output: Path, card: str) -> None:
    """Write a trained model into `output`; config and tokenizer are those of the folder `source`.

    Weights are written in the numbers they were trained in. Files are written aside and renamed,
    weights last, so that an interrupted call leaves either the old model or none that loads half.
    """
    parameters = list(found.module.parameters())
    require_free_space(output, sum(each.numel() * each.element_size() for each in parameters))
    with _aside(output) as aside:
        with quiet_transformers():
            found.model.save_pretrained(aside)
        copy_tokenizer(source, aside)
        # As published: transformers writes the fields of its own version. Only the numbers' type
        # is another now.
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config.pop("dtype", None)
        write_json(
            aside / "config.json", {**config, "torch_dtype": dtype_name(parameters[0].dtype)}
        )
        write_text(aside / "README.md", card)
        written = sorted(
            aside.iterdir(), key=lambda path: (path.suffix == ".safetensors", path.name in _WEIGHTS)
        )
        for path in written:
            # By a rename each file is the old one or the new one, whole.
            path.replace(output / path.name)
    sync_folder(output)


@contextmanager
def _aside(output: Path) -> Iterator[Path]:
    """Yield a hidden folder within `output`, which is gone afterwards."""
    folder = output / f".{secrets.token_hex(8)}.partial"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def stored_tensors(folder: Path, model: HFModel) -> dict[str, Tensor]:
    """Return a trained model's tensors under the names that the files of `folder` have."""
    stored = set(open_checkpoint(folder).tensors)
    named: dict[str, Any] = dict(model.module.state_dict())
    if not stored <= named.keys():  # files of another generation of transformers
        stored = {name for name in named if not _is_tied_copy(name, named)}
    return {name: named[name] for name in stored}


def _is_tied_copy(name: str, named: dict[str, Any]) -> bool:
    # Tied weights share memory: they are stored once, as the embedding.
    pointer = named[name].data_ptr()
    return name == "lm_head.weight" and any(
        other != name and array.data_ptr() == pointer for other, array in named.items()
    )
