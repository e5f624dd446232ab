"""`specrun completion`: the script that lets a shell complete commands, options and models."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from specrun.cli.options.group import SectionedCommand
from specrun.cli.options.output import terminal_options
from specrun.cli.terminal.terminal import Terminal

SHELLS = ("bash", "zsh", "fish")
_EPILOG = """\b
To have it in every shell:
  bash  eval "$(specrun completion bash)"          in ~/.bashrc
  zsh   eval "$(specrun completion zsh)"           in ~/.zshrc, behind compinit
  fish  specrun completion fish | source           in ~/.config/fish/config.fish
"""


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@click.argument("shell", required=False, type=click.Choice(SHELLS))
@terminal_options
@click.pass_context
def completion(context: click.Context, shell: str | None, terminal: Terminal) -> None:
    """Print the completion script of a shell; without SHELL, of the one that runs."""
    shell = shell or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise click.UsageError(f"name the shell: {', '.join(SHELLS)}")
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(context.find_root().command, {}, "specrun", "_SPECRUN_COMPLETE")
    # Not `source()`: it asks bash for its version, by running it.
    terminal.answer(script.source_template % script.source_vars() + "\n")
