"""Kinds of heads: the parts that each defines so that its checkpoints can be converted.

A head is a small network that drafts from the target's hidden states (Medusa, Hydra, EAGLE).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specrun.bindings.errors import MalformedFileError
from specrun.convert.checkpoint import Checkpoint, JsonObject
from specrun.convert.families.family import Array, TensorRule
from specrun.convert.gguf import Metadata
from specrun.convert.heads.target_facts import TargetFacts, misfit
from specrun.runtime.language import METHODS


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """The plan of a head's file; no number of the weights has been read.

    `metadata` has the architecture's own keys (`medusa.head_count`); `general.*` and
    `specrun.target.*` are added for every kind. `tensors` are in the file's order: matrices get the
    type that was chosen, vectors and `keep_f32` float32, `token_ids` int64. `hidden_size` is the
    length of the target's hidden state that the head reads (at one layer), `vocab_size` the
    tokens of the target it was made for. `left_out` are tensors of the checkpoint that are known
    and not wanted, by name; a name that ends in a dot covers all that begin so. `renamed` is the
    checkpoint under the names that `tensors` have, if that is not the one that was read.
    `architecture` is the file's, if that is not the name of the kind.
    """

    metadata: Metadata
    tensors: Sequence[TensorRule]
    hidden_size: int
    vocab_size: int
    left_out: Collection[str] = ()
    renamed: Checkpoint | None = None
    architecture: str | None = None


@dataclass(frozen=True, slots=True)
class HeadKind:
    """A kind of head: `name`, that of a method, is `--kind` and mostly the file's architecture.

    `weights` are the names of weight files, without ending, that only this kind has; `in_config`
    and `in_tensors` decide whether a config, or the names of a checkpoint's tensors, are this
    kind's beyond doubt. `plan` makes the plan of a checkpoint: it raises UnsupportedModelError for
    a layout or a setting that the runtime could not compute as the checkpoint means it,
    MalformedFileError for tensors that are missing or contradict each other, PairError for a head
    that does not fit the target. Sizes and vocabularies are compared with the target for every
    kind.
    """

    name: str
    plan: Callable[[Checkpoint, TargetFacts], HeadPlan]
    in_tensors: Callable[[Collection[str]], bool]
    in_config: Callable[[JsonObject], bool] = lambda _config: False
    weights: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in METHODS:
            raise ValueError(f"no method of runtime/language.py drafts with {self.name!r} heads")


def architectures(config: JsonObject) -> list[str]:
    """Return the names of classes that a config states for its checkpoint."""
    named = config.any("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def known_as(
    checkpoint: Checkpoint, by_architecture: Mapping[str, str], by_tensor: Mapping[str, str]
) -> str | None:
    """Return the kind of a checkpoint, by its architecture or the beginning of a tensor's name."""
    named = [by_architecture[n] for n in architectures(checkpoint.config) if n in by_architecture]
    names = [name.removeprefix("model.") for name in checkpoint.tensors]
    named += [what for start, what in by_tensor.items() if any(n.startswith(start) for n in names)]
    return named[0] if named else None


def whole_numbers(config: JsonObject, key: str) -> list[int]:
    """Return a list of whole numbers; raises MalformedFileError for others."""
    values = config.items(key)
    if not all(type(value) is int for value in values):
        raise config.malformed(f"has {key} that are no whole numbers")
    return [value for value in values if isinstance(value, int)]


def matrix_shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    """Return rows and columns; raises MalformedFileError for no tensor or no matrix."""
    stored = checkpoint.tensors.get(name)
    if stored is None:
        raise checkpoint.malformed(f"has no tensor {name}: incomplete, or another kind of head")
    if len(stored.shape) != 2:
        raise MalformedFileError(f"{stored.path} has {name} of shape {stored.shape}, no matrix")
    return stored.shape[0], stored.shape[1]


def check_taps(
    checkpoint: Checkpoint, target: TargetFacts, taps: Sequence[int], last: int, n_layers: int
) -> None:
    """Raise PairError for an input that is read of a layer outside 0 to `last`, of `n_layers`."""
    outside = next((tap for tap in taps if not 0 <= tap <= last), None)
    if outside is not None:
        reads = f"it reads the input of layer {outside}"
        there = f"the target has {n_layers} layers, the first of them layer 0"
        raise misfit(target, checkpoint.config.shown, f"{reads}, and {there}")


def check_joined(checkpoint: Checkpoint, joined: int, n_taps: int, width: int) -> None:
    """Raise MalformedFileError unless `fc.weight` reads the inputs of so many layers."""
    if joined != n_taps * width:
        read = f"{n_taps} layers of {width} are read"
        raise checkpoint.malformed(f"has fc.weight for {joined} numbers, and {read}")


def as_stored(checkpoint: Checkpoint, config: JsonObject, layer: str, hidden: int) -> JsonObject:
    """Return the config of a head with one layer, its sizes as the layer's tensors have them.

    Many configs of heads are copies of the target's: their numbers of layers, heads and widths are
    not the head's. `layer` begins the names of its tensors, `hidden` is the width of its states.
    Raises MalformedFileError for a missing tensor, or heads that do not divide a matrix's rows.
    """
    query, key, gate = (
        matrix_shape(checkpoint, f"{layer}{part}.weight")[0]
        for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj")
    )
    heads = config.count("num_attention_heads")
    width = config.count("head_dim", max(1, query // heads))
    if query % width or key % width:
        widths = f"queries of {query} and keys of {key} numbers"
        problem = f"{config.shown} has {heads} heads of {width}"
        raise checkpoint.malformed(f"has {widths}, and {problem}")
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": gate,
        "num_hidden_layers": 1,
        "num_attention_heads": query // width,
        "num_key_value_heads": key // width,
        "head_dim": width,
    }
    return JsonObject({**config.values, **sizes}, config.shown)


def require_one_layer(checkpoint: Checkpoint, layer: str, kind: str) -> None:
    """Raise UnsupportedModelError for a head with layers beside `layer`, such as "layers.0."."""
    stem = layer.removesuffix("0.")
    numbers = {
        name.removeprefix(stem).split(".")[0]
        for name in checkpoint.tensors
        if layer.endswith(".0.") and name.startswith(stem)
    }
    if len(numbers) > 1:
        raise checkpoint.unsupported(f"has {len(numbers)} layers: an {kind} head has one")


def check_token_ids(checkpoint: Checkpoint, target: TargetFacts, name: str, ids: Array) -> None:
    """Raise for a list `name` of the target's tokens with one that it lacks or that comes twice.

    That is PairError or MalformedFileError.
    """
    outside = ids[(ids < 0) | (ids >= target.vocab_size)]
    if len(outside):
        problem = f"its {name} names token {outside[0]}, and the target has {target.vocab_size}"
        raise misfit(target, checkpoint.folder, problem)
    tokens, counts = np.unique(ids, return_counts=True)
    if len(tokens) != len(ids):
        raise checkpoint.malformed(f"has token {tokens[counts > 1][0]} twice in its {name}")


def stored_ids(checkpoint: Checkpoint, name: str) -> Array:
    """Return a list of whole numbers; raises MalformedFileError for another tensor."""
    stored = checkpoint.tensors[name]
    if len(stored.shape) != 1 or stored.type_name not in ("I64", "I32"):
        raise MalformedFileError(f"{stored.path} has {name} of {stored.type_name} {stored.shape}")
    return stored.read()


def draft_ids(checkpoint: Checkpoint, target: TargetFacts, name: str) -> Array | None:
    """Return the target's token of each draft token, None if the vocabularies are the same.

    `name` is the tensor of offsets. Raises PairError for a token that the target lacks,
    MalformedFileError for one that is there twice.
    """
    if name not in checkpoint.tensors:
        return None
    offsets = stored_ids(checkpoint, name)
    ids = absolute_ids(offsets)
    if len(ids) == target.vocab_size and not offsets.any():
        return None
    check_token_ids(checkpoint, target, f"vocabulary map ({name})", ids)
    return ids


def absolute_ids(offsets: Array) -> Array:
    """Return target tokens: token i of the draft vocabulary is token i + offset of the target."""
    return offsets.astype(np.int64) + np.arange(len(offsets), dtype=np.int64)


def llama_layer(
    checkpoint: Checkpoint,
    ours: str,
    theirs: str,
    sizes: tuple[int, int, int],
    *,
    biased: bool = False,
) -> Iterator[TensorRule]:
    """Yield the tensors of a Llama's layer without its input norm, from `theirs` to `ours`.

    `sizes` are those of hidden states, keys and the feed-forward network. Queries, keys and values
    have a bias if the checkpoint has one or `biased`, as Qwen 2 does.
    """
    hidden, kv_size, wide = sizes
    for name, source, shape in (
        ("attn_q", "self_attn.q_proj", (hidden, hidden)),
        ("attn_k", "self_attn.k_proj", (kv_size, hidden)),
        ("attn_v", "self_attn.v_proj", (kv_size, hidden)),
        ("attn_output", "self_attn.o_proj", (hidden, hidden)),
        ("ffn_norm", "post_attention_layernorm", (hidden,)),
        ("ffn_gate", "mlp.gate_proj", (wide, hidden)),
        ("ffn_up", "mlp.up_proj", (wide, hidden)),
        ("ffn_down", "mlp.down_proj", (hidden, wide)),
    ):
        yield TensorRule(f"{ours}{name}.weight", (f"{theirs}{source}.weight",), shape)
        bias = f"{theirs}{source}.bias"
        if name in ("attn_q", "attn_k", "attn_v") and (biased or bias in checkpoint.tensors):
            yield TensorRule(f"{ours}{name}.bias", (bias,), shape[:1])
