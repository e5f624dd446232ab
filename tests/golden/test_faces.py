"""Help texts, messages of wrong input, and public signatures."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from support.commands import run

from golden.record import check

FACES = ("specrun.runtime", "specrun.convert")


HELP = """
import json
import click
from click.testing import CliRunner
from specrun.cli.main import cli

def commands(group, path=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))

def shown(path):
    return CliRunner().invoke(cli, [*path, "--help"]).output.splitlines()

print(json.dumps({" ".join(path): shown(path) for path in [(), *commands(cli)]}))
"""


def test_help_of_every_command() -> None:
    """In a process of its own: other tests register drafters and rules, which help lists."""
    environment = {**os.environ, "COLUMNS": "100"}
    command = [sys.executable, "-c", HELP]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(found) > 30
    check("help", found)


WRONG = (
    "chat -m missing.gguf",
    "generate",
    "generate --demo -p hi -n -7",
    "generate --demo -p hi --temp hot",
    "generate --demo -p hi --temp nan",
    "generate --demo -p hi --top-p 2",
    "generate --demo -p hi --samplers top_q",
    "generate --demo -p hi --sampler-seq kz",
    "generate --demo -p hi --mirostat 3",
    "generate --demo -p hi -l 12",
    "generate --demo -p hi -fa maybe",
    "generate --demo -p hi -ctk f12",
    "generate --demo -p hi --accept hopeful",
    "generate --demo -p hi --accept typical(eps=2)",
    "generate --demo -p hi --drafter draft(",
    "generate --demo -p hi --drafter prompt-lookup(size=3)",
    "generate --demo -p hi --drafter promptlookup",
    "generate --demo -p hi --drafter draft(n=0)",
    "generate --demo -p hi --drafter draft(tree=0x2)",
    "generate --demo -p hi --drafter cascade(draft)",
    "generate --demo -p hi --drafter medusa(missing.gguf)",
    "generate --demo -p hi --shape 3",
    "generate --demo -p hi --shape none",
    "generate --demo -p hi --draft 3",
    "generate --demo -p hi -ngl some",
    "generate --demo -p hi --json-schema {",
    'generate --demo -p hi --grammar "root ::= "',
    "serve --demo --port 70000",
    "convert missing-folder",
    "quantize missing.gguf Q4_0",
    "inspect missing.gguf",
    "prove --demo --seconds 0",
    "bench nothing",
    "train nothing",
    "tune missing.gguf",
    "why missing.gguf",
    "models nothing",
    "nothing",
)


def test_messages_of_wrong_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    found = {}
    for line in WRONG:
        done = run(line)
        assert done.exit_code != 0, line
        found[line] = {"exit": done.exit_code, "says": done.output.splitlines()}
    check("wrong_input", found)


def test_public_signatures() -> None:
    found: dict[str, Any] = {}
    for face in FACES:
        module = importlib.import_module(face)
        for name in module.__all__:
            found[f"{face}.{name}"] = signature(getattr(module, name))
    check("signatures", found)


def signature(thing: Any) -> Any:
    if not inspect.isclass(thing):
        return str(inspect.signature(thing))
    if issubclass(thing, BaseException):
        return [base.__name__ for base in thing.__mro__]
    fields = [f.name for f in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else []
    members: dict[str, str] = {}
    for name, member in inspect.getmembers(thing):
        if name.startswith("_") and name not in ("__init__", "__enter__", "__iter__"):
            continue
        if callable(member):
            try:
                members[name] = str(inspect.signature(member))
            except (TypeError, ValueError):
                members[name] = "?"
        else:
            members[name] = "property" if isinstance(member, property) else type(member).__name__
    return {"fields": fields, "members": members}
