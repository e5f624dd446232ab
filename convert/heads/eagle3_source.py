"""What a checkpoint of an EAGLE-3 head says, in any of its layouts: names, layers, settings, draft vocabulary.

SafeAILab's layout has `midlayer.*` and a flat config.json; SpecForge's, of the same names, an `eagle_config` inside;
that of RedHat's speculators `layers.0.*`, and the sizes in `transformer_layer_config`. Some put `model.` before all
names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specrun.bindings.errors import MalformedFileError, PairError
from specrun.convert.checkpoint import Checkpoint
from specrun.convert.families.family import Array
from specrun.convert.heads.target_facts import TargetFacts
from specrun.convert.json_file import JsonObject

__all__ = [
    "LAYERS",
    "PREFIXES",
    "TensorNames",
    "absolute_ids",
    "flat_config",
    "has_setting",
    "target_layers",
    "tensor_names",
    "word_ids",
    "word_map",
]

PREFIXES = ("", "model.")
LAYERS = ("midlayer.", "layers.0.")

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NESTED = "eagle_config"
_WORD_MAP = "d2t"


@dataclass(frozen=True, slots=True)
class TensorNames:
    """How names begin in a checkpoint: `prefix` all but the output matrix, `layer` those of the one layer."""

    prefix: str
    layer: str


def flat_config(config: JsonObject) -> JsonObject:
    """Return the config with what speculators wrap brought to the top."""
    wrapped = config.object("transformer_layer_config")
    return JsonObject({**config.values, **wrapped.values}, config.shown)


def tensor_names(checkpoint: Checkpoint) -> TensorNames:
    """Return how the names begin; raises MalformedFileError where the one tensor that tells is missing."""
    for prefix in PREFIXES:
        for layer in LAYERS:
            if f"{prefix}{layer}hidden_norm.weight" in checkpoint.tensors:
                return TensorNames(prefix, f"{prefix}{layer}")
    raise MalformedFileError(
        f"{checkpoint.folder} has no tensor midlayer.hidden_norm.weight or layers.0.hidden_norm.weight: it is "
        "incomplete, or no EAGLE-3 head"
    )


def has_setting(config: JsonObject, name: str) -> bool:
    """Return a setting that may stand inside `eagle_config`; false where it is nowhere."""
    return config.flag(name, config.object(_NESTED).flag(name, False))


def target_layers(config: JsonObject, target: TargetFacts) -> Sequence[int]:
    """Return the layers whose inputs the head reads; raises PairError for those that the target lacks.

    At the top of a config (speculators, vLLM, llama.cpp) layers are named by their inputs, inside `eagle_config`
    (SpecForge, SGLang, ModelOpt) by their outputs, one less. Where none are named they are SafeAILab's.
    """
    nested = config.object(_NESTED)
    n = target.n_layers
    layers = [2, n // 2, n - 3]
    if _LAYER_IDS in config:
        layers = _whole(config, config.items(_LAYER_IDS))
    elif nested.items(_LAYER_IDS):
        layers = [output + 1 for output in _whole(nested, nested.items(_LAYER_IDS))]
    if not layers:
        raise MalformedFileError(f"{config.shown} has an empty list as {_LAYER_IDS}")
    outside = next((layer for layer in layers if not 0 <= layer < n), None)
    if outside is not None:
        raise PairError(
            f"{config.shown} does not fit the target {target.path}: it reads the input of layer {outside}, and the "
            f"target has {n} layers, the first of them layer 0"
        )
    return layers


def _whole(config: JsonObject, values: Sequence[object]) -> list[int]:
    if not all(type(value) is int for value in values):
        raise MalformedFileError(f"{config.shown} has {_LAYER_IDS} that are no whole numbers")
    return [value for value in values if isinstance(value, int)]


def word_map(checkpoint: Checkpoint) -> str:
    """Return the name of the tensor that maps the draft vocabulary."""
    return _WORD_MAP if _WORD_MAP in checkpoint.tensors else f"model.{_WORD_MAP}"


def word_ids(checkpoint: Checkpoint, target: TargetFacts) -> Array | None:
    """Return the target's word of each draft word, None where the draft vocabulary is the target's.

    Raises PairError for a word that the target lacks, MalformedFileError for one that is there twice.
    """
    name = word_map(checkpoint)
    stored = checkpoint.tensors.get(name)
    if stored is None:
        return None
    if len(stored.shape) != 1 or stored.type_name not in ("I64", "I32"):
        raise MalformedFileError(f"{stored.path} has {name} of {stored.type_name} {stored.shape}, no list of offsets")
    offsets = stored.read()
    ids = absolute_ids(offsets)
    if len(ids) == target.n_words and not offsets.any():
        return None
    outside = ids[(ids < 0) | (ids >= target.n_words)]
    if len(outside):
        raise PairError(
            f"{checkpoint.folder} does not fit the target {target.path}: its vocabulary map ({name}) names word "
            f"{outside[0]}, and the target has {target.n_words}"
        )
    words, counts = np.unique(ids, return_counts=True)
    if len(words) != len(ids):
        raise MalformedFileError(f"{stored.path} has word {words[counts > 1][0]} twice in its vocabulary map ({name})")
    return ids


def absolute_ids(offsets: Array) -> Array:
    """Return the target's words for offsets: word i of the draft vocabulary is word i + offset of the target."""
    return offsets.astype(np.int64) + np.arange(len(offsets), dtype=np.int64)
