"""`specrun clean`: lists the files in specrun's caches and state, and removes named ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class Kept:
    """A file or folder that specrun keeps; `is_cache` if it can be made or fetched again."""

    name: str
    path: Path
    is_cache: bool
    n_files: int
    n_bytes: int

    @property
    def contents(self) -> str:
        """Its contents, in words."""
        return _CONTENTS.get(self.name, "")


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@click.argument("names", nargs=-1, help="The names of the files to remove, as listed.")
@OUTPUT.flag("--cache", "Remove everything that can be made or fetched again.", dest="cache")
@OUTPUT.flag("--all", "Remove everything, also your own work and settings.", dest="everything")
@json_option()
@terminal_options
def clean(
    names: tuple[str, ...], cache: bool, everything: bool, as_json: bool, terminal: Terminal
) -> None:
    """List the files that specrun keeps on this disk, or remove them."""
    found = list(_kept())
    chosen = _chosen(found, names, cache=cache, everything=everything)
    for each in chosen:
        _remove(each.path)
    if as_json:
        terminal.answer_json([_facts(each, removed=each in chosen) for each in found])
        return
    for each in chosen:
        terminal.note(f"removed {each.path} ({bytes_text(each.n_bytes)})")
    if chosen or names or cache or everything:
        terminal.note("nothing to remove" if not chosen else "")
    elif not found:
        terminal.say("Nothing is kept.")
    else:
        _list(found, terminal)


def _kept() -> Iterator[Kept]:
    """Yield all that is there: each entry of the cache, of the state, and the config file."""
    folders = {state_folder(): False, cache_folder(): True}  # Windows has one for both
    own = ("history", "learn")
    for folder, is_cache in folders.items():
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            yield _measured(path, path.name, is_cache and path.name not in own)
    if config_path().is_file():
        yield _measured(config_path(), "config", is_cache=False)


def _measured(path: Path, name: str, is_cache: bool) -> Kept:
    inner = path.rglob("*") if path.is_dir() and not path.is_symlink() else (path,)
    sizes = [each.lstat().st_size for each in inner if not each.is_dir() or each.is_symlink()]
    return Kept(name, path, is_cache, len(sizes), sum(sizes))


def _chosen(
    found: Sequence[Kept], names: Sequence[str], *, cache: bool, everything: bool
) -> list[Kept]:
    known = {each.name for each in found}
    unknown = [name for name in names if name not in known]
    if unknown:
        listed = ", ".join(sorted(known)) or "nothing"
        raise click.UsageError(f"{unknown[0]!r} is not kept: there is {listed}")
    return [each for each in found if everything or each.name in names or (cache and each.is_cache)]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _facts(each: Kept, *, removed: bool) -> dict[str, object]:
    return {
        "name": each.name,
        "path": str(each.path),
        "cache": each.is_cache,
        "files": each.n_files,
        "bytes": each.n_bytes,
        "removed": removed,
    }


def _list(found: Sequence[Kept], terminal: Terminal) -> None:
    rows = [
        (each.name, bytes_text(each.n_bytes), f"{each.n_files:,}", each.contents, str(each.path))
        for each in found
    ]
    print_table(terminal, "kept by specrun", ("name", "size", "files", "contents", "path"), rows)
    total = bytes_text(sum(each.n_bytes for each in found))
    terminal.note(
        f"{total} in all; specrun clean NAME removes one, --cache all that can be made again"
    )
