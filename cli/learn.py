"""`specrun learn show` and `forget`: the files of --learn-keep and --keep-answers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click

from specrun.bindings.errors import ModelError, OptionError
from specrun.cli.options.group import MODEL, OUTPUT, LazyCommand, LazyGroup, SectionedCommand
from specrun.cli.options.model import trust_option
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.options.types import FILE
from specrun.cli.terminal.screen import bytes_text
from specrun.cli.terminal.terminal import Terminal, one_line

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


def _kept(folder: Path) -> dict[str, Any]:
    """Return the facts of the files kept for a target, with the error of reading its buffer."""
    from specrun.runtime.online import BUFFER_NAME, read_facts

    files = [path for path in folder.iterdir() if path.is_file()]
    target, answers, rejected, problem = folder.name, 0, 0, None
    if (folder / BUFFER_NAME).exists():
        try:
            facts = read_facts(folder / BUFFER_NAME)
            target, answers, rejected = facts.key.name, facts.n_answers, facts.n_places
        except ModelError as error:
            problem = str(error)
    return {
        "target": target,
        "folder": str(folder),
        "answers": answers,
        "rejected": rejected,
        "bytes": sum(path.stat().st_size for path in files),
        "drafters": sorted(path.name for path in files if path.suffix == ".gguf"),
        "problem": problem,
    }


def _kept_answers() -> list[dict[str, Any]]:
    """Return the facts of the stores of answers, each with its error."""
    from specrun.runtime.drafters.retrieval import StoreHeader, kept_answers

    found: list[dict[str, Any]] = []
    for path, header in kept_answers():
        target, answers, tokens, problem = path.name, 0, 0, None
        if isinstance(header, StoreHeader):
            target = f"answers of {header.model}'s vocabulary"
            answers, tokens = header.n_files, header.n_positions
        else:
            problem = str(header)
        facts: dict[str, Any] = {
            "target": target,
            "folder": str(path),
            "answers": answers,
            "rejected": 0,
        }
        size = path.stat().st_size
        found.append({**facts, "bytes": size, "drafters": [], "problem": problem, "tokens": tokens})
    return found


@click.command(cls=SectionedCommand)
@json_option()
@terminal_options
def show(as_json: bool, terminal: Terminal) -> None:
    "Show the kept answers and their folder."
    from specrun.runtime.online import kept_folders

    found = [*map(_kept, kept_folders()), *_kept_answers()]
    if as_json:
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
