"""Conversations in the form that a template takes: whatever clients send is rendered whole.

Many templates take one system message, and only at the beginning; some take none, or raise if
roles do not alternate; some print parts of a content and skip a text. Nothing in a file shows this.
So the template is tried: first with the messages as they are, then with changes that keep every
text, the least first. A way has failed if the template raises, or leaves out a text.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specrun.bindings.errors import TemplateError
from specrun.runtime.chat.families import GENERIC, syntax_of
from specrun.runtime.chat.syntax import ToolSyntax

if TYPE_CHECKING:
    from specrun.runtime.chat.template import ChatTemplate

_log = logging.getLogger(__name__)
_Message = dict[str, Any]
Messages = list[_Message]
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""The names of an answer's reasoning: which one is read depends on the template."""
_TEXTS = ("content", *THOUGHTS)


class RefusedError(TemplateError):
    """The template raises for this conversation; it may take another form of it."""


# -- Changes of a conversation, each of which keeps all texts --------------------------------------

_Change = Callable[[Messages], Messages]


def _of_each(change: Callable[[_Message], _Message]) -> _Change:
    """Return the change of a conversation that changes every message."""
    return lambda messages: [change(message) for message in messages]


def _without(message: _Message, *names: str) -> _Message:
    return {key: part for key, part in message.items() if key not in names}


def _beginning_joined(messages: Messages) -> Messages:
    """Return the messages with those of the system at the beginning as one."""
    count = _n_leading(messages)
    return [*_neighbours_joined(messages[:count]), *messages[count:]]


def _late_as_user(messages: Messages) -> Messages:
    """Return the messages with later ones of the system as the user's."""
    count = _n_leading(messages)
    return [*messages[:count], *_system_as_user(messages[count:])]


@_of_each
def _system_as_user(message: _Message) -> _Message:
    """Return a message of the system as the user's."""
    return {**message, "role": "user"} if message["role"] == "system" else message


def _neighbours_joined(messages: Messages) -> Messages:
    """Return the messages with neighbours of one role as one; results stay apart."""
    joined: Messages = []
    for message in messages:
        before = joined[-1] if joined else None
        if before is None or before["role"] != message["role"] or message["role"] == "tool":
            joined.append(dict(message))
            continue
        for key in {*_TEXTS, "tool_calls"} & message.keys():
            own, more = before.get(key), message[key]
            before[key] = _joined(own, more) if key in _TEXTS else [*(own or ()), *(more or ())]
    return joined


def _user_first(messages: Messages) -> Messages:
    """Return the messages with a user's turn, which is empty, before an answer that is first."""
    count = _n_leading(messages)
    if messages[count:] and messages[count]["role"] != "user":
        return [*messages[:count], {"role": "user", "content": ""}, *messages[count:]]
    return messages


def _behind_results(messages: Messages) -> Messages:
    """Return the messages with the user's text behind results as a part of the last of them."""
    told: Messages = []
    for message in messages:
        if message["role"] == "user" and told and told[-1]["role"] == "tool":
            text = _joined(told[-1]["content"], message["content"])
            told[-1] = {**told[-1], "content": text}
        else:
            told.append(message)
    return told


def _calls_apart(messages: Messages) -> Messages:
    """Return the messages with the text beside calls as a message before them."""
    apart: Messages = []
    for message in messages:
        if message.get("tool_calls") and message["content"]:
            apart.append(_without(message, "tool_calls"))
            message = {**_without(message, *THOUGHTS), "content": ""}
        apart.append(message)
    return apart


def _texts_after_results(messages: Messages) -> Messages:
    """Return the messages with texts beside calls in the answer behind the calls' results."""
    told: Messages = []
    waiting: Messages = []  # those whose texts wait for an answer
    for message in map(dict, messages):
        if message.get("tool_calls") and message["content"]:
            waiting.append(message)
        elif waiting and message["role"] in ("assistant", "user") and not message.get("tool_calls"):
            if message["role"] == "user":
                told.append({"role": "assistant", "content": ""})
            answer = message if message["role"] == "assistant" else told[-1]
            answer["content"] = _joined(*(each["content"] for each in (*waiting, answer)))
            for each in waiting:
                each["content"] = ""
            waiting = []
        told.append(message)
    return told


def _texts_in_results(messages: Messages) -> Messages:
    """Return the messages with a text beside calls at the beginning of their first result."""
    told: Messages = []
    caller: _Message = {}
    for message in map(dict, messages):
        if message.get("tool_calls"):
            caller = message
        elif message["role"] == "tool" and caller.get("content"):
            said = f"[said with the call]\n{caller['content']}"
            message["content"] = _joined(said, message["content"])
            caller["content"] = ""
        told.append(message)
    return told


def _calls_in_turn(messages: Messages) -> Messages:
    """Return the messages with one call in each, and its results behind it."""
    groups: list[Messages] = []
    by_id: dict[object, Messages] = {}
    for message in messages:
        if message["role"] == "tool" and groups:
            by_id.get(message.get("tool_call_id"), groups[-1]).append(message)
            continue
        by_id = {}
        first, *others = message.get("tool_calls") or [None]
        groups.append([message if first is None else {**message, "tool_calls": [first]}])
        later = {**_without(message, *THOUGHTS), "content": ""}
        groups += [[{**later, "tool_calls": [call]}] for call in others]
        if first is not None:
            made = groups[-1 - len(others) :]
            by_id = {group[0]["tool_calls"][0].get("id"): group for group in made}
    return [message for group in groups for message in group]


@_of_each
def _calls_alone(message: _Message) -> _Message:
    """Return a message with null as the content if it has calls and no text."""
    is_alone = message.get("tool_calls") and not message["content"]
    return {**message, "content": None} if is_alone else message


@_of_each
def _arguments_as_texts(message: _Message) -> _Message:
    """Return a message with the arguments of calls as JSON in texts, as OpenAI has them."""
    if not message.get("tool_calls"):
        return message
    calls: list[_Message] = []
    for call in message["tool_calls"]:
        function = dict(_function(call))
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _calls_in_words(messages: Messages, syntax: ToolSyntax = GENERIC) -> Messages:
    """Return the messages with calls in the assistant's text, as its model writes them."""
    told: Messages = []
    for message in messages:
        calls: list[tuple[str, Mapping[str, Any]]] = []
        for function in map(_function, message.get("tool_calls") or ()):
            arguments = arguments_of(function.get("arguments"))
            own = arguments if isinstance(arguments, Mapping) else {}
            calls.append((str(function.get("name")), own))
        text = syntax.form.written(calls) if calls else ""
        content = "\n".join(filter(None, (message["content"], text)))
        told.append({**_without(message, "tool_calls"), "content": content})
    return told


def arguments_of(arguments: object) -> Any:  # noqa: ANN401 - any JSON value
    """Return the arguments of an earlier call as an object, if they can be one.

    Templates write arguments as JSON themselves; a text would be quoted twice.
    """
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {"arguments": arguments}  # such as of a call that was cut short


@_of_each
def _results_as_user(message: _Message) -> _Message:
    """Return a result of a call as the user's."""
    if message["role"] not in ("tool", "function"):
        return message
    name = message.get("name") or "the tool"
    return {"role": "user", "content": f"[{name} returned]\n{message['content']}"}


def _n_leading(messages: Messages) -> int:
    """Return how many messages of the system are at the beginning."""
    roles = [message["role"] for message in messages]
    return next((place for place, role in enumerate(roles) if role != "system"), len(roles))


def _joined(*texts: str | None) -> str:
    return "\n\n".join(text for text in texts if text)


_CHANGES: dict[_Change, str] = {
    _beginning_joined: "the system messages at the beginning are one",
    _late_as_user: "later system messages are the user's",
    _system_as_user: "the system's text is before the user's",
    _neighbours_joined: "neighbours of one role are one message",
    _user_first: "an empty message of the user is first",
    _texts_after_results: "a text beside calls is behind their results",
    _texts_in_results: "a text beside calls is in their first result",
    _behind_results: "the user's text behind results is in the last of them",
    _calls_apart: "a text beside calls is a message of its own",
    _calls_in_turn: "each message has one call",
    _calls_alone: "the content beside calls is null",
    _arguments_as_texts: "arguments of calls are texts",
    _calls_in_words: "calls are in the assistant's text",
    _results_as_user: "results of calls are the user's",
}
"""The changes, and their names in the log."""

_Way = Sequence[_Change]
_SYSTEM_FIRST: _Way = (_beginning_joined, _late_as_user)
_NO_SYSTEM: _Way = (_system_as_user, _neighbours_joined, _user_first)
_ANSWERED: Sequence[_Way] = (
    (_texts_after_results,),
    (*_SYSTEM_FIRST, _neighbours_joined, _texts_after_results),
    (*_NO_SYSTEM, _texts_after_results),
    (*_SYSTEM_FIRST, _neighbours_joined, _texts_after_results, _behind_results),
    (*_NO_SYSTEM, _texts_after_results, _behind_results),
)
_WAYS: Sequence[_Way] = (
    (),
    (_beginning_joined,),
    (_neighbours_joined,),
    _SYSTEM_FIRST,
    (*_SYSTEM_FIRST, _neighbours_joined),
    (_system_as_user, _neighbours_joined),
    _NO_SYSTEM,
    (*_SYSTEM_FIRST, _neighbours_joined, _behind_results),
    (*_NO_SYSTEM, _behind_results),
    *(
        (*before, *way)
        for way in (
            (_calls_apart,),
            (_calls_in_turn,),
            (_calls_apart, _calls_in_turn),
            (_arguments_as_texts,),
            (_calls_apart, _calls_alone),
            (_calls_apart, _calls_alone, _arguments_as_texts),
        )
        for before in ((), _SYSTEM_FIRST)
    ),
    *_ANSWERED,
    *((*way, _texts_in_results) for way in _ANSWERED),
    (_calls_in_words,),
    (_calls_in_words, *_SYSTEM_FIRST),
    (_calls_in_words, _results_as_user, *_SYSTEM_FIRST, _neighbours_joined),
    (_calls_in_words, _results_as_user, *_NO_SYSTEM),
)


# -- Texts that a template leaves out --------------------------------------------------------------


Writer = Callable[[Messages], str]
"""A rendering of messages by one template; raises `RefusedError`."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A text of a message that the template has to write: its content, or the name of a call."""

    place: int
    role: str
    text: str
    call: int | None = None


def _pieces(messages: Messages) -> Iterator[_Piece]:
    for place, message in enumerate(messages):
        if text := (message["content"] or "").strip():
            yield _Piece(place, message["role"], text)
        for number, call in enumerate(message.get("tool_calls") or ()):
            name = _function(call).get("name")
            if isinstance(name, str) and name:
                yield _Piece(place, message["role"], name, number)


def _function(call: object) -> Mapping[str, Any]:
    found = call.get("function", call) if isinstance(call, Mapping) else {}
    return found if isinstance(found, Mapping) else {}


def _absent(pieces: Sequence[_Piece], text: str, source: str) -> list[_Piece]:
    """Return the contents that may not be in `text`: in it, they follow each other by role.

    Those that the template may have written itself are among them.
    """
    cursors: dict[str, int] = {}
    absent: list[_Piece] = []
    for piece in pieces:
        size = len(piece.text)
        found = text.find(piece.text, cursors.get(piece.role, 0))
        is_late = piece.role == "system" and piece.place > 0
        if found < 0 or (size <= _SHORT and (is_late or piece.text in source)):
            absent.append(piece)
        if found >= 0:
            cursors[piece.role] = found + size
    return absent


def _lost(absent: Sequence[_Piece], messages: Messages, write: Writer, mark: str) -> list[_Piece]:
    """Return those of the pieces that the template does not write.

    A template may change texts: it takes "/no_think" out, or writes JSON. So these are rendered
    once more with marks behind them: a piece is lost if its mark is.
    """
    if not absent:
        return []
    marked = [dict(message) for message in messages]
    shown = [f"{mark}{number}{mark}" for number in range(len(absent))]
    for piece, sign in zip(absent, shown, strict=True):
        own = marked[piece.place]
        if piece.call is None:
            own["content"] += sign
        else:
            calls = own["tool_calls"] = [*own["tool_calls"]]
            call, function = calls[piece.call], _function(calls[piece.call])
            named = {**function, "name": f"{function['name']}{sign}"}
            calls[piece.call] = {**call, "function": named} if "function" in call else named
    try:
        text = write(marked)
    except RefusedError:  # because of a mark: the messages themselves were taken
        return []
    return [
        piece
        for piece, sign in zip(absent, shown, strict=True)
        if sign not in text and json.dumps(sign)[1:-1] not in text
    ]


# -- The first way that loses nothing --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fitted:
    """A conversation in a form for a template: its text, and the messages that make it."""

    text: str
    messages: Messages
    way: _Way
    lost: Sequence[_Piece]

    @property
    def keeps_calls(self) -> bool:
        """Whether calls and results are in the template's own form."""
        lost = any(piece.call is not None or piece.role == "tool" for piece in self.lost)
        return _calls_in_words not in self.way and not lost


class Fitting:
    """How conversations are put for one template; keeps the results of trials of the template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        syntax = syntax_of(template.source) or GENERIC
        self._in_words = functools.partial(_calls_in_words, syntax=syntax)
        self._writes_calls: dict[tuple[_Way, bool, bool], bool] = {}
        self._said: set[str] = set()

    def fitted(self, messages: Messages, write: Writer, mark: str) -> Fitted:
        """Return a conversation in the first form that loses nothing.

        If each loses something, it is the first one, with a line in the log. Raises `TemplateError`
        if the template refuses all, or writes the user's last message in none. `mark` is a
        character that is nowhere in the conversation.
        """
        attempts: list[Fitted] = []
        refusals: list[RefusedError] = []
        tried: list[Messages] = []
        for way in _WAYS:
            if _calls_in_words in way and any(each.keeps_calls for each in attempts):
                break  # in a text they are other tokens than the model learnt
            changed = messages
            for change in way:
                changed = (self._in_words if change is _calls_in_words else change)(changed)
            if changed in tried:
                continue
            tried.append(changed)
            try:
                attempt = self._attempt(changed, way, write, mark)
            except RefusedError as refusal:
                refusals.append(refusal)
                continue
            attempts.append(attempt)
            if not attempt.lost:
                return self._chosen(attempt)
        if not attempts:
            raise refusals[0]
        return self._chosen(_least_lost(attempts, messages))

    def _attempt(self, messages: Messages, way: _Way, write: Writer, mark: str) -> Fitted:
        def typed(those: Messages) -> str:
            return write(_typed(those, self.roles_of_parts))

        text, pieces = typed(messages), [*_pieces(messages)]
        contents = [piece for piece in pieces if piece.call is None]
        doubtful = _absent(contents, text, self._template.source)
        # A call's name is among the tools, too: each kind is looked at once for a template; some
        # templates write the first call of a message alone.
        calls = {
            piece: (way, bool(messages[piece.place]["content"]), bool(piece.call))
            for piece in pieces
            if piece.call is not None
        }
        unknown = [piece for piece, kind in calls.items() if kind not in self._writes_calls]
        lost = _lost([*doubtful, *unknown], messages, typed, mark)
        for piece in unknown:
            self._writes_calls[calls[piece]] = piece not in lost
        gone = [piece for piece, kind in calls.items() if not self._writes_calls[kind]]
        taken = _typed(messages, self.roles_of_parts)
        return Fitted(text, taken, way, [*(piece for piece in lost if piece.call is None), *gone])

    def _chosen(self, attempt: Fitted) -> Fitted:
        if attempt.way:
            changes = "; ".join(_CHANGES[change] for change in attempt.way)
            self._say(f"the chat template does not take this conversation as it came: {changes}")
        for piece in attempt.lost:
            self._say(f"the chat template leaves out a text of the {piece.role}")
        return attempt

    def _say(self, text: str) -> None:
        """Log a sentence once for this template."""
        if text not in self._said:
            self._said.add(text)
            _log.warning("%s", text)

    @functools.cached_property
    def roles_of_parts(self) -> frozenset[str]:
        """The roles whose texts the template prints as parts only, as it does beside pictures."""
        roles: frozenset[str] = frozenset()
        if "text" not in self._template.source:  # the name of a part's text
            return roles
        for role in ("user", "system", "assistant", "tool"):
            if not self._shows(role, roles) and self._shows(role, roles | {role}):
                roles |= {role}
        return roles

    def _shows(self, role: str, roles: frozenset[str]) -> bool:
        """Whether the template prints the text of a message of this role."""
        call = {"name": "f", "arguments": {}}
        calls = [{"id": "abcdefghi", "type": "function", "function": call}]
        answer = {"role": "assistant", "content": "b", "tool_calls": calls}
        result = {"role": "tool", "content": _PROBE, "name": "f", "tool_call_id": "abcdefghi"}
        probed: Messages = [{"role": role, "content": _PROBE}]
        user: Messages = [{"role": "user", "content": "a"}]
        talks: dict[str, Messages] = {
            "user": probed,
            "system": [*probed, *user],
            "assistant": [*user, *probed, *user],
            "tool": [*user, answer, result],
        }
        try:
            text = self._template.render(_typed(talks[role], roles))
        except TemplateError:
            return False
        return _PROBE in text and str(_parts(_PROBE)) not in text


_PROBE = "Xq7probe"
_SHORT = 64  # characters of a text that a template may have written itself


def _typed(messages: Messages, roles: frozenset[str]) -> Messages:
    """Return the messages with contents as parts, for these roles."""
    if not roles:
        return messages
    return [
        {**message, "content": _parts(message["content"])} if message["role"] in roles else message
        for message in messages
    ]


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _least_lost(attempts: Sequence[Fitted], messages: Messages) -> Fitted:
    """Return the attempt that loses least, of those that have the user's last message."""
    users = [each["content"].strip() for each in messages if each["role"] == "user"]

    def asks(attempt: Fitted) -> bool:
        lost = [piece.text for piece in attempt.lost if piece.role == "user"]
        return not users or not users[-1] or not any(users[-1] in text for text in lost)

    asking = [attempt for attempt in attempts if asks(attempt)]
    if not asking:
        problem = "the chat template leaves out the user's last message"
        raise TemplateError(f"{problem}: give another one (--chat-template-file)")
    return min(asking, key=lambda attempt: len(attempt.lost))
