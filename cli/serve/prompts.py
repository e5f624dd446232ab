"""Prompts of requests as tokens: templates are rendered beside the event loop, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import anyio.to_thread

from specrun.bindings.errors import OptionError
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.request import AnswerRequest, Prompt
from specrun.runtime.engine import Engine

_SHORT = 2_000  # characters that are tokenized faster than a thread is woken


class PromptReader:
    """Turns messages and texts into tokens, by the target's template and vocabulary."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rendering = threading.Lock()  # a template's sandbox counts for one conversation

    async def read(self, request: AnswerRequest) -> list[list[int]]:
        """Return the tokens of each prompt. Raises `TemplateError` where messages do not fit."""
        if request.messages:
            return [await anyio.to_thread.run_sync(self._conversation, request)]
        if sum(map(len, request.prompts)) <= _SHORT:
            return self._texts(request.prompts)
        return await anyio.to_thread.run_sync(self._texts, request.prompts)

    async def rendered(self, request: AnswerRequest) -> str:
        """Return the text that the template makes of the messages."""

        def render() -> str:
            with self._rendering:
                return self._engine.chat_template.render(request.messages)

        return await anyio.to_thread.run_sync(render)

    def _conversation(self, request: AnswerRequest) -> list[int]:
        from specrun.runtime.chat_template import chat_tokens

        with self._rendering:
            template = self._engine.chat_template
            return chat_tokens(template, self._engine.vocabulary, request.messages)

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
