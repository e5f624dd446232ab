"""`specrun learn show` and `forget`: rejected drafts and drafters that --learn-keep left."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import click

from specrun.bindings.errors import ModelError, OptionError
from specrun.cli.options.group import MODEL, OUTPUT, LazyCommand, LazyGroup, SectionedCommand
from specrun.cli.options.model import trust_option
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.options.types import FILE
from specrun.cli.terminal.screen import bytes_text
from specrun.cli.terminal.terminal import Terminal, one_line

_COMMANDS = (
    LazyCommand("specrun.cli.learn", "show", "Show what is kept of rejected drafts, and where."),
    LazyCommand("specrun.cli.learn", "forget", "Delete it, of one target or of all."),
)

_EPILOG = """\b
Examples:
  specrun chat -m target.gguf -md small.gguf --learn-keep
  specrun learn show
  specrun train drafter --online BUFFER --draft small.gguf -o learnt --gguf small-2.gguf
  specrun learn forget -m target.gguf

\b
What is kept are tokens of questions and answers, the target's laws where drafts were rejected,
and the drafters that learnt from them, in a folder that only you can read. Nothing is kept
without --learn-keep.
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """Files kept for a target; `problem` is the error of reading its buffer, or ""."""

    folder: Path
    target: str
    answers: int
    rejected: int
    n_bytes: int
    drafters: list[str]
    problem: str


@click.group(cls=LazyGroup, lazy=_COMMANDS, epilog=_EPILOG)
def learn() -> None:
    """Show or delete what draft models learn from (`--learn-keep`)."""


@click.command(cls=SectionedCommand)
@json_option()
@terminal_options
def show(as_json: bool, terminal: Terminal) -> None:
    """Show what is kept of rejected drafts, and where."""
    from specrun.runtime.online import kept_folders

    found = [_kept(folder) for folder in kept_folders()]
    if as_json:
        terminal.answer(json.dumps([_record(each) for each in found]) + "\n")
        return
    if not found:
        terminal.note(
            "nothing is kept: only --learn-keep (chat, generate, serve) keeps rejected drafts"
        )
    for each in found:
        terminal.answer(f"{one_line(each.target)}\n")
        what = f"{each.rejected:,} rejected drafts of {each.answers:,} answers"
        terminal.answer(f"  {each.problem or what}, {bytes_text(each.n_bytes)} in all\n")
        for name in each.drafters:
            terminal.answer(f"  drafter {one_line(name)}\n")
        terminal.answer(f"  {each.folder}\n")


@click.command(cls=SectionedCommand)
@MODEL.option("-m, --model", "The target to forget everything of.", FILE)
@OUTPUT.flag("--all", "Forget everything of every target.", dest="everything")
@trust_option
@terminal_options
def forget(model: Path | None, everything: bool, terminal: Terminal) -> None:
    """Delete rejected drafts and the drafters that learnt from them."""
    if (model is None) == (not everything):
        raise click.UsageError("give -m TARGET or --all, one of the two")
    from specrun.runtime.online import kept_folders

    folders = kept_folders() if model is None else [_folder_of(model)]
    for folder in folders:
        shutil.rmtree(folder)
        terminal.note(f"forgot {folder}")
    if not folders:
        terminal.note("nothing was kept")


def _folder_of(model: Path) -> Path:
    from specrun.bindings.models.model import Model
    from specrun.runtime.online import BufferKey, learn_folder

    with Model(model.expanduser(), vocab_only=True) as target:
        folder = learn_folder(BufferKey.of(target))
    if not folder.is_dir():
        raise OptionError(f"nothing is kept of {model}: specrun learn show lists what is")
    return folder


def _kept(folder: Path) -> Kept:
    from specrun.runtime.online import BUFFER_NAME, read_facts

    files = [path for path in folder.iterdir() if path.is_file()]
    n_bytes = sum(path.stat().st_size for path in files)
    drafters = sorted(path.name for path in files if path.suffix == ".gguf")
    buffer = folder / BUFFER_NAME
    if not buffer.exists():
        return Kept(folder, folder.name, 0, 0, n_bytes, drafters, "")
    try:
        facts = read_facts(buffer)
    except ModelError as error:
        return Kept(folder, folder.name, 0, 0, n_bytes, drafters, str(error))
    name = facts.key.name
    return Kept(folder, name, facts.n_answers, facts.n_places, n_bytes, drafters, "")


def _record(kept: Kept) -> dict[str, object]:
    return {
        "target": kept.target,
        "folder": str(kept.folder),
        "answers": kept.answers,
        "rejected": kept.rejected,
        "bytes": kept.n_bytes,
        "drafters": kept.drafters,
        "problem": kept.problem or None,
    }
