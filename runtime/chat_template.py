"""Chat messages to prompt tokens: the model's own Jinja template, rendered where it can do no harm.

Templates come from model files and are not trusted: they run in Jinja's immutable sandbox, with bounded
output, operands and time. What users wrote is never read as control tokens.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2.exceptions import SecurityError

from specrun.bindings.errors import OptionError, TemplateError
from specrun.bindings.vocabulary import Vocabulary

__all__ = ["ChatTemplate", "Message", "chat_tokens"]

Message = Mapping[str, Any]
_MAX_OUTPUT = 16 * 1024 * 1024
_MAX_OPERAND = 1024 * 1024
_MAX_SECONDS = 5.0
# Private-use characters: one that occurs nowhere in the conversation marks where texts are taken apart.
_MARKERS = [chr(code) for code in range(0xE000, 0xE100)]


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Also refuses operators that make huge values out of small ones (`"a" * 10**9`, `"%999999999d" % 1`)."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        sizes = [value for value in (left, right) if isinstance(value, int)]
        texts = [value for value in (left, right) if isinstance(value, str | list | tuple)]
        if operator == "**" and any(abs(value) > 10_000 for value in sizes):
            raise SecurityError("a power too large for a chat template")
        if operator == "*" and texts and sizes and len(texts[0]) * max(sizes) > _MAX_OPERAND:
            raise SecurityError("a repetition too large for a chat template")
        if operator == "%" and isinstance(left, str) and any(len(part) > 4 for part in _digits(left)):
            raise SecurityError("a field too wide for a chat template")
        return super().call_binop(context, operator, left, right)


def _digits(text: str) -> list[str]:
    return "".join(char if char.isdigit() else " " for char in text).split()


class ChatTemplate:
    """A compiled template; raises `TemplateError` if its text is not Jinja."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        self.source = source
        self._tokens = {"bos_token": bos, "eos_token": eos}
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            undefined=jinja2.ChainableUndefined,
        )
        # Formatting and padding filters would make huge strings out of small ones.
        for name in ("center", "format", "indent", "wordwrap", "xmlattr"):
            environment.filters.pop(name, None)
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        environment.filters["tojson"] = _tojson
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template is not valid Jinja: {error}. Use --chat-template-file") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return the conversation as text.

        Raises `TemplateError` if the template refuses the messages, tries to leave the sandbox, or takes
        more than its share of time or text.
        """
        values = {"messages": [dict(one) for one in messages], "add_generation_prompt": add_generation_prompt}
        try:
            return _within_time(lambda: self._collect({**self._tokens, **values}))
        except TemplateError:
            raise
        except SecurityError as error:
            raise TemplateError(
                f"the chat template was stopped: {error}. It tries to do more than write text: do not trust this file"
            ) from error
        except Exception as error:  # a template may raise whatever Python can
            raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error

    def _collect(self, values: dict[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        for part in self._template.generate(**values):
            size += len(part)
            if size > _MAX_OUTPUT:
                raise TemplateError(f"the chat template wrote more than {_MAX_OUTPUT} characters and was stopped")
            parts.append(part)
        return "".join(parts)


def chat_tokens(
    template: ChatTemplate,
    vocabulary: Vocabulary,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Return the prompt tokens of a conversation.

    The template's own texts may name control tokens; the same texts inside a message are taken apart, so
    that `<|end|>` typed by a user stays seven characters. No second bos is added.
    """
    _check(messages)
    contents = [_texts_of(message) for message in messages]
    joined = "".join(text for texts in contents for text in texts)
    if any(special in joined for special in vocabulary.special_texts):
        marker = next((mark for mark in _MARKERS if mark not in joined and mark not in template.source), None)
        if marker is None:
            raise OptionError("the messages use every private-use character: remove some")
        messages = [_with_markers(message, vocabulary.special_texts, marker) for message in messages]
        pieces = template.render(messages, add_generation_prompt=add_generation_prompt).split(marker)
    else:
        pieces = [template.render(messages, add_generation_prompt=add_generation_prompt)]
    tokens: list[int] = []
    for piece in pieces:
        tokens += vocabulary.tokenize(piece, add_special=False, parse_special=True)
    if vocabulary.adds_bos and vocabulary.bos is not None and tokens[:1] != [vocabulary.bos]:
        tokens.insert(0, vocabulary.bos)
    return tokens


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise OptionError("a conversation needs at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise OptionError(f"a message must be a mapping with a role and a content, not {message!r}")
        if not isinstance(message.get("content"), str):
            raise OptionError(f"the content of a message must be text, not {message.get('content')!r}")


def _texts_of(message: Message) -> list[str]:
    return [value for value in message.values() if isinstance(value, str)]


def _with_markers(message: Message, special_texts: Sequence[str], marker: str) -> dict[str, Any]:
    """Return the message with `marker` after the first character of every control token's text."""

    def split(text: str) -> str:
        for special in special_texts:
            text = text.replace(special, special[0] + marker + special[1:])
        return text

    return {key: split(value) if isinstance(value, str) and key != "role" else value for key, value in message.items()}


def _within_time(work: Callable[[], str]) -> str:
    """Run `work`, stopping it after a while: nested loops would otherwise run for years.

    A trace function sees every line of the compiled template; no thread or signal is needed.
    """
    deadline = time.monotonic() + _MAX_SECONDS

    def trace(_frame: FrameType, _event: str, _argument: object) -> Any:  # noqa: ANN401 - sys.settrace's type
        if time.monotonic() > deadline:
            raise TemplateError(f"the chat template ran for more than {_MAX_SECONDS:.0f} seconds and was stopped")
        return trace

    previous = sys.gettrace()
    if previous is not None:  # a debugger or coverage is watching: leave it in place
        return work()
    sys.settrace(trace)
    try:
        return work()
    finally:
        sys.settrace(None)


def _raise_exception(message: str) -> None:
    raise TemplateError(f"the chat template refuses this conversation: {message}")


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **_options: object) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent if indent is None else min(indent, 16))
