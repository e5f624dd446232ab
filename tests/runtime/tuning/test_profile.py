"""Profiles: kept by content, used where they apply, and ignored with one sentence where not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specrun.bindings import files as files_module
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.runtime.memory import LoadOptions
from specrun.runtime.planning import (
    ANY,
    Choice,
    Profile,
    describe_file,
    describe_settings,
    drafter_for,
    known_profile_file,
    load_profile,
    profile_file,
    save_profile,
    workload_of,
)
from specrun.runtime.planning.default_drafter import ChosenDrafter

pytestmark = pytest.mark.usefixtures("own_cache")

CONTEXT = ContextOptions(n_ctx=256, n_threads=1)
SETTINGS = describe_settings(LoadOptions(CONTEXT))
CHOICES = (
    Choice(0.0, "questions", "none", 1.0, "the curve is steep"),
    Choice(0.0, "edited", "prompt-lookup", 1.5),
    Choice(0.0, ANY, "prompt-lookup", 1.2),
    Choice(0.8, ANY, "lookahead", 1.1),
)


@pytest.fixture
def target(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy2(tiny_model, tmp_path / "target.gguf"))


def keep(target: Path, **changes: Any) -> Path:
    values = {"settings": SETTINGS, "choices": CHOICES}
    return save_profile(Profile(**{**values, "measured": "2026-11-23", **changes}), target)


def chosen(target: Path, temperature: float, workload: str = ANY, **options: Any) -> ChosenDrafter:
    warned: list[str] = []
    found = drafter_for(
        target, temperature, workload, options=LoadOptions(CONTEXT), warn=warned.append, **options
    )
    assert warned == []
    return found


def test_the_choice_is_that_of_the_workload_at_the_nearest_temperature(target: Path) -> None:
    keep(target)
    assert chosen(target, 0.1).expression == "prompt-lookup"
    assert chosen(target, 1.5).expression == "lookahead"
    assert chosen(target, 0.0, "questions").expression == "none"
    assert chosen(target, 0.0, "edited").expression == "prompt-lookup"
    assert chosen(target, 0.0, "songs").expression == "prompt-lookup"


def test_one_line_says_what_is_used_and_how_to_be_without_it(target: Path) -> None:
    keep(target)
    note = chosen(target, 0.0).note
    assert note == (
        "profile: prompt-lookup, 1.20 times plain decoding when measured (--no-profile: without it)"
    )
    plain = chosen(target, 0.0, "questions").note
    assert "decoding plainly" in plain
    assert "the curve is steep" in plain
    assert "\n" not in plain


def test_without_a_profile_auto_drafts(target: Path) -> None:
    assert chosen(target, 0.0) == ChosenDrafter("auto")
    keep(target)
    assert chosen(target, 0.0, use_profile=False) == ChosenDrafter("auto")


def test_a_rule_that_is_not_exact_gets_no_drafter_that_nobody_named(target: Path) -> None:
    keep(target)
    for rule in ("typical", "cascade-opt(alpha=0.1)", "lossy"):
        assert chosen(target, 0.0, accept=rule) == ChosenDrafter("none")
    assert chosen(target, 0.0, accept="block").expression == "prompt-lookup"


def test_a_file_keeps_its_profile_under_another_name(target: Path, tmp_path: Path) -> None:
    kept = keep(target)
    moved = target.rename(tmp_path / "better-name.gguf")
    assert known_profile_file(moved) == kept
    assert chosen(moved, 0.0).expression == "prompt-lookup"
    assert keep(moved) == kept
    assert len(list(kept.parent.iterdir())) == 1


def test_what_was_kept_is_read_back(target: Path, tiny_drafter: Path) -> None:
    files = {str(tiny_drafter): describe_file(tiny_drafter)}
    record = {"trials": [{"drafter": "none"}]}
    keep(target, files=files, record=record, finished=True)
    found = load_profile(target, SETTINGS)
    assert found is not None
    assert (found.choices, found.files, found.record) == (CHOICES, files, record)
    assert (found.finished, found.measured) == (True, "2026-11-23")


def _changed(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda content: content.update({name: value})


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an older version": (_changed("format", 0), "another version of specrun"),
    "another machine": (_changed("machine", {"cpu": "another"}), "on another machine"),
    "another file": (_changed("target", {"size": 1}), "is another file"),
    "other threads": (lambda content: content["settings"].update(threads=64), "threads 64, not 1"),
    "a drafter that is gone": (
        _changed("files", {"/nowhere/small.gguf": {}}),
        "/nowhere/small.gguf, which is not there",
    ),
    "no choices": (lambda content: content.pop("choices"), "is damaged"),
    "choices that are none": (_changed("choices", [7]), "is damaged"),
    "a drafter that is none": (
        lambda content: content["choices"][0].update(drafter="draft(("),
        "is damaged",
    ),
    "a speed that is none": (
        lambda content: content["choices"][0].update(speed_up="nan"),
        "is damaged",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_profile_that_does_not_apply_is_ignored_with_one_sentence(
    target: Path, case: str
) -> None:
    path = keep(target)
    change, reason = BROKEN[case]
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    warned: list[str] = []
    found = drafter_for(target, 0.0, options=LoadOptions(CONTEXT), warn=warned.append)
    assert found == ChosenDrafter("auto")
    assert len(warned) == 1
    assert reason in warned[0]
    assert "\n" not in warned[0]
    assert warned[0].startswith("the profile of target.gguf was ignored")


def test_a_profile_that_cannot_be_read_is_no_error(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(target)

    def fail(_path: Path, _most: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files_module, "_bytes_of", fail)
    warned: list[str] = []
    assert load_profile(target, SETTINGS, warn=warned.append) is None
    assert len(warned) == 1
    assert "Input/output error" in warned[0]


def test_a_drafter_that_changed_is_no_longer_used(
    target: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    small = Path(shutil.copy2(tiny_drafter, tmp_path / "small.gguf"))
    keep(target, files={str(small): describe_file(small)})
    shutil.copy(target, small)
    warned: list[str] = []
    assert load_profile(target, SETTINGS, warn=warned.append) is None
    assert f"{small} is another file" in warned[0]


def test_the_file_is_named_by_content(target: Path) -> None:
    name = profile_file(target).name
    target.write_bytes(target.read_bytes() + b"\0")
    assert profile_file(target).name != name


def test_long_prompts_are_edited() -> None:
    assert workload_of("Who are you?") == "questions"
    assert workload_of("Correct this: " + "words " * 400) == "edited"
