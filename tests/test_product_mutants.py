"""The tool that looks for superfluous tests: its mutants, and what it says of their killers."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from support.product_mutants import ROOT, Changes, codes_of, real_path, superfluous

from specrun.runtime.trees.layout import moves_onto

SOURCE = '''
LIMIT = 3

def outer(a, b: int = 2):
    """A text is no constant."""
    if a < b and not a:
        print("said")
        raise ValueError(f"{a} is 1")
    return a + LIMIT * 2
'''
MADE = [
    "if a <= b and (not a):",
    "if a < b and a:",
    "if a < b or not a:",
    "if True:",
    "if False:",
    "print('XXsaid')",
    "pass",  # in place of the call
    "pass",  # in place of `raise`
    "return a + LIMIT * 3",
    "return a + LIMIT / 2",
    "return a - LIMIT * 2",
    "return None",
]


def test_every_change_is_made_alone_and_in_functions_only() -> None:
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    found = Changes()
    found.visit(ast.parse(SOURCE))
    changed: list[str] = []
    for index in range(len(found.found)):
        text = ast.unparse(ast.fix_missing_locations(Changes(index).visit(ast.parse(SOURCE))))
        changed += [line.strip() for line in text.splitlines() if line not in plain]
    assert sorted(changed) == sorted(MADE)


def test_codes_are_found_by_the_place_of_their_function(tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text(SOURCE)
    plain, changed = codes_of(path), codes_of(path, len(MADE) - 1)
    place = (str(path), "outer", 4)
    assert plain[place] != changed[place]
    assert plain[place] == codes_of(path)[place]


@pytest.mark.parametrize(
    ("mutants", "left"),
    [
        ({"m": [["a"], []]}, ["b", "c"]),
        ({"m": [["a"], ["kept"]]}, ["a", "b", "c"]),
        # One of several is enough, and the one that most mutants need.
        ({"m": [["a", "b[1]"], []], "n": [["b[2]", "c"], []]}, ["a", "c"]),
    ],
)
def test_suspects_stay_that_a_mutant_needs(
    tmp_path: Path, mutants: dict[str, list[list[str]]], left: list[str]
) -> None:
    file = tmp_path / "mutants.json"
    file.write_text(json.dumps({"mutants": mutants, "suspects": ["a", "b", "c"]}))
    assert superfluous([file]) == left


def test_functions_that_were_imported_by_a_link_are_those_of_the_checkout() -> None:
    """Their code names the link: mutants of the checkout's files would never be put into them."""
    place = real_path(moves_onto.__wrapped__.__code__.co_filename)
    assert place == str(ROOT / "runtime/trees/layout.py")
    assert any(key[1] == "moves_onto" for key in codes_of(Path(place)))
