"""Chat messages to prompt tokens: the model's own Jinja template, rendered in a sandbox.

Templates come from model files and are not trusted: they run in Jinja's immutable sandbox, with
bounded output, operands and time. Users' texts are never read as control tokens.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2.meta
from jinja2.exceptions import SecurityError

from specrun.bindings.errors import ContextFullError, OptionError, TemplateError
from specrun.bindings.models import Model, Vocabulary
from specrun.runtime.chat.sandbox import TemplateSandbox
from specrun.runtime.chat.token_memory import TokenMemory

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
_MAX_SOURCE = 256 * 1024  # many times the longest that any model is known to have
_MAX_OUTPUT = 16 * 1024 * 1024
_MAX_MESSAGE = 1000  # characters of an error message, which may show any text of the template
# Private-use characters: an unused one marks the places where texts are taken apart.
_MARKERS = [chr(code) for code in range(0xE000, 0xE100)]
_OUR_NAMES = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "self"}
)


class ChatTemplate:
    """A compiled template; raises `TemplateError` if its text is not Jinja."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        self.source = source
        self.memory = TokenMemory()
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._environment = TemplateSandbox()
        helpers = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._environment.globals.update(helpers)
        if len(source) > _MAX_SOURCE:
            raise TemplateError(f"bad chat template: it is longer than {_MAX_SOURCE} characters")
        try:
            self._template = self._environment.from_string(source)
        except Exception as error:  # Jinja's own, or that of Python's compiler for deep nesting
            raise TemplateError(f"bad chat template: {error}. Use --chat-template-file") from error

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The variables that the template reads, such as "tools" or "enable_thinking"."""
        try:
            tree = self._environment.parse(self.source)
            return frozenset(jinja2.meta.find_undeclared_variables(tree))
        except Exception as error:  # as of any other text of a stranger's
            raise TemplateError(f"bad chat template: {error}. Use --chat-template-file") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as text.

        `tools` are functions in OpenAI's form; `variables` are further ones that the template may
        read (llama.cpp's `chat_template_kwargs`), of JSON's types. Raises `TemplateError` if
        the template refuses the messages, tries to leave the sandbox, or takes more than its share
        of time or text, and `OptionError` for a variable that is not the caller's to set.
        """
        values = dict(variables or {})
        for name in values:
            if name in _OUR_NAMES or name in self._environment.globals:
                problem = "which the conversation itself or the template's language sets"
                raise OptionError(f"chat_template_kwargs has {name!r}, {problem}: leave it out")
        values |= {**self._tokens, "add_generation_prompt": add_generation_prompt}
        values["messages"] = [dict(message) for message in messages]
        if tools:  # templates test whether it is defined
            values["tools"] = [dict(tool) for tool in tools]
        try:
            return self._collect(values)
        except TemplateError:
            raise
        except SecurityError as error:
            problem = f"the chat template was stopped: {str(error).rstrip('.')}"
            advice = "It tries to do more than write text: do not trust this file"
            raise TemplateError(f"{problem}. {advice}") from error
        except Exception as error:  # a template may raise whatever Python can
            what = f"{type(error).__name__}: {str(error)[:_MAX_MESSAGE]}"
            raise TemplateError(f"the chat template failed: {what}") from error

    def _collect(self, values: dict[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        with self._environment.rendering(values):
            for part in self._template.generate(**values):
                size += len(part)
                if size > _MAX_OUTPUT:
                    raise TemplateError(f"the chat template wrote over {_MAX_OUTPUT} characters")
                parts.append(part)
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class ChatText:
    """A conversation as its template wrote it, in pieces: no control token spans two of them."""

    pieces: Sequence[str]
    memory: TokenMemory

    @property
    def text(self) -> str:
        """The whole of it."""
        return "".join(self.pieces)

    def tokens(self, vocabulary: Vocabulary) -> list[int]:
        """Return the prompt's tokens; no second bos is added."""
        tokens: list[int] = []
        for piece in self.pieces:
            tokens += self.memory.tokenize(piece, vocabulary)
        return vocabulary.with_bos(tokens)


def require_room(vocabulary: Vocabulary, texts: Iterable[str], n_ctx: int) -> None:
    """Raise `ContextFullError` for texts with more tokens, by their number of bytes alone.

    Texts that are far too long are so refused at once: reading 15 MB as tokens takes seconds.
    """
    fewest = sum(map(vocabulary.fewest_tokens, texts))
    if fewest > n_ctx:
        raise too_long(f"at least {fewest}", n_ctx)


def too_long(n_tokens: int | str, n_ctx: int) -> ContextFullError:
    """Return the error for a prompt of so many tokens."""
    problem = f"the prompt has {n_tokens} tokens and the context {n_ctx}"
    return ContextFullError(f"{problem}: shorten it, or raise the context size (-c)")


def chat_tokens(
    template: ChatTemplate,
    vocabulary: Vocabulary,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Return the prompt tokens of a conversation: see `chat_text`."""
    text = chat_text(template, vocabulary, messages, add_generation_prompt=add_generation_prompt)
    return text.tokens(vocabulary)


def chat_text(
    template: ChatTemplate,
    vocabulary: Vocabulary,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Tool] = (),
    variables: Mapping[str, Any] | None = None,
    n_ctx: int | None = None,
) -> ChatText:
    """Return the prompt of a conversation, with its tools and further variables.

    The template's own texts may name control tokens; the same texts inside a message, a tool or a
    variable are taken apart, so that `<|end|>` typed by a user stays seven characters. Raises as
    `ChatTemplate.render`, `OptionError` for messages that are none, and `ContextFullError` if its
    number of bytes alone means more than `n_ctx` tokens.
    """
    _check(messages)
    variables = variables or {}

    def rendered() -> str:
        return template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )

    contents = [{key: part for key, part in each.items() if key != "role"} for each in messages]
    joined = "".join(_texts_of([contents, tools, variables]))
    marker: str | None = None
    if n_ctx is not None and vocabulary.fewest_tokens(joined) > n_ctx:
        # A template may leave texts out, so its output counts; taken apart they take long.
        require_room(vocabulary, [rendered()], n_ctx)
    if any(special in joined for special in vocabulary.special_texts):
        used = joined + template.source
        marker = next((mark for mark in _MARKERS if mark not in used), None)
        if marker is None:
            raise OptionError("the messages use every private-use character: remove some")
        special = vocabulary.special_texts
        contents, tools, variables = _with_markers([contents, tools, variables], special, marker)
        messages = [
            {"role": message["role"], **content}
            for message, content in zip(messages, contents, strict=True)
        ]
    text = rendered()
    pieces = [text] if marker is None else text.split(marker)
    if n_ctx is not None:
        require_room(vocabulary, pieces, n_ctx)
    return ChatText(pieces, template.memory)


def _check(messages: Sequence[Message]) -> None:
    if not messages:
        raise OptionError("a conversation needs at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise OptionError(
                f"give a message as a mapping with a role and a content, not {message!r}"
            )
        content = message.get("content")
        if not isinstance(content, str):
            raise OptionError(f"the content of a message must be text, not {content!r}")


def _texts_of(value: object) -> list[str]:
    """Return every text in a value of JSON, however deep (tool calls are nested)."""
    found: list[str] = []
    left: list[object] = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, Mapping):
            left.extend((*item.keys(), *item.values()))
        elif isinstance(item, list | tuple):
            left.extend(item)
    return found


def _with_markers(value: Any, special_texts: Sequence[str], marker: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value with `marker` after the first character of every control token's text."""
    if isinstance(value, str):
        for special in special_texts:
            value = value.replace(special, special[0] + marker + special[1:])
        return value
    if isinstance(value, Mapping):
        pairs = value.items()
        return {
            _with_markers(key, special_texts, marker): _with_markers(part, special_texts, marker)
            for key, part in pairs
        }
    if isinstance(value, list | tuple):
        return [_with_markers(item, special_texts, marker) for item in value]
    return value


def _raise_exception(message: str) -> None:
    problem = "the chat template refuses this conversation"
    raise TemplateError(f"{problem}: {str(message)[:_MAX_MESSAGE]}")


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_MESSAGE:  # results may be hundreds of times as long
        raise SecurityError("a date longer than any chat needs")
    return datetime.datetime.now().strftime(form)


def prompt_tokens(model: Model, prompts: Sequence[str], as_text: bool = False) -> list[list[int]]:
    """Return each prompt's tokens, as a chat message if there is a template and not `as_text`."""
    vocabulary = model.vocabulary
    if as_text or model.chat_template is None:
        return [vocabulary.tokenize_prompt(prompt) for prompt in prompts]
    template = template_of(model.chat_template, vocabulary)
    messages = ([{"role": "user", "content": prompt}] for prompt in prompts)
    return [chat_tokens(template, vocabulary, message) for message in messages]


def template_of(source: str, vocabulary: Vocabulary) -> ChatTemplate:
    """Return a compiled template that knows the vocabulary's bos and eos."""
    special = (vocabulary.bos, vocabulary.eos)
    bos, eos = ("" if token is None else vocabulary.text(token) for token in special)
    return ChatTemplate(source, bos=bos, eos=eos)
