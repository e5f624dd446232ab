"""Prompts from -p, -f or a pipe, system prompts from -sys or -sysf, and the target of -m or --demo.

Commands that measure take several prompts (`prompts_option`), and those that do not time answers
may have several answered at once (`parallel_option`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import click

from specrun.cli.options.group import PROMPT, TEMPLATE, Decorator, Section, option_group
from specrun.cli.options.model import LoadSettings
from specrun.cli.options.types import FILE
from specrun.cli.terminal.terminal import MAX_TEXT_BYTES, decode_text, read_text, require_file

_MOST_AT_ONCE = 64  # prompts
_ASK = "give -m FILE, or --demo for the embedded models"


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """The prompt's text or file."""

    prompt: str | None
    file: Path | None


prompt_options = option_group(
    "prompt",
    PromptSettings,
    PROMPT.option("-p, --prompt TEXT", "The prompt; -: read it from stdin."),
    PROMPT.option("-f, --file", "Read the prompt from a file.", FILE),
)


def prompts_option(section: Section, help: str = "A prompt; repeatable.") -> Decorator:
    """Return -p of commands that have prompts answered to measure something."""
    return section.option("-p, --prompt TEXT", help, multiple=True)


def prompt_file_option(section: Section) -> Decorator:
    """Return -f, a file with one of the prompts of such a command."""
    return section.option("-f, --file", "A file that is one prompt.", FILE)


def no_template_option(section: Section) -> Decorator:
    """Return --no-chat-template of commands that have prompts answered to measure something."""
    help = "Continue the prompts as text, even if the model has a chat template."
    return section.flag("--no-chat-template", help)


def _read_system_prompt(system_prompt: str | None, system_prompt_file: Path | None) -> str | None:
    if system_prompt is not None and system_prompt_file is not None:
        raise click.UsageError("give one of -sys and -sysf")
    if system_prompt_file is not None:
        return read_prompt_file(system_prompt_file)
    return system_prompt


system_prompt_options = option_group(
    "system",
    _read_system_prompt,
    TEMPLATE.option(
        "-sys, --system-prompt TEXT", "The system prompt: the first message of a conversation."
    ),
    TEMPLATE.option("-sysf, --system-prompt-file", "The same, from a file.", FILE),
)


def read_prompt(settings: PromptSettings) -> str:
    """Return the prompt; one newline at the end of a file or a pipe is not part of it."""
    if settings.prompt is not None and settings.file is not None:
        raise click.UsageError("give one of -p and -f")
    if settings.file is not None:
        return read_prompt_file(settings.file)
    if settings.prompt is not None and settings.prompt != "-":
        return settings.prompt
    if settings.prompt is None and sys.stdin.isatty():
        raise click.UsageError("no prompt is given: use -p TEXT, -f FILE, or pipe it in")
    data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    return _without_last_newline(decode_text(data, "the standard input"))


def read_prompt_file(path: Path) -> str:
    """Return the text of a file without one newline at its end, as llama.cpp does."""
    return _without_last_newline(read_text(path))


def _without_last_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def named_target(load: LoadSettings, *, ask: str = _ASK) -> Path:
    """Return the file of -m, or the embedded target's with --demo; `ask` is advice in the error."""
    from specrun.runtime.demo import demo_target

    check_named(load, ask=ask)
    return require_file(load.model or demo_target())


def check_named(load: LoadSettings, *, ask: str = _ASK) -> None:
    """Raise UsageError unless exactly one of -m and --demo is given."""
    if load.demo == (load.model is not None):
        problem = "--demo and -m exclude each other" if load.demo else "no model is given"
        raise click.UsageError(f"{problem}: {ask}")


def parallel_option(section: Section, default: int = 1) -> Decorator:
    """Return `--parallel`, the conversations that an engine answers at once."""
    return section.option(
        "--parallel N",
        "Prompts that are answered at once, their drafts verified in one evaluation.",
        click.IntRange(1, _MOST_AT_ONCE),
        default=default,
    )
