"""`specrun generate`: continues or answers one prompt, on stdout."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from specrun.cli.chat.learning import open_learning
from specrun.cli.options.drafting import LearnSettings, learn_options, require_training
from specrun.cli.options.group import PROMPT, TEMPLATE, SectionedCommand
from specrun.cli.options.model import (
    DraftSettings,
    LoadSettings,
    TemplateSettings,
    draft_options,
    load_options,
    lora_option,
    template_options,
)
from specrun.cli.options.opening import kept_session, open_models, session_option
from specrun.cli.options.output import (
    AnswerDisplay,
    answer_display_options,
    json_option,
    terminal_options,
)
from specrun.cli.options.prompt import read_prompt, system_prompt_options
from specrun.cli.options.sampling import AnswerSettings, answer_options
from specrun.cli.options.types import FILE
from specrun.cli.terminal.answer import (
    AnswerWriter,
    PlainWriter,
    context_full,
    reply_writer,
    run_stream,
    statistics_line,
)
from specrun.cli.terminal.terminal import INTERRUPTED, Terminal
from specrun.runtime import GenerationStream, Runtime
from specrun.runtime.planning import workload_of

_EPILOG = """\b
Examples:
  specrun generate --demo -p "What does os.getcwd do?" --temp 0
  specrun generate -m target.gguf -md small.gguf -f prompt.txt -n 256 > answer.txt
  git diff | specrun generate -m target.gguf -sys "Describe this change." -q
  specrun generate -m target.gguf -p "Once upon a time" --drafter prompt-lookup --json

\b
A model with a chat template answers the prompt as a message; --no-chat-template continues it
as text, as models without a template always do. stdout carries only the answer (with --json
one object), everything else goes to stderr; a model's thoughts are shown on a screen only.
Options also come from SPECRUN_<OPTION>.
"""


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@load_options
@PROMPT.option("-p, --prompt TEXT", "The prompt; -: read it from stdin.")
@PROMPT.option("-f, --file", "Read the prompt from a file.", FILE)
@draft_options
@answer_options
@template_options
@TEMPLATE.flag(
    "--no-parse-special", "In plain text, treat names of control tokens as text, as in a message."
)
@system_prompt_options
@terminal_options
@answer_display_options
@session_option
@lora_option
@learn_options
@json_option("Print one JSON object instead of the text.")
def generate(
    load: LoadSettings,
    prompt: str | None,
    file: Path | None,
    draft: DraftSettings,
    answer: AnswerSettings,
    template: TemplateSettings,
    no_parse_special: bool,
    system: str | None,
    terminal: Terminal,
    display: AnswerDisplay,
    session: Path | None,
    lora: tuple[str, ...],
    learning: LearnSettings,
) -> None:
    """Continue a prompt, or answer it if the model has a chat template."""
    if learning.learn and not learning.learn_keep:
        raise click.UsageError(
            "--learn learns between answers, and there is one: give --learn-keep, and the next "
            "call continues with the trained drafter"
        )
    if learning.wanted:
        require_training("--learn")
    text = read_prompt(prompt, file)
    with ExitStack() as opened:
        closed_last = opened.enter_context(ExitStack())
        runtime = opened.enter_context(
            open_models(
                *(Runtime, load, draft, template, answer.params, terminal, workload_of(text)),
                lora=lora,
                learn=learning.place,
            )
        )
        drafter = open_learning(closed_last, runtime, learning, terminal)
        answer = answer.of(runtime.vocabulary)
        writer: AnswerWriter | None = None
        if not terminal.as_json:
            plain = PlainWriter(terminal, show_draft=display.show_draft)
            writer = reply_writer(terminal, plain, fold=not display.show_thinking)
        with kept_session(lambda: runtime, session, terminal):
            stream = _start(
                runtime, text, system, answer, template, parse_special=not no_parse_special
            )
            answered = run_stream(stream, writer)
        full = context_full(answered, answer.max_tokens, runtime)
        trained = runtime.model.n_ctx_train
        if drafter is not None and not answered.interrupted:
            drafter.after_only_answer()
    if terminal.as_json:
        values: dict[str, Any] = answered.result.to_dict()
        if session is None:
            del values["usage"]["cached_tokens"]  # nothing is cached before the first prompt
        is_unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        terminal.answer_json(values, ensure_ascii=not is_unicode, allow_nan=False)
    if display.show_timings:
        terminal.note(statistics_line(answered.result, trained))
    if full:
        terminal.note(full, "yellow")
    if answered.interrupted:
        click.get_current_context().exit(INTERRUPTED)


def _start(
    runtime: Runtime,
    text: str,
    system: str | None,
    answer: AnswerSettings,
    template: TemplateSettings,
    *,
    parse_special: bool,
) -> GenerationStream:
    given = template.chat_template is not None or template.chat_template_file is not None
    if template.no_chat_template or not (given or runtime.model.chat_template):
        if system is not None:
            lacks = "a model without a chat template"
            why = "--no-chat-template" if template.no_chat_template else lacks
            raise click.UsageError(f"-sys has no place with {why}: write it into the prompt")
        prompt = runtime.vocabulary.tokenize_prompt(text, parse_special=parse_special)
        return runtime.stream(prompt, answer.params, max_tokens=answer.max_tokens, logprobs=False)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return runtime.stream_chat(
        messages, answer.params, max_tokens=answer.max_tokens, logprobs=False
    )
