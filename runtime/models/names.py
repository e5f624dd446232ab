"""Names of models, and the catalogue of the models on this disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specrun.bindings.errors import FileMissingError, OptionError, SpecrunError
from specrun.bindings.gguf import GGUFHeader, read_header
from specrun.bindings.models import read_nextn, stored_fingerprint
from specrun.runtime.heads.file import TARGET_VOCABULARY
from specrun.runtime.language import method_of_head
from specrun.runtime.models.hub import HUB_PREFIX, HubName, Progress, fetch_model
from specrun.runtime.models.stores import StoredModel, stored_models

# == Names =========================================================================================
#
# An existing path is that file, whatever models have the same name. Only `hf:` uses the network.


_SHOWN = 8


def locate_model(
    name: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    warn: Callable[[str], None] | None = None,
) -> Path:
    """Return the file of a name; a path, or a text like one, is returned unchanged.

    Raises OptionError for a name of several models, or one that no hub's name can be,
    FileMissingError with the nearest names for an unknown one, and the errors of `fetch_model`.
    """
    text = os.fspath(name)
    if is_hub_name(text):
        return fetch_model(HubName.parse(text), progress=progress, warn=warn)
    path = Path(text).expanduser()
    if looks_like_path(path, text):
        return path
    models = stored_models().models
    found = distinct(matching(text, models))
    if not found and path.suffix.lower() == ".gguf":
        return path  # opening it reports that it is missing
    if not found:
        raise FileMissingError(_unknown(text, models))
    if len(found) > 1:
        names = [model.name for model in found]
        if len(set(names)) < len(names):
            names = [f"{model.name} ({model.path})" for model in found]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise OptionError(f"{text} may be {', '.join(names[:_SHOWN])}{more}: name one of them")
    return found[0].path


def is_hub_name(text: str) -> bool:
    """Whether a name begins as those of the hub do; a file may be called so, too."""
    return text.startswith(HUB_PREFIX) and not os.path.lexists(text)


def looks_like_path(path: Path, text: str) -> bool:
    """Whether a name is that of a file, there or not, rather than of a model in a store."""
    if os.path.lexists(path) or path.is_absolute() or text.startswith((".", "~", "\\")):
        return True
    return path.parent != Path() and path.parent.is_dir()


def matching(text: str, models: Sequence[StoredModel]) -> list[StoredModel]:
    """Return the models of a name: of a whole name, else of an alias, else of a part of one."""
    wanted = text.casefold()
    exact = [model for model in models if model.name.casefold() == wanted]
    said = [model for model in models if wanted in map(str.casefold, model.aliases)]
    is_part = wanted and not wanted.endswith(".gguf")
    held = [model for model in models if is_part and wanted in model.name.casefold()]
    return exact or said or held


def distinct(models: Iterable[StoredModel]) -> list[StoredModel]:
    """Return the models without further copies: the same name, and files of the same sizes."""
    kept: dict[tuple[str, tuple[int, ...]], StoredModel] = {}
    for model in models:
        sizes = tuple(file.stat().st_size for file in model.files)
        kept.setdefault((model.name.casefold(), sizes), model)
    return list(kept.values())


def _unknown(text: str, models: Sequence[StoredModel]) -> str:
    from difflib import get_close_matches

    said = {name.casefold(): model for model in models for name in (*model.aliases, model.name)}
    near = get_close_matches(text.casefold(), said, 6, cutoff=0.5)
    names = list(dict.fromkeys(said[name].name for name in near))[:3]
    if names:
        hint = f"did you mean {' or '.join(names)}?"
    elif models:
        hint = "`specrun models` lists those that there are"
    else:
        hint = f"to fetch one from the hub: -hf {text}" if text.count("/") == 1 else "give a path"
    return f"there is no file {text}, and no model of that name in the caches; {hint}"


# == The catalogue of stored models: their headers, and which could draft for which ================
#
# A model can draft for another of the same vocabulary that is at least twice as large; heads draft
# for models of the vocabulary and hidden size that they were made for. Whether drafting pays is
# another question: `specrun tune`.


LEAST_RATIO = 2.0
"""How many times as many parameters a target has as a model that could draft for it."""

_STATE_KEYS = (".ssm.", ".wkv.", ".shortconv.")  # of recurrent and hybrid models


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A stored model, and the facts in its headers; None for missing ones, `problem` if unreadable.

    `n_bytes` and `n_parameters` are those of all its files. `method` is the drafting method of
    files that draft but are no models: heads, or NextN blocks alone. `vocabulary` is the SHA-256 of
    the tokens, for heads of their target's. `drafters` are the entries that could draft for it.
    """

    model: StoredModel
    n_bytes: int
    architecture: str | None = None
    n_parameters: int | None = None
    quantization: str | None = None
    chat_template: bool = False
    n_ctx_train: int | None = None
    vocabulary: str | None = None
    width: int | None = None
    method: str | None = None
    recurrent: bool = False
    problem: str | None = None
    drafters: list[str] = field(default_factory=list)


def catalogue(models: Sequence[StoredModel]) -> list[ModelEntry]:
    """Return an entry for each model, with the names of those that could draft for it."""
    entries = [_described(model) for model in models]
    for target in entries:
        target.drafters.extend(entry.model.name for entry in entries if could_draft(entry, target))
    return entries


def could_draft(drafter: ModelEntry, target: ModelEntry) -> bool:
    """Whether one could draft for the other, by vocabulary, kind and size."""
    if target.method is not None or target.vocabulary is None:
        return False
    if drafter.vocabulary != target.vocabulary or drafter is target:
        return False
    if drafter.method is not None:
        return drafter.width in (None, target.width)
    sizes = drafter.n_parameters or 0, target.n_parameters or 0
    return not drafter.recurrent and 0 < sizes[0] * LEAST_RATIO <= sizes[1]


def _described(model: StoredModel) -> ModelEntry:
    n_bytes = sum(_sizes(model))
    try:
        headers = [read_header(model.path)]
        headers += [read_header(path, named=False) for path in model.files[1:]]
        first = headers[0]
        method = method_of_head(first.architecture)
        alone = method is None and read_nextn(model.path, first).alone
        drafts_by = "mtp" if alone else method.name if method else None
    except SpecrunError as error:
        return ModelEntry(model, n_bytes, problem=str(error))
    template = first.metadata.get("tokenizer.chat_template")
    vocabulary = first.metadata.get(TARGET_VOCABULARY)  # of a head, its target's
    if not isinstance(vocabulary, str):
        fingerprint = stored_fingerprint(first)
        vocabulary = None if fingerprint is None else fingerprint.hex()
    # Of a head, the size of its target's hidden states, which it reads.
    width = _number(first, "target_hidden_size")
    if width is None and method is not None:
        width = _number(first, "embedding_length_out")
    return ModelEntry(
        model,
        n_bytes,
        architecture=first.architecture,
        n_parameters=sum(header.n_parameters for header in headers),
        quantization=first.file_type_name,
        chat_template=isinstance(template, str),
        n_ctx_train=_number(first, "context_length"),
        vocabulary=vocabulary,
        width=_number(first, "embedding_length") if width is None else width,
        method=drafts_by,
        recurrent=is_recurrent(first),
    )


def answers_alone(path: Path) -> bool:
    """Whether a file may answer as a model: it is no head and no adapter, or cannot be read."""
    try:
        header = read_header(path)
        if header.metadata.get("general.type", "model") != "model":
            return False
        return method_of_head(header.architecture) is None and not read_nextn(path, header).alone
    except SpecrunError:
        return True  # opening it raises the reason


def is_recurrent(header: GGUFHeader) -> bool:
    """Whether a model keeps a recurrent state, by its header: it cannot draft as a small model."""
    keys = tuple(f"{header.architecture}{key}" for key in _STATE_KEYS)
    return any(name.startswith(keys) for name in header.metadata)


def _sizes(model: StoredModel) -> Iterator[int]:
    for path in model.files:
        with contextlib.suppress(OSError):
            yield path.stat().st_size


def _number(header: GGUFHeader, name: str) -> int | None:
    value = header.metadata.get(f"{header.architecture}.{name}")
    return value if isinstance(value, int) and not isinstance(value, bool) else None
