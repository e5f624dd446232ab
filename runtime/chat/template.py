"""Chat messages to prompt tokens: the model's own Jinja template, rendered in a sandbox.

Templates come from model files and are not trusted: they run in Jinja's immutable sandbox, with
bounded output, operands and time. Users' texts are never read as control tokens.
"""

from __future__ import annotations

import datetime
import functools
import json
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2.meta
from jinja2.exceptions import SecurityError

from specrun.bindings.errors import ContextFullError, OptionError, TemplateError
from specrun.bindings.models import Model, Vocabulary
from specrun.runtime.chat.effort import Effort
from specrun.runtime.chat.families import think_tags_of
from specrun.runtime.chat.fitting import THOUGHTS, Fitting, Messages, RefusedError
from specrun.runtime.chat.parts import content_text
from specrun.runtime.chat.plan import ReplyPlan
from specrun.runtime.chat.sandbox import TemplateSandbox
from specrun.runtime.chat.syntax import ThinkTags

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
_MAX_SOURCE = 256 * 1024  # many times the longest that any model is known to have
_MAX_OUTPUT = 16 * 1024 * 1024
_LONGEST_END = 64  # characters: a tag and the white space behind it
_MAX_MESSAGE = 1000  # characters of an error message, which may show any text of the template
# Private-use characters: an unused one marks the places where texts are taken apart.
_MARKERS = [chr(code) for code in range(0xE000, 0xE100)]
_OUR_NAMES = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "self"}
)


# == Tokens of the last texts: a conversation that grew is tokenized from its first change on ======
#
# Agents send the whole conversation with every request. llama.cpp reads the texts between control
# tokens one by one, so tokens up to a control token do not depend on the text behind it.


_SHORT = 2_000  # characters that are not worth remembering: they take less than a millisecond
_MOST_TEXTS = 16
_MOST_CHARACTERS = 4 << 20


@dataclass(frozen=True, slots=True)
class _Tokenized:
    """A text with its tokens; behind token `counts[k]` - 1, a control token, `ends[k]` begins."""

    text: str
    tokens: list[int]
    ends: list[int]
    counts: list[int]


class TokenMemory:
    """Tokenizes texts that often begin as earlier ones; for several threads at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[_Tokenized] = []  # the latest last

    def tokenize(self, text: str, vocabulary: Vocabulary) -> list[int]:
        """Return the tokens of a text, names of control tokens read as such; nothing is added."""
        if len(text) < _SHORT or vocabulary.strips:
            return vocabulary.tokenize(text, add_special=False, parse_special=True)
        with self._lock:
            kept = [*self._kept]
        margin = max(map(len, vocabulary.special_texts), default=0)
        best, n_ends = None, 0
        for each in reversed(kept):
            # A name may reach over the end of the common part.
            shared = _n_shared(each.text, text) - margin
            count = bisect_right(each.ends, shared)
            if count and (best is None or each.ends[count - 1] > best.ends[n_ends - 1]):
                best, n_ends = each, count
        made = _continued(text, best, n_ends, vocabulary)
        with self._lock:
            if best is not None and text.startswith(best.text):  # the conversation went on
                self._kept = [each for each in self._kept if each is not best]
            self._kept = _newest([*self._kept, made])
        return [*made.tokens]


def _continued(
    text: str, known: _Tokenized | None, n_ends: int, vocabulary: Vocabulary
) -> _Tokenized:
    """Tokenize a text from the end number `n_ends` of a known one on; None: from its start."""
    tokens: list[int] = []
    ends: list[int] = []
    counts: list[int] = []
    if known is not None:
        ends, counts = known.ends[:n_ends], known.counts[:n_ends]
        tokens = known.tokens[: counts[-1]]
    place, done = (ends[-1], counts[-1]) if ends else (0, 0)
    tokens += vocabulary.tokenize(text[place:], add_special=False, parse_special=True)
    names = vocabulary.special_tokens
    for count, token in enumerate(tokens[done:], start=done + 1):
        name = names.get(token)
        if name is None:
            continue
        found = text.find(name, place)
        if found < 0:  # it is spelled in another way: nothing behind it is certain
            break
        place = found + len(name)
        ends.append(place)
        counts.append(count)
    return _Tokenized(text, tokens, ends, counts)


def _n_shared(first: str, second: str) -> int:
    """Return how many characters two texts begin with in common."""
    most = min(len(first), len(second))
    return bisect_left(range(most), True, key=lambda n: first[: n + 1] != second[: n + 1])


def _newest(kept: list[_Tokenized]) -> list[_Tokenized]:
    """Return the latest texts, as many as there is room for."""
    kept, size = kept[-_MOST_TEXTS:], 0
    for place, each in reversed([*enumerate(kept)]):
        size += len(each.text)
        if size > _MOST_CHARACTERS:
            return kept[place + 1 :]
    return kept


# == Templates =====================================================================================


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
        self.fitting = Fitting(self)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The variables that the template reads, such as "tools" or "enable_thinking"."""
        try:
            tree = self._environment.parse(self.source)
            return frozenset(jinja2.meta.find_undeclared_variables(tree))
        except RecursionError as error:  # deeper in the stack than it was compiled
            raise TemplateError(f"bad chat template: {error}. Use --chat-template-file") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as text, its messages as they are (`ChatTurn` makes them fit).

        `tools` are functions in OpenAI's form; `variables` are further ones that the template may
        read (llama.cpp's `chat_template_kwargs`), of JSON's types. Raises `RefusedError` if
        the template refuses the messages, `TemplateError` if it tries to leave the sandbox or takes
        more than its share of time or text, and `OptionError` for a variable that is not the
        caller's to set.
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
        if "functions" in self.names:  # of Functionary's and Fireworks' older templates
            values.setdefault("functions", json.dumps([*map(dict, tools)], indent=2))
        if "datetime" in self.names:
            values.setdefault("datetime", _strftime_now("%b %d %Y"))
        parts: list[str] = []
        size = 0
        try:
            with self._environment.rendering(values):
                for part in self._template.generate(**values):
                    size += len(part)
                    if size > _MAX_OUTPUT:
                        problem = f"wrote over {_MAX_OUTPUT} characters"
                        raise TemplateError(f"the chat template {problem}")
                    parts.append(part)
            return "".join(parts)
        except TemplateError:
            raise
        except SecurityError as error:
            problem = f"the chat template was stopped: {str(error).rstrip('.')}"
            advice = "It tries to do more than write text: do not trust this file"
            raise TemplateError(f"{problem}. {advice}") from error
        except Exception as error:  # a template may raise whatever Python can
            what = f"{type(error).__name__}: {str(error)[:_MAX_MESSAGE]}"
            raise RefusedError(f"the chat template failed: {what}") from error


@dataclass(frozen=True, slots=True)
class ChatText:
    """A conversation as its template wrote it, in pieces: no control token spans two of them.

    `end` is the last of its text; of an answer that was begun, the last before that.
    """

    pieces: Sequence[str]
    memory: TokenMemory
    end: str = ""

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


def is_begun_answer(messages: Sequence[Message]) -> bool:
    """Whether a conversation ends with a text of the assistant, which then goes on."""
    last = messages[-1] if messages else {}
    is_answer = isinstance(last, Mapping) and last.get("role") == "assistant"
    return is_answer and not last.get("tool_calls")


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A conversation with its tools and variables of the template, and the plan of the reply.

    `is_begun`: the last message is an answer that goes on, and the prompt ends behind its text.
    `is_asked`: the prompt ends with the begin of an answer, as the template has it. `no_thoughts`:
    the answer begins behind a reasoning that is empty, if the template opens one or has no variable
    for it.
    """

    messages: Sequence[Message] = ()
    tools: Sequence[Tool] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    plan: ReplyPlan = field(default_factory=ReplyPlan)
    is_begun: bool = False
    is_asked: bool = True
    no_thoughts: bool = False

    def text(
        self,
        template: ChatTemplate,
        vocabulary: Vocabulary,
        variables: Mapping[str, Any] | None = None,
        n_ctx: int | None = None,
    ) -> ChatText:
        """Return the prompt that a template makes, with further `variables`.

        Messages that the template refuses, or leaves out, are put in another form that it takes
        (`Fitting`). The template's own texts may name control tokens; the same texts inside a
        message, a tool or a variable are taken apart, so that `<|end|>` typed by a user stays seven
        characters. Raises as `ChatTemplate.render`, `OptionError` for messages that are none, and
        `ContextFullError` if its number of bytes alone means more than `n_ctx` tokens.
        """
        talk, is_begun = [_checked(message) for message in self.messages], self.is_begun
        if not talk:
            raise OptionError("a conversation needs at least one message")
        if is_begun and len(talk) > 1 and not _begun_text(talk[-1]).strip():
            is_begun = talk.pop() is None  # an answer without a text is not begun
        given: _Given = [talk, list(self.tools), {**(variables or {}), **self.template_kwargs}]
        joined = "".join(_texts_of([[{**each, "role": ""} for each in talk], *given[1:]]))
        used = joined + template.source
        marker, begun_mark, probe = _marks_outside(used, 3)
        special = vocabulary.special_texts
        is_apart = any(text in joined for text in special)

        def written(given: _Given) -> ChatText:
            talk, tools, variables = given
            render = functools.partial(template.render, tools=tools, variables=variables)
            ending = _Ending(template, render, begun_mark, self.is_asked, self.no_thoughts)
            write = ending.begun if is_begun else ending.whole
            try:
                text = template.fitting.fitted(talk, write, probe).text
            except RefusedError:
                if _described(tools) == tools:
                    raise
                return written([talk, _described(tools), variables])
            begun = _begun_text(talk[-1]).lstrip() if is_begun else ""
            end = text.removesuffix(begun)[-_LONGEST_END:].replace(marker, "")
            return ChatText(text.split(marker) if is_apart else [text], template.memory, end)

        if n_ctx is not None and vocabulary.fewest_tokens(joined) > n_ctx:
            # A template may leave texts out, so its output counts; taken apart they take long.
            require_room(vocabulary, [written(given).text], n_ctx)
        if is_apart:
            given = _with_markers(given, special, marker)
            given[0] = [
                {**each, "role": own["role"]} for each, own in zip(given[0], talk, strict=True)
            ]
        text = written(given)
        if n_ctx is not None:
            require_room(vocabulary, text.pieces, n_ctx)
        return text


def chat_tokens(
    template: ChatTemplate,
    vocabulary: Vocabulary,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Return the prompt tokens of a conversation: see `ChatTurn.text`."""
    turn = ChatTurn(messages, is_asked=add_generation_prompt)
    return turn.text(template, vocabulary).tokens(vocabulary)


def fitted_messages(template: ChatTemplate, messages: Sequence[Message]) -> Messages:
    """Return a conversation as messages of which the template renders every text; see `Fitting`."""
    talk = [_checked(message) for message in messages]
    write = functools.partial(template.render, add_generation_prompt=False)
    (probe,) = _marks_outside("".join([*_texts_of(talk), template.source]), 1)
    return template.fitting.fitted(talk, write, probe).messages


def _marks_outside(text: str, count: int) -> list[str]:
    """Return so many characters that are nowhere in a text; raises `OptionError`."""
    marks = [mark for mark in _MARKERS if mark not in text][:count]
    if len(marks) < count:
        raise OptionError("the messages use every private-use character: remove some")
    return marks


def _described(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return tools with a description, an empty one, of every argument: some templates add it."""
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    made = {key: _described(part) for key, part in value.items()}
    arguments = made.get("properties")
    if isinstance(arguments, Mapping):
        made["properties"] = {
            name: {"description": "", **own} if isinstance(own, Mapping) else own
            for name, own in arguments.items()
        }
    return made


_Given = list[Any]
"""The messages, the tools and the variables."""


def require_message(message: Message) -> Message:
    """Return a message; raises `OptionError` if it is none."""
    if isinstance(message, Mapping) and isinstance(message.get("role"), str):
        return message
    raise OptionError(f"give a message as a mapping with a role and a content, not {message!r}")


def _checked(message: Message) -> dict[str, Any]:
    """Return a message with its content as a text; raises `OptionError` if it is none.

    "developer" is OpenAI's newer name of the system, which templates do not have; the reasoning of
    an answer has the names that they read.
    """
    own = dict(require_message(message))
    if own["role"] == "developer":
        own["role"] = "system"
    has_more = own.get("tool_calls") or any(own.get(name) for name in THOUGHTS)
    is_empty = own.get("content") is None and has_more
    own["content"] = "" if is_empty else content_text(own.get("content"))
    thoughts = next((own[name] for name in THOUGHTS if own.get(name)), None)
    return {**own, **dict.fromkeys(THOUGHTS, thoughts)} if isinstance(thoughts, str) else own


def _begun_text(message: Message) -> str:
    """Return the text that goes on: the content, or the reasoning if there is no content yet."""
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    return content or str(message.get(THOUGHTS[0]) or "")


@dataclass(frozen=True, slots=True)
class _Ending:
    """Renders messages with their continuation: the begin of an answer, or one that was begun.

    `render` has the tools and variables, `mark` is a character that stands nowhere.
    """

    template: ChatTemplate
    render: Callable[..., str]
    mark: str
    add_generation_prompt: bool
    no_thoughts: bool

    def whole(self, messages: Messages) -> str:
        """Return the text of messages that are whole."""
        prompt = self.add_generation_prompt
        text = self.render(messages, add_generation_prompt=prompt)
        return self._without_thoughts(text) if prompt and self.no_thoughts else text

    def _without_thoughts(self, text: str) -> str:
        """Return the begin of an answer with an empty reasoning."""
        source = self.template.source
        tags, written = think_tags_of(source), text.rstrip()
        if tags is None or tags.follow or written.endswith(tags.last):
            return text
        if written.endswith(tags.first):
            return f"{written}\n\n{tags.last}\n\n"
        if tags.first not in source or Effort(is_on=False).variables(self.template):
            return text  # its model thinks without marks, or the template took care of it
        return f"{text}{tags.first}\n\n{tags.last}\n\n"

    def begun(self, messages: Messages) -> str:
        """Return the text of messages up to the end of the last one's, which goes on.

        The template writes it as one of the history, if it can. Else it follows the begin of an
        answer, behind the reasoning if the template opens one.
        """
        *before, last = messages
        tags, text = think_tags_of(self.template.source), _begun_text(last)
        thought = str(last.get(THOUGHTS[0]) or "")
        is_thought = text == thought and not last["content"]
        try:
            marked = [*before, self._marked(last, is_thought)]
            whole = self.render(marked, add_generation_prompt=False)
        except RefusedError:
            if not before:
                raise
            whole = ""
        written, mark, _ = whole.rpartition(self.mark)
        opens = tags is not None and written.removesuffix(text.lstrip()).rstrip().endswith(
            tags.first
        )
        if mark and (is_thought or (thought.strip() in written and not opens)):
            return written
        if not before:
            raise RefusedError("the chat template leaves out the answer that was begun")
        start = self.render(before, add_generation_prompt=True)
        if tags is not None:
            start = _with_thought(start, thought, tags, is_thought)
        return start if is_thought else start + text

    def _marked(self, message: Message, is_thought: bool) -> dict[str, Any]:
        """Return a message with a mark behind its content, or behind its reasoning."""
        if is_thought:
            return {**message, **dict.fromkeys(THOUGHTS, f"{message[THOUGHTS[0]]}{self.mark}")}
        content = message["content"]
        if isinstance(content, str):
            return {**message, "content": content + self.mark}
        *others, last = content
        return {**message, "content": [*others, {**last, "text": last["text"] + self.mark}]}


def _with_thought(start: str, thought: str, tags: ThinkTags, is_open: bool) -> str:
    """Return the begin of an answer with its reasoning, which goes on if `is_open`."""
    first, last = tags.first, tags.last
    if thought and start.rstrip().endswith(last):  # the template opens and ends none
        start = start.rstrip().removesuffix(last)
        start = start.rstrip().removesuffix(first) if start.rstrip().endswith(first) else start
    opens = start.rstrip().endswith(first)
    if thought or opens:
        start += thought if opens else f"{first}\n{thought}"
        start += "" if is_open else f"\n{last}\n\n"
    return start


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
    raise RefusedError(f"{problem}: {str(message)[:_MAX_MESSAGE]}")


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
    """Return a compiled template with the vocabulary's bos and eos."""
    special = (vocabulary.bos, vocabulary.eos)
    bos, eos = ("" if token is None else vocabulary.text(token) for token in special)
    return ChatTemplate(source, bos=bos, eos=eos)
