"""Detection of the kind of head in a checkpoint folder: by files, config, names of tensors."""

from __future__ import annotations

from pathlib import Path

from specrun.bindings.errors import OptionError, SpecrunError
from specrun.convert.checkpoint import PICKLE_ENDINGS, Checkpoint, open_checkpoint, read_json_object
from specrun.convert.heads import eagle, eagle3, hydra, lookahead, medusa
from specrun.convert.heads.head_kind import HeadKind
from specrun.convert.names import nearest

# The more particular ones first: the first that recognises a checkpoint has it.
HEAD_KINDS: tuple[HeadKind, ...] = (
    *(lookahead.PASS, lookahead.SPACE),
    *(medusa.KIND, hydra.KIND, eagle3.KIND, eagle.KIND),
)
"""All kinds of heads that can be converted."""

_WEIGHTS = tuple(name for kind in HEAD_KINDS for name in kind.weights)


def known_kind(name: str) -> HeadKind:
    """Return the kind of that name; raises OptionError for another."""
    found = next((kind for kind in HEAD_KINDS if kind.name == name), None)
    if found is None:
        known = [kind.name for kind in HEAD_KINDS]
        raise OptionError(f"kind is {name!r}: use one of {', '.join(known)}{nearest(name, known)}")
    return found


def open_head(folder: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Open a head's folder, with weights of any known name; raises as `open_checkpoint`."""
    return open_checkpoint(folder, allow_pickle=allow_pickle, also_named=_WEIGHTS)


def kind_of(checkpoint: Checkpoint) -> HeadKind:
    """Return the kind of an opened head; raises UnsupportedModelError for an unknown one."""
    found = _by_files_or_config(checkpoint.folder) or _by_tensors(checkpoint)
    if found is None:
        known = ", ".join(kind.name for kind in HEAD_KINDS)
        first = ", ".join(list(checkpoint.tensors)[:3])
        raise checkpoint.unsupported(f"is no head of a known layout ({known}): it has {first}, ...")
    return found


def detect_kind(folder: Path, *, allow_pickle: bool = False) -> HeadKind | None:
    """Return the kind of head in a folder, None for a model or what cannot be opened."""
    try:
        found = _by_files_or_config(folder)
        return found or _by_tensors(open_head(folder, allow_pickle=allow_pickle))
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
    return next((kind for kind in HEAD_KINDS if kind.in_tensors(names)), None)
