"""Prompts of requests as tokens: templates are rendered beside the event loop, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specrun.bindings.errors import OptionError
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.http.server import beside_the_loop
from specrun.cli.serve.request import AnswerRequest, Prompt
from specrun.runtime.engine import Engine

if TYPE_CHECKING:
    from specrun.runtime.chat_template import ChatPrompt

_SHORT = 2_000  # characters that are tokenized faster than a thread is woken
_LONGEST_END = 64  # characters: a tag and the white space behind it


@dataclass(frozen=True, slots=True)
class Prompts:
    """The tokens of a request's prompts; `end` is how a template ended the conversation's text."""

    tokens: list[list[int]]
    end: str = ""


class PromptReader:
    """Turns messages and texts into tokens, by the target's template and vocabulary."""

    def __init__(self, engine: Engine, template_kwargs: Mapping[str, Any]) -> None:
        self._engine = engine
        self._template_kwargs = template_kwargs
        self._rendering = threading.Lock()  # a template's sandbox counts for one conversation

    async def read(self, request: AnswerRequest) -> Prompts:
        """Return the tokens of each prompt. Raises `TemplateError` where messages do not fit."""
        if request.messages:
            self._require_template()
            prompt = await beside_the_loop(lambda: self._conversation(request))
            return Prompts([prompt.tokens], prompt.text[-_LONGEST_END:])
        if sum(map(len, request.prompts)) <= _SHORT:
            return Prompts(self._texts(request.prompts))
        return Prompts(await beside_the_loop(lambda: self._texts(request.prompts)))

    async def rendered(self, request: AnswerRequest) -> str:
        """Return the text that the template makes of the messages."""
        return (await beside_the_loop(lambda: self._conversation(request))).text

    def _require_template(self) -> None:
        """Raise `RequestError` where there is no template; its words are for clients."""
        if self._engine.options.chat_template is None and self._engine.model.chat_template is None:
            problem = "this model has no chat template, which messages need"
            advice = "continue a prompt (/v1/completions), or give the server --chat-template-file"
            raise RequestError(f"{problem}: {advice}", "messages")

    def _conversation(self, request: AnswerRequest) -> ChatPrompt:
        from specrun.runtime.chat_template import ChatPrompt, chat_prompt

        vocabulary, prefill = self._engine.vocabulary, request.prefill
        with self._rendering:
            prompt = chat_prompt(
                self._engine.tool_template if request.tools else self._engine.chat_template,
                vocabulary,
                request.messages,
                tools=request.tools,
                variables={**self._template_kwargs, **request.template_kwargs},
            )
        tokens = vocabulary.tokenize(prefill, add_special=False)
        return ChatPrompt(prompt.tokens + tokens, prompt.text + prefill) if prefill else prompt

    def _texts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return [self._tokens(prompt) for prompt in prompts]

    def _tokens(self, prompt: Prompt) -> list[int]:
        vocabulary = self._engine.vocabulary
        tokens = vocabulary.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise OptionError("prompt is empty, and this model has no token to begin a text with")
        for token in tokens:
            if not 0 <= token < vocabulary.size:
                problem = f"prompt has the token {token}, and the model {vocabulary.size} tokens"
                raise RequestError(problem, "prompt")
        return tokens
