"""`specrun datastore build` and `info`: makes and shows REST's datastores.

A datastore is the suffix array of texts in one vocabulary; `info` also checks that it is whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.bindings.errors import MalformedFileError
from specrun.bindings.files import check_target
from specrun.cli.options.group import MODEL, OUTPUT, LazyCommand, LazyGroup, SectionedCommand
from specrun.cli.options.model import trust_option
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.options.types import FILE, PATH
from specrun.cli.terminal.screen import bytes_text, screen_bar
from specrun.cli.terminal.terminal import Terminal, one_line

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

    from specrun.runtime.drafters.retrieval import BuildProgress

_COMMANDS = (
    LazyCommand("specrun.cli.datastore", "build", "Make a datastore of text files."),
    LazyCommand("specrun.cli.datastore", "info", "Show the contents of a datastore, and check it."),
)

_EPILOG = """\b
Examples:
  specrun datastore build docs/*.md -m target.gguf -o docs.store
  specrun datastore info docs.store
  specrun chat -m target.gguf --drafter "rest(docs.store)"
"""


@click.group(cls=LazyGroup, lazy=_COMMANDS, epilog=_EPILOG)
def datastore() -> None:
    """Make and show datastores: texts ordered by context, from which rest(STORE) drafts."""


_BUILD_EPILOG = """\b
Examples:
  specrun datastore build manual.txt -m target.gguf -o manual.store
  specrun datastore build src/*.py docs/*.md -m target.gguf -o project.store --force

\b
Texts are UTF-8 and are kept apart from each other. The store fits every model with the same vocabulary as
MODEL, of which only the vocabulary is loaded. It takes about 8 bytes a token (2 to 3 times the text); memory
stays below some 300 MB whatever the size. Ctrl-C leaves nothing behind.
"""  # noqa: E501 - as it is shown


@click.command(cls=SectionedCommand, epilog=_BUILD_EPILOG)
@click.argument(
    "files", nargs=-1, required=True, type=FILE, metavar="FILES...", help="Texts in UTF-8."
)
@MODEL.model("-m, --model", "The target, whose vocabulary is used.", required=True)
@OUTPUT.option("-o, --output STORE", "The datastore to write.", PATH, required=True)
@OUTPUT.flag("--force", "Overwrite an existing file.")
@trust_option
@terminal_options
def build(
    files: tuple[Path, ...], model: Path, output: Path, force: bool, terminal: Terminal
) -> None:
    """Tokenize text files and order them for retrieval."""
    from specrun.bindings.models.model import Model
    from specrun.runtime.drafters.retrieval import build_store

    check_target(output, force=force)
    with Model(model, vocab_only=True) as vocab_model, _progress(terminal) as progress:
        header = build_store(
            files, vocab_model.vocabulary, output, model=model.name, force=force, progress=progress
        )
    size = bytes_text(output.stat().st_size)
    terminal.note(
        f"wrote {output}: {header.n_positions:,} tokens of {header.n_files:,} files "
        f"({bytes_text(header.n_text_bytes)}) in {size}; draft with --drafter 'rest({output})'"
    )


@contextmanager
def _progress(terminal: Terminal) -> Iterator[BuildProgress]:
    """Yield a function that shows the progress with the time left, if stderr is a screen."""

    def columns() -> list[ProgressColumn]:
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

        text = TextColumn("{task.description}")
        return [text, BarColumn(), TaskProgressColumn(), TimeRemainingColumn()]

    with screen_bar(terminal, columns, transient=False) as bar:
        if bar is None:
            yield lambda _what, _done, _total: None
            return
        tasks = {
            "reading": bar.add_task("reading", total=None),
            "ordering": bar.add_task("ordering", total=None, start=False),
        }

        def report(what: str, done: int, total: int) -> None:
            task = tasks[what]
            if not bar.tasks[task].started:
                bar.start_task(task)
            amount = f"{total:,} tokens"
            if what == "reading":
                amount = f"{bytes_text(done)} of {bytes_text(total)}"
            bar.update(task, completed=done, total=total, description=f"{what} {amount}")

        yield report


@click.command(cls=SectionedCommand)
@click.argument("store", type=FILE, metavar="STORE", help="The datastore.")
@MODEL.model("-m, --model", "Also check whether it fits this target.")
@json_option()
@trust_option
@terminal_options
def info(store: Path, model: Path | None, terminal: Terminal) -> None:
    """Show the contents of a datastore. All of it is read, to check that it is undamaged."""
    from specrun.runtime.drafters.retrieval import open_store, read_store_header, verify_store

    header = read_store_header(store)
    if not verify_store(store):
        raise MalformedFileError(
            f"the datastore {store} is damaged: its checksum differs; build it again"
        )
    if model is not None:
        from specrun.bindings.models.model import Model

        with Model(model, vocab_only=True) as target:
            open_store(store, target.vocabulary)
    if terminal.as_json:
        terminal.answer_json(dataclasses.asdict(header), indent=2)
        return
    lines = {
        "datastore": f"{store} ({bytes_text(store.stat().st_size)}, undamaged)",
        "tokens": (
            f"{header.n_positions:,} of {header.n_files:,} files "
            f"({bytes_text(header.n_text_bytes)} of text)"
        ),
        "vocabulary": (
            f"{header.n_words:,} tokens, hash {header.vocabulary[:12]}, of {one_line(header.model)}"
        ),
    }
    if model is not None:
        lines["fits"] = str(model)
    for name, value in lines.items():
        terminal.answer(f"{name:<11} {value}\n")
