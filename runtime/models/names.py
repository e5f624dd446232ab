"""A model's name: a path, `hf:OWNER/REPO[:QUANT]` of the hub, or an unambiguous name of a store.

A path that is there is that file, whatever else is called so. Only `hf:` may ask the network.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from specrun.bindings.errors import FileMissingError, OptionError
from specrun.runtime.models.hub import Progress, fetch_model
from specrun.runtime.models.hub_files import HUB_PREFIX, HubName
from specrun.runtime.models.stores import StoredModel, stored_models

_SHOWN = 8


def locate_model(
    name: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    warn: Callable[[str], None] | None = None,
) -> Path:
    """Return the file that a name stands for; what looks like a path is returned as it is.

    Raises OptionError for a name that several models have, or that is none of the hub's,
    FileMissingError with the nearest names for one that nothing has, and what `fetch_model` raises.
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
        return path  # whoever opens it says that it is not there
    if not found:
        raise FileMissingError(_unknown(text, models))
    if len(found) > 1:
        raise OptionError(_ambiguous(text, found))
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
    """Return the models of a name: by all of it, else by another way to say it, else by a part."""
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


def _ambiguous(text: str, found: Sequence[StoredModel]) -> str:
    names = [model.name for model in found]
    if len(set(names)) < len(names):
        names = [f"{model.name} ({model.path})" for model in found]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{text} may be {', '.join(names[:_SHOWN])}{more}: name one of them"


def _unknown(text: str, models: Sequence[StoredModel]) -> str:
    said = {name.casefold(): model for model in models for name in (*model.aliases, model.name)}
    near = difflib.get_close_matches(text.casefold(), said, 6, cutoff=0.5)
    names = list(dict.fromkeys(said[name].name for name in near))[:3]
    if names:
        hint = f"did you mean {' or '.join(names)}?"
    elif models:
        hint = "`specrun models` lists those that there are"
    else:
        hint = f"to fetch one from the hub: -hf {text}" if text.count("/") == 1 else "give a path"
    return f"there is no file {text}, and no model of that name in the caches; {hint}"
