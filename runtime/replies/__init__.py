"""Replies of chat models taken apart: reasoning, content and tool calls, piece by piece."""

from specrun.runtime.replies.forced_calls import ForcedCalls
from specrun.runtime.replies.parts import CallBegun, Content, MoreArguments, Part, Reasoning
from specrun.runtime.replies.reply import Reply, ReplyParser
from specrun.runtime.replies.syntaxes import ToolSyntax, syntax_of, think_tags_of
