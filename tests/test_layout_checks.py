"""Every check of the layout finds a made-up offender, and nothing where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.layout import (
    Floor,
    Source,
    folders_without_init,
    forbidden_imports,
    import_circles,
    imports_back_up,
    imports_upwards,
    long_lines,
    mixed_names,
    printing,
    read_sources,
    undocumented,
    unplaced,
    variables_called_one,
)

FLOORS = (
    Floor("base", ("tree", "law")),
    Floor("methods", ("drafters/eagle", "drafters/medusa", "drafters/state")),
    Floor("choice", ("drafters", "tuning")),
    Floor("top", ("session", "__init__")),
)


def sources(**texts: str) -> list[Source]:
    """Files by path: two underscores stand for a slash, `init` stands for `__init__`."""
    paths = {
        name.replace("__", "/").replace("init", "__init__"): text for name, text in texts.items()
    }
    return [Source(f"{path}.py", text) for path, text in paths.items()]


def test_files_are_read_with_their_paths(tmp_path: Path) -> None:
    (tmp_path / "runtime" / "heads").mkdir(parents=True)
    (tmp_path / "runtime" / "heads" / "tokens.py").write_text("x = 1\n")
    (tmp_path / "runtime" / "__init__.py").write_text("")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "more.py").write_text("")
    first, second = read_sources(tmp_path, ["runtime"])
    assert (first.path, first.module, first.folder) == (
        "runtime/__init__.py",
        "specrun.runtime",
        "runtime",
    )
    assert (second.path, second.module, second.text) == (
        "runtime/heads/tokens.py",
        "specrun.runtime.heads.tokens",
        "x = 1\n",
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import specrun.bindings.errors\nfrom specrun.runtime import tree\nimport numpy", []),
        ("from specrun.cli import main", ["specrun.cli.main"]),
        ("def f():\n    import specrun.cli.main", ["specrun.cli.main"]),
        ("if TYPE_CHECKING:\n    from specrun.cli.main import cli", ["specrun.cli.main.cli"]),
        ("from . import tree", ["..tree"]),
        ("from runtime import tree", ["runtime.tree"]),
        ("import tests.tiny", ["tests.tiny"]),
    ],
)
def test_imports_that_go_up_or_go_astray(text: str, found: list[str]) -> None:
    order = ["bindings", "runtime", "cli"]
    assert imports_upwards(sources(runtime__a=text), order) == [
        f"runtime/a.py: {name}" for name in found
    ]


def test_libraries_that_are_not_for_everybody() -> None:
    late = "def f():\n    import torch\nif TYPE_CHECKING:\n    from torch import nn\n"
    made = sources(cli__late=late, cli__early="import torch.nn", cli__none="import torchless")
    assert forbidden_imports(made, ["torch"], top_level_only=True) == ["cli/early.py: torch.nn"]
    assert sorted(forbidden_imports(made, ["torch"])) == [
        "cli/early.py: torch.nn", "cli/late.py: torch", "cli/late.py: torch.nn",
    ]  # fmt: skip


HOUSE = {
    "runtime__init": "from specrun.runtime.session import Session",
    "runtime__tree": "import numpy",
    "runtime__law": "from specrun.runtime.tree import DraftTree",
    "runtime__drafters__init": "from specrun.runtime.drafters.eagle.source import Eagle",
    "runtime__drafters__state": "from specrun.runtime.law import Law",
    "runtime__drafters__build": "from specrun.runtime.drafters import Eagle",
    "runtime__drafters__eagle__init": "",
    "runtime__drafters__eagle__source": "from specrun.runtime.drafters.state import State",
    "runtime__drafters__medusa__heads": "from specrun.runtime import tree",
    "runtime__tuning__tune": "from specrun.runtime.drafters import build",
    "runtime__session": "import specrun.runtime.tuning.tune",
}


def test_a_house_in_order_has_no_offenders() -> None:
    made = sources(**HOUSE)
    assert unplaced(made, "runtime", FLOORS) == []
    assert imports_back_up(made, "runtime", FLOORS) == []
    assert import_circles(made, "runtime", FLOORS) == []


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        (
            "runtime__law",
            "from specrun.runtime.session import Session, Conversation",
            "runtime/law.py (base) imports runtime/session.py (top)",
        ),
        (
            "runtime__tree",
            "def f():\n    import specrun.runtime.tuning.tune",
            "runtime/tree.py (base) imports runtime/tuning/tune.py (choice)",
        ),
        (
            "runtime__drafters__state",
            "if TYPE_CHECKING:\n    from specrun.runtime.drafters.build import build",
            "runtime/drafters/state.py (methods) imports runtime/drafters/build.py (choice)",
        ),
        (
            "runtime__tree",
            "from specrun.runtime import Session",
            "runtime/tree.py (base) imports runtime/session.py (top)",
        ),
    ],
)
def test_imports_that_run_back_up(path: str, text: str, found: str) -> None:
    assert imports_back_up(sources(**{**HOUSE, path: text}), "runtime", FLOORS) == [found]


def test_a_name_that_a_package_hands_on_is_its_makers() -> None:
    """What an `__init__` imports is no way up for those who take it there; what it makes is."""
    same_floor = {
        **HOUSE,
        "runtime__drafters__medusa__heads": "from specrun.runtime.drafters import Eagle",
    }
    assert imports_back_up(sources(**same_floor), "runtime", FLOORS) == []
    made_there = {**same_floor, "runtime__drafters__init": "Eagle = 1"}
    assert imports_back_up(sources(**made_there), "runtime", FLOORS) == [
        "runtime/drafters/medusa/heads.py (methods) imports runtime/drafters/__init__.py (choice)"
    ]


EAGLE, MEDUSA = "runtime__drafters__eagle__source", "runtime__drafters__medusa__heads"


@pytest.mark.parametrize(
    ("changed", "circle"),
    [
        (
            {
                EAGLE: "from specrun.runtime.drafters.medusa.heads import Heads",
                MEDUSA: "from specrun.runtime.drafters.eagle.source import Eagle",
            },
            ["runtime/drafters/eagle", "runtime/drafters/medusa"],
        ),
        (
            {
                EAGLE: "import specrun.runtime.drafters.medusa.heads",
                MEDUSA: "import specrun.runtime.drafters.state",
                "runtime__drafters__state": "import specrun.runtime.drafters.eagle.source",
            },
            ["methods", "runtime/drafters/eagle", "runtime/drafters/medusa"],
        ),
        (
            {"runtime__law": "import specrun.runtime.tuning.tune"},
            ["base", "methods", "runtime/drafters", "runtime/drafters/eagle", "runtime/tuning"],
        ),
    ],
)
def test_circles_between_folders(changed: dict[str, str], circle: list[str]) -> None:
    (found,) = import_circles(sources(**{**HOUSE, **changed}), "runtime", FLOORS)
    folders, _, whys = found.partition(": ")
    assert folders.split(", ") == circle
    assert len(whys.split("; ")) >= len(circle)


def test_a_circle_within_a_folder_is_its_own_affair() -> None:
    made = {**HOUSE, "runtime__tree": "import specrun.runtime.law"}
    assert import_circles(sources(**made), "runtime", FLOORS) == []


def test_files_on_no_floor_and_members_that_are_nothing() -> None:
    made = sources(**HOUSE, runtime__strange="", train__other="")
    floors = (*FLOORS, Floor("roof", ("gone", "law")))
    assert unplaced(made, "runtime", floors) == [
        "runtime/strange.py",
        "gone is nothing in runtime",
        *["law is on two floors"] * 2,
    ]


def test_folders_without_init_are_found() -> None:
    made = sources(runtime__a="", runtime__heads__c="")
    assert folders_without_init(made) == ["runtime", "runtime/heads"]
    assert folders_without_init(sources(runtime__init="", runtime__a="")) == []


@pytest.mark.parametrize(
    "text", ["print(1)", "input()", "import sys\nsys.stdout.write('')", "f(sys.stderr)"]
)
def test_printing_is_found(text: str) -> None:
    made = sources(train__quiet="log.print(1)\nprocess.stdout.read()", train__loud=text)
    assert [place.partition(":")[0] for place in printing(made)] == ["train/loud.py"]


def test_what_has_no_docstring_is_found() -> None:
    made = sources(
        runtime__good='"""Trees."""\nclass Tree:\n    """A tree."""\ndef _own(): ...',
        runtime__many='"""Trees."""\n@typing.overload\ndef f(): ...',
        runtime__bare="x = 1",
        runtime__class='"""Trees."""\nif True:\n    class Tree:\n        x = 1',
        runtime__function='"""Trees."""\nasync def grow(): ...',
    )
    found = ["runtime/bare.py", "runtime/class.py:3 Tree", "runtime/function.py:2 grow"]
    assert undocumented(made) == found


def test_names_that_are_listed_and_not_there_are_found() -> None:
    good = (
        '__all__ = ["a", "b", "C", "d"]\nimport a\nfrom x import y as b\nclass C: ...\nd: int = 1'
    )
    made = sources(runtime__good=good, runtime__lazy='__all__ = ["a"]\ndef __getattr__(name): ...')
    assert mixed_names(made) == []
    bad = sources(runtime__bad='__all__ = ["a", "a", "b"]\na = 1')
    assert mixed_names(bad) == ["runtime/bad.py: a", "runtime/bad.py: a", "runtime/bad.py: b"]


def test_long_lines_are_found() -> None:
    assert long_lines(sources(runtime__a=f"{'x' * 10}\n{'é' * 11}\n"), 10) == ["runtime/a.py:2"]


@pytest.mark.parametrize(
    "text",
    [
        "one = 1",
        "for one in x: ...",
        "[one for one in x]",
        "lambda one: 1",
        "def f(*, one): ...",
        "with x as one: ...",
        "one: int",
        "(one := 1)",
        "match x:\n    case [one]: ...",
    ],
)
def test_variables_called_one_are_found(text: str) -> None:
    made = sources(
        runtime__a=text, runtime__b="x.one = 1\nf(one=2)\none_more = 1\n'one'\nfrom one import x"
    )
    assert [place.partition(":")[0] for place in variables_called_one(made)] == ["runtime/a.py"]
