"""MTP blocks of checkpoints, to a file of their own that drafts for a target: `mtp(FILE)`.

A block is one more layer behind the target's, with norms of an embedding and a state, and a matrix
that joins both. Checkpoints hold it beside the whole model, as `mtp.*` (Qwen 3.5, Qwen3-Next) or as
the layer behind the last (`model.layers.{n}.*`, GLM-4.5), or alone, as `mtp_layers.0.*`
(speculators). The file has the target's architecture, settings, tokens, embeddings and output
matrix, as that of llama.cpp's converter with --mtp. References: llama.cpp, conversion/qwen.py and
glm.py, src/models/qwen35.cpp, qwen35moe.cpp, qwen3next.cpp and glm4-moe.cpp;
vllm-project/speculators, convert/mtp.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from operator import methodcaller

import numpy as np

from specrun.bindings.errors import UnsupportedModelError
from specrun.convert.checkpoint import Checkpoint, SourceTensor
from specrun.convert.families.family import Array, TensorRule, unchanged
from specrun.convert.families.steps import plus_one
from specrun.convert.gguf import GGUFSource, Metadata
from specrun.convert.heads.head_kind import HeadKind, HeadPlan
from specrun.convert.heads.target_facts import TargetFacts, misfit, own_layers

# The change of norms: Qwen 3.5 and Qwen3-Next store their difference from 1.
_NORMS = {"qwen35": plus_one, "qwen35moe": plus_one, "qwen3next": plus_one, "glm4moe": unchanged}
_BEGINNING = re.compile(
    r"(model\.)?(language_model\.)?(mtp\.layers\.\d+\.|mtp_layers\.\d+\.|mtp\.)"
)
_NUMBERED = re.compile(r"mtp(?:\.|_)layers\.(\d+)\.")
_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.(.+)")
_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "embed_tokens.weight": "nextn.embed_tokens.weight",
    "shared_head.head.weight": "nextn.shared_head_head.weight",
}
_NAMES |= {f"self_attn.{p}_proj.{k}": f"attn_{p}.{k}" for p in "qkv" for k in ("weight", "bias")}
_NAMES |= {f"self_attn.{part}_norm.weight": f"attn_{part}_norm.weight" for part in "qk"}
_PARTS = ("gate", "up", "down")
_NAMES |= {f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in _PARTS}
_NAMES |= {
    f"mlp.shared_{name}.{part}_proj.weight": f"ffn_{part}_shexp.weight"
    for name in ("expert", "experts")
    for part in _PARTS
}
_NAMES |= {
    f"{theirs}.weight": f"nextn.{ours}.weight"
    for ours, several in {
        "eh_proj": ("fc", "eh_proj", "input_proj"),
        "enorm": ("pre_fc_norm_embedding", "enorm", "token_layernorm"),
        "hnorm": ("pre_fc_norm_hidden", "hnorm", "hidden_layernorm"),
        "shared_head_norm": ("norm", "shared_head.norm", "final_layernorm"),
    }.items()
    for theirs in several
}
_NEEDED = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight")
_FUSED = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_OTHER = "llama.cpp's convert_hf_to_gguf.py --mtp makes the file that mtp(FILE) drafts with"


def has_blocks(names: Collection[str]) -> bool:
    """Return whether tensors of these names hold MTP blocks, alone or beside a model."""
    return any(
        _BEGINNING.match(name) or (_LAYER.match(name) and name.endswith(".eh_proj.weight"))
        for name in names
    )


def _alone(names: Collection[str]) -> bool:
    """Return whether the blocks are there without the model that they belong to."""
    first = (layer for layer in map(_LAYER.match, names) if layer and layer[1] == "0")
    return has_blocks(names) and next(first, None) is None


def _plan(checkpoint: Checkpoint, target: TargetFacts) -> HeadPlan:
    kind = target.architecture
    if target.path.is_dir():
        raise checkpoint.unsupported(
            "holds MTP blocks, whose file gets the settings and matrices of the target: name its "
            "GGUF file with --target"
        )
    if kind not in _NORMS:
        known = ", ".join(_NORMS)
        raise checkpoint.unsupported(
            f"holds MTP blocks, and the target is a {kind}: they are converted for {known}; "
            f"{_OTHER}"
        )
    source = GGUFSource(target.path)
    n = own_layers(target)
    block = _block(checkpoint, n)
    wanted = _sibling(source, n)
    rules, matrices = list[TensorRule](), _matrices(source)
    for name, tensor in matrices.items():
        rules.append(TensorRule(name, (name,), tensor.shape))
    rules += _rules(checkpoint, block, wanted, f"blk.{n}.", target)
    metadata = _described(source, kind, n)
    metadata.add(target.load_tokenizer())
    renamed = dataclasses.replace(checkpoint, tensors={**block, **matrices})
    hidden = matrices["token_embd.weight"].shape[1]
    return HeadPlan(metadata, rules, hidden, target.vocab_size, (), renamed, architecture=kind)


def _block(checkpoint: Checkpoint, n: int) -> dict[str, SourceTensor]:
    """Return the tensors of the one block by their names in it."""
    numbers = {int(m[1]) for m in map(_NUMBERED.search, checkpoint.tensors) if m}
    behind = {int(m[1]) for m in map(_LAYER.match, checkpoint.tensors) if m and int(m[1]) >= n}
    if max(len(numbers), len(behind)) > 1:
        count = max(len(numbers), len(behind))
        raise checkpoint.unsupported(f"holds {count} MTP blocks: llama.cpp has one; {_OTHER}")
    found = {}
    for name, tensor in checkpoint.tensors.items():
        beginning, layer = _BEGINNING.match(name), _LAYER.match(name)
        if beginning is not None:
            found[name[beginning.end() :]] = tensor
        elif layer is not None and int(layer[1]) in behind:
            found[layer[2]] = tensor
    return found


def _sibling(source: GGUFSource, n: int) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the target's last layer of attention: the block's are the same."""
    for layer in reversed(range(n)):
        start = f"blk.{layer}."
        if f"{start}attn_q.weight" in source.tensors:
            return {
                name.removeprefix(start): tensor.shape[::-1]
                for name, tensor in source.tensors.items()
                if name.startswith(start)
            }
    raise source.unsupported("has no layer with attention (attn_q): it is no whole model")


def _matrices(source: GGUFSource) -> dict[str, SourceTensor]:
    """Return the target's embeddings, output matrix and last norm, which the file has, too."""
    names = ("token_embd.weight", "output_norm.weight", "output.weight")
    found = {name: source.tensors[name] for name in names if name in source.tensors}
    if not set(names[:2]) <= found.keys():
        raise source.unsupported(f"has no {names[0]} or {names[1]}: it is no whole model")
    return {name: source.as_source(tensor) for name, tensor in found.items()}


def _rules(
    checkpoint: Checkpoint,
    block: Mapping[str, SourceTensor],
    wanted: Mapping[str, tuple[int, ...]],
    ours: str,
    target: TargetFacts,
) -> Iterator[TensorRule]:
    """Yield the block's tensors; raises unless they are the same as those of a target's layer."""
    norm, hidden, made = _NORMS[target.architecture], target.hidden_size, dict[str, TensorRule]()
    shapes = {**wanted, "nextn.eh_proj.weight": (hidden, 2 * hidden)}
    shapes |= dict.fromkeys(("nextn.enorm.weight", "nextn.hnorm.weight"), (hidden,))
    shapes["nextn.shared_head_norm.weight"] = (hidden,)
    for name in ("embed_tokens", "shared_head_head"):
        shapes[f"nextn.{name}.weight"] = (target.vocab_size, hidden)
    for rule in (*_named(block, shapes, norm), *_experts(block, shapes)):
        tensor = rule.name
        if shapes.get(tensor) != rule.written_shape:
            has, theirs = list(rule.written_shape), list(shapes.get(tensor, ()))
            problem = f"it has {rule.sources[0]} for a {tensor} of {has}"
            problem = f"{problem}, and layers of the target have {theirs}"
            raise misfit(target, checkpoint.folder, problem)
        made[tensor] = dataclasses.replace(rule, name=ours + tensor)
    fused = {"ffn_gate_up_exps.weight"}  # of the target, if its converter joined them
    missing = [name for name in (*wanted, *_NEEDED) if name not in {*made, *fused}]
    if missing:
        raise checkpoint.malformed(f"has MTP blocks without {', '.join(missing[:4])}: incomplete")
    yield from made.values()


def _named(
    block: Mapping[str, SourceTensor],
    shapes: Mapping[str, tuple[int, ...]],
    norm: object,
) -> Iterator[TensorRule]:
    for theirs, tensor in block.items():
        name = _NAMES.get(theirs)
        if name is None:
            continue  # those of experts, or unknown ones, which the map of tensors refuses
        change = norm if name.endswith("norm.weight") else unchanged
        shape, flat = tensor.shape, shapes.get(name, ())
        if shape == (1, *flat):  # a row that llama.cpp has as a vector
            yield TensorRule(name, (theirs,), shape, methodcaller("reshape", flat), flat)
        else:
            keep = name == "ffn_gate_inp.weight"
            yield TensorRule(name, (theirs,), shape, change, keep_f32=keep)  # type: ignore[arg-type]


def _experts(
    block: Mapping[str, SourceTensor], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[TensorRule]:
    """Yield the matrices of experts, each kind in one tensor, from one each or from joined ones."""
    down = shapes.get("ffn_down_exps.weight")
    if down is None:
        return
    n, hidden, wide = down
    whole = {"gate": (n, wide, hidden), "up": (n, wide, hidden), "down": down}
    both, own = _FUSED
    if both in block and block[both].shape == (n, 2 * wide, hidden):
        for part, start in (("gate", 0), ("up", wide)):
            cut = partial(_rows, start=start, count=wide)
            name = f"ffn_{part}_exps.weight"
            yield TensorRule(name, (both,), block[both].shape, cut, whole[part], moves_only=True)
        yield TensorRule("ffn_down_exps.weight", (own,), down)
        return
    for part, shape in whole.items():
        sources = tuple(f"mlp.experts.{i}.{part}_proj.weight" for i in range(n))
        name = f"ffn_{part}_exps.weight"
        yield TensorRule(name, sources, shape[1:], _stacked, shape, moves_only=True)


def _rows(array: Array, start: int, count: int) -> Array:
    return array[:, start : start + count]


def _stacked(*arrays: Array) -> Array:
    return np.stack(arrays)


def _described(source: GGUFSource, kind: str, n: int) -> Metadata:
    """Return the target's settings, with one block more than it has layers."""
    metadata = Metadata()
    for key, value, value_kind, element in source.metadata():
        if not key.startswith(f"{kind}."):
            continue
        if element is not None and len(value) == n and not key.endswith("dimension_sections"):
            # One value for each layer: the block's is that of a layer of attention.
            if not key.endswith("recurrent_layers"):
                raise UnsupportedModelError(
                    f"{source.path} has {key} for each of its layers, and it is not known what "
                    f"an MTP block has: {_OTHER}"
                )
            value = [*value, False]
        metadata.raw(key, value, value_kind, element)
    metadata.count(f"{kind}.block_count", n + 1)
    metadata.count(f"{kind}.nextn_predict_layers", 1)
    return metadata


KIND = HeadKind("mtp", _plan, _alone)
"""MTP blocks; those beside a whole model are wanted only if a target is named."""
