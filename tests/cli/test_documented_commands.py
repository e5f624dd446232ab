"""Commands and flags that README.md and docs/ show as code exist; those of `tools/measure`, too."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from measure.command import measure
from specrun.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_OTHER_PROGRAMS = {"--mtp"}  # llama.cpp's converter

Name = tuple[str, ...]
_BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^    (specrun .*)$", re.MULTILINE)
_SPAN = re.compile(r"`([^`]+)`")
_CALL = re.compile(r"(?<![\w.-])(?<!from )specrun +(?=[a-z-])([^;&]*)")
_FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")


def _walk(command: click.Command, path: Name = ()) -> Iterator[tuple[Name, set[str]]]:
    yield path, {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _walk(child, (*path, name))


@functools.cache
def commands() -> dict[Name, set[str]]:
    """Return the flags of every command by its name, such as ("train", "eagle")."""
    known = (*_walk(cli), *_walk(measure, ("measure",)))
    found = {path: {*flags, "-h", "--help"} for path, flags in known}
    found["demo",] |= found["chat",] | found["train", "eagle3"]  # it hands options on to these
    return found


def wrong_in_call(call: str) -> list[str]:
    """Return the subcommands, or else the flags, behind `specrun` that do not exist."""
    known, words = commands(), call.partition(" | ")[0].split()
    paths: list[Name] = [()]
    while words and any(path[:-1] == paths[0] for path in known if path):
        names = words[0].strip(",.()").split("|")  # eagle|eagle3: either
        if not re.fullmatch(r"[a-z][a-z0-9-]*", names[0]):
            break
        paths = [(*paths[0], name) for name in names]
        if unknown := [" ".join(path) for path in paths if path not in known]:
            return unknown
        words.pop(0)
    flags = _FLAG.findall(" ".join(words))
    return [
        f"{' '.join(path)} {flag}" for path in paths for flag in flags if flag not in known[path]
    ]


def wrong_in_page(page: str) -> list[str]:
    """Return the commands and flags in the page's code that do not exist."""
    page = page.replace("python tools/measure ", "specrun measure ")
    blocks = "\n".join([*_BLOCK.findall(page), *_INDENTED.findall(page)]).replace("\\\n", " ")
    shown = [line.partition(" #")[0] for line in blocks.splitlines()]
    spans = [" ".join(span.split()) for span in _SPAN.findall(_BLOCK.sub("", page))]
    calls = [call for code in (*shown, *spans) for call in _CALL.findall(code)]
    calls += [span for span in spans if " " in span and (span.split()[0],) in commands()]
    every = set().union(*commands().values(), OF_OTHER_PROGRAMS)
    flags = [flag for span in spans if span.startswith("--") for flag in _FLAG.findall(span)[:1]]
    wrong = [flag for flag in flags if flag not in every]
    return [*wrong, *itertools.chain.from_iterable(map(wrong_in_call, calls))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_exist(page: Path) -> None:
    assert wrong_in_page(page.read_text()) == []


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        ("`specrun train drafter --cover FILE`", "train drafter --cover"),
        ("boosting: `train drafter\n--cover`", "train drafter --cover"),
        ("```sh\nspecrun chat --demo \\\n  --tempo 0  # --temp\n```", "chat --tempo"),
        ("    specrun chat --tempo 0", "chat --tempo"),
        ("`specrun benhc drafters`", "benhc"),
        ("`python tools/measure load --rounds 3`", "measure load --rounds"),
        ("`specrun train eagle|eagel`", "train eagel"),
        ("`--cover FILE`", "--cover"),
    ],
)
def test_what_does_not_exist_is_seen(page: str, wrong: str) -> None:
    assert wrong_in_page(page) == [wrong]
