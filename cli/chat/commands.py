"""The commands of a chat, which begin with a slash."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from specrun.bindings.errors import OptionError, SpecrunError
from specrun.cli.chat.conversation import load_conversation, save_conversation
from specrun.cli.chat.loop import Chat
from specrun.cli.chat.settings import (
    SETTING_NAMES,
    change_setting,
    describe_sampling,
    setting_lines,
)
from specrun.cli.terminal.answer import statistics_line
from specrun.cli.terminal.terminal import one_line
from specrun.runtime.round import ChatResult


@dataclass(frozen=True, slots=True)
class _Command:
    """One command: its form, and its effect; one without `run` leaves the chat."""

    usage: str
    help: str
    run: Callable[[Chat, str], None] | None = None


def handle_command(chat: Chat, line: str) -> bool:
    """Run the command on a line that begins with a slash; return whether the chat goes on."""
    name, _, argument = line.strip().partition(" ")
    command = _COMMANDS.get(_ALIASES.get(name, name))
    if command is None:
        near = difflib.get_close_matches(name, COMMAND_NAMES, 1)
        hint = f"did you mean {near[0]}?" if near else "/help lists the commands."
        literal = "" if near else " To send a message that begins with a slash, write two."
        raise OptionError(f"there is no command {one_line(name, 40)}; {hint}{literal}")
    if command.run is None:
        return False
    command.run(chat, argument.strip())
    return True


def _help(chat: Chat, _argument: str) -> None:
    width = max(len(command.usage) for command in _COMMANDS.values())
    for command in _COMMANDS.values():
        chat.terminal.say(f"  {command.usage:{width}}  {command.help}")
    chat.terminal.say(
        '  """ begins a message of several lines and """ ends it; Alt-Enter breaks a line.\n'
        "  Ctrl-C stops an answer and keeps the conversation; Ctrl-D leaves. // sends a slash."
    )


def _set(chat: Chat, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if not name:
        for line in setting_lines(chat.conversation):
            chat.terminal.say(f"  {line}")
        return
    if not value.strip():
        raise OptionError(f"give a value: /set {name} VALUE")
    changed = change_setting(
        chat.conversation, name, value.strip(), vocab_size=chat.runtime.vocabulary.size
    )
    line = next(line for line in setting_lines(chat.conversation) if line.split()[0] == changed)
    chat.terminal.say(f"  {line}")


def _show(chat: Chat, _argument: str) -> None:
    runtime, conversation = chat.runtime, chat.conversation
    system = "none" if conversation.system is None else one_line(conversation.system)
    used = ""
    if chat.last:
        usage = chat.last.usage
        used = f", {usage.prompt_tokens + usage.completion_tokens:,} used"
    facts = {
        "model": one_line(str(runtime.model.path)),
        "drafter": one_line(runtime.drafter),
        "rule": runtime.session.rule.name,
        "context": f"{runtime.n_ctx:,} tokens{used}",
        "system": system,
        "messages": str(len(conversation.messages)),
    }
    width = max(map(len, SETTING_NAMES))
    for name, text in facts.items():
        chat.terminal.say(f"  {name:{width}}  {text}")
    for line in setting_lines(conversation):
        chat.terminal.say(f"  {line}")


def _stats(chat: Chat, _argument: str) -> None:
    if chat.last is None:
        chat.terminal.say("  There was no answer yet.")
        return
    stats = chat.last.stats

    def total(name: str) -> Any:  # noqa: ANN401 - a count, or seconds
        return sum(map(attrgetter(name), chat.results))

    positions = " ".join(f"{share:.0%}" for share in stats.acceptance_by_position) or "-"
    lines = [
        f"last      {statistics_line(chat.last, chat.runtime.model.n_ctx_train)}",
        f"time      target {stats.target_s:.3f} s | drafter {stats.drafter_s:.3f} s | "
        f"overhead {stats.overhead_s:.3f} s | all {stats.wall_s:.3f} s",
        f"accepted  {positions} (by position in the draft)",
        f"chat      {len(chat.results)} answers, {total('usage.completion_tokens'):,} tokens in "
        f"{total('stats.rounds'):,} rounds, "
        f"drafts {total('stats.accepted'):,}/{total('stats.drafted'):,} accepted, prompts "
        f"{total('usage.prompt_tokens'):,} tokens ({total('usage.cached_tokens'):,} cached), "
        f"{total('stats.wall_s'):.2f} s",
    ]
    if chat.models.learning is not None:
        lines += chat.models.learning.lines()
    for line in lines:
        chat.terminal.say(f"  {line}")


def _thinking(chat: Chat, argument: str) -> None:
    if argument in ("on", "off"):
        chat.shows_thinking = argument == "on"
        how = "shown as it comes" if chat.shows_thinking else "folded to one line"
        chat.terminal.say(f"  Thinking is {how}.")
        return
    if argument:
        raise OptionError("give /thinking on, /thinking off, or /thinking alone")
    thought = chat.last.reasoning if isinstance(chat.last, ChatResult) else ""
    if not thought:
        raise OptionError("the last answer came without thinking")
    chat.terminal.answer(f"{thought.rstrip()}\n", "dim")


def _learn(chat: Chat, _argument: str) -> None:
    if chat.models.learning is None:
        raise OptionError("nothing is learnt in this chat: begin it with --learn")
    chat.models.learning.update()


def _clear(chat: Chat, _argument: str) -> None:
    chat.conversation.messages.clear()
    chat.terminal.say("  The conversation is empty; system prompt and settings stay.")


def _system(chat: Chat, argument: str) -> None:
    chat.conversation.system = argument or None
    chat.terminal.say(
        "  The system prompt is set." if argument else "  There is no system prompt now."
    )


def _regen(chat: Chat, _argument: str) -> None:
    conversation = chat.conversation
    if not conversation.ends_with_answer:
        raise OptionError("there is no answer to make again")
    before = list(conversation.messages)
    chat.index += 1
    if conversation.params.is_greedy:
        chat.terminal.note(
            "temperature 0 gives the same answer with every seed; /set temperature 0.8 does not"
        )
    conversation.messages.pop()
    done = False
    try:
        done = chat.answer(conversation.params)
    finally:
        if not done:
            conversation.messages[:] = before


def _model(chat: Chat, argument: str) -> None:
    if argument:
        try:
            chat.models.switch_model(argument, chat.conversation.params)
        except SpecrunError:
            chat.terminal.note("the model stays; any other can answer with /drafter none")
            raise
    chat.terminal.say(f"  model {one_line(str(chat.runtime.model.path))}")
    _say_drafter(chat)


def _drafter(chat: Chat, argument: str) -> None:
    if argument:
        chat.models.switch_drafter(argument, chat.conversation.params)
    _say_drafter(chat)


def _accept(chat: Chat, argument: str) -> None:
    if argument:
        chat.models.switch_rule(argument, chat.conversation.params)
    _say_drafter(chat)


def _say_drafter(chat: Chat) -> None:
    runtime = chat.runtime
    chat.terminal.say(f"  drafter {one_line(runtime.drafter)} · {one_line(runtime.accept)}")


def _save(chat: Chat, argument: str, *, force: bool = False) -> None:
    path = _path(argument, "/save")
    if path.exists() and not force:
        raise OptionError(f"{one_line(str(path))} exists: /save! {argument} overwrites it")
    save_conversation(chat.conversation, path, force=force)
    chat.terminal.say(f"  Saved {len(chat.conversation.messages)} messages to {path}.")


def _load(chat: Chat, argument: str) -> None:
    path = _path(argument, "/load")
    chat.conversation = load_conversation(path)
    chat.index = 0
    sampling = describe_sampling(chat.conversation.params, chat.conversation.max_tokens)
    chat.terminal.say(f"  {len(chat.conversation.messages)} messages from {path}; {sampling}")


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise OptionError(f"name a file: {command} FILE")
    return Path(argument).expanduser()


_COMMANDS = {
    command.usage.split()[0]: command
    for command in (
        _Command("/help", "this list", _help),
        _Command(
            "/set NAME VALUE", "change a setting, such as temperature; alone: list them", _set
        ),
        _Command("/show", "the models and all settings", _show),
        _Command("/model NAME", "answer with another model: a file, a name, hf:OWNER/REPO", _model),
        _Command("/drafter EXPR", "draft with another drafter, as --drafter or -md", _drafter),
        _Command("/accept RULE", "accept drafts by another rule", _accept),
        _Command("/stats", "the time and the tokens of the last answer and the chat", _stats),
        _Command(
            "/thinking [on|off]", "show the last answer's thinking; show or fold all", _thinking
        ),
        _Command("/learn", "let the drafter learn now (with --learn)", _learn),
        _Command("/clear", "forget the conversation, keep the settings", _clear),
        _Command("/system TEXT", "set the system prompt; alone: remove it", _system),
        _Command("/regen", "answer the last message again, drawn anew", _regen),
        _Command("/save FILE", "write conversation and settings to a new file", _save),
        _Command("/save! FILE", "the same, over an existing file", partial(_save, force=True)),
        _Command("/load FILE", "continue a saved conversation", _load),
        _Command("/quit", "leave (also /bye, /exit, Ctrl-D)"),
    )
}
_ALIASES = {"/?": "/help", "/bye": "/quit", "/exit": "/quit"}
COMMAND_NAMES = (*_COMMANDS, *_ALIASES)
