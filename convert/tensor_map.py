"""Tensors of a checkpoint mapped to those of the GGUF file, and checked before any is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from specrun.bindings.gguf import stored_bytes
from specrun.convert.checkpoint import Checkpoint, SourceTensor
from specrun.convert.families.family import Family, TensorRule

# Tensors that old checkpoints carry although they are computed.
_COMPUTED = ("rotary_emb.inv_freq", "masked_bias")
_MOST_NAMED = 100  # a config with a wrong number of layers can ask for millions
_PLAIN_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One tensor of the file: its rule, where its numbers come from, and the type it gets."""

    rule: TensorRule
    sources: tuple[SourceTensor, ...]
    type_name: str

    @property
    def name(self) -> str:
        """The name in the GGUF file."""
        return self.rule.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the GGUF file, rows first."""
        return self.rule.written_shape

    @property
    def n_parameters(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Its size in the GGUF file."""
        return stored_bytes(self.shape, self.type_name)


def map_tensors(checkpoint: Checkpoint, family: Family, type_name: str) -> list[MappedTensor]:
    """Return the file's tensors in order; `type_name` is the type of those not always float32.

    Raises MalformedFileError naming all tensors that are missing, or one of another shape than the
    config says, UnsupportedModelError naming all that the family does not know.
    """
    # Where embeddings are tied, an output matrix that is there all the same is a copy of them.
    # Heads that draft for the model are files of their own.
    left_out = ("lm_head.weight", "medusa_head.", "space_mask.")
    rules = family.rules(checkpoint.config)
    return map_rules(checkpoint, rules, lambda _: type_name, left_out=left_out)


def map_rules(
    checkpoint: Checkpoint,
    rules: Iterable[TensorRule],
    type_of: Callable[[TensorRule], str],
    *,
    left_out: Collection[str] = (),
) -> list[MappedTensor]:
    """Return the tensors of `rules` in order; `type_of` says the type where it is not fixed.

    `left_out` are names of the checkpoint's tensors that are known and not wanted; one that ends in
    a dot stands for all that begin so. Raises as `map_tensors`.
    """
    mapped: list[MappedTensor] = []
    used: set[str] = set()
    missing: list[str] = []
    # All that is missing is named at once; nothing more is mapped after the first of them.
    for rule in rules:
        missing += [name for name in rule.sources if name not in checkpoint.tensors]
        if len(missing) > _MOST_NAMED:
            break
        if missing:
            continue
        sources = tuple(checkpoint.tensor(name, rule.shape) for name in rule.sources)
        used.update(rule.sources)
        mapped.append(MappedTensor(rule, sources, rule.fixed_type or type_of(rule)))
    if missing:
        problem = "it is incomplete, or not what config.json says"
        raise checkpoint.malformed(f"has no tensor {_listed(missing)}: {problem}")
    _check_left(checkpoint, used, left_out)
    return mapped


def usual_type(checkpoint: Checkpoint) -> str:
    """Return the type that most of a checkpoint's numbers have, of F32, F16 and BF16."""
    sizes = dict.fromkeys(_PLAIN_TYPES, 0)
    for tensor in checkpoint.tensors.values():
        kind = "F32" if tensor.type_name == "F64" else tensor.type_name
        if kind in sizes and len(tensor.shape) > 1:
            sizes[kind] += tensor.n_elements
    return max(_PLAIN_TYPES, key=sizes.__getitem__)


def _check_left(checkpoint: Checkpoint, used: Collection[str], left_out: Collection[str]) -> None:
    beginnings = tuple(name for name in left_out if name.endswith("."))
    known = {*used, *left_out}
    left = [name for name in checkpoint.tensors if name not in known]
    left = [name for name in left if not (name.endswith(_COMPUTED) or name.startswith(beginnings))]
    if left:
        raise checkpoint.unsupported(f"has tensors its architecture does not know: {_listed(left)}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
