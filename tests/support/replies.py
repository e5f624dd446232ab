"""Replies of models, read as a server reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specrun.runtime.chat import Reply, ReplyParser, ToolSyntax


def read_reply(
    syntax: ToolSyntax | None,
    pieces: Sequence[str],
    tools: Mapping[str, Any],
    *,
    is_cut: bool = False,
    **options: Any,
) -> Reply:
    """Return what the pieces of a text are together."""
    parser, reply = ReplyParser(syntax, tools, **options), Reply()
    for piece in pieces:
        reply.add(parser.push(piece))
    reply.add(parser.finish(is_cut=is_cut))
    return reply
