"""A command group that imports a command only when it is run: help and completion stay fast."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.shell_completion import CompletionItem

from specrun.cli.terminal.errors import INTERRUPTED, reported_errors


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command by its module and name, and its line in the group's help.

    `attribute` is what the module calls it, where Python does not allow its name.
    """

    module: str
    name: str
    short_help: str
    attribute: str = ""

    def load(self) -> click.Command:
        """Import and return the command; Ctrl-C meanwhile ends quietly, nothing has begun."""
        try:
            module = importlib.import_module(self.module)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None
        command: click.Command = getattr(module, self.attribute or self.name)
        return command


class LazyGroup(click.Group):
    """A group over a table of commands, of which those exist whose module is installed."""

    def __init__(self, *args: Any, lazy: Sequence[LazyCommand], **attributes: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **attributes)
        known = (command for command in lazy if importlib.util.find_spec(command.module))
        self._lazy = {command.name: command for command in known}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the table's order."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, imported now, or None."""
        known = self._lazy.get(cmd_name)
        return known.load() if known else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.short_help) for name, command in self._lazy.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of commands without importing them."""
        names = {name: known.short_help for name, known in self._lazy.items()}
        found = [(name, text) for name, text in names.items() if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(name, help=text) for name, text in found), *options]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; an unknown one is answered with the nearest."""
        if args[0] not in self._lazy and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], self._lazy, 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(self._lazy)}."
            ctx.fail(f"No such command {args[0]!r}. {hint}")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the group's own options, --help and --version among them."""
        with reported_errors(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's
        """Run the command; every error it raises is reported in one place."""
        with reported_errors(ctx):
            return super().invoke(ctx)
