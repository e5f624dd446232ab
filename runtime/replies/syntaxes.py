"""Families of chat templates: which syntax of tool calls and of reasoning a template's model has.

Nothing in a model's file names its family; the marks that the template itself writes do.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from specrun.runtime.replies import call_syntaxes as calls
from specrun.runtime.replies.forced_calls import CallForm
from specrun.runtime.replies.reader import Reader, Reading


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How a family writes tool calls.

    `read` parses them; `marks` are texts that are control tokens in most vocabularies of the
    family, which the text of an answer otherwise leaves out. `form` is how calls are forced.
    `id_length` is how many letters and digits the family's templates want an id to have, None where
    they do not care.
    """

    name: str
    read: Callable[[Reader], Reading[None]]
    marks: tuple[str, ...]
    form: CallForm
    id_length: int | None = None

    def new_id(self) -> str:
        """Return an id for a call."""
        letters = string.ascii_letters + string.digits
        made = "".join(secrets.choice(letters) for _ in range(self.id_length or 24))
        return f"call_{made}" if self.id_length is None else made


HERMES = ToolSyntax(
    "hermes",
    calls.read_hermes,
    (calls.TOOL_CALL, calls.END_TOOL_CALL),
    CallForm(
        f'{calls.TOOL_CALL}\n{{"name": "',
        '", "arguments": ',
        behind=f"}}\n{calls.END_TOOL_CALL}",
        separator="\n",
        mark=calls.TOOL_CALL,
    ),
)
LLAMA3 = ToolSyntax(
    "llama3",
    calls.read_llama3,
    (calls.PYTHON_TAG,),
    CallForm('{"name": "', '", "parameters": ', behind="}", tag=calls.PYTHON_TAG),
)
MISTRAL = ToolSyntax(
    "mistral",
    calls.read_mistral,
    (calls.TOOL_CALLS, calls.CALL_ID, calls.ARGS),
    CallForm(
        '{"name": "',
        '", "arguments": ',
        behind="}",
        before_all=f"{calls.TOOL_CALLS}[",
        behind_all="]",
        separator=", ",
        mark=calls.TOOL_CALLS,
    ),
    id_length=9,
)
MISTRAL_V11 = ToolSyntax(
    "mistral",
    calls.read_mistral,
    (calls.TOOL_CALLS, calls.CALL_ID, calls.ARGS),
    CallForm(calls.TOOL_CALLS, calls.ARGS, separator="", mark=calls.TOOL_CALLS),
    id_length=9,
)
QWEN_CODER = ToolSyntax(
    "qwen3-coder",
    calls.read_qwen_coder,
    (calls.TOOL_CALL, calls.END_TOOL_CALL),
    CallForm(
        f"{calls.TOOL_CALL}\n{calls.FUNCTION}",
        ">\n",
        behind=f"{calls.END_FUNCTION}\n{calls.END_TOOL_CALL}",
        separator="\n",
        tagged=True,
        mark=calls.TOOL_CALL,
    ),
)


def syntax_of(source: str) -> ToolSyntax | None:
    """Return how the model of a chat template writes tool calls, None where that is not known."""
    if calls.TOOL_CALLS in source:
        return MISTRAL_V11 if calls.ARGS in source else MISTRAL
    if calls.TOOL_CALL in source:
        return QWEN_CODER if calls.FUNCTION in source else HERMES
    is_llama3 = "<|start_header_id|>" in source and '"parameters"' in source
    return LLAMA3 if is_llama3 or calls.PYTHON_TAG in source else None


ThinkTags = tuple[str, str]
_THINK_TAGS: tuple[ThinkTags, ...] = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def think_tags_of(source: str) -> ThinkTags | None:
    """Return the tags around what the model of a chat template thinks, None if it has none."""
    return next((tags for tags in _THINK_TAGS if tags[0] in source or tags[1] in source), None)
