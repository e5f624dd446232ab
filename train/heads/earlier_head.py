"""An EAGLE head's GGUF file, read back so that a trainer learns on from it (`--from`).

Quantized weights become the numbers of their codes, names become upstream's, and in EAGLE-3's files
rows of queries and keys go back to Hugging Face's order. A head with parts that ours lack (an
embedding or norms of its own, scaled positions, biases) is refused: without it, it would be another
head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from specrun.bindings.errors import PairError, UnsupportedModelError
from specrun.bindings.gguf import ArrayValue
from specrun.convert.gguf import GGUFSource
from specrun.convert.heads.target_facts import TargetFacts
from specrun.runtime.drafters.eagle import DRAFT_TOKENS, VOCABULARY_MAP
from specrun.runtime.heads import TARGET_VOCABULARY
from specrun.train.target.from_gguf import LAYER_NAMES, in_halves
from specrun.train.target.shape import ModelShape

_LAYER = {**LAYER_NAMES, "attn_norm_2": "hidden_norm"}
_OURS = {
    "eagle": {
        "eagle.fc.weight": "fc.weight",
        "eagle.fc.bias": "fc.bias",
        **{f"eagle.{ours}.weight": f"layers.0.{name}.weight" for ours, name in _LAYER.items()},
    },
    "eagle3": {
        "fc.weight": "fc.weight",
        "output_norm.weight": "norm.weight",
        "output.weight": "lm_head.weight",
        **{f"blk.0.{ours}.weight": f"midlayer.{name}.weight" for ours, name in _LAYER.items()},
    },
}
"""Of each kind upstream's names of a file's tensors."""

_IDS = (DRAFT_TOKENS, VOCABULARY_MAP)
_VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_ROPE_TOLERANCE = 1e-6
_TAPS = 3


@dataclass(frozen=True, slots=True)
class EarlierHead:
    """A head to learn on from: `weights` by upstream's names, in float32.

    `draft_tokens` are the target's ids that it drafts, in its own order, None for all; `taps` the
    layers whose inputs it reads, none for a head that reads final states.
    """

    path: Path
    weights: Mapping[str, Tensor]
    draft_tokens: Tensor | None
    taps: tuple[int, ...]

    def put_into(self, module: nn.Module, others: Mapping[str, Tensor]) -> None:
        """Load the weights, and `others` that no file has; raises PairError for other sizes."""
        found = {**self.weights, **others}
        wanted = module.state_dict()
        for name in sorted({*wanted, *found}):
            have, want = _shape(found, name), _shape(wanted, name)
            if have != want:
                raise PairError(
                    f"{self.path} does not fit the target: it has {name} of shape {have}, and its "
                    f"head would have {want}"
                )
        module.load_state_dict(found)


def _shape(tensors: Mapping[str, Tensor], name: str) -> list[int] | None:
    return list(tensors[name].shape) if name in tensors else None


def read_earlier_head(
    path: Path, kind: str, shape: ModelShape, facts: TargetFacts | None
) -> EarlierHead:
    """Return the head of a file, to go on with as a `kind` ("eagle", "eagle3") for a target.

    Raises UnsupportedModelError for other kinds and unknown parts, PairError for one
    that was made for another target, and the errors of reading a GGUF file.
    """
    file = GGUFSource(path)
    what = file.header.architecture
    if what != kind or kind not in _OURS:
        wanted = kind if kind in _OURS else " or ".join(_OURS)
        raise UnsupportedModelError(
            f"{path} is a file of architecture {what}: only {wanted} heads are learnt on from here"
        )
    _require_same(file, kind, shape, facts)
    # Rows of EAGLE-1's files have stayed in upstream's order.
    heads = {"q_proj": shape.n_heads, "k_proj": shape.n_kv_heads} if kind == "eagle3" else {}
    weights = {}
    for name, ours in _names(file, kind):
        numbers = file.numbers(file.tensors[name])
        turned = ours.split(".")[-2]
        if turned in heads:
            numbers = in_halves(numbers, heads[turned])
        weights[ours] = torch.from_numpy(numbers)
    if kind == "eagle":
        weights.setdefault("fc.bias", torch.zeros(shape.hidden))
    elif "lm_head.weight" not in weights:
        raise file.unsupported("has no output matrix of its own: here an EAGLE-3 head has one")
    return EarlierHead(path, weights, _ids(file), _taps(file, kind))


def _require_same(
    file: GGUFSource, kind: str, shape: ModelShape, facts: TargetFacts | None
) -> None:
    """Raise unless vocabulary, heads and positions are the target's, and all of it is known."""
    metadata = file.header.metadata
    variant = next((name for name in _VARIANTS if metadata.get(f"{kind}.{name}")), None)
    if variant is not None:
        raise file.unsupported(f"has {kind}.{variant}, with which no head is trained here")
    made_for = metadata.get(TARGET_VOCABULARY)
    if facts is not None and isinstance(made_for, str) and made_for != facts.fingerprint.hex():
        raise PairError(
            f"{file.path} does not fit the target {facts.path}: it was made for another vocabulary"
        )
    sizes = {
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.feed_forward,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": shape.n_kv_heads,
    }
    for name, wanted in sizes.items():
        found = file.count(f"{kind}.{name}")
        if found != wanted:
            raise PairError(
                f"{file.path} does not fit the target: it has {found} as {kind}.{name}, and its "
                f"head would have {wanted}"
            )
    base = metadata.get(f"{kind}.rope.freq_base", 10000.0)
    scaled = metadata.get(f"{kind}.rope.scaling.type", "none") != "none"
    near = isinstance(base, float) and math.isclose(base, shape.rope_theta, rel_tol=_ROPE_TOLERANCE)
    if scaled or not near:
        raise file.unsupported(
            f"turns positions by {base}{', scaled' if scaled else ''}, and a head of the target "
            f"by {shape.rope_theta:g}"
        )


def _names(file: GGUFSource, kind: str) -> Iterator[tuple[str, str]]:
    """Yield the file's tensors and upstream's names of them."""
    for name in file.tensors:
        if name in _IDS:
            continue
        if name not in _OURS[kind]:
            raise file.unsupported(f"has {name}, which no head has that is trained here")
        yield name, _OURS[kind][name]


def _ids(file: GGUFSource) -> Tensor | None:
    """Return the target's ids that the head drafts."""
    name = next((name for name in _IDS if name in file.tensors), None)
    if name is None:
        return None
    return torch.from_numpy(np.array(file.stored(file.tensors[name]), np.int64))


def _taps(file: GGUFSource, kind: str) -> tuple[int, ...]:
    layers = file.header.metadata.get(f"{kind}.target_layers")
    taps = tuple(int(layer) for layer in layers) if isinstance(layers, ArrayValue) else ()
    if kind == "eagle3" and len(taps) != _TAPS:
        raise file.unsupported(f"reads {len(taps)} layers: here an EAGLE-3 head reads {_TAPS}")
    return taps
