"""Drafters that are there already: NextN blocks, heads and models beside a file and in caches.

Models of the same vocabulary (by its hash) and at most half the size could draft, as `specrun
models` tells them; heads could that were made for this vocabulary and this width, those that come
with specrun too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from specrun.bench.accelerate.search import FoundDrafter
from specrun.bindings.gguf import read_header
from specrun.bindings.models.nextn import NEXTN_ARCHITECTURES, read_nextn
from specrun.runtime.language import method_of_head
from specrun.runtime.models import (
    ModelEntry,
    StoredModel,
    catalogue,
    could_draft,
    shipped_heads,
    stored_models,
)

_BESIDE, _OURS = "beside it", "comes with specrun"
_MOST_HEADS, _MOST_MODELS = 4, 3
_MOST_BESIDE = 200  # files of a folder that are looked into
_USUAL_RATIO = 20.0  # times smaller than its target: what usually drafts best


def found_drafters(target: Path, named: Sequence[Path] = ()) -> list[FoundDrafter]:
    """Return what could draft for a file, what is likely best first; raises as reading it does.

    What a user `named` is tried in any case, and before all others.
    """
    asked = [_named(path) for path in dict.fromkeys(named)]
    known = {path.resolve() for path in named}
    others = _looked_up(target)
    return asked + [new for new in others if new.path is None or new.path.resolve() not in known]


def _named(path: Path) -> FoundDrafter:
    header = read_header(path)
    method = method_of_head(header.architecture)
    alone = "mtp" if read_nextn(path, header).alone else "draft"
    return FoundDrafter(path.absolute(), method.name if method else alone, "named")


def _looked_up(target: Path) -> list[FoundDrafter]:
    header = read_header(target)
    blocks = read_nextn(target, header).count and header.architecture in NEXTN_ARCHITECTURES
    own = [FoundDrafter(None, "mtp", "NextN blocks of the file")] if blocks else []
    first, *others = catalogue(_models(target))
    fitting = [entry for entry in others if could_draft(entry, first)]
    heads = [entry for entry in fitting if entry.method is not None]
    models = sorted(
        (entry for entry in fitting if entry.method is None),
        key=lambda entry: abs(math.log(_ratio(first, entry) / _USUAL_RATIO)),
    )
    return own + [_found(entry) for entry in (*heads[:_MOST_HEADS], *models[:_MOST_MODELS])]


def _models(target: Path) -> Sequence[StoredModel]:
    """Return the target and all other files, each once, whatever leads to it."""
    beside = sorted(target.resolve().parent.glob("*.gguf"))[:_MOST_BESIDE]
    near = [StoredModel(path.name, _BESIDE, (path,)) for path in beside if path.is_file()]
    ours = [StoredModel(path.name, _OURS, (path,)) for path in shipped_heads()]
    models = {target.resolve(): StoredModel(target.name, "", (target,))}
    for model in (*near, *ours, *stored_models().models):
        models.setdefault(model.path.resolve(), model)
    return list(models.values())


def _ratio(target: ModelEntry, draft: ModelEntry) -> float:
    return (target.n_parameters or 1) / (draft.n_parameters or 1)


def _found(entry: ModelEntry) -> FoundDrafter:
    store = entry.model.store
    where = store if store in (_BESIDE, _OURS) else f"in the cache of {store}: {entry.model.name}"
    return FoundDrafter(entry.model.path.absolute(), entry.method or "draft", where)
