"""Medusa (Cai et al. 2024, arXiv 2401.10774): folders of heads (Medusa-1), models with heads (-2).

Head i is residual blocks j = 0..L-1, x + SiLU(W x + b), and an output matrix. Tensors of a
checkpoint: `{i}.{j}.linear.weight` [h, h], `{i}.{j}.linear.bias` [h], `{i}.{L}.weight` [vocab, h];
with `medusa_head.` in front if they are in the file of the whole model (Medusa-2). Without an
output matrix a head uses the target's. Layout: FasterDecoding/Medusa, medusa/model/medusa_model.py.

vLLM names them `blocks.{i}.layers.{j}.weight` and `lm_heads.{i}.weight`, ModelOpt
`medusa_heads.{i}.medusa_layers.{j}.linear.weight` and `medusa_heads.{i}.lm_head.weight`.

How many heads and blocks there are is read from the tensors: old configs state other numbers than
were saved. The reference repeats one block L times, so its blocks share their weights; some files
then hold them once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from specrun.convert.checkpoint import Checkpoint, JsonObject, SourceTensor
from specrun.convert.families.family import TensorRule
from specrun.convert.families.steps import with_bias
from specrun.convert.gguf import Metadata
from specrun.convert.heads.head_kind import HeadKind, HeadPlan, matrix_shape
from specrun.convert.heads.target_facts import TargetFacts

_IN_A_MODEL = "medusa_head."
_NAME = re.compile(r"(\d{1,4})\.(\d{1,4})\.(linear\.weight|linear\.bias|weight)")
# vLLM's and ModelOpt's names, and ours of the same: heads, blocks and parts are groups 1 to 3.
_OTHERS = re.compile(
    r"(?:medusa_heads\.)?(?:blocks\.(\d{1,4})\.layers\.(\d{1,4})\.(weight|bias)"
    r"|(\d{1,4})\.(?:medusa_layers\.)?(\d{1,4})\.linear\.(weight|bias)"
    r"|lm_heads\.(\d{1,4})\.weight|(\d{1,4})\.lm_head\.weight)"
)
_MOST_HEADS, _MOST_BLOCKS = 32, 16  # the runtime's limits


@dataclass(frozen=True, slots=True)
class _Head:
    """One head of a checkpoint: the numbers of its blocks, and of its output matrix or None."""

    blocks: tuple[int, ...]
    output: int | None

    @property
    def n_blocks(self) -> int:
        """How many blocks the state goes through."""
        return max(self.blocks, default=-1) + 1 if self.output is None else self.output

    def source(self, block: int) -> int:
        """Return the block whose weights block `block` has: its own, or the only one there is."""
        return self.blocks[0] if len(self.blocks) == 1 else block


def _plan(checkpoint: Checkpoint, target: TargetFacts) -> HeadPlan:
    checkpoint = dataclasses.replace(checkpoint, tensors=_usual_names(checkpoint.tensors))
    prefix = _IN_A_MODEL if any(name.startswith(_IN_A_MODEL) for name in checkpoint.tensors) else ""
    heads = _heads(checkpoint, prefix)
    hidden = matrix_shape(checkpoint, f"{prefix}0.{heads[0].source(0)}.linear.weight")[1]
    vocab_size = target.vocab_size
    if heads[0].output is not None:
        vocab_size = matrix_shape(checkpoint, f"{prefix}0.{heads[0].output}.weight")[0]
    metadata = Metadata()
    metadata.counts("medusa", embedding_length=hidden, vocab_size=vocab_size)
    metadata.counts("medusa", head_count=len(heads), block_count=heads[0].n_blocks)
    rules = list(_rules(heads, prefix, hidden, vocab_size))
    backbone = {name for name in checkpoint.tensors if prefix and not name.startswith(prefix)}
    return HeadPlan(metadata, rules, hidden, vocab_size, backbone, checkpoint)


def _usual_names(tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """Return the tensors under the reference's names, whoever named them."""
    found: dict[str, SourceTensor] = {}
    outputs: dict[int, SourceTensor] = {}
    for name, tensor in tensors.items():
        match = _OTHERS.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        head, block, part = match[1] or match[4], match[2] or match[5], match[3] or match[6]
        if head is not None:
            found[f"{int(head)}.{int(block)}.linear.{part}"] = tensor
        else:
            outputs[int(match[7] or match[8])] = tensor
    for head_number, tensor in outputs.items():
        parts = [_NAME.fullmatch(name) for name in found]
        blocks = [int(part[2]) for part in parts if part and int(part[1]) == head_number]
        found[f"{head_number}.{max(blocks, default=-1) + 1}.weight"] = tensor
    return found


def _rules(heads: list[_Head], prefix: str, hidden: int, vocab_size: int) -> Iterator[TensorRule]:
    for i, head in enumerate(heads):
        for j in range(head.n_blocks):
            source, shape = f"{prefix}{i}.{head.source(j)}.linear", (hidden, hidden)
            yield from with_bias(f"medusa.{i}.res.{j}", source, shape, bias=True)
        if head.output is not None:
            source, shape = f"{prefix}{i}.{head.output}.weight", (vocab_size, hidden)
            yield TensorRule(f"medusa.{i}.output.weight", (source,), shape)


def _heads(checkpoint: Checkpoint, prefix: str) -> list[_Head]:
    """Return the heads in order; raises for gaps and for heads beyond the runtime's limits."""
    found: dict[int, list[tuple[int, str]]] = {}
    for name in checkpoint.tensors:
        match = _NAME.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if match is not None:
            found.setdefault(int(match[1]), []).append((int(match[2]), match[3]))
    missing = next((i for i in range(max(found, default=0) + 1) if i not in found), None)
    if missing is not None:
        name = f"{prefix}{missing}.0.linear.weight"
        raise checkpoint.malformed(f"has no tensor {name}: it is incomplete")
    heads = [_head(checkpoint, f"{prefix}{i}", found[i]) for i in range(len(found))]
    without = next((i for i, head in enumerate(heads) if head.output is None), None)
    if without is not None and any(head.output is not None for head in heads):
        name = f"{prefix}{without}.{heads[without].n_blocks}.weight"
        raise checkpoint.malformed(f"has no tensor {name}, and other heads have theirs")
    depths = {head.n_blocks for head in heads}
    if len(depths) > 1:
        raise checkpoint.unsupported(f"has heads of {min(depths)} and of {max(depths)} blocks")
    depth = depths.pop()
    if not 1 <= depth <= _MOST_BLOCKS or len(heads) > _MOST_HEADS:
        raise checkpoint.unsupported(
            f"has {len(heads)} heads of {depth} residual blocks: "
            f"up to {_MOST_HEADS} heads of 1 to {_MOST_BLOCKS} blocks can be run"
        )
    return heads


def _head(checkpoint: Checkpoint, name: str, parts: list[tuple[int, str]]) -> _Head:
    outputs = [j for j, part in parts if part == "weight"]
    if len(outputs) > 1:
        both = f"{name}.{outputs[0]}.weight and {name}.{outputs[1]}.weight"
        raise checkpoint.unsupported(f"has two output matrices of one head, {both}")
    blocks = tuple(sorted({j for j, part in parts if part != "weight"}))
    return _Head(blocks, outputs[0] if outputs else None)


def _in_config(config: JsonObject) -> bool:
    return "medusa_num_heads" in config


def _in_tensors(names: Collection[str]) -> bool:
    if any(name.startswith(_IN_A_MODEL) for name in names):
        return True
    theirs = [name for name in names if not _NAME.fullmatch(name)]
    begins = {"0.0.linear.weight", "blocks.0.layers.0.weight"} & {*names} or any(
        name.startswith("medusa_heads.") for name in names
    )
    return bool(begins) and all(map(_OTHERS.fullmatch, theirs))


KIND = HeadKind("medusa", _plan, _in_tensors, _in_config, weights=("medusa_lm_head",))
"""Medusa-1 and Medusa-2."""
