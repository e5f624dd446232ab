"""Conversion of a Hugging Face checkpoint folder to one GGUF file: planned, checked, written.

Its logits can be compared with those of transformers."""

from __future__ import annotations

import functools
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts import Batch, Context, ContextOptions
from specrun.bindings.errors import ModelError, OptionError, SpecrunError
from specrun.bindings.files import check_target, require_free_space
from specrun.bindings.gguf import read_header
from specrun.bindings.models import Model, trusting_files
from specrun.bindings.quantizer import FILE_TYPE_ALIASES, FILE_TYPES
from specrun.convert.checkpoint import SOURCE_KEY, Checkpoint, SourceDigest, open_checkpoint
from specrun.convert.families import family_of
from specrun.convert.families.family import Array
from specrun.convert.gguf import (
    Metadata,
    ModelName,
    PlannedTensor,
    Progress,
    file_name,
    loadable_name,
    name_of,
    replace_text,
    write_gguf,
)
from specrun.convert.names import nearest
from specrun.convert.quantize import quantize_model
from specrun.convert.tensor_stream import (
    MappedTensor,
    TensorStream,
    check_written,
    map_tensors,
    usual_type,
)
from specrun.convert.text_part import text_part
from specrun.convert.tokenizer import read_vocabulary

# == Logits of a converted file, compared with those transformers computes from the checkpoint =====
#
# The fixed text has prose, talk, code, numbers and a list, as people give them to models. It never
# changes: figures measured with it at different times can be compared. Its perplexity alone is a
# poor measure of a model, since the text is short.


FIXED_TEXT = Path(__file__).with_name("fixed_text.txt").read_text(encoding="utf-8")
LARGEST_ERRORS = {"F32": 1e-4, "F16": 2e-2, "BF16": 1e-1}
"""The allowed error over the largest logit: float32's by its rounding, the others' by weights'."""

_MOST_TOKENS = 64
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LogitCheck:
    """Whether logits were compared, and how.

    `relative_error` is the largest difference over the largest logit, `same_top` the share of
    positions whose most likely token is the same, both over `n_tokens` tokens of the fixed text.
    `reason` is why nothing was compared, and empty if something was.
    """

    relative_error: float | None
    largest_allowed: float
    same_top: float | None
    n_tokens: int
    reason: str = ""


def check_logits(
    path: Path, folder: Path, type_name: str, *, allow_pickle: bool = False, n_threads: int = 0
) -> LogitCheck:
    """Compare the file's logits with those of the checkpoint in `folder`, both in float32.

    Raises SpecrunError if they are further apart than LARGEST_ERRORS allows for `type_name`. If
    transformers is not installed, or cannot open the checkpoint, the result has the reason.
    """
    allowed = LARGEST_ERRORS[type_name]
    # It was just written here, and may have no name yet that another process could open.
    with trusting_files(), Model(path) as model:
        length = max(1, min(_MOST_TOKENS, model.n_ctx_train))
        tokens = model.vocabulary.tokenize(FIXED_TEXT)[:length]
        try:
            wanted = _reference(folder, tokens, allow_pickle=allow_pickle)
        except _CannotCompareError as error:
            return LogitCheck(None, allowed, None, 0, str(error))
        try:
            found = _logits(model, tokens, n_threads)
        except ModelError as error:
            return LogitCheck(None, allowed, None, 0, f"llama.cpp cannot evaluate it here: {error}")
    if found.shape != wanted.shape:
        raise SpecrunError(f"it gives {found.shape[1]} logits, the checkpoint {wanted.shape[1]}")
    error_found = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    if not error_found <= allowed:  # not a number is no match either
        raise SpecrunError(
            f"the logits of the file are not the checkpoint's: off by {error_found:.1e} of the "
            f"largest, and {allowed:g} is allowed for {type_name}; nothing was kept (--no-verify "
            "keeps it all the same)"
        )
    same = float(np.mean(found.argmax(axis=1) == wanted.argmax(axis=1)))
    return LogitCheck(error_found, allowed, same, len(tokens))


class _CannotCompareError(Exception):
    """There is nothing to compare with; the message is the reason."""


def _logits(model: Model, tokens: list[int], n_threads: int) -> Logits:
    n = len(tokens)
    options = ContextOptions(
        n_ctx=max(64, n),
        n_outputs=n,
        n_threads=n_threads,
        flash_attention="off",
        cache_type_k="f32",
        cache_type_v="f32",
    )
    with Context(model, options) as context:
        batch = Batch(n, 1)
        batch.fill_chain(tokens, 0, [0], n)
        rows = context.decode(batch)
        return np.stack([rows.logits(row) for row in range(n)])


def _reference(folder: Path, tokens: list[int], *, allow_pickle: bool) -> Logits:
    """Return transformers' logits of the checkpoint in float32; no code of the checkpoint runs."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise _CannotCompareError("transformers is not installed") from error
    auto: Any = transformers.AutoModelForCausalLM
    quiet: Any = transformers.utils.logging
    level, bar = quiet.get_verbosity(), quiet.is_progress_bar_enabled()
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    try:
        options: dict[str, Any] = {} if allow_pickle else {"use_safetensors": True}
        model = auto.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, **options
        ).eval()
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0].float().numpy()
    except MemoryError:
        raise
    except Exception as error:  # whatever its code for this one architecture may raise
        lines = (line for line in str(error).splitlines() if line.strip())
        reason = next(lines, type(error).__name__)[:200]
        raise _CannotCompareError(f"transformers cannot open the checkpoint ({reason})") from error
    finally:
        quiet.set_verbosity(level)
        if bar:
            quiet.enable_progress_bar()
    if not math.isfinite(float(np.abs(logits).max())):
        raise _CannotCompareError("transformers computes logits that are not finite")
    found: Logits = np.ascontiguousarray(logits)
    return found


# == Conversion ====================================================================================


OUTPUT_TYPES = ("f32", "f16", "bf16")
"""The values of `outtype` that need no quantizer."""

SMALL_MODEL = 300_000_000
"""The most parameters of a model whose logits are compared by default."""

AUTOMATIC_TYPE = "auto"
"""The value of `outtype` for the type of most of the checkpoint."""


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """The plan of a conversion; no number of the weights has been read.

    `file_type` is the wanted type (F16, Q4_K_M, ...), `type_name` the type matrices are
    converted to, which a quantizer then makes smaller if the two differ. `file_name` follows the
    GGUF naming convention.
    """

    checkpoint: Checkpoint
    architecture: str
    metadata: Metadata
    tensors: Sequence[MappedTensor]
    vocab_size: int
    type_name: str
    file_type: str
    file_name: str

    @property
    def is_quantized(self) -> bool:
        """Whether the quantizer runs after the conversion."""
        return self.file_type != self.type_name

    @property
    def n_parameters(self) -> int:
        """The numbers of all tensors."""
        return sum(tensor.n_parameters for tensor in self.tensors)

    @property
    def source_bytes(self) -> int:
        """The bytes of all tensors in the checkpoint."""
        sizes = {source.name: source.n_bytes for info in self.tensors for source in info.sources}
        return sum(sizes.values())

    @property
    def source_types(self) -> Mapping[str, int]:
        """How many tensors of the checkpoint have each type."""
        types = {source.name: source.type_name for info in self.tensors for source in info.sources}
        return {kind: list(types.values()).count(kind) for kind in sorted(set(types.values()))}

    @property
    def n_bytes(self) -> int:
        """The bytes of all tensors once converted, before any quantizing."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    def output_in(self, place: Path | None) -> Path:
        """Return the file to write: `place`, or the usual name in that folder or in this one."""
        if place is None:
            return Path(self.file_name)
        return place / self.file_name if place.is_dir() else place


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """The written file: `type_name` is the file type (F16, Q4_K_M, ...), `n_bytes` the file's size.

    `source_bytes` is the size of the tensors in the checkpoint; `logits` is None unless they were
    to be compared.
    """

    output: Path
    architecture: str
    type_name: str
    n_tensors: int
    n_parameters: int
    n_words: int
    n_bytes: int
    source_bytes: int
    source_types: Mapping[str, int]
    tensor_types: Mapping[str, int]
    bits_per_weight: float
    source_sha256: str
    logits: LogitCheck | None


def plan_conversion(
    source: str | os.PathLike[str],
    *,
    outtype: str = "f16",
    allow_pickle: bool = False,
    pre: str | None = None,
    imatrix: str | os.PathLike[str] | None = None,
) -> ConversionPlan:
    """Read config, vocabulary and the places of all tensors, and return the plan of a conversion.

    `outtype` is f32, f16, bf16, auto (the type of most of the checkpoint), or a type of the
    quantizer such as q4_k_m; `pre` is llama.cpp's name of the way text is split before tokens are
    merged, if it is not to be recognised from the tokenizer; `imatrix` is the importance matrix for
    the quantizer. Raises OptionError for another type, FileMissingError, MalformedFileError,
    UnsupportedModelError.
    """
    wanted = known_type(outtype, has_importance=imatrix is not None)
    if imatrix is not None and (wanted == AUTOMATIC_TYPE or wanted.lower() in OUTPUT_TYPES):
        raise OptionError(
            f"an importance matrix is for a quantized type: outtype {outtype} has no use for one"
        )
    checkpoint = text_part(open_checkpoint(Path(source), allow_pickle=allow_pickle))
    family = family_of(checkpoint.config)
    # The input of a quantizer has lost nothing before.
    type_name = wanted if wanted.lower() in OUTPUT_TYPES else usual_type(checkpoint)
    file_type = type_name if wanted == AUTOMATIC_TYPE else wanted
    described = Metadata()
    family.describe(checkpoint.config, described)
    vocabulary = read_vocabulary(checkpoint, pre=pre)
    vocabulary.describe(described)
    # A quantizer takes plain numbers.
    keeps_blocks = file_type == type_name
    tensors = map_tensors(checkpoint, family, type_name, keeps_blocks=keeps_blocks)
    name = name_of(checkpoint.folder, sum(tensor.n_parameters for tensor in tensors))
    metadata = general_metadata(name, type_name)
    metadata.text("general.name", loadable_name(name.name, checkpoint, vocabulary.tokens))
    metadata.add(described)
    return ConversionPlan(
        checkpoint=checkpoint,
        architecture=family.gguf_architecture,
        metadata=metadata,
        tensors=tensors,
        vocab_size=len(vocabulary.tokens),
        type_name=type_name,
        file_type=file_type,
        file_name=file_name(name, file_type),
    )


def general_metadata(name: ModelName, file_type: str) -> Metadata:
    """Return the keys of a model's or a head's file for its name, its kind and its source."""
    metadata = Metadata()
    metadata.text("general.type", "model")
    name.describe(metadata)
    metadata.count("general.file_type", FILE_TYPES[file_type].number)
    metadata.count("general.quantization_version", 2)
    metadata.text(SOURCE_KEY, SourceDigest.placeholder)
    return metadata


def convert_checkpoint(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    outtype: str = "f16",
    force: bool = False,
    allow_pickle: bool = False,
    pre: str | None = None,
    imatrix: str | os.PathLike[str] | None = None,
    verify: bool | None = False,
    n_threads: int = 0,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert the folder `source` (config.json, weights, tokenizer.json) to the GGUF file `output`.

    `outtype`, `pre` and `imatrix` are as in `plan_conversion`; vectors stay float32. `output` may
    be a folder, None means the current one: the file is then named by the GGUF convention.
    `allow_pickle` opens .bin and .pt weights, as tensors only, if there are no safetensors.
    `verify` compares logits with transformers, if that is installed, and None does for models of
    up to SMALL_MODEL parameters; names, shapes and types are always compared. `n_threads` are the
    quantizer's and the comparison's, 0 for as many as cores.

    Config, vocabulary and shapes are checked before the first byte is written, then the tensors are
    read piece by piece, and the file appears whole or not at all.

    Raises OptionError (unknown `outtype`, `output` exists and `force` is not given),
    FileMissingError, MalformedFileError, UnsupportedModelError; SpecrunError if the disk is full,
    the folder cannot be written or the logits are not the checkpoint's.
    """
    plan = plan_conversion(
        source, outtype=outtype, allow_pickle=allow_pickle, pre=pre, imatrix=imatrix
    )
    target = plan.output_in(None if output is None else Path(output))
    check_target(target, force=force)
    if verify is None:
        verify = plan.n_parameters <= SMALL_MODEL
    digest = SourceDigest(plan.checkpoint.folder)
    logits: LogitCheck | None = None

    def check(aside: Path) -> None:
        nonlocal logits
        if verify:
            options: dict[str, Any] = {"allow_pickle": allow_pickle, "n_threads": n_threads}
            logits = check_logits(aside, plan.checkpoint.folder, plan.type_name, **options)

    with TensorStream(digest) as stream:
        if plan.is_quantized:
            # The quantizer reads a file: both have to fit.
            require_free_space(target.parent, plan.n_bytes + plan.n_bytes // 2)
            with _intermediate(target) as whole:
                write_plan(plan, whole, stream.pieces, digest, progress=progress, check=check)
                options: dict[str, Any] = {
                    "force": force,
                    "n_threads": n_threads,
                    "imatrix": imatrix,
                }
                quantize_model(whole, target, plan.file_type, **options)
        else:
            write_plan(
                plan, target, stream.pieces, digest, force=force, progress=progress, check=check
            )
    return conversion_report(plan, target, digest.value, logits)


def write_plan(
    plan: ConversionPlan,
    target: Path,
    pieces: Callable[[MappedTensor], Iterable[Array]],
    digest: SourceDigest,
    *,
    force: bool = False,
    progress: Progress | None = None,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write the numbers that `pieces` yields; the file is compared with the plan before it appears.

    `digest` is complete once all pieces have been read, and `check` then looks at the file.
    """

    def finish(aside: Path) -> None:
        replace_text(aside, SOURCE_KEY, digest.placeholder, digest.value)
        check_written(aside, plan.tensors)
        if check is not None:
            check(aside)

    tensors = [
        PlannedTensor(info.name, info.shape, info.type_name, functools.partial(pieces, info))
        for info in plan.tensors
    ]
    name, metadata = plan.architecture, plan.metadata
    write_gguf(target, name, metadata, tensors, force=force, progress=progress, finish=finish)


def known_type(outtype: str, *, has_importance: bool = False) -> str:
    """Return the typed file type or AUTOMATIC_TYPE; raises OptionError for another.

    Without an importance matrix, that includes the types that need one.
    """
    if outtype.lower() == AUTOMATIC_TYPE:
        return AUTOMATIC_TYPE
    name = FILE_TYPE_ALIASES.get(outtype.upper(), outtype.upper())
    if name in FILE_TYPES and (has_importance or not FILE_TYPES[name].needs_importance):
        return name
    if name in FILE_TYPES:
        raise OptionError(
            f"outtype {outtype!r} needs an importance matrix: give one with --imatrix FILE "
            "(specrun imatrix makes it of the model in f16); heads have none"
        )
    quantized = [file_type.lower() for file_type in FILE_TYPES]
    quantized = [file_type for file_type in quantized if file_type not in OUTPUT_TYPES]
    hint = nearest(outtype.lower(), [*OUTPUT_TYPES, AUTOMATIC_TYPE, *quantized])
    raise OptionError(
        f"outtype is {outtype!r}: use one of {', '.join(OUTPUT_TYPES)}{hint}, {AUTOMATIC_TYPE}, "
        f"or to quantize {', '.join(quantized)}"
    )


@contextmanager
def _intermediate(target: Path) -> Iterator[Path]:
    """Yield the path of a hidden file in the folder of `target`, which is removed afterwards."""
    path = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}.whole")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def conversion_report(
    plan: ConversionPlan, target: Path, sha256: str, logits: LogitCheck | None
) -> ConversionReport:
    """Return the report of a file `target` written from tensors with the digest `sha256`."""
    header = read_header(target)
    return ConversionReport(
        output=target,
        architecture=plan.architecture,
        type_name=plan.file_type,
        n_tensors=len(header.tensors),
        n_parameters=plan.n_parameters,
        n_words=plan.vocab_size,
        n_bytes=header.file_size,
        source_bytes=plan.source_bytes,
        source_types=plan.source_types,
        tensor_types=header.tensor_type_counts,
        bits_per_weight=header.bits_per_weight,
        source_sha256=sha256,
        logits=logits,
    )
