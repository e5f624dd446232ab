"""`specrun models`: the GGUF models that are on this disk, and which could draft for which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from specrun.bindings.errors import FileMissingError
from specrun.cli.options.group import SectionedCommand
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.terminal.screen import bytes_text, count_text, print_table
from specrun.cli.terminal.terminal import Terminal, one_line

if TYPE_CHECKING:
    from specrun.runtime.models import ModelEntry

_EPILOG = """\b
Examples:
  specrun models                      everything
  specrun models smollm               those whose names hold this
  specrun chat -m smollm2-135m        a name that only one model has opens it
  specrun models --json

\b
Reads the caches of the Hugging Face hub, llama.cpp, ollama and LM Studio, and changes nothing:
LLAMA_CACHE, HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME and OLLAMA_MODELS name their folders. A model
could draft for those of the same vocabulary that are at least twice as large.
"""


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@click.argument("name", required=False, help="A part of the names to list.")
@json_option()
@terminal_options
def models(name: str | None, terminal: Terminal) -> None:
    """List the models on this disk: size, architecture, quantization, and fitting drafters."""
    from specrun.runtime.models import catalogue, stored_models

    found = stored_models()
    with terminal.meanwhile(f"reading {len(found.models)} files ..."):
        entries = _chosen(name, catalogue(found.models))
    if terminal.as_json:
        models = [_facts(entry) for entry in entries]
        terminal.answer_json({"models": models, "problems": list(found.problems)})
        return
    if entries:
        _print(terminal, entries)
    else:
        terminal.say("There are no models in the caches; specrun chat -hf OWNER/REPO fetches one.")
    for entry in entries:
        if entry.problem:
            terminal.warn(one_line(entry.problem, 400))
    for problem in found.problems:
        terminal.warn(one_line(problem, 400))


def _chosen(name: str | None, entries: list[ModelEntry]) -> list[ModelEntry]:
    """Return the entries whose names hold `name`; raises FileMissingError if none does."""
    if name is None:
        return entries
    wanted = name.casefold()
    chosen = [
        entry
        for entry in entries
        if any(wanted in said.casefold() for said in (entry.model.name, *entry.model.aliases))
    ]
    if not chosen:
        raise FileMissingError(f"no model here is called {name}: `specrun models` lists all")
    return chosen


def _print(terminal: Terminal, entries: Sequence[ModelEntry]) -> None:
    numbers = {entry.model.name: f"{number}" for number, entry in enumerate(entries, 1)}
    drafters = [
        " ".join(numbers[name] for name in entry.drafters if name in numbers) for entry in entries
    ]
    total = bytes_text(sum(entry.n_bytes for entry in entries))
    title = f"{len(entries)} model{'s' * (len(entries) > 1)}, {total}"
    rows = [
        (f"{number}", *_row(entry), by)
        for number, (entry, by) in enumerate(zip(entries, drafters, strict=True), 1)
    ]
    if terminal.answers_on_screen:
        _print_framed(terminal, title, rows)
    else:
        head = ("", "name", "in", "size", "model", "type", "use", "drafters")
        print_table(terminal, title, head, rows)
    if any(drafters):
        terminal.note(
            "drafters: models that could draft for it, by number; `specrun tune` measures"
        )


def _row(entry: ModelEntry) -> tuple[str, ...]:
    """Return name, store, size, model, type and use: chat needs a template, heads draft."""
    weights = "" if entry.n_parameters is None else count_text(entry.n_parameters)
    model = f"{entry.architecture or '?'} {weights}".strip()
    facts = (entry.model.name, entry.model.store, bytes_text(entry.n_bytes), model)
    if entry.problem is not None:
        return *facts, "damaged", ""
    use = "chat" if entry.chat_template else "text"
    use = use if entry.method is None else "head"
    return *facts, entry.quantization or "?", use


def _print_framed(terminal: Terminal, title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print the models below the names of their stores; only long names are broken."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    table.pad_edge, table.padding = False, (0, 2, 0, 0)
    table.add_column("", justify="right", style="dim", no_wrap=True)
    table.add_column("name", overflow="fold")
    for head in ("size", "model", "type", "use"):
        table.add_column(head, justify="right" if head == "size" else "left", no_wrap=True)
    before = None
    for number, called, store, *cells, by in rows:
        if store != before:
            table.add_row("", Text(one_line(store), style="bold cyan"))
            before = store
        name = Text(one_line(called))
        if by:
            name.append(f"\ndrafters: {by}", style="dim")
        table.add_row(number, name, *(Text(one_line(cell)) for cell in cells))
    Console(no_color=not terminal.color_answers, highlight=False).print(table)


def _facts(entry: ModelEntry) -> dict[str, Any]:
    return {
        "name": entry.model.name,
        "store": entry.model.store,
        "files": [str(path) for path in entry.model.files],
        "bytes": entry.n_bytes,
        "architecture": entry.architecture,
        "parameters": entry.n_parameters,
        "quantization": entry.quantization,
        "chat_template": entry.chat_template,
        "context_length": entry.n_ctx_train,
        "vocabulary_sha256": entry.vocabulary,
        "drafts_by": entry.method,
        "drafters": entry.drafters,
        "problem": entry.problem,
    }
