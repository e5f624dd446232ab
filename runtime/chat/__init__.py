"""Chat: messages to prompts by a model's template; replies to reasoning, content and tool calls."""

from typing import TYPE_CHECKING

from specrun.bindings.faces import lazy_face

if TYPE_CHECKING:
    from specrun.runtime.chat.effort import LEVELS, Effort
    from specrun.runtime.chat.families import syntax_of, think_tags_of
    from specrun.runtime.chat.fitting import arguments_of
    from specrun.runtime.chat.forced import ForcedCalls
    from specrun.runtime.chat.parts import (
        content_text,
        is_malformed,
        is_unreadable,
        joined,
        part_text,
    )
    from specrun.runtime.chat.plan import ReplyPlan, ReplyReading
    from specrun.runtime.chat.reader import CallBegun, Content, MoreArguments, Part, Reasoning
    from specrun.runtime.chat.reply import Reply, ReplyParser, Thoughts, ToolCall
    from specrun.runtime.chat.syntax import ThinkTags, ToolSyntax
    from specrun.runtime.chat.template import (
        ChatTemplate,
        ChatText,
        ChatTurn,
        Message,
        chat_tokens,
        fitted_messages,
        is_begun_answer,
        prompt_tokens,
        require_room,
        template_of,
        too_long,
    )
    from specrun.runtime.chat.turn import ToolChoice, for_template, turn_of

__getattr__, __dir__ = lazy_face(__name__)
