"""`specrun datastore info`: what a datastore holds, and whether it is whole."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from specrun.bindings.errors import MalformedFileError
from specrun.cli.option_group import SectionedCommand, option
from specrun.cli.option_types import ExistingFile
from specrun.cli.output_options import terminal_options
from specrun.cli.printable import one_line
from specrun.cli.quantities import bytes_text
from specrun.cli.terminal import Terminal

__all__ = ["info"]


@click.command(cls=SectionedCommand)
@click.argument("store", type=ExistingFile(), metavar="STORE")
@option("-m", "--model", section="Model", type=ExistingFile(), help="Also say whether it fits this target.")
@option("--json", "as_json", section="Output", is_flag=True, help="Print one JSON object.")
@terminal_options
def info(store: Path, model: Path | None, as_json: bool, terminal: Terminal) -> None:
    """Show what a datastore holds; reads all of it to check that it is undamaged."""
    from specrun.runtime.datastore.store_file import open_store, read_store_header, verify_store

    header = read_store_header(store)
    if not verify_store(store):
        raise MalformedFileError(f"the datastore {store} is damaged: its checksum differs; build it again")
    if model is not None:
        from specrun.bindings.model import Model

        with Model(model, vocab_only=True) as target:
            open_store(store, target.vocabulary)
    if as_json:
        terminal.answer(json.dumps(dataclasses.asdict(header), indent=2) + "\n")
        return
    lines = {
        "datastore": f"{store} ({bytes_text(store.stat().st_size)}, undamaged)",
        "tokens": f"{header.n_positions:,} of {header.n_files:,} files ({bytes_text(header.n_text_bytes)} of text)",
        "vocabulary": f"{header.n_words:,} words, hash {header.vocabulary[:12]}, of {one_line(header.model)}",
    }
    if model is not None:
        lines["fits"] = str(model)
    for name, value in lines.items():
        terminal.answer(f"{name:<11} {value}\n")
