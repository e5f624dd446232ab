"""`specrun clean`: lists the files in specrun's caches and state, and removes named ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from specrun.bindings.files import cache_folder, state_folder
from specrun.cli.options.config_file import config_path
from specrun.cli.options.group import OUTPUT, SectionedCommand
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.terminal.screen import bytes_text, print_table
from specrun.cli.terminal.terminal import Terminal

_EPILOG = """\b
Examples:
  specrun clean                    list everything, with its size
  specrun clean wheels cuts        remove these
  specrun clean --cache            remove files that can be made or fetched again
  specrun clean --all              also remove your own work and settings

\b
Models of the hub lie in its own cache, which other programs share: `hf cache` removes them.
To remove specrun itself: delete the checkout, or `pipx uninstall specrun`.
"""

_CONTENTS = {
    "wheels": "llama.cpp as it was built for `make`",
    "models": "published models of `specrun demo`",
    "profiles": "measurements of models on this machine, and the choices of accelerate and tune",
    "cuts": "drafters that accelerate cut out of models",
    "heads": "drafters that accelerate trained",
    "tried": "names of files that were opened before",
    "history": "lines typed in chats",
    "learn": "rejected drafts and drafters that learnt (--learn-keep)",
    "config": "the config file",
}


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@click.argument("names", nargs=-1, help="The names of the files to remove, as listed.")
@OUTPUT.flag("--cache", "Remove everything that can be made or fetched again.", dest="cache")
@OUTPUT.flag("--all", "Remove everything, also your own work and settings.", dest="everything")
@json_option()
@terminal_options
def clean(names: tuple[str, ...], cache: bool, everything: bool, terminal: Terminal) -> None:
    """List the files that specrun keeps on this disk, or remove them."""
    found = list(_kept())
    known = {each["name"] for each in found}
    unknown = [name for name in names if name not in known]
    if unknown:
        listed = ", ".join(sorted(known)) or "nothing"
        raise click.UsageError(f"{unknown[0]!r} is not kept: there is {listed}")
    for each in found:
        each["removed"] = everything or each["name"] in names or (cache and each["cache"])
    chosen = [each for each in found if each["removed"]]
    for each in chosen:
        path = Path(each["path"])
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if terminal.as_json:
        terminal.answer_json(found)
        return
    for each in chosen:
        terminal.note(f"removed {each['path']} ({bytes_text(each['bytes'])})")
    if chosen or names or cache or everything:
        terminal.note("nothing to remove" if not chosen else "")
    elif not found:
        terminal.say("Nothing is kept.")
    else:
        _list(found, terminal)


def _kept() -> Iterator[dict[str, Any]]:
    """Yield the facts of each entry of the cache and of the state, and of the config file.

    `cache`: it can be made or fetched again.
    """
    folders = {state_folder(): False, cache_folder(): True}  # Windows has one for both
    own = ("history", "learn")
    entries = [
        (path, path.name, is_cache and path.name not in own)
        for folder, is_cache in folders.items()
        for path in (sorted(folder.iterdir()) if folder.is_dir() else ())
    ]
    if config_path().is_file():
        entries.append((config_path(), "config", False))
    for path, name, is_cache in entries:
        inner = path.rglob("*") if path.is_dir() and not path.is_symlink() else (path,)
        sizes = [each.lstat().st_size for each in inner if not each.is_dir() or each.is_symlink()]
        facts = {"name": name, "path": str(path), "cache": is_cache}
        yield {**facts, "files": len(sizes), "bytes": sum(sizes)}


def _list(found: Sequence[dict[str, Any]], terminal: Terminal) -> None:
    rows = [
        (
            each["name"],
            bytes_text(each["bytes"]),
            f"{each['files']:,}",
            _CONTENTS.get(each["name"], ""),
            each["path"],
        )
        for each in found
    ]
    print_table(terminal, "kept by specrun", ("name", "size", "files", "contents", "path"), rows)
    total = bytes_text(sum(each["bytes"] for each in found))
    terminal.note(
        f"{total} in all; specrun clean NAME removes one, --cache all that can be made again"
    )
