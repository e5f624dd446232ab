"""`specrun learn show` and `forget`: the files of --learn-keep and --keep-answers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.bindings.errors import ModelError, OptionError, SpecrunError
from specrun.cli.options.group import MODEL, OUTPUT, LazyCommand, LazyGroup, SectionedCommand
from specrun.cli.options.model import trust_option
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.options.types import FILE
from specrun.cli.terminal.screen import bytes_text
from specrun.cli.terminal.terminal import Terminal, one_line

if TYPE_CHECKING:
    from specrun.runtime.drafters.retrieval import StoreHeader

_COMMANDS = (
    LazyCommand("specrun.cli.learn", "show", "Show the kept answers and their folder."),
    LazyCommand("specrun.cli.learn", "forget", "Delete it, of one target or of all."),
)

_EPILOG = """\b
Examples:
  specrun chat -m target.gguf -md small.gguf --learn-keep
  specrun learn show
  specrun train drafter --online BUFFER --draft small.gguf -o learnt --gguf small-2.gguf
  specrun learn forget -m target.gguf

\b
With --learn-keep specrun keeps the tokens of questions and answers, the target's distributions
at rejected drafts, and the trained drafters, in a folder that only you can read. With
--keep-answers the tokens of answers are kept, for all targets of a vocabulary. Nothing is kept
without these options.
"""


@click.group(cls=LazyGroup, lazy=_COMMANDS, epilog=_EPILOG)
def learn() -> None:
    """Show or delete the data kept for learning (`--learn-keep`, `--keep-answers`)."""


def _kept(path: Path) -> dict[str, Any]:
    """Return the facts of a target's folder, or of a store of answers."""
    files = [path]
    if path.is_dir():
        files = [each for each in path.iterdir() if each.is_file()]
    return {
        "target": path.name,
        "folder": str(path),
        "answers": 0,
        "rejected": 0,
        "bytes": sum(each.stat().st_size for each in files),
        "drafters": sorted(each.name for each in files if each.suffix == ".gguf"),
        "problem": None,
    }


def _kept_drafts(folder: Path) -> dict[str, Any]:
    """Return the facts of the files kept for a target, with the error of reading its buffer."""
    from specrun.runtime.online import BUFFER_NAME, MOST_FILE_BYTES, load_rejections

    found = _kept(folder)
    if (folder / BUFFER_NAME).exists():
        try:
            key, buffer = load_rejections(folder / BUFFER_NAME, most_bytes=MOST_FILE_BYTES)
        except ModelError as error:
            return {**found, "problem": str(error)}
        found |= {"target": key.name, "answers": len(buffer), "rejected": buffer.n_places}
    return found


def _kept_answers(path: Path, header: StoreHeader | SpecrunError) -> dict[str, Any]:
    """Return the facts of a store of answers, with the error of reading it."""
    found = {**_kept(path), "tokens": 0}
    if isinstance(header, SpecrunError):
        return {**found, "problem": str(header)}
    target = f"answers of {header.model}'s vocabulary"
    return {**found, "target": target, "answers": header.n_files, "tokens": header.n_positions}


@click.command(cls=SectionedCommand)
@json_option()
@terminal_options
def show(terminal: Terminal) -> None:
    "Show the kept answers and their folder."
    from specrun.runtime.drafters.retrieval import kept_answers
    from specrun.runtime.online import kept_folders

    found = [_kept_drafts(folder) for folder in kept_folders()]
    found += [_kept_answers(path, header) for path, header in kept_answers()]
    if terminal.as_json:
        terminal.answer_json(found)
        return
    if not found:
        terminal.note("nothing is kept: answers are kept only with --learn-keep or --keep-answers")
    for each in found:
        terminal.answer(f"{one_line(each['target'])}\n")
        what = f"{each['rejected']:,} rejected drafts of {each['answers']:,} answers"
        if "tokens" in each:
            what = f"{each['answers']:,} answers of {each['tokens']:,} tokens"
        terminal.answer(f"  {each['problem'] or what}, {bytes_text(each['bytes'])} in all\n")
        for name in each["drafters"]:
            terminal.answer(f"  drafter {one_line(name)}\n")
        terminal.answer(f"  {each['folder']}\n")


@click.command(cls=SectionedCommand)
@MODEL.option("-m, --model", "The target to forget everything of.", FILE)
@OUTPUT.flag("--all", "Forget everything of every target.", dest="everything")
@trust_option
@terminal_options
def forget(model: Path | None, everything: bool, terminal: Terminal) -> None:
    """Delete rejected drafts, the drafters that learnt from them, and answers."""
    if (model is None) == (not everything):
        raise click.UsageError("give -m TARGET or --all, one of the two")
    from specrun.runtime.drafters.retrieval import kept_answers
    from specrun.runtime.online import kept_folders

    answers = [path for path, _ in kept_answers()]
    places = [*kept_folders(), *answers] if model is None else _places_of(model)
    for place in places:
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink()
        terminal.note(f"forgot {place}")
    if not places:
        terminal.note("nothing was kept")


def _places_of(model: Path) -> list[Path]:
    """Return the folder of a target and the answers of its vocabulary, as far as they exist."""
    from specrun.bindings.models.model import Model
    from specrun.runtime.drafters.retrieval import answers_file
    from specrun.runtime.online import BufferKey, learn_folder

    with Model(model.expanduser(), vocab_only=True) as target:
        places = [learn_folder(BufferKey.of(target)), answers_file(target)]
    if not any(map(Path.exists, places)):
        raise OptionError(f"nothing is kept of {model}: specrun learn show lists everything kept")
    return [place for place in places if place.exists()]
