"""Prompts from -p, -f or a pipe, system prompts from -sys or -sysf, and the target of -m or --demo.

Commands that measure take several prompts (`prompts_option`), and those that do not time answers
may have several answered at once (`parallel_option`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from specrun.cli.options.group import TEMPLATE, Decorator, Section, option_group
from specrun.cli.options.model import LoadSettings
from specrun.cli.options.types import FILE
from specrun.cli.terminal.terminal import MAX_TEXT_BYTES, decode_text, read_text, require_file

_ASK = "give -m FILE, or --demo for the embedded models"


def prompts_option(section: Section, help: str = "A prompt; repeatable.") -> Decorator:
    """Return -p of commands that have prompts answered to measure something."""
    return section.option("-p, --prompt TEXT", help, multiple=True)


def prompt_file_option(section: Section) -> Decorator:
    """Return -f, a file with one of the prompts of such a command."""
    return section.option("-f, --file", "Read one prompt from this file.", FILE)


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
    TEMPLATE.option("-sysf, --system-prompt-file", "Read the system prompt from this file.", FILE),
)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the prompt; one newline at the end of a file or a pipe is not part of it."""
    if prompt is not None and file is not None:
        raise click.UsageError("give one of -p and -f")
    if file is not None:
        return read_prompt_file(file)
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("no prompt is given: use -p TEXT, -f FILE, or pipe it in")
    data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    return _without_last_newline(decode_text(data, "the standard input"))


def read_prompt_file(path: Path) -> str:
    """Return the text of a file without one newline at its end, as llama.cpp does."""
    return _without_last_newline(read_text(path))


def measured_prompts(
    prompts: Sequence[str], file: Path | None = None, *, n_demo: int = 0
) -> tuple[str, ...]:
    """Return the prompts of -p and -f; without any, `n_demo` of the demo's, or 0: usual ones."""
    given = (*prompts, *(() if file is None else (read_prompt_file(file),)))
    if given:
        return given
    from specrun.bench.drafters.prompts import GENERAL_PROMPTS, demo_prompts

    return demo_prompts(n_demo) if n_demo else GENERAL_PROMPTS


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
        click.IntRange(1, 64),
        default=default,
    )
