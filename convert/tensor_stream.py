"""Tensors of a checkpoint on their way into a file: mapped, read, hashed and converted."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import SpecrunError
from specrun.bindings.gguf import read_header, stored_bytes
from specrun.bindings.threads import available_cores
from specrun.convert.checkpoint import (
    NUMBER_TYPES,
    PIECE_BYTES,
    Checkpoint,
    SourceDigest,
    SourceTensor,
    block_numbers,
    raw_stored_as,
    stored_as,
)
from specrun.convert.families.family import Family, TensorRule, unchanged
from specrun.convert.gguf import FLOATS

# == The map: a checkpoint's tensors to those of the GGUF file, checked before any is read =========


# Tensors that old checkpoints carry although they are computed.
_COMPUTED = ("rotary_emb.inv_freq", "masked_bias")
_MOST_NAMED = 100  # a config with a wrong number of layers can need millions


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One tensor of the file: its rule, the source of its numbers, and the type it gets."""

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


def map_tensors(
    checkpoint: Checkpoint, family: Family, type_name: str, *, keeps_blocks: bool = True
) -> list[MappedTensor]:
    """Return the file's tensors in order; `type_name` is the type of those not always float32.

    With `keeps_blocks` tensors in MXFP4 stay so, otherwise they get that type, too.
    Raises MalformedFileError naming all tensors that are missing, or of another shape than the
    config's, UnsupportedModelError naming all that the family does not have.
    """
    # If embeddings are tied, an output matrix that is present all the same is a copy of them.
    # Heads that draft for the model are files of their own.
    unread = family.left_out(checkpoint.config)
    left_out = ("lm_head.weight", "medusa_head.", "space_mask.", *unread)
    rules = family.rules(checkpoint.config)

    def type_of(rule: TensorRule) -> str:
        return "MXFP4" if rule.is_mxfp4 and keeps_blocks else type_name

    return map_rules(checkpoint, rules, type_of, left_out=left_out)


def map_rules(
    checkpoint: Checkpoint,
    rules: Iterable[TensorRule],
    type_of: Callable[[TensorRule], str],
    *,
    left_out: Collection[str] = (),
) -> list[MappedTensor]:
    """Return the tensors of `rules` in order; `type_of` chooses the type unless it is fixed.

    `left_out` are names of the checkpoint's tensors that are known and not wanted; one that ends in
    a dot covers all that begin so. Raises as `map_tensors`.
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
        sources = tuple(map(checkpoint.tensor, rule.sources, rule.read_shapes))
        used.update(rule.sources)
        mapped.append(MappedTensor(rule, sources, rule.fixed_type or type_of(rule)))
    if missing:
        problem = "it is incomplete, or differs from config.json"
        raise checkpoint.malformed(f"has no tensor {_listed(missing)}: {problem}")
    _check_left(checkpoint, used, left_out)
    return mapped


def usual_type(checkpoint: Checkpoint) -> str:
    """Return the type that most of a checkpoint's numbers have, of F32, F16 and BF16."""
    sizes = dict.fromkeys(FLOATS, 0)
    for tensor in checkpoint.tensors.values():
        kind = "F32" if tensor.type_name == "F64" else tensor.type_name
        if kind in sizes and len(tensor.shape) > 1:
            sizes[kind] += tensor.n_elements
    return max(FLOATS, key=sizes.__getitem__)


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


# == Streams: tensors are read, hashed and converted in pieces =====================================
#
# Worker threads read, hash and convert several pieces at a time (all of that runs without Python's
# lock) while the caller writes, in order. Files are read in pieces and not mapped: a mapped file
# that shrinks, or a disk that fails, would end the process and leave a half-written file behind,
# and mapped pages count as the process's memory.


Array = npt.NDArray[Any]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_MOST_WORKERS = 4  # more than this wait for the disk


class TensorStream:
    """Converts tensors with worker threads: a context manager that ends them.

    At most two pieces a worker are in memory, and one whole tensor if a rule has to change
    it.
    """

    def __init__(self, digest: SourceDigest) -> None:
        self._digest = digest
        self._n_workers = min(_MOST_WORKERS, available_cores())
        self._pool = ThreadPoolExecutor(self._n_workers, thread_name_prefix="specrun-convert")

    def __enter__(self) -> TensorStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def pieces(self, tensor: MappedTensor) -> Iterator[Array]:
        """Yield the tensor's numbers in its own type, flat, in order.

        Raises MalformedFileError for numbers that are not finite or a file that became shorter,
        UnsupportedModelError for numbers too large for the type.
        """
        rule = tensor.rule
        if len(tensor.sources) == 1 and rule.change is unchanged:
            yield from self._straight(tensor, tensor.sources[0])
            return
        shown = rule.sources[0] if rule.sources else rule.name
        kinds = {source.type_name for source in tensor.sources}
        as_bits = rule.moves_only and len(kinds) == 1
        raws = [self._whole(source) for source in tensor.sources]
        both = zip(tensor.sources, raws, strict=True)
        if as_bits:
            kind = kinds.pop()
            numbers = rule.change(*(raw.reshape(source.shape) for source, raw in both))
        else:
            numbers = rule.change(*(source.as_numbers(raw) for source, raw in both))
        del raws, both
        if rule.is_mxfp4:
            if tensor.type_name == "MXFP4":
                yield numbers.reshape(-1)
                return
            numbers = block_numbers(numbers)
        if numbers.shape != tensor.shape:
            raise SpecrunError(
                f"the tensor {tensor.name} came out as {numbers.shape}, not {tensor.shape}: this "
                "is a mistake in specrun"
            )
        flat = np.ascontiguousarray(numbers).reshape(-1)
        del numbers

        def convert(place: slice) -> Array:
            if as_bits:
                return raw_stored_as(flat[place], kind, tensor.type_name, shown)
            return stored_as(flat[place], tensor.type_name, shown)

        yield from self._in_order(convert, _places(flat.size, flat.itemsize))

    def _straight(self, tensor: MappedTensor, source: SourceTensor) -> Iterator[Array]:
        def convert(place: slice) -> tuple[Array, bytes]:
            raw = source.raw(place.start, place.stop - place.start)
            hashed = hashlib.sha256(raw.view(np.uint8).data).digest()
            return raw_stored_as(raw, source.type_name, tensor.type_name, source.name), hashed

        hashes: list[bytes] = []
        for piece, hashed in self._in_order(convert, _source_places(source)):
            hashes.append(hashed)
            yield piece
        self._digest.add(source, hashes)

    def _whole(self, source: SourceTensor) -> Array:
        """Return all numbers of a source, flat, as it stores them."""
        whole = np.empty(source.n_elements, NUMBER_TYPES[source.type_name])

        def read(place: slice) -> bytes:
            whole[place] = source.raw(place.start, place.stop - place.start)
            return hashlib.sha256(whole[place].view(np.uint8).data).digest()

        self._digest.add(source, list(self._in_order(read, _source_places(source))))
        return whole

    def _in_order(
        self, work: Callable[[_Item], _Result], items: Iterable[_Item]
    ) -> Iterator[_Result]:
        """Yield the results in the items' order, worked out a few ahead."""
        ahead: deque[Future[_Result]] = deque()
        try:
            for item in items:
                ahead.append(self._pool.submit(work, item))
                if len(ahead) >= 2 * self._n_workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for left in ahead:
                left.cancel()


def _source_places(source: SourceTensor) -> Iterator[slice]:
    return _places(source.n_elements, np.dtype(NUMBER_TYPES[source.type_name]).itemsize)


def _places(n: int, item_bytes: int) -> Iterator[slice]:
    step = PIECE_BYTES // item_bytes
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def check_written(path: Path, tensors: Sequence[MappedTensor]) -> None:
    """Raise SpecrunError unless the file has exactly these names, shapes, types and sizes."""
    written = {tensor.name: tensor for tensor in read_header(path).tensors}
    wanted = {tensor.name: tensor for tensor in tensors}
    if written.keys() != wanted.keys():
        names = ", ".join(sorted(written.keys() ^ wanted.keys())[:4])
        raise SpecrunError(f"the file has tensors not as planned ({names}): a mistake in specrun")
    for name, array in wanted.items():
        found = written[name]
        got = found.shape[::-1], found.type_name, found.n_bytes
        if got != (array.shape, array.type_name, array.n_bytes):
            raise SpecrunError(f"{name} came out as {got}, not as planned: a mistake in specrun")
