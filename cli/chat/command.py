"""`specrun chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import click

from specrun.cli.chat.commands import COMMAND_NAMES, handle_command
from specrun.cli.chat.conversation import Conversation
from specrun.cli.chat.loop import Chat, ChatModels, make_line_reader
from specrun.cli.chat.settings import describe_sampling
from specrun.cli.doctor import specrun_version
from specrun.cli.options.drafting import LearnSettings, learn_options, require_training
from specrun.cli.options.group import SectionedCommand
from specrun.cli.options.model import (
    DraftSettings,
    LoadSettings,
    TemplateSettings,
    draft_options,
    load_options,
    lora_option,
    template_options,
)
from specrun.cli.options.opening import kept_session, session_option
from specrun.cli.options.output import (
    AnswerDisplay,
    answer_display_options,
    markdown_option,
    terminal_options,
)
from specrun.cli.options.prompt import system_prompt_options
from specrun.cli.options.sampling import AnswerSettings, answer_options
from specrun.cli.terminal.screen import count_text
from specrun.cli.terminal.terminal import Terminal, one_line
from specrun.runtime import Runtime

_EPILOG = """\b
Examples:
  specrun chat --demo                                   the embedded models, offline
  specrun chat --demo --show-draft                      see the drafted tokens
  specrun chat -m target.gguf -md small.gguf -c 8192
  specrun chat -m target.gguf -md small.gguf --learn    the drafter learns from rejected drafts
  specrun chat -m target.gguf --drafter prompt-lookup --temp 0 -sys "Be brief."
  printf 'Hello\\nAnd again\\n' | specrun chat -m target.gguf -q

\b
In the chat, /help lists the commands. Ctrl-C stops an answer and keeps the conversation,
Ctrl-D leaves. From a pipe, every line is a message. Options also come from SPECRUN_<OPTION>.
"""
_DEMO_NOTE = "The embedded models are tiny: drafting gains no time with them, it shows the method."


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@load_options
@draft_options
@answer_options
@template_options
@system_prompt_options
@terminal_options
@answer_display_options
@markdown_option
@session_option
@lora_option
@learn_options
def chat(
    load: LoadSettings,
    draft: DraftSettings,
    answer: AnswerSettings,
    template: TemplateSettings,
    system: str | None,
    terminal: Terminal,
    display: AnswerDisplay,
    markdown: bool,
    session: Path | None,
    lora: tuple[str, ...],
    learning: LearnSettings,
) -> None:
    """Talk to a model. Drafts are verified, so that its text is the same as without them."""
    if learning.wanted:
        require_training("--learn")
    with closing(ChatModels(load, draft, template, terminal, lora, learning)) as models:
        runtime = models.open(answer.params)
        answer = answer.of(runtime.vocabulary)
        _print_banner(runtime, answer, terminal, demo=load.demo)
        conversation = Conversation(answer.params, answer.max_tokens, system)
        with kept_session(lambda: models.runtime, session, terminal):
            chat = Chat(models, conversation, terminal, display, markdown=markdown)
            exit_code = chat.run(make_line_reader(COMMAND_NAMES), handle_command)
    if not sys.stdin.isatty():
        click.get_current_context().exit(exit_code)


def _print_banner(
    runtime: Runtime, answer: AnswerSettings, terminal: Terminal, *, demo: bool
) -> None:
    model = runtime.model
    file = model.path.name
    name = str(model.header.metadata.get("general.name") or file)
    about = f"{model.architecture}, {count_text(model.n_params)} parameters"
    facts = about if name == file else f"{file}, {about}"
    terminal.note(f"specrun {specrun_version()} · {one_line(name, 60)} ({one_line(facts)})", "bold")
    drafter = (
        f"drafter {one_line(runtime.drafter)} · {runtime.session.rule.name} · context "
        f"{runtime.n_ctx:,} tokens"
    )
    terminal.note(drafter)
    terminal.note(f"{describe_sampling(answer.params, answer.max_tokens)} · /help for commands")
    if demo:
        terminal.note(_DEMO_NOTE)
    if terminal.notes_on_screen:
        terminal.note("")
