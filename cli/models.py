"""`specrun models`: the GGUF models that are on this disk, and which could draft for which."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from specrun.bindings.errors import FileMissingError
from specrun.cli.options.group import SectionedCommand
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.terminal.table import bytes_text, count_text, print_table
from specrun.cli.terminal.terminal import Terminal, one_line

if TYPE_CHECKING:
    from specrun.runtime.models import ModelEntry, StoredModel

_EPILOG = """\b
Examples:
  specrun models                      everything
  specrun models smollm               those whose names hold this
  specrun chat -m smollm2-135m        a name that only one model has opens it
  specrun models --json

\b
Read are the caches of the Hugging Face hub, llama.cpp, ollama and LM Studio, nothing is changed:
LLAMA_CACHE, HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME and OLLAMA_MODELS say where they lie. A model
could draft for those of the same vocabulary that are at least twice as large.
"""


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@click.argument("name", required=False)
@json_option()
@terminal_options
def models(name: str | None, as_json: bool, terminal: Terminal) -> None:
    """List the models on this disk: size, architecture, quantization, and what drafts for what."""
    from specrun.runtime.models import catalogue, stored_models

    found = stored_models()
    entries = _chosen(name, catalogue(found.models))
    if as_json:
        problems = list(found.problems)
        facts = {"models": [_facts(entry) for entry in entries], "problems": problems}
        terminal.answer(json.dumps(facts) + "\n")
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
    chosen = [entry for entry in entries if _is_called(entry.model, wanted)]
    if not chosen:
        raise FileMissingError(f"no model here is called {name}: `specrun models` lists all")
    return chosen


def _is_called(model: StoredModel, wanted: str) -> bool:
    return any(wanted in said.casefold() for said in (model.name, *model.aliases))


def _print(terminal: Terminal, entries: Sequence[ModelEntry]) -> None:
    numbers = {entry.model.name: f"{number}" for number, entry in enumerate(entries, 1)}
    rows = [
        (
            numbers[entry.model.name],
            entry.model.name,
            entry.model.store,
            bytes_text(entry.n_bytes),
            entry.architecture or "?",
            "" if entry.n_parameters is None else count_text(entry.n_parameters),
            entry.quantization or "?",
            _use(entry),
            " ".join(numbers[name] for name in entry.drafters if name in numbers),
        )
        for entry in entries
    ]
    total = bytes_text(sum(entry.n_bytes for entry in entries))
    head = ("", "name", "in", "size", "architecture", "weights", "type", "use", "drafters")
    print_table(terminal, f"{len(entries)} models, {total}", head, rows)
    if any(row[-1] for row in rows):
        terminal.note("drafters: what could draft for it, by number; `specrun tune` measures")


def _use(entry: ModelEntry) -> str:
    """Return in a word or two what a file is good for."""
    if entry.problem is not None:
        return "damaged"
    if entry.method is not None:
        return f"drafts: {entry.method}"
    return "chat" if entry.chat_template else "text"


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
