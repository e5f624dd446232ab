"""Tool calls as families of models write them: Hermes and Qwen, Llama 3, Mistral, Qwen3-Coder."""

from __future__ import annotations

import json
from typing import Any

from specrun.runtime.replies.reader import BLANK, NotACallError, Reader, Reading

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"

_NAMES_OF_ARGUMENTS = ("arguments", "parameters")


def read_hermes(reader: Reader) -> Reading[None]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, among content."""
    while (yield from reader.until((TOOL_CALL,))):
        if (yield from reader.attempt(_object)):
            yield from reader.follows(END_TOOL_CALL)


def read_llama3(reader: Reader) -> Reading[None]:
    """Read `{"name": ..., "parameters": {...}}`: the reply's begin, or behind `<|python_tag|>`."""
    yield from _objects(reader)
    while (yield from reader.until((PYTHON_TAG,))):
        yield from _objects(reader)


def read_mistral(reader: Reader) -> Reading[None]:
    """Read `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{}`.

    The second is how models since 2025 write it, each call behind a marker of its own.
    """
    while (yield from reader.until((TOOL_CALLS,))):
        yield from reader.attempt(_after_tool_calls)


def read_qwen_coder(reader: Reader) -> Reading[None]:
    """Read `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""
    while marker := (yield from reader.until((TOOL_CALL, FUNCTION))):
        call = _tagged_function if marker == FUNCTION else _enclosed_function
        if (yield from reader.attempt(call)):
            yield from reader.follows(END_TOOL_CALL)


# -- calls that are JSON objects -------------------------------------------------------------------


def _objects(reader: Reader) -> Reading[None]:
    """Read calls that follow each other, with or without a semicolon between them."""
    if not (yield from reader.attempt(_object)):
        return
    while (yield from reader.attempt(_separated_object)):
        pass


def _separated_object(reader: Reader) -> Reading[None]:
    separator = yield from reader.after_blank()
    if separator not in (";", ","):
        reader.back(separator)
    yield from _object(reader)


def _object(reader: Reader) -> Reading[None]:
    """Read one call: its name and arguments may come in any order, beside other keys."""
    if (yield from reader.after_blank()) != "{":
        raise NotACallError
    name: str | None = None
    arguments: Any = None
    begun = False
    separator = ","
    while separator == ",":
        if (yield from reader.after_blank()) != '"':
            raise NotACallError
        key = yield from reader.string()
        if (yield from reader.after_blank()) != ":":
            raise NotACallError
        first = yield from reader.after_blank()
        if key in _NAMES_OF_ARGUMENTS and name is not None and first == "{" and not begun:
            yield from _arguments(reader, name)
            begun = True
        elif key == "name" and not begun:
            name = _known(reader, (yield from reader.value(first)))
        else:
            value = yield from reader.value(first)
            arguments = value if key in _NAMES_OF_ARGUMENTS else arguments
        separator = yield from reader.after_blank()
    if separator != "}" or name is None:
        raise NotACallError
    if not begun:
        text = _as_object(arguments)
        reader.begin(name)
        reader.argue(text)
    reader.end_call()


def _arguments(reader: Reader, name: str) -> Reading[None]:
    """Give out the arguments whose bracket was read, as they come."""
    second = yield from reader.after_blank()
    if second not in ('"', "}"):  # a dictionary of Python's, say: not to be begun
        raise NotACallError
    reader.back(second)
    reader.begin(name)
    reader.argue("{")
    yield from reader.bracketed(reader.argue)


def _known(reader: Reader, name: object) -> str:
    if not isinstance(name, str) or name not in reader.tools:
        raise NotACallError
    return name


def _as_object(arguments: object) -> str:
    """Return arguments that came whole as JSON: some models write them as a string of it."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise NotACallError from error
    if arguments is None:
        return "{}"
    if not isinstance(arguments, dict):
        raise NotACallError
    return json.dumps(arguments, ensure_ascii=False)


# -- Mistral ---------------------------------------------------------------------------------------


def _after_tool_calls(reader: Reader) -> Reading[None]:
    first = yield from reader.after_blank()
    if first == "{":
        reader.back(first)
        yield from _object(reader)
    elif first == "[":
        separator = ","
        while separator == ",":
            reader.hold()
            yield from _object(reader)
            separator = yield from reader.after_blank()
        if separator != "]":
            raise NotACallError
    else:
        yield from _named_call(reader, first)


def _named_call(reader: Reader, first: str) -> Reading[None]:
    """Read `name[ARGS]{...}`; some models name the call in between: `[CALL_ID]id`."""
    name = first + (yield from _identifier(reader))
    if (yield from reader.follows(CALL_ID)):
        yield from _identifier(reader)
    yield from reader.follows(ARGS)
    if (yield from reader.after_blank()) != "{":
        raise NotACallError
    yield from _arguments(reader, _known(reader, name))
    reader.end_call()


def _identifier(reader: Reader) -> Reading[str]:
    name = ""
    while (character := (yield from reader.next())) and character not in BLANK + "[{":
        name += character
    reader.back(character)
    return name


# -- calls that are tags ---------------------------------------------------------------------------


def _enclosed_function(reader: Reader) -> Reading[None]:
    if not (yield from reader.follows(FUNCTION)):
        yield from reader.next()
        raise NotACallError
    yield from _tagged_function(reader)


def _tagged_function(reader: Reader) -> Reading[None]:
    """Read the call whose name comes next; each argument is given out when it is whole."""
    name = _known(reader, (yield from _tag(reader)))
    reader.begin(name)
    reader.argue("{")
    separator = ""
    while (yield from reader.follows(PARAMETER)):
        key = yield from _tag(reader)
        value = yield from _raw_value(reader)
        text = json.dumps(_typed(value, reader.tools[name], key), ensure_ascii=False)
        reader.argue(f"{separator}{json.dumps(key, ensure_ascii=False)}: {text}")
        separator = ", "
    reader.argue("}")
    if not (yield from reader.follows(END_FUNCTION)):
        yield from reader.next()
        raise NotACallError
    reader.end_call()


def _tag(reader: Reader) -> Reading[str]:
    """Return what stands before the bracket that closes a tag."""
    name = ""
    while (character := (yield from reader.next())) != ">":
        if not character or character in "\n<":
            raise NotACallError
        name += character
    return name


def _raw_value(reader: Reader) -> Reading[str]:
    """Return the text of an argument, without the line breaks next to its tags."""
    text = ""
    while not text.endswith(END_PARAMETER):
        character = yield from reader.next()
        if not character:
            raise NotACallError
        text += character
    return text.removesuffix(END_PARAMETER).removeprefix("\n").removesuffix("\n")


def takes_text(schema: object) -> bool:
    """Whether a schema takes texts only."""
    if not isinstance(schema, dict):
        return False
    known = schema.get("enum")
    if isinstance(known, list):
        return bool(known) and all(isinstance(value, str) for value in known)
    return schema.get("type") == "string"


def _typed(value: str, schema: object, key: str) -> object:
    """Return the argument as its schema has it: text, or what the text says in JSON."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    described = properties.get(key) if isinstance(properties, dict) else None
    if takes_text(described):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
