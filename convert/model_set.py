"""A target and the drafters made for it, converted to one folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specrun.bindings.errors import OptionError
from specrun.bindings.files import check_target
from specrun.convert.conversion import (
    ConversionPlan,
    ConversionReport,
    convert_checkpoint,
    plan_conversion,
)
from specrun.convert.gguf import Progress
from specrun.convert.heads.head_conversion import convert_head, detect_kind, plan_head
from specrun.convert.heads.target_facts import target_facts
from specrun.convert.quantize import HEAD_TYPE
from specrun.runtime.language import method_of_head
from specrun.runtime.models.model_set import SET_FILE, ModelSet

_DRAFT, _MTP = "draft", "mtp"


@dataclass(frozen=True, slots=True)
class SetMember:
    """One conversion of a set: its plan, the function that writes it, and how it drafts.

    `method` is None for the target.
    """

    plan: ConversionPlan
    write: Callable[..., ConversionReport]
    method: str | None
    place: Path


@dataclass(frozen=True, slots=True)
class SetPlan:
    """The plan of a set; nothing has been written. `model` is the target's file."""

    folder: Path
    model: Path
    members: Sequence[SetMember]

    def convert(
        self,
        *,
        force: bool = False,
        n_threads: int = 0,
        progress: Callable[[], AbstractContextManager[Progress | None]] = nullcontext,
    ) -> tuple[list[ConversionReport], ModelSet]:
        """Write all files, and then the one with the commands to run them.

        Raises as `convert_checkpoint` and `convert_head`; files that were written before stay.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in (*(member.place for member in self.members), self.folder / SET_FILE):
            check_target(path, force=force)
        reports = []
        for member in self.members:
            options: dict[str, Any] = {"force": force, "n_threads": n_threads}
            with progress() as shown:
                reports.append(member.write(member.place, progress=shown, **options))
        drafters = [(m.method, m.place) for m in self.members if m.method is not None]
        made = ModelSet(self.folder, self.model, drafters)
        made.write(force=force)
        return reports, made


def plan_set(
    target: str | os.PathLike[str],
    drafters: Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    outtype: str = "f16",
    allow_pickle: bool = False,
    pre: str | None = None,
    imatrix: str | os.PathLike[str] | None = None,
    verify: bool | None = False,
) -> SetPlan:
    """Plan the files of a target and of the drafters made for it.

    `target` is a checkpoint folder, or a GGUF file, which stays where it is; each of `drafters` is
    the folder of heads or of a draft model. The options are those of `convert_checkpoint`, for the
    target; draft models get its `outtype`, and heads Q8_0. Raises as `plan_conversion` and
    `plan_head`, and OptionError for two files of one name.
    """
    source, place, model = Path(target), Path(folder), Path(target)
    if place.exists() and not place.is_dir():
        raise OptionError(f"{place} is a file; name the folder for the set")
    members = list[SetMember]()
    checked: dict[str, Any] = {"allow_pickle": allow_pickle, "outtype": outtype}
    whole: dict[str, Any] = {**checked, "pre": pre, "imatrix": imatrix}
    if source.is_dir():
        plan = plan_conversion(source, **whole)
        model = place / plan.file_name
        write = partial(convert_checkpoint, source, verify=verify, **whole)
        members.append(SetMember(plan, write, None, model))
    facts = target_facts(source, pre=pre if source.is_dir() else None)
    for drafter in map(Path, drafters):
        kind = detect_kind(drafter, allow_pickle=allow_pickle)
        if kind is None:
            plan = plan_conversion(drafter, **checked)
            writes, method = partial(convert_checkpoint, drafter, **checked), _DRAFT
        else:
            options: dict[str, Any] = {"target": facts, "kind": kind.name}
            options |= {"allow_pickle": allow_pickle, "outtype": HEAD_TYPE.lower()}
            plan = plan_head(drafter, **options)
            found = method_of_head(plan.architecture)
            writes = partial(convert_head, drafter, **options)
            method = _MTP if found is None else found.name
        members.append(SetMember(plan, writes, method, place / plan.file_name))
    names = [member.plan.file_name for member in members]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise OptionError(f"two files of the set would be {twice}: rename the folder of one")
    return SetPlan(place, model, members)
