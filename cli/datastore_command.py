"""`specrun datastore`: the table of its commands."""

from __future__ import annotations

import click

from specrun.cli.lazy_group import LazyCommand, LazyGroup

__all__ = ["datastore"]

_COMMANDS = {
    "build": LazyCommand("specrun.cli.datastore_build_command", "build", "Make a datastore of text files."),
    "info": LazyCommand("specrun.cli.datastore_info_command", "info", "Show what a datastore holds, and check it."),
}

_EPILOG = """\b
Examples:
  specrun datastore build docs/*.md -m target.gguf -o docs.store
  specrun datastore info docs.store
  specrun chat -m target.gguf --drafter "rest(docs.store)"
"""


@click.group(cls=LazyGroup, lazy=_COMMANDS, epilog=_EPILOG)
def datastore() -> None:
    """Make and show datastores: texts ordered by context, from which rest(STORE) drafts."""
