"""Hydra and Hydra++ (Ankner et al. 2024, arXiv 2402.05109): config.json and hydra_lm_head.pt.

Tensors of a checkpoint, head i: residual blocks `hydra_mlp.{i}.{j}.linear.weight` and `.bias`,
[h, (i + 2) h] in the first block of grounded heads, which also has `.res_connection.weight` and
`.bias`, [h, h] in the others; an output matrix `hydra_lm_head.{i}.weight` [vocab, h] and `.bias`.
If training had dropout, it takes every other place: blocks are then j = 1, 3, ... and the output
matrix is `hydra_lm_head.{i}.1.weight`. Hydra++ (`hydra_head_arch` "prefix-mlp") has a one-layer
Llama, `prefix_embeding_layer.*` (so spelt), made from the target's config, which has its heads and
rotary embedding. Layout: zankner/Hydra, hydra/model/hydra_heads/mlp_head.py and prefix_mlp_head.py.

The reference repeats one block after the first, so the later ones share their weights; some files
hold them once. The target's embeddings, which checkpoints carry along (`input_embed_fn`), are read
from the target instead.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from specrun.bindings.errors import UnsupportedModelError
from specrun.convert.checkpoint import Checkpoint, JsonObject
from specrun.convert.families.family import TensorRule
from specrun.convert.families.steps import with_bias
from specrun.convert.gguf import Metadata
from specrun.convert.heads.head_kind import HeadKind, HeadPlan, llama_layer, matrix_shape
from specrun.convert.heads.target_facts import TargetFacts

_BLOCK = re.compile(r"hydra_mlp\.(\d{1,4})\.(\d{1,4})\.(linear|res_connection)\.weight")
_PREFIX = "prefix_embeding_layer."
_LAYER = f"{_PREFIX}layers.0."
_EMBEDDINGS = ("input_embed_fn.", f"{_PREFIX}embed_tokens.")
_PLAIN, _PREFIXED = "mlp", "prefix-mlp"
_MOST_HEADS, _MOST_BLOCKS = 32, 16  # the runtime's limits


@dataclass(frozen=True, slots=True)
class _Heads:
    """The heads of a checkpoint: for each the places j of its blocks' weights, first to last."""

    places: tuple[tuple[int, ...], ...]
    grounded: bool
    hidden: int

    @property
    def n_blocks(self) -> int:
        """How many blocks each head has."""
        return len(self.places[0])

    def width(self, head: int) -> int:
        """Numbers that a head's first block reads."""
        return self.hidden * (head + 2) if self.grounded else self.hidden


def _plan(checkpoint: Checkpoint, target: TargetFacts) -> HeadPlan:
    _require_known(checkpoint)
    heads = _heads(checkpoint)
    outputs = [_output(checkpoint, head) for head in range(len(heads.places))]
    sizes = (matrix_shape(checkpoint, f"{name}.weight")[0] for name in outputs if name)
    vocab_size = next(sizes, target.vocab_size)
    with_prefix = _has_prefix(checkpoint)
    metadata = Metadata()
    metadata.counts("hydra", embedding_length=heads.hidden, vocab_size=vocab_size)
    metadata.counts("hydra", head_count=len(heads.places), block_count=heads.n_blocks)
    metadata.flag("hydra.grounded", heads.grounded)
    metadata.flag("hydra.prefix_layer", with_prefix)
    rules = [*_head_rules(checkpoint, heads, outputs, vocab_size)]
    if with_prefix:
        rules += _prefix_rules(checkpoint, target, heads.hidden, metadata)
    return HeadPlan(metadata, rules, heads.hidden, vocab_size, _EMBEDDINGS)


def _require_known(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    kind = config.text("hydra_head_arch", _PREFIXED if _has_prefix(checkpoint) else _PLAIN)
    if kind not in (_PLAIN, _PREFIXED):
        raise config.unsupported(
            f"has hydra_head_arch {kind!r}: only {_PLAIN} and {_PREFIXED} (Hydra++) can be run"
        )
    if (kind == _PREFIXED) != _has_prefix(checkpoint):
        article = "no" if kind == _PREFIXED else "a"
        raise checkpoint.malformed(f"has {article} prefix layer, and hydra_head_arch is {kind!r}")
    offset = config.any("hidden_state_offset") or 0
    if offset != 0:
        raise config.unsupported(f"has hidden_state_offset {offset!r}: only 0, the last, is read")


def _heads(checkpoint: Checkpoint) -> _Heads:
    """Return the heads, from the names of the tensors and the config's number of them."""
    found: dict[int, set[int]] = {}
    grounded = False
    for name in checkpoint.tensors:
        match = _BLOCK.fullmatch(name)
        if match is not None:
            found.setdefault(int(match[1]), set()).add(int(match[2]))
            grounded = grounded or match[3] == "res_connection"
    config = checkpoint.config
    if config.flag("grounded_heads", grounded) != grounded:
        no, said = ("", "false") if grounded else ("no ", "true")
        raise checkpoint.malformed(f"has {no}res_connection tensors, and grounded_heads is {said}")
    n_heads = config.count("hydra_num_heads", max(found, default=0) + 1)
    n_blocks = config.count("hydra_num_layers", max(map(len, found.values()), default=1))
    if n_heads > _MOST_HEADS or n_blocks > _MOST_BLOCKS:
        raise checkpoint.unsupported(
            f"has {n_heads} heads of {n_blocks} residual blocks: "
            f"up to {_MOST_HEADS} heads of 1 to {_MOST_BLOCKS} blocks can be run"
        )
    there = [sorted(found.get(head, ())) for head in range(n_heads)]
    places = tuple(_places(checkpoint, i, own, n_blocks, grounded) for i, own in enumerate(there))
    hidden, _ = matrix_shape(checkpoint, f"hydra_mlp.0.{places[0][0]}.linear.weight")
    return _Heads(places, grounded, hidden)


def _places(
    checkpoint: Checkpoint, head: int, there: list[int], n_blocks: int, grounded: bool
) -> tuple[int, ...]:
    """Return the places of a head's blocks' weights; the last one serves for shared ones."""
    if not there:
        raise checkpoint.malformed(f"has no tensor hydra_mlp.{head}.0.linear.weight: incomplete")
    own = 2 if grounded else 1  # how many blocks differ in the reference
    if len(there) != n_blocks and (len(there) != own or n_blocks < own):
        raise checkpoint.malformed(
            f"has {len(there)} residual blocks of head {head}, and hydra_num_layers is {n_blocks}"
        )
    return tuple(there[min(block, len(there) - 1)] for block in range(n_blocks))


def _output(checkpoint: Checkpoint, head: int) -> str | None:
    """Return the name of a head's output matrix without ending, None for the target's."""
    names = (f"hydra_lm_head.{head}", f"hydra_lm_head.{head}.1")
    return next((name for name in names if f"{name}.weight" in checkpoint.tensors), None)


def _head_rules(
    checkpoint: Checkpoint, heads: _Heads, outputs: list[str | None], vocab_size: int
) -> Iterator[TensorRule]:
    hidden = heads.hidden
    for head, (places, output) in enumerate(zip(heads.places, outputs, strict=True)):
        own, theirs = f"hydra.{head}", f"hydra_mlp.{head}"
        for block, place in enumerate(places):
            shape = (hidden, heads.width(head) if block == 0 else hidden)
            yield from with_bias(f"{own}.res.{block}", f"{theirs}.{place}.linear", shape, bias=True)
        if heads.grounded:
            # The first block's input is wider than its output: a matrix replaces the identity.
            skip, shape = f"{theirs}.{places[0]}.res_connection", (hidden, heads.width(head))
            yield from with_bias(f"{own}.skip", skip, shape, bias=True)
        if output is not None:
            bias = f"{output}.bias" in checkpoint.tensors
            yield from with_bias(f"{own}.output", output, (vocab_size, hidden), bias=bias)


def _has_prefix(checkpoint: Checkpoint) -> bool:
    return any(name.startswith(_LAYER) for name in checkpoint.tensors)


def _prefix_rules(
    checkpoint: Checkpoint, target: TargetFacts, hidden: int, metadata: Metadata
) -> Iterator[TensorRule]:
    """Yield the prefix layer's tensors; write the target's values of heads and rotation."""
    if target.architecture != "llama":
        raise checkpoint.unsupported(
            f"has a prefix layer made from a Llama's config, and {target.path} "
            f"is a {target.architecture}: is it the model these heads were made for?"
        )
    heads = target.count("attention.head_count")
    shared = target.count("attention.head_count_kv", heads)
    kv_size = matrix_shape(checkpoint, f"{_LAYER}self_attn.k_proj.weight")[0]
    if hidden % heads or hidden // heads % 2 or hidden // heads * shared != kv_size:
        raise checkpoint.malformed(
            f"has a prefix layer with keys of {kv_size} numbers, and the "
            f"target's config requires {shared} of {heads} heads of hidden states of {hidden}"
        )
    scaling = target.settings.get("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise UnsupportedModelError(
            f"{target.path} scales positions by {scaling}: prefix layers are run with linear only"
        )
    wide = matrix_shape(checkpoint, f"{_LAYER}mlp.gate_proj.weight")[0]
    metadata.counts("hydra.attention", head_count=heads, head_count_kv=shared)
    metadata.count("hydra.feed_forward_length", wide)
    metadata.number("hydra.rope.freq_base", target.number("rope.freq_base", 10000.0))
    if scaling == "linear":
        metadata.number("hydra.rope.scaling.factor", target.number("rope.scaling.factor", 1.0))
    epsilon = "attention.layer_norm_rms_epsilon"
    metadata.number(f"hydra.{epsilon}", target.number(epsilon, 1e-6))
    norms = {"attn_norm": f"{_LAYER}input_layernorm", "output_norm": f"{_PREFIX}norm"}
    for name, theirs in norms.items():
        yield TensorRule(f"hydra.prefix.{name}.weight", (f"{theirs}.weight",), (hidden,))
    yield from llama_layer(checkpoint, "hydra.prefix.", _LAYER, (hidden, kv_size, wide))
    factors = target.load_rope_factors()
    if factors is not None:
        yield TensorRule("hydra.prefix.rope_freqs.weight", (), factors.shape, factors.copy)


def _in_config(config: JsonObject) -> bool:
    return "hydra_num_heads" in config


def _in_tensors(names: Collection[str]) -> bool:
    return any(_BLOCK.fullmatch(name) for name in names)


KIND = HeadKind("hydra", _plan, _in_tensors, _in_config, weights=("hydra_lm_head",))
"""Hydra and Hydra++."""
