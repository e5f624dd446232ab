"""Tool calls in a reply, read by the form of its family: objects, names, tags, Python's calls."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from specrun.runtime.chat.reader import (
    BLANK,
    LONGEST_HEAD,
    Content,
    NotACallError,
    Reader,
    Reading,
    Reasoning,
)
from specrun.runtime.chat.syntax import ArgumentForm, ToolSyntax
from specrun.runtime.chat.values import ValueReading, as_json, kinds_of, typed
from specrun.runtime.grammar.references import properties_of

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_WRAPPERS = ("function", "tool_call", "tool_calls")  # keys of objects around calls
_FENCES = ("```json", "```tool_call", "```")


def read_calls(reader: Reader, syntax: ToolSyntax, around: Collection[str] = ()) -> Reading[str]:
    """Read content and calls up to the end, or to a mark of `around`, which is returned."""
    openers = (*syntax.sections, *syntax.openers)
    while mark := (yield from reader.until((*openers, *around))):
        if mark in around:
            return mark
        if (yield from reader.attempt(functools.partial(read_call, syntax=syntax, mark=mark))):
            yield from end_calls(reader, syntax)
    return ""


def end_calls(reader: Reader, syntax: ToolSyntax) -> Reading[None]:
    """Read the marks that end calls."""
    while (yield from reader.follows_any(syntax.closers)):
        pass


def read_call(reader: Reader, syntax: ToolSyntax, mark: str) -> Reading[None]:
    """Read the call, or the list of calls, behind a mark; "" is the begin of the reply."""
    if mark in syntax.sections and syntax.openers:
        mark = yield from reader.follows_any(syntax.openers)
        if not mark and syntax.kind != "object":
            yield from reader.next()
            raise NotACallError
    if mark.startswith("{"):  # it is the begin of an object
        reader.back(mark)
    if syntax.kind == "keywords" or syntax.at_start:
        in_list, character = yield from _first_in_list(reader)
        is_object = character == "{"
        if not is_object and (syntax.kind == "keywords" or (in_list and character.isidentifier())):
            yield from _keyword_calls(reader, syntax)
            return
    yield from reader.follows_any(_FENCES if not mark or mark.endswith(":") else ())
    first = yield from reader.after_blank()
    if first in ("{", "["):
        reader.back(first)
        yield from _objects(reader, syntax)
    elif syntax.kind == "object":
        raise NotACallError
    else:
        reader.back(first)
        if syntax.kind == "tags":
            yield from _tagged(reader, syntax, mark)
        else:
            yield from _named(reader, syntax)


def _first_in_list(reader: Reader) -> Reading[tuple[bool, str]]:
    """Return whether a list comes, and the character that comes within it; all is read again."""
    seen, character = "", (yield from reader.next())
    while character and character in BLANK + "[":
        seen += character
        character = yield from reader.next()
    reader.back(seen + character)
    return "[" in seen, character


def _known(reader: Reader, name: object) -> str:
    if not isinstance(name, str) or name not in reader.tools:
        raise NotACallError
    return name


# -- calls that are JSON objects -------------------------------------------------------------------


def _objects(reader: Reader, syntax: ToolSyntax) -> Reading[None]:
    """Read calls in a list, or calls that follow each other, with or without a semicolon."""
    if (yield from reader.follows("[")):
        separator = ","
        while separator == ",":
            reader.hold()
            yield from _object(reader, syntax)
            separator = yield from reader.after_blank()
        if separator != "]":
            reader.back(separator)
            reader.require_more()
        return
    yield from _object(reader, syntax)
    while True:
        separator = yield from reader.follows_any((";", ","))
        if not (yield from reader.ahead("{", BLANK)):
            reader.back(separator)
            return
        if not (yield from reader.attempt(functools.partial(_object, syntax=syntax))):
            return


def _object(reader: Reader, syntax: ToolSyntax) -> Reading[None]:
    """Read one call: its name and arguments may come in any order, among other keys."""
    if (yield from reader.after_blank()) != "{":
        raise NotACallError
    name: str | None = None
    arguments: Any = None
    begun = False
    while True:
        quote = yield from reader.after_blank()
        if begun and quote not in ('"', "'"):
            reader.back("" if quote == "}" else quote)
            break
        key = yield from _string(reader, quote)
        if (yield from reader.after_blank()) != ":":
            raise NotACallError
        first = yield from reader.after_blank()
        if key in _WRAPPERS and name is None and first in ("{", "["):
            reader.back(first)
            yield from _objects(reader, syntax)
            yield from reader.follows("}")
            return
        if key == syntax.answer_key and first == '"':
            yield from _answer(reader)
            return
        if key in _ARGUMENTS and name is not None and first == "{" and not begun:
            yield from _arguments(reader, syntax, name)
            begun = True
        elif key in _NAMES and not begun:
            name = _known(reader, (yield from _value(reader, syntax, first)))
        elif name is None and first == "{" and syntax.form.before_arguments == '": ':
            name, begun = _known(reader, key), True  # the name itself is the key
            yield from _arguments(reader, syntax, name)
        else:
            value = yield from _value(reader, syntax, first)
            arguments = value if key in _ARGUMENTS else arguments
        separator = yield from reader.after_blank()
        if separator == "}":
            break
        if separator != ",":
            if not begun:
                raise NotACallError
            reader.back(separator)
            reader.require_more()
            break
    if name is None:
        raise NotACallError
    if not begun:
        text = _as_object(arguments)
        reader.begin(name)
        reader.argue(text)
    reader.end_call()


def _answer(reader: Reader) -> Reading[None]:
    """Give out the text of an answer that is a string of an object, as content."""
    reader.release()

    def give(piece: str) -> None:
        if piece != '"':
            reader.parts.append(Content(json.loads(f'"{piece}"')))

    reader.back('"')
    yield from ValueReading(reader, give).value()
    yield from reader.follows("}")


def _arguments(reader: Reader, syntax: ToolSyntax, name: str) -> Reading[None]:
    """Give out the arguments whose bracket was read, as they come."""
    second = yield from reader.after_blank()
    if not (second.isalnum() or second in ('"', "'", "}", "_", syntax.form.quote[:1] or "}")):
        raise NotACallError
    reader.back(second)
    reader.begin(name)
    marks, quote = (*syntax.closers, *syntax.openers), syntax.form.quote
    yield from ValueReading(reader, reader.argue, marks, quote).inside("{")


def _string(reader: Reader, quote: str) -> Reading[str]:
    """Return the string whose opening quote was read; control characters are none of it."""
    if quote not in ('"', "'") or not quote:
        raise NotACallError
    raw = ""
    while (character := (yield from reader.next())) != quote:
        if character < " ":  # the end of the text, too
            raise NotACallError
        if character == "\\":
            following = yield from reader.next()
            character = following if following == "'" else character + following
        raw += '\\"' if character == '"' else character
    return str(_parsed(f'"{raw}"'))


def _value(reader: Reader, syntax: ToolSyntax, first: str) -> Reading[Any]:
    """Return the value that begins with the character `first`, which was read."""
    if first in ('"', "'"):
        return (yield from _string(reader, first))
    raw = first
    if first in ("{", "["):
        pieces: list[str] = []
        yield from ValueReading(reader, pieces.append, syntax.closers).inside(first)
        raw = "".join(pieces)
    else:
        while (character := (yield from reader.next())).isalnum() or character in ("+", "-", "."):
            raw += character
        reader.back(character)
    return _parsed({"True": "true", "False": "false", "None": "null"}.get(raw, raw))


def _parsed(raw: str) -> Any:  # noqa: ANN401 - any JSON value
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise NotACallError from error


def _as_object(arguments: object) -> str:
    """Return arguments that came whole as JSON: some models write them as a string of it."""
    if isinstance(arguments, str):
        arguments = _parsed(as_json(arguments))
    if arguments is None:
        return "{}"
    if not isinstance(arguments, dict):
        raise NotACallError
    return json.dumps(arguments, ensure_ascii=False)


# -- calls that begin with a name ------------------------------------------------------------------


def _named(reader: Reader, syntax: ToolSyntax) -> Reading[None]:
    """Read a name, the text before the arguments, and these."""
    if syntax.at_start and not (yield from reader.ahead(reader.tools, BLANK)):
        raise NotACallError  # at once: it is a text that is shown
    head = ""
    while not head.endswith("{"):
        character = yield from reader.next()
        if not character or len(head) > LONGEST_HEAD:
            raise NotACallError
        head += character
        mark = next((each for each in syntax.openers if head.endswith(each)), None)
        if mark is not None:
            reader.back(mark)
            raise NotACallError
    assert syntax.head is not None
    found = syntax.head.fullmatch(head[:-1])
    if found is None:
        raise NotACallError
    yield from _arguments(reader, syntax, _known(reader, found["name"]))
    reader.end_call()


# -- calls as Python has them ----------------------------------------------------------------------


def _keyword_calls(reader: Reader, syntax: ToolSyntax) -> Reading[None]:
    """Read `name(key=value, ...)`: in a list, or one a line."""
    in_list = yield from reader.follows("[")
    while True:
        name = yield from _identifier(reader)
        if (yield from reader.next()) != "(":
            raise NotACallError
        name = _known(reader, name)
        first = yield from reader.after_blank()
        reader.back(first)
        if not (first.isalnum() or first in ("_", ")", '"', "'")):
            raise NotACallError
        reader.begin(name)
        keys = list(properties_of(reader.tools[name]))
        yield from ValueReading(reader, reader.argue, syntax.closers, names=keys).inside("(")
        reader.end_call()
        if in_list and not (yield from reader.ahead((",",), BLANK)):
            break
        yield from reader.follows(",")
        names = [f"{name}(" for name in reader.tools]
        if not in_list and not (yield from reader.ahead(names, BLANK)):
            return
        reader.hold()
    if in_list and not (yield from reader.follows("]")):
        reader.require_more()


def _identifier(reader: Reader) -> Reading[str]:
    name = yield from reader.after_blank()
    while (character := (yield from reader.next())).isalnum() or character in tuple("_.-"):
        name += character
    reader.back(character)
    return name


# -- calls that are tags ---------------------------------------------------------------------------


def _tagged(reader: Reader, syntax: ToolSyntax, mark: str) -> Reading[None]:
    """Read the call whose name comes next; give out texts as they come, other values when whole."""
    form = syntax.form.argument
    assert form is not None
    second = syntax.form.before_name.partition(mark)[2].strip() if mark else ""
    if second and mark != second and not (yield from reader.follows(second)):
        yield from reader.next()
        raise NotACallError
    name = yield from _identifier(reader)
    end = syntax.form.before_arguments.strip()
    end = end[end.rfind("<") if end.endswith("|>") else -1 :]  # without attributes
    if end and not (yield from reader.through(end, "\n")):
        raise NotACallError
    name = _known(reader, name)
    if not (yield from reader.ahead((form.before.strip(), *syntax.closers), BLANK)):
        yield from reader.next()
        raise NotACallError
    reader.begin(name)
    reader.argue("{")
    properties = properties_of(reader.tools[name])
    given: list[str] = []
    is_whole = True
    while is_whole and not (yield from reader.ahead(syntax.closers, BLANK)):
        if not (yield from reader.follows(form.before.strip())):
            break
        head = yield from reader.through(form.value_mark)
        found = re.match(r'[^"<>\n]+', head)
        if found is None or not found[0].strip():
            is_whole = False
            break
        key, attributes = found[0].strip(), head[found.end() :]
        keys = [each for each in properties if each != key and each not in given]
        lead = f"{', ' if given else ''}{json.dumps(key, ensure_ascii=False)}: "
        schema = properties.get(key)
        if schema is None and re.search(r'(string|type)="(true|string)"', attributes):
            schema = {"type": "string"}
        is_text = "{key}" not in form.behind and kinds_of(schema, reader.tools[name]) == {"string"}
        reader.argue(f'{lead}"' if is_text else "")
        value = yield from _TagValue(reader, syntax, form, key, keys, is_text=is_text).read()
        is_whole = value is not None
        if is_text and is_whole:
            reader.argue('"')
        elif value is not None:
            reader.argue(lead + _typed_argument(value, form, schema, reader.tools[name]))
        given.append(key)
    if not is_whole or not (yield from reader.ahead(syntax.closers, BLANK)):
        reader.require_more()
        if reader.is_cut and (not is_whole or (yield from reader.at_end())):
            return
    reader.argue("}")
    yield from end_calls(reader, syntax)
    reader.end_call()


_CDATA = "<![CDATA["


class _TagValue:
    """The value of an argument, up to its closing tag, which may stand within it or be missing.

    A closing tag is the argument's if a possible continuation of an argument follows. Tags of calls
    that are opened and closed within the value belong to it. If the closing tag is missing, the
    value ends at the tag of one of the other `keys`, or at the end of the call. One that `is_text`
    is given out as it comes: up to a possible end, and to the first closing tag that may be its
    end.
    """

    def __init__(
        self,
        reader: Reader,
        syntax: ToolSyntax,
        form: ArgumentForm,
        key: str,
        keys: list[str],
        *,
        is_text: bool = False,
    ) -> None:
        self._reader = reader
        self._form = form
        self._close = form.behind.strip().replace("{key}", key)
        self._call_open = syntax.openers[-1]
        self._call_close = syntax.form.behind.split()[0]
        self._before = form.before.strip()
        lead = form.between.strip()[:1]
        self._others = [f"{each}{lead}" for each in keys]
        self._nested = self._before
        if "{key}" in form.behind:  # each argument has a closing tag of its own
            self._nested, self._others = f"{self._before}{key}>", []
        self._behind = (*syntax.closers, *syntax.openers, *syntax.sections)
        self._text = ""
        self._open: list[str] = []  # closing tags of tags opened within the value
        self._breaks = form.between.endswith("\n") or form.behind.startswith("\n")
        self._is_text, self._n_given = is_text, 0

    def read(self) -> Reading[str | None]:
        """Return the value, None if the text is cut within it."""
        value = yield from self._read()
        if self._is_text and value is not None:
            self._give(value[self._n_given :])
        return value

    def _read(self) -> Reading[str | None]:
        reader, rest = self._reader, ""
        closed: int | None = None
        while True:
            character = yield from reader.next()
            if not character:
                if reader.is_cut:
                    return None
                reader.require_more()
                if closed is not None:
                    rest = self._text[closed + len(self._close) :]
                    self._text = self._text[:closed]
                reader.back(rest)
                return self._trimmed(self._text)
            self._text += character
            if self._ends(self._close):
                if self._closes(self._close):
                    continue
                if (yield from self._followed((self._before, *self._behind))):
                    return self._trimmed(self._text.removesuffix(self._close))
                closed = len(self._text) - len(self._close) if closed is None else closed
            elif self._ends(self._call_close):
                if not self._closes(self._call_close) and (yield from self._followed(self._behind)):
                    return self._until(self._call_close)
            elif self._ends(self._nested):
                if not self._open and (yield from reader.ahead(self._others)):
                    return self._until(self._nested)
                self._open.append(self._close)
            elif self._ends(self._call_open):
                self._open.append(self._call_close)
            if self._is_text:
                self._hand_out(closed)

    def _hand_out(self, closed: int | None) -> None:
        """Give out the certain part of the value."""
        text, tags = self._text, (self._close, self._call_close, self._nested)
        first = int(self._breaks and text[:1] == "\n")
        if (not first and text[:1] == "\n") or _CDATA.startswith(text[: len(_CDATA)]):
            return  # its borders are known at its end
        start = first + self._n_given
        end = len(text) if closed is None else closed
        for place in range(start, end):
            if any(tag.startswith(text[place:end]) for tag in tags):
                end = place
                break
        held = text[start:end].rstrip(BLANK).removesuffix(self._close).rstrip(BLANK)
        if held:
            self._give(held)
            self._n_given += len(held)

    def _give(self, text: str) -> None:
        self._reader.argue(json.dumps(text, ensure_ascii=False)[1:-1])

    def _ends(self, tag: str) -> bool:
        return self._text.endswith(tag)

    def _closes(self, tag: str) -> bool:
        """Whether a closing tag closes a tag opened within the value."""
        is_inner = tag in self._open if tag == self._call_close else self._open[-1:] == [tag]
        while is_inner and self._open.pop() != tag:
            pass
        return is_inner

    def _followed(self, tags: Collection[str]) -> Reading[bool]:
        return (yield from self._reader.at_end()) or (yield from self._reader.ahead(tags, BLANK))

    def _until(self, tag: str) -> str:
        """Return the value before a tag that ends it instead of its own."""
        self._reader.back(tag)
        text = self._text.removesuffix(tag)
        closed = text.rstrip(BLANK)  # by a tag that seemed to close one within
        has_tag = closed.endswith(self._close)
        return self._trimmed(closed.removesuffix(self._close) if has_tag else text)

    def _trimmed(self, text: str) -> str:
        """Return the value without the line breaks next to its tags."""
        if text.startswith(_CDATA) and text.endswith("]]>"):
            return text[len(_CDATA) : -len("]]>")]
        if self._breaks or (text[:1] == "\n" == text[-1:]):
            return text.removeprefix("\n").removesuffix("\n")
        return text


def _typed_argument(value: str, form: ArgumentForm, schema: object, root: object) -> str:
    """Return the JSON of an argument's text by its schema."""
    if "{key}" in form.behind and (form.before in value or not value.strip()):
        with suppress(NotACallError):
            return json.dumps(_elements(value, form.before, schema, root), ensure_ascii=False)
    return typed(value, schema, root)


def _elements(text: str, before: str, schema: object, root: object) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value that elements within elements are."""
    tag = re.compile(re.escape(before) + r"(/?)([^>]*)>")
    opened: list[tuple[str, object]] = [("", schema)]
    inner: list[list[tuple[str, Any]]] = [[]]
    place = 0
    for found in tag.finditer(text):
        between, place = text[place : found.start()], found.end()
        if not found[1]:
            parent = opened[-1][1]
            items = parent.get("items") if isinstance(parent, dict) else None
            own = items if found[2] == "item" and items else properties_of(parent).get(found[2])
            opened.append((found[2], own))
            inner.append([])
        elif opened[-1][0] == found[2] and len(opened) > 1:
            name, own = opened.pop()
            made = _element(inner.pop(), between, own, root)
            inner[-1].append((name, made))
        else:
            raise NotACallError
    if len(opened) > 1:
        raise NotACallError
    return _element(inner[0], text if not inner[0] else "", schema, root)


def _element(children: list[tuple[str, Any]], text: str, schema: object, root: object) -> Any:  # noqa: ANN401 - any JSON value
    kinds = kinds_of(schema, root)
    if children:
        if all(name == "item" for name, _ in children) and kinds != {"object"}:
            return [value for _, value in children]
        return dict(children)
    if not text.strip() and kinds & {"array", "object"}:
        return [] if "array" in kinds else {}
    return None if not text and not kinds else json.loads(typed(text, schema, root))


# -- replies made of messages ----------------------------------------------------------------------


_HEADER_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "to=")


def read_messages(reader: Reader, syntax: ToolSyntax) -> Reading[None]:
    """Read messages to channels and recipients: reasoning, content, and calls of tools.

    `<|start|>assistant<|channel|>commentary to=functions.name<|message|>...<|call|>`
    """
    ends = (*syntax.closers, "<|start|>", "<|channel|>", "<|message|>")
    while True:
        header = yield from _header(reader)
        if header is None:
            mark = yield from reader.until(ends)
        else:
            found = re.search(r"to=([^\s<]+)", header)
            recipient = found[1].removeprefix("functions.") if found else ""
            is_thought = recipient == "self" or "<|channel|>analysis" in header
            is_call = syntax.kind == "tags" and recipient not in ("", "self", "user")
            if recipient in reader.tools or is_call:
                mark = yield from _message_call(reader, syntax, recipient, ends)
            elif is_thought:
                reader.back((yield from reader.after_blank()))
                mark = yield from reader.until(ends, Reasoning)
            else:
                mark = yield from reader.until(ends)
        if not mark:
            return
        held = reader.release()
        if mark not in syntax.closers:
            reader.back(held.lstrip(BLANK))


def _header(reader: Reader) -> Reading[str | None]:
    """Return a message's header, None if there is none."""
    seen = ""
    while not seen.endswith("<|message|>"):
        character = yield from reader.next()
        seen += character
        begun = seen.lstrip(BLANK)
        fits = any(mark.startswith(begun) or begun.startswith(mark) for mark in _HEADER_MARKS)
        if not character or not fits or len(seen) > LONGEST_HEAD:
            mark = next((each for each in _HEADER_MARKS[:-1] if begun.startswith(each)), "")
            reader.back(begun.removeprefix(mark) if mark else seen)  # a mark is no content
            return None
    return seen


def _message_call(
    reader: Reader, syntax: ToolSyntax, name: str, ends: Collection[str]
) -> Reading[str]:
    """Read the call that a message is; return the mark that ends it."""
    if syntax.kind == "tags":
        return (yield from read_calls(reader, syntax, ends))

    def call(reader: Reader) -> Reading[None]:
        first = yield from reader.after_blank()
        if first != "{":
            raise NotACallError
        yield from _arguments(reader, syntax, name)
        reader.end_call()

    yield from reader.attempt(call)
    return (yield from reader.until(ends))
