"""Where a prompt comes from: -p, -f, or a pipe; and the system prompt, -sys or -sysf.

The target that options name: a file, or the embedded one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import click

from specrun.cli.options.group import Decorator, option, option_group
from specrun.cli.options.model import LoadSettings
from specrun.cli.options.types import ExistingFile
from specrun.cli.terminal.paths import MAX_TEXT_BYTES, decode_text, read_text, require_file

_PROMPT, _CHAT = "Prompt", "Chat template"


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """Where the prompt comes from."""

    prompt: str | None
    file: Path | None


prompt_options = option_group(
    "prompt",
    PromptSettings,
    option(
        "-p", "--prompt", section=_PROMPT, metavar="TEXT", help="The prompt; -: read it from stdin."
    ),
    option(
        "-f", "--file", section=_PROMPT, type=ExistingFile(), help="Read the prompt from a file."
    ),
)


def no_template_option(section: str) -> Decorator:
    """Return --no-chat-template of commands that have prompts answered to measure something."""
    return option(
        "--no-chat-template",
        section=section,
        is_flag=True,
        help="Continue the prompts as text, even if the model has a chat template.",
    )


def _read_system_prompt(system_prompt: str | None, system_prompt_file: Path | None) -> str | None:
    if system_prompt is not None and system_prompt_file is not None:
        raise click.UsageError("give one of -sys and -sysf")
    if system_prompt_file is not None:
        return _without_last_newline(read_text(system_prompt_file))
    return system_prompt


system_prompt_options = option_group(
    "system",
    _read_system_prompt,
    option(
        "-sys",
        "--system-prompt",
        section=_CHAT,
        metavar="TEXT",
        help="What the model is told first.",
    ),
    option(
        "-sysf",
        "--system-prompt-file",
        section=_CHAT,
        type=ExistingFile(),
        help="The same, from a file.",
    ),
)


def read_prompt(settings: PromptSettings) -> str:
    """Return the prompt; one newline at the end of a file or a pipe is not part of it."""
    if settings.prompt is not None and settings.file is not None:
        raise click.UsageError("give one of -p and -f")
    if settings.file is not None:
        return _without_last_newline(read_text(settings.file))
    if settings.prompt is not None and settings.prompt != "-":
        return settings.prompt
    if settings.prompt is None and sys.stdin.isatty():
        raise click.UsageError("no prompt is given: use -p TEXT, -f FILE, or pipe it in")
    data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    return _without_last_newline(decode_text(data, "the standard input"))


def _without_last_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def named_target(
    load: LoadSettings, *, ask: str = "give -m FILE, or --demo for the embedded models"
) -> Path:
    """Return the file of -m, or the embedded target's where --demo is given; `ask` is said where
    neither is."""
    from specrun.runtime.demo import demo_target

    check_named(load, ask=ask)
    return require_file(load.model or demo_target())


def check_named(
    load: LoadSettings, *, ask: str = "give -m FILE, or --demo for the embedded models"
) -> None:
    """Raise UsageError unless exactly one of -m and --demo is given."""
    if load.demo == (load.model is not None):
        problem = "--demo and -m exclude each other" if load.demo else "no model is given"
        raise click.UsageError(f"{problem}: {ask}")
