"""Every file that specrun keeps for itself: junk in it is a warning that names it, and no more.

Each reader is given the whole file as junk, and then each value of a good one in turn.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specrun.bench.accelerate import training
from specrun.bench.accelerate.record import Contender, LeftOut, Record, Sweep
from specrun.bench.accelerate.training import TrainingOrder, TrainingPlan
from specrun.bench.diagnosis.diagnosis import Work
from specrun.bindings import files as files_module
from specrun.bindings.contexts import ContextOptions
from specrun.bindings.models import Model
from specrun.runtime.memory import LoadOptions
from specrun.runtime.online import BufferKey, learn_folder, open_rejections
from specrun.runtime.planning import (
    ANY,
    Choice,
    CostCurve,
    Profile,
    StoredPlan,
    describe_file,
    describe_settings,
    load_curve,
    load_plans,
    load_profile,
    measured_acceptance,
    profile,
    save_curve,
    save_plans,
    save_profile,
    write_json,
)

CONTEXT = ContextOptions(n_ctx=256, n_threads=1)
SETTINGS = describe_settings(LoadOptions(CONTEXT, n_gpu_layers=0, n_gpu_layers_draft=0))


@dataclass(frozen=True)
class Kept:
    """A good file, and its reader, which returns nothing ("falsy") if it is damaged."""

    path: Path
    read: Callable[[], object]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(files_module, "_warned", set())


def a_curve(target: Path, _draft: Path) -> Kept:
    curve = CostCurve((1, 2, 8), (0.01, 0.011, 0.02), (0.011, 0.012, 0.022), (0.1, 0.0, 0.2))
    path = save_curve(curve, target, CONTEXT, 0)
    return Kept(path, lambda: load_curve(target, CONTEXT, 0))


def _plan(target: Path, draft: Path) -> Path:
    acceptance = {"argmax": (0.6, 0.2), "with": (0.5,)}
    plan = StoredPlan(0.5, "n=3", ("n=3", "tree=2x1"), 100.0, 99.0, None, 8, acceptance)
    return save_plans(target, draft, SETTINGS, [plan])


def a_plan(target: Path, draft: Path) -> Kept:
    def read() -> object:
        return load_plans(target, draft, SETTINGS, warn=files_module.logger.warning)

    return Kept(_plan(target, draft), read)


def an_acceptance(target: Path, draft: Path) -> Kept:
    return Kept(_plan(target, draft), lambda: measured_acceptance(target, draft, "argmax"))


def a_profile(target: Path, draft: Path) -> Kept:
    work = Work(*[1] * 6, *[1.0] * 4, 1)
    record = Record(
        "basis",
        [Contender("lookahead", "built in")],
        [LeftOut("mtp", "no blocks")],
        [Sweep(0.0, ANY, 0, {"none": work, "lookahead": work})],
        ["curve"],
    )
    choices = (Choice(0.0, ANY, f'draft("{draft}", n=2)', 1.5, ""),)
    files = {str(draft): describe_file(draft)}
    kept = Profile(SETTINGS, choices, files, record=record.to_dict())
    path = save_profile(kept, target)

    def read() -> object:
        warn = files_module.logger.warning
        profile = load_profile(target, SETTINGS, warn=warn)
        if profile is None:
            return None
        read_record = Record.read(profile.record, "basis", lambda why: warn(f"{path}: {why}"))
        return profile.choice(0.0) if read_record.sweeps else None

    return Kept(path, read)


def a_training(target: Path, _draft: Path) -> Kept:
    order = TrainingOrder(target, 2.0, ("hello",))
    order.folder.mkdir(parents=True)
    plan = TrainingPlan("eagle", 2.0, 30, 20, 10, 1.5, "")
    content = {"plan": plan.__getstate__(), "prompts": ["hello"]}  # type: ignore[attr-defined]
    names = list(TrainingPlan.__dataclass_fields__)
    content["plan"] = dict(zip(names, plan.__getstate__(), strict=True))  # type: ignore[attr-defined]
    path = write_json(order.folder / "plan.json", content)
    return Kept(path, lambda: training._begun(order))


JSON_FILES = {
    "curve": a_curve,
    "plan": a_plan,
    "acceptance": an_acceptance,
    "profile": a_profile,
    "training": a_training,
}

WHOLE = {
    "empty": b"",
    "truncated": b'{"format": 2, "machine": {"cpu',
    "a list": b"[]",
    "a number": b"7",
    "null": b"null",
    "an empty object": b"{}",
    "binary": bytes(range(256)) * 8,
    "not UTF-8": b'{"format": "\xff"}',
    "deep": b"[" * 100_000,
    "deep and whole": b'{"format": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a large number": b'{"format": ' + b"9" * 5000 + b"}",
    "infinity": b'{"format": Infinity}',
    "huge": b" " * (17 << 20),
}

VALUES = [
    *("Infinity", "NaN", "1e999", "1" + 400 * "0", "1e-320", "-1", "0", "true", "null", '"1"'),
    *('"\\ud800"', "{}", "[[1e300]]", "[" * 400 + "]" * 400, '"' + "(" * 2000 + '"'),
]


@pytest.fixture(params=JSON_FILES)
def kept(request: pytest.FixtureRequest, tiny_model: Path, tiny_drafter: Path) -> Kept:
    return JSON_FILES[request.param](tiny_model, tiny_drafter)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    caplog.clear()
    files_module._warned.clear()
    return found


def test_a_good_file_is_read_without_a_warning(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    assert kept.read()
    assert warnings(caplog) == []
    kept.path.unlink()
    assert not kept.read()
    assert warnings(caplog) == []


@pytest.mark.parametrize("name", WHOLE)
def test_a_file_of_junk_is_named_and_left_out(
    kept: Kept, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    kept.path.write_bytes(WHOLE[name])
    assert not kept.read()
    (said,) = warnings(caplog)
    assert str(kept.path) in said or "another version" in said


def test_what_is_no_file_is_named_and_left_out(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    for make in (Path.mkdir, os.mkfifo):
        kept.path.unlink(missing_ok=True)
        make(kept.path)
        assert not kept.read()
        (said,) = warnings(caplog)
        assert str(kept.path) in said
        assert "Is a directory" in said or "not a regular file" in said
        if kept.path.is_dir():
            kept.path.rmdir()


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all values in a JSON value."""
    if way:
        yield way
    if isinstance(value, dict | list):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(below, (*way, key))


def changed(content: Any, way: tuple[Any, ...], text: str | None) -> str:
    """The JSON with another value, None: without it."""
    content = copy.deepcopy(content)
    at = content
    for key in way[:-1]:
        at = at[key]
    if text is None:
        del at[way[-1]]
        return json.dumps(content)
    at[way[-1]] = "PLACE"
    return json.dumps(content).replace('"PLACE"', text)


def numbers_in(value: object) -> Iterator[float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from numbers_in(each)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from numbers_in(getattr(value, name))


def test_any_value_may_be_junk(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is raised; kept values have finite numbers, and dropped ones were named."""
    content = json.loads(kept.path.read_text())
    n_left_out = 0
    for way in places(content):
        for text in (None, *VALUES):
            kept.path.write_text(changed(content, way, text))
            found, said = kept.read(), warnings(caplog)
            assert all(math.isfinite(number) for number in numbers_in(found))
            n_left_out += not found
            if isinstance(found, CostCurve):
                assert math.isfinite(found.seconds(64) / found.seconds(1))
            # A curve, acceptance or training for something else causes no warning.
            assert len(said) <= 1
    assert n_left_out > 100


# -- rejected drafts: binary ---------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE)
def test_what_was_kept_of_rejected_drafts_may_be_junk(
    name: str, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Model(tiny_model) as target:
        path = learn_folder(BufferKey.of(target)) / "buffer.bin"
        path.parent.mkdir(parents=True)
        for content in (WHOLE[name], b"SPECLEARN\x01" + WHOLE[name][:200]):
            path.write_bytes(content)
            store = open_rejections("keep", target)
            assert store is not None
            assert len(store.buffer) == 0
            (said,) = warnings(caplog)
            assert str(path) in said
            assert path.with_suffix(".damaged").read_bytes() == content
            assert not path.exists()


# -- parts of one profile --------------------------------------------------------------------------


def test_all_parts_of_a_profile_lie_in_one_file_and_leave_each_other_alone(
    tiny_model: Path, tiny_drafter: Path
) -> None:
    kept = [make(tiny_model, tiny_drafter) for make in (a_curve, a_plan, a_profile)]
    assert len({each.path for each in kept}) == 1
    save_curve(CostCurve.flat([0.5]), tiny_model, CONTEXT, 3)
    assert all(each.read() for each in kept)
    # Of another machine nothing is kept.
    content = json.loads(kept[0].path.read_text())
    kept[0].path.write_text(json.dumps({**content, "machine": "another"}))
    save_curve(CostCurve.flat([0.5]), tiny_model, CONTEXT, 0)
    assert load_curve(tiny_model, CONTEXT, 0) == CostCurve.flat([0.5])
    assert not kept[1].read()
    assert not kept[2].read()


def test_files_of_earlier_versions_are_left_out_with_one_line(
    tiny_model: Path, tiny_drafter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older = [profile._older_file("curves", tiny_model)]
    older.append(profile._older_file("plans", tiny_model, tiny_drafter))
    for path in older:
        write_json(path, {"format": 2})
    told: list[str] = []
    for _ in range(2):
        assert load_curve(tiny_model, CONTEXT, 0) is None
    assert load_plans(tiny_model, tiny_drafter, SETTINGS, warn=told.append) == []
    (line,) = warnings(caplog)
    for said, path in zip((line, *told), older, strict=True):
        assert f"{path} was written by another version of specrun; run specrun tune" in said
    a_curve(tiny_model, tiny_drafter)
    a_plan(tiny_model, tiny_drafter)
    assert load_curve(tiny_model, CONTEXT, 0)
    assert load_plans(tiny_model, tiny_drafter, SETTINGS, warn=told.append)
    assert warnings(caplog) == []
    assert len(told) == 1
