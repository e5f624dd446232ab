"""Conversion of a head's checkpoint folder to one GGUF file for a target."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.utility import size_label

from specrun.bindings.errors import (
    MalformedFileError,
    OptionError,
    SpecrunError,
    UnsupportedModelError,
)
from specrun.bindings.files import atomic_path, check_target
from specrun.bindings.quantizer import FILE_TYPES, quantize_rows
from specrun.convert.checkpoint import (
    PICKLE_ENDINGS,
    Checkpoint,
    JsonObject,
    SourceDigest,
    open_checkpoint,
    read_json_object,
)
from specrun.convert.conversion import (
    AUTOMATIC_TYPE,
    ConversionPlan,
    ConversionReport,
    conversion_report,
    general_metadata,
    known_type,
    write_plan,
)
from specrun.convert.families.family import Array, TensorRule
from specrun.convert.gguf import (
    STORED_TYPES,
    GGUFSource,
    Metadata,
    ModelName,
    Progress,
    name_of,
    safe_file_name,
)
from specrun.convert.heads import dflash, eagle, eagle3, hydra, lookahead, medusa, mtp
from specrun.convert.heads.head_kind import HeadKind
from specrun.convert.heads.target_facts import TargetFacts, target_facts
from specrun.convert.names import nearest
from specrun.convert.quantize import HEAD_TYPE, fitting_type
from specrun.convert.tensor_stream import MappedTensor, TensorStream, map_rules, usual_type
from specrun.convert.text_part import refuse_quantized, without_prefixes
from specrun.runtime.heads import DEPTHS_KEY, KEY, Accuracy

# == Detection of the kind of head in a folder: by files, config, names of tensors =================


# The more particular ones first: the first that recognises a checkpoint has it.
HEAD_KINDS: tuple[HeadKind, ...] = (
    *(lookahead.PASS, lookahead.SPACE),
    *(medusa.KIND, hydra.KIND, dflash.KIND, eagle3.KIND, eagle.KIND),
)
"""All kinds of heads that can be converted."""

_WEIGHTS = tuple(name for kind in HEAD_KINDS for name in kind.weights)


def _known_kind(name: str) -> HeadKind:
    """Return the kind of that name; raises OptionError for another."""
    kinds = (*HEAD_KINDS, mtp.KIND)
    found = next((kind for kind in kinds if kind.name == name), None)
    if found is None:
        known = [kind.name for kind in kinds]
        raise OptionError(f"kind is {name!r}: use one of {', '.join(known)}{nearest(name, known)}")
    return found


def _open_head(folder: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Open a head's folder, with weights of any known name; raises as `open_checkpoint`."""
    try:
        opened = open_checkpoint(folder, allow_pickle=allow_pickle, also_named=_WEIGHTS)
    except (MalformedFileError, UnsupportedModelError):
        # Configs of heads are often copies of the target's: only numbers of other types count.
        refuse_quantized(Checkpoint(folder, read_json_object(folder / "config.json"), {}))
        raise
    return dataclasses.replace(opened, tensors=without_prefixes(opened.tensors))


def kind_of(checkpoint: Checkpoint) -> HeadKind:
    """Return the kind of an opened head; raises UnsupportedModelError for an unknown one."""
    found = _by_files_or_config(checkpoint.folder) or _by_tensors(checkpoint)
    if found is None and mtp.has_blocks(checkpoint.tensors):
        found = mtp.KIND
    if found is None:
        known = ", ".join(kind.name for kind in HEAD_KINDS)
        first = ", ".join(list(checkpoint.tensors)[:3])
        raise checkpoint.unsupported(f"is no head of a known layout ({known}): it has {first}, ...")
    return found


def detect_kind(folder: Path, *, allow_pickle: bool = False) -> HeadKind | None:
    """Return the kind of head in a folder, None for a model or a folder that cannot be opened."""
    try:
        found = _by_files_or_config(folder)
        return found or _by_tensors(_open_head(folder, allow_pickle=allow_pickle))
    except SpecrunError:
        return None


def _by_files_or_config(folder: Path) -> HeadKind | None:
    endings = (".safetensors", *PICKLE_ENDINGS)
    for kind in HEAD_KINDS:
        names = [f"{name}{ending}" for name in kind.weights for ending in endings]
        if any((folder / name).is_file() for name in names):
            return kind
    config = read_json_object(folder / "config.json")
    return next((kind for kind in HEAD_KINDS if kind.in_config(config)), None)


def _by_tensors(checkpoint: Checkpoint) -> HeadKind | None:
    names = checkpoint.tensors.keys()
    return next((kind for kind in (*HEAD_KINDS, mtp.KIND) if kind.in_tensors(names)), None)


# == Conversion: planned, checked, written =========================================================


_OUTTYPE = HEAD_TYPE.lower()
_LONGEST_NAME = 200


def plan_head(
    source: str | os.PathLike[str],
    *,
    target: str | os.PathLike[str] | TargetFacts,
    kind: str | None = None,
    outtype: str = _OUTTYPE,
    allow_pickle: bool = False,
) -> ConversionPlan:
    """Read config and tensor places, compare them with the target, and plan the file.

    `target` is the GGUF file or the checkpoint folder (config and tokenizer) of the model the head
    drafts for, `kind` one of HEAD_KINDS by name, None to recognise it, `outtype` as in
    `plan_conversion`: the type of matrices. Raises OptionError for another kind or type,
    FileMissingError, MalformedFileError, UnsupportedModelError, and PairError, naming both numbers,
    for a head that does not fit the target.
    """
    wanted = known_type(outtype)
    chosen = None if kind is None else _known_kind(kind)
    checkpoint = _open_head(Path(source), allow_pickle=allow_pickle)
    chosen = chosen or kind_of(checkpoint)
    facts = target if isinstance(target, TargetFacts) else target_facts(target)
    head = chosen.plan(checkpoint, facts)
    facts.check_fits(checkpoint.folder, hidden_size=head.hidden_size, vocab_size=head.vocab_size)
    file_type = usual_type(checkpoint) if wanted.lower() == AUTOMATIC_TYPE else wanted
    kind_of_rule = functools.partial(_type_of, file_type)
    tensors = map_rules(
        head.renamed or checkpoint, head.tensors, kind_of_rule, left_out=head.left_out
    )
    n_parameters = sum(tensor.n_parameters for tensor in tensors)
    name = _head_name(checkpoint.folder, chosen.name, n_parameters)
    metadata = general_metadata(name, file_type)
    _describe_base(checkpoint.config, metadata)
    metadata.add(head.metadata)
    facts.describe(metadata)
    return ConversionPlan(
        checkpoint=checkpoint,
        architecture=head.architecture or chosen.name,
        metadata=metadata,
        tensors=tensors,
        vocab_size=head.vocab_size,
        type_name=file_type,
        file_type=file_type,
        file_name=safe_file_name(f"{name.name}-{file_type}"),
    )


def convert_head(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    target: str | os.PathLike[str] | TargetFacts,
    kind: str | None = None,
    outtype: str = _OUTTYPE,
    force: bool = False,
    allow_pickle: bool = False,
    n_threads: int = 0,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert the head in the folder `source` (config.json, weights) to the file `output`.

    The options are those of `plan_head` and `convert_checkpoint`; vectors stay float32, matrices
    whose rows do not divide into the blocks of the type get a wider one. Names, shapes and types
    are compared with the plan before the file appears, whole or not at all.

    Raises OptionError (also if `output` exists and `force` is not given), FileMissingError,
    MalformedFileError, UnsupportedModelError, PairError; SpecrunError if the disk is full or the
    folder cannot be written.
    """
    plan = plan_head(source, target=target, kind=kind, outtype=outtype, allow_pickle=allow_pickle)
    place = plan.output_in(None if output is None else Path(output))
    check_target(place, force=force)
    digest = SourceDigest(plan.checkpoint.folder)
    with TensorStream(digest) as stream:
        pieces = functools.partial(_pieces, stream, n_threads)
        write_plan(plan, place, pieces, digest, force=force, progress=progress)
    return conversion_report(plan, place, digest.value, None)


def _head_name(folder: Path, kind: str, n_parameters: int) -> ModelName:
    """Return a head's name; a size in the folder's is the target's, the label is the head's own."""
    found = name_of(folder, 0)
    label = size_label(n_parameters, 0, 0, 0)
    if found.name.lower().startswith(kind):
        return dataclasses.replace(found, size_label=label)
    basename = f"{kind}-{found.basename}" if found.basename else None
    name = f"{kind}-{found.name}"
    return dataclasses.replace(found, name=name, basename=basename, size_label=label)


def _type_of(file_type: str, rule: TensorRule) -> str:
    return fitting_type(FILE_TYPES[file_type].base_type, rule.written_shape[-1])


def _pieces(stream: TensorStream, n_threads: int, tensor: MappedTensor) -> Iterator[Array]:
    """Yield the tensor in its own type: rows are quantized as they come."""
    if tensor.type_name in STORED_TYPES:
        yield from stream.pieces(tensor)
        return
    rows = stream.pieces(dataclasses.replace(tensor, type_name="F32"))
    try:
        yield from quantized_pieces(rows, tensor.shape[-1], tensor.type_name, n_threads=n_threads)
    except MalformedFileError as error:
        raise MalformedFileError(f"{tensor.name}: {error}") from error


def quantized_pieces(
    pieces: Iterable[Array], width: int, type_name: str, *, n_threads: int = 0
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the blocks of rows of `width` float32 numbers that come flat and cut anywhere.

    Raises as `quantize_rows`; the numbers must make up whole rows.
    """
    rest = np.empty(0, np.float32)  # the beginning of a row whose end comes with the next piece
    for piece in pieces:
        numbers = np.concatenate([rest, piece]) if rest.size else piece
        whole = numbers.size // width * width
        rest = numbers[whole:].copy()
        if whole:
            yield quantize_rows(numbers[:whole].reshape(-1, width), type_name, n_threads=n_threads)


def _describe_base(config: JsonObject, metadata: Metadata) -> None:
    """Add the model that a head was trained for, if its config names it, as "owner/name"."""
    base = config.any("base_model_name_or_path")
    owner, _, name = base.rstrip("/").rpartition("/") if isinstance(base, str) else ("", "", "")
    if name:
        metadata.count("general.base_model.count", 1)
        metadata.text("general.base_model.0.name", name[:_LONGEST_NAME])
        if owner and "/" not in owner:
            metadata.text("general.base_model.0.organization", owner[:_LONGEST_NAME])


# == Accuracies that calibration measured, kept in the head's own file or in a CSV file ============


def store_accuracy(path: str | os.PathLike[str], accuracy: Accuracy, *, n_positions: int) -> int:
    """Write accuracies into a head's file, over earlier ones; return its size in bytes.

    The file is written anew in the same folder and then replaces the old one, every tensor bit by
    bit as it was: readers in between, and an interrupt, leave the old one. Raises OptionError if
    there is nothing to keep, and the errors of `write_gguf`.
    """
    head = GGUFSource(path)
    ranks = max(map(len, accuracy), default=0)
    if not any(accuracy[0] if accuracy else ()):
        raise OptionError("no guess of these heads was ever right: there is nothing to keep")
    metadata, kind = head.metadata(), head.header.architecture
    filled = [[*row, *[0.0] * (ranks - len(row))] for row in accuracy]
    metadata.numbers(f"{kind}.{KEY}", [share for row in filled for share in row])
    metadata.count(f"{kind}.{DEPTHS_KEY}", len(accuracy))
    metadata.count(f"{kind}.{KEY}_positions", n_positions)
    tensors = list(map(head.unchanged, head.header.tensors))
    # The place a link points to: the link itself stays.
    place = Path(path).resolve()
    return head.write_changed(place, metadata, tensors, force=True)


def write_accuracy_csv(
    path: str | os.PathLike[str], accuracy: Accuracy, alone: Accuracy = (), *, force: bool = False
) -> None:
    """Write accuracies for `read_accuracy_csv`, those of each head alone in a fourth column.

    Raises OptionError if the file exists and `force` is not given. Nothing is left behind on
    failure.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["head", "rank", "accuracy", "accuracy_alone"])
    for depth, row in enumerate(accuracy):
        for rank, share in enumerate(row):
            measured = depth < len(alone) and rank < len(alone[depth])
            own = f"{alone[depth][rank]:.6f}" if measured else ""
            writer.writerow([depth, rank, f"{share:.6f}", own])
    with atomic_path(path, force=force) as aside:
        aside.write_text(text.getvalue(), encoding="utf-8")
