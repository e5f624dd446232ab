"""A conversation of a chat (messages, system prompt, sampling), and its file.

The file is one JSON object, written whole or not at all, and checked when read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrun.bindings.errors import ModelError, OptionError
from specrun.bindings.files import atomic_path
from specrun.cli.options.types import format_logit_bias, parse_logit_bias
from specrun.cli.terminal.terminal import read_text
from specrun.runtime.grammar import Grammar
from specrun.runtime.laws import SamplingParams

ASSISTANT, USER, SYSTEM = "assistant", "user", "system"


@dataclass(slots=True)
class Conversation:
    """Messages of the user and the assistant in turns, behind an optional system prompt."""

    params: SamplingParams
    max_tokens: int | None = None
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> None:
        """Add the user's message."""
        self.messages.append({"role": USER, "content": text})

    def reply(self, text: str) -> None:
        """Add the assistant's answer."""
        self.messages.append({"role": ASSISTANT, "content": text})

    @property
    def ends_with_answer(self) -> bool:
        """Whether the last message is the assistant's."""
        return bool(self.messages) and self.messages[-1]["role"] == ASSISTANT

    def for_template(self) -> list[dict[str, str]]:
        """Return all messages, the system prompt first."""
        first = [{"role": SYSTEM, "content": self.system}] if self.system is not None else []
        return [*first, *self.messages]


_FORMAT = "specrun conversation"
_VERSION = 1
_KEYS = {"format", "version", "system", "messages", "sampling", "max_tokens"}


def save_conversation(conversation: Conversation, path: Path, *, force: bool = False) -> None:
    """Write a conversation with its settings; an existing file is an OptionError, or `force`."""
    sampling = conversation.params.to_dict()
    sampling["logit_bias"] = [
        format_logit_bias(*bias) for bias in conversation.params.logit_bias.items()
    ]
    if conversation.params.grammar is not None:
        sampling["grammar"] = dataclasses.asdict(conversation.params.grammar)
    values = {
        "format": _FORMAT,
        "version": _VERSION,
        "system": conversation.system,
        "messages": conversation.messages,
        "sampling": sampling,
        "max_tokens": conversation.max_tokens,
    }
    with atomic_path(path, force=force) as aside:
        aside.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def load_conversation(path: Path) -> Conversation:
    """Return the conversation of a file; raises ModelError that names the problem."""
    try:
        values = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise _wrong(path, f"it is not JSON ({error})") from error
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise _wrong(path, "it was not written by /save")
    if values.get("version") != _VERSION:
        versions = f"version {values.get('version')!r} and this specrun reads {_VERSION}"
        raise _wrong(path, f"it has {versions}: update specrun")
    if values.keys() != _KEYS:
        found, wanted = ", ".join(sorted(values)), ", ".join(sorted(_KEYS))
        raise _wrong(path, f"its entries are {found} instead of {wanted}")
    params = _params(values["sampling"], path)
    most, system = values["max_tokens"], values["system"]
    is_count = isinstance(most, int) and not isinstance(most, bool) and most >= 0
    if most is not None and not is_count:
        raise _wrong(path, f"max_tokens is {most!r}")
    if not isinstance(system, str | None):
        raise _wrong(path, f"the system prompt is {system!r}")
    return Conversation(params, most, system, _messages(values["messages"], path))


def _wrong(path: Path, problem: str) -> ModelError:
    return ModelError(f"{path} is not a saved conversation: {problem}")


def _params(values: object, path: Path) -> SamplingParams:
    try:
        if not isinstance(values, dict) or not isinstance(values.get("logit_bias", []), list):
            raise OptionError("the sampling settings are not a mapping")
        bias = dict(parse_logit_bias(str(text)) for text in values.get("logit_bias", []))
        grammar = values.get("grammar") and Grammar(**values["grammar"])
        params = SamplingParams.from_dict({**values, "logit_bias": bias, "grammar": grammar})
        if not (params.seed is None or (isinstance(params.seed, int) and params.seed >= 0)):
            raise OptionError(f"seed is {params.seed!r}: it must be a whole number or null")
        return params
    except (OptionError, TypeError) as error:
        raise _wrong(path, str(error)) from error


def _messages(values: object, path: Path) -> list[dict[str, str]]:
    if not isinstance(values, list):
        raise _wrong(path, "its messages are not a list")
    if len(values) % 2:
        raise _wrong(path, "its last message has no answer")
    for number, message in enumerate(values, 1):
        role = USER if number % 2 else ASSISTANT
        if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
            raise _wrong(path, f"message {number} is not a role and a content")
        if message["role"] != role or not isinstance(message["content"], str):
            raise _wrong(path, f"message {number} is not a text of the {role}")
    return [dict[str, Any](message) for message in values]
