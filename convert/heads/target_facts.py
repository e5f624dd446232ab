"""Facts of a target that its heads must fit: sizes, vocabulary, rotary embedding.

They come from a GGUF file, or from a checkpoint folder with config and tokenizer.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specrun.bindings.errors import (
    MalformedFileError,
    OptionError,
    PairError,
    UnsupportedModelError,
)
from specrun.bindings.gguf import read_header
from specrun.bindings.models import Model
from specrun.convert.checkpoint import (
    Checkpoint,
    SourceTensor,
    open_checkpoint,
    read_json_object,
)
from specrun.convert.families import family_of
from specrun.convert.families.family import Array
from specrun.convert.gguf import GGUFSource, Metadata, name_of, write_gguf
from specrun.convert.text_part import text_part
from specrun.convert.tokenizer import read_vocabulary

_TOKENIZER = "tokenizer."
_ROPE_FACTORS, _EMBEDDING = "rope_freqs.weight", "token_embd.weight"
Setting = bool | int | float | str
Matrices = tuple[SourceTensor, SourceTensor]
_Loaders = tuple[Callable[[], Metadata], Callable[[], Array | None], Callable[[], Matrices]]


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target as heads see it; `path` is the GGUF file or the checkpoint folder it was read from.

    `settings` are the architecture's keys without its name in front, as llama.cpp names them
    ("rope.freq_base", "context_length", "attention.layer_norm_rms_epsilon"): those that hold one
    value. `fingerprint` is `Vocabulary.fingerprint` of the loaded model. `load_tokenizer` returns
    the `tokenizer.*` keys to copy, and `load_rope_factors` the numbers that divide the rope
    frequencies ([head width / 2], None for none). `load_matrices` returns its embeddings and its
    output matrix, which may be the same. `has_sections`: its rope has some (M-RoPE).
    """

    path: Path
    name: str
    architecture: str
    hidden_size: int
    vocab_size: int
    n_layers: int
    fingerprint: bytes
    settings: Mapping[str, Setting]
    load_tokenizer: Callable[[], Metadata]
    load_rope_factors: Callable[[], Array | None]
    load_matrices: Callable[[], Matrices]
    has_sections: bool = False

    def describe(self, metadata: Metadata) -> None:
        """Add the keys that name the target a head was made for."""
        metadata.text("specrun.target.name", self.name)
        metadata.text("specrun.target.architecture", self.architecture)
        sizes = {"embedding_length": self.hidden_size, "block_count": self.n_layers}
        metadata.counts("specrun.target", **sizes, vocab_size=self.vocab_size)
        metadata.text("specrun.target.vocabulary_sha256", self.fingerprint.hex())

    def summary(self) -> dict[str, str | int]:
        """Return the target's names and sizes, by the names of these fields, for reports."""
        return {
            "path": str(self.path),
            "name": self.name,
            "architecture": self.architecture,
            "hidden_size": self.hidden_size,
            "n_words": self.vocab_size,
            "n_layers": self.n_layers,
            "fingerprint": self.fingerprint.hex(),
        }

    def count(self, key: str, default: int | None = None) -> int:
        """Return a setting that must be a positive whole number."""
        return _count(self.settings, key, self.path, default)

    def number(self, key: str, default: float) -> float:
        """Return a setting that must be a positive number."""
        value = self.settings.get(key, default)
        if isinstance(value, bool | str) or not value > 0:
            raise MalformedFileError(f"{self.path} has {value!r} as {key}, no positive number")
        return value

    def check_fits(self, head: Path, *, hidden_size: int, vocab_size: int) -> None:
        """Raise PairError unless a head has this size of hidden states and vocabulary."""
        if hidden_size != self.hidden_size:
            reads = f"it reads hidden states of {hidden_size} numbers"
            raise misfit(self, head, f"{reads}, and the target's have {self.hidden_size}")
        if vocab_size != self.vocab_size:
            tokens = f"{vocab_size} tokens, and the target has {self.vocab_size}"
            raise misfit(self, head, f"it predicts {tokens}")


def own_layers(target: TargetFacts) -> int:
    """Return the number of a target's layers without the NextN blocks behind them."""
    return target.n_layers - int(target.settings.get("nextn_predict_layers", 0))


def misfit(target: TargetFacts, head: object, problem: str) -> PairError:
    """Return the error for a head, or its config, that was made for another target."""
    return PairError(f"{head} does not fit the target {target.path}: {problem}")


def target_facts(target: str | os.PathLike[str], *, pre: str | None = None) -> TargetFacts:
    """Return the facts of a GGUF model, or of a checkpoint folder with config and tokenizer.

    A folder needs no weights; `pre` is as in `plan_conversion`, and for folders. Raises
    OptionError, FileMissingError, MalformedFileError, UnsupportedModelError, as the reading of a
    model does.
    """
    path = Path(target)
    if path.is_dir():
        return _of_folder(path, pre)
    if pre is not None:
        raise OptionError(
            f"{path} has its own way to split text: leave the pre-tokenizer ({pre}) out"
        )
    return _of_file(path)


def _of_file(path: Path) -> TargetFacts:
    header = read_header(path)
    if not header.tensors or f"{header.architecture}.block_count" not in header.metadata:
        raise UnsupportedModelError(f"{path} is no target: a {header.architecture} without layers")
    with Model(path, vocab_only=True) as model:
        tokens = model.vocabulary.size, model.vocabulary.fingerprint
    named = header.metadata.get("general.name")
    name = named if isinstance(named, str) and named else path.stem

    def tokenizer() -> Metadata:
        vocabulary = Metadata()
        whole = GGUFSource(path).metadata()
        vocabulary.add(entry for entry in whole if entry[0].startswith(_TOKENIZER))
        return vocabulary

    def rope_factors() -> Array | None:
        source = GGUFSource(path)
        tensor = source.tensors.get(_ROPE_FACTORS)
        return None if tensor is None else source.numbers(tensor)

    def matrices() -> Matrices:
        source = GGUFSource(path)
        found = [source.tensors.get(own) for own in (_EMBEDDING, "output.weight")]
        embedding, output = found
        if embedding is None:
            raise source.unsupported(f"has no {_EMBEDDING}")
        return source.as_source(embedding), source.as_source(output or embedding)

    loaders = tokenizer, rope_factors, matrices
    return _facts(path, name, header.architecture, header.metadata, tokens, loaders)


def _of_folder(folder: Path, pre: str | None) -> TargetFacts:
    checkpoint = Checkpoint(folder, read_json_object(folder / "config.json"), {})
    family = family_of(checkpoint.config)
    described = Metadata()
    family.describe(checkpoint.config, described)
    values = ((key, value) for key, value, _, _ in described)
    as_stored = {key: float(np.float32(v)) if isinstance(v, float) else v for key, v in values}
    vocabulary = Metadata()
    read_vocabulary(checkpoint, pre=pre).describe(vocabulary)
    architecture, name = family.gguf_architecture, name_of(folder, 0).name
    tokens = _fingerprint(architecture, described, vocabulary)

    def rope_factors() -> Array | None:
        rules = (rule for rule in family.rules(checkpoint.config) if rule.name == _ROPE_FACTORS)
        return next((rule.change() for rule in rules), None)

    def matrices() -> Matrices:
        whole = text_part(open_checkpoint(folder))
        sources = {rule.name: rule.sources for rule in family.rules(whole.config)}
        names = sources[_EMBEDDING], sources.get("output.weight", sources[_EMBEDDING])
        shape = whole.config.count("vocab_size"), whole.config.count("hidden_size")
        first, last = (whole.tensor(name, shape) for (name,) in names)
        return first, last

    loaders = vocabulary.copy, rope_factors, matrices
    return _facts(folder, name, architecture, as_stored, tokens, loaders)


def _facts(
    path: Path,
    name: str,
    architecture: str,
    metadata: Mapping[str, Any],
    tokens: tuple[int, bytes],
    loaders: _Loaders,
) -> TargetFacts:
    own = f"{architecture}."
    found = {key.removeprefix(own): value for key, value in metadata.items() if key.startswith(own)}
    if not found:
        raise MalformedFileError(f"{path} has no facts of its {architecture}; get it again")
    single = (bool, int, float, str)
    settings = {key: value for key, value in found.items() if isinstance(value, single)}
    return TargetFacts(
        path=path,
        name=name,
        architecture=architecture,
        hidden_size=_count(settings, "embedding_length", path),
        vocab_size=tokens[0],
        n_layers=_count(settings, "block_count", path),
        fingerprint=tokens[1],
        settings=settings,
        has_sections="rope.dimension_sections" in found,
        load_tokenizer=loaders[0],
        load_rope_factors=loaders[1],
        load_matrices=loaders[2],
    )


def _fingerprint(architecture: str, described: Metadata, vocabulary: Metadata) -> tuple[int, bytes]:
    """Return the number of tokens and the fingerprint as llama.cpp reads the vocabulary."""
    whole = described.copy()
    whole.add(vocabulary)
    with tempfile.TemporaryDirectory(prefix="specrun-tokens-") as folder:
        path = Path(folder) / "tokens.gguf"
        write_gguf(path, architecture, whole, [])
        with Model(path, vocab_only=True) as model:
            return model.vocabulary.size, model.vocabulary.fingerprint


def _count(
    settings: Mapping[str, Setting], key: str, path: Path, default: int | None = None
) -> int:
    value = settings.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise MalformedFileError(f"{path} has {value!r} as {key}, which must be a count above 0")
    return value
