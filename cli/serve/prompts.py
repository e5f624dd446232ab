"""Prompts of requests as tokens: rendered and read beside the event loop, and beside each other.

What is longer than the context by its bytes alone is refused before it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrun.bindings.errors import OptionError
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.http.server import beside_the_loop
from specrun.cli.serve.request import AnswerRequest, Prompt
from specrun.runtime.chat import ChatText, chat_text, require_room, too_long
from specrun.runtime.engine import Engine

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

    async def read(self, request: AnswerRequest, n_ctx: int | None = None) -> Prompts:
        """Return the tokens of each prompt.

        Raises `TemplateError` where messages do not fit the template, and `ContextFullError`
        where it is plain that a prompt does not fit in `n_ctx` tokens (None: the engine's).
        """
        longest = self._engine.n_ctx if n_ctx is None else n_ctx
        if request.messages:
            self._require_template()
            return await beside_the_loop(lambda: self._conversation(request, longest))
        if sum(map(len, request.prompts)) <= _SHORT:
            return Prompts(self._texts(request.prompts, longest))
        return Prompts(await beside_the_loop(lambda: self._texts(request.prompts, longest)))

    async def rendered(self, request: AnswerRequest) -> str:
        """Return the text that the template makes of the messages."""
        return await beside_the_loop(lambda: self._rendered(request).text)

    def _require_template(self) -> None:
        """Raise `RequestError` where there is no template; its words are for clients."""
        if self._engine.options.chat_template is None and self._engine.model.chat_template is None:
            problem = "this model has no chat template, which messages need"
            advice = "continue a prompt (/v1/completions), or give the server --chat-template-file"
            raise RequestError(f"{problem}: {advice}", "messages")

    def _rendered(self, request: AnswerRequest, longest: int | None = None) -> ChatText:
        return chat_text(
            self._engine.tool_template if request.tools else self._engine.chat_template,
            self._engine.vocabulary,
            request.messages,
            tools=request.tools,
            variables={**self._template_kwargs, **request.template_kwargs},
            n_ctx=longest,
        )

    def _conversation(self, request: AnswerRequest, longest: int) -> Prompts:
        vocabulary, prefill = self._engine.vocabulary, request.prefill
        text = self._rendered(request, longest)
        self._require_room(prefill, longest)
        tokens = text.tokens(vocabulary) + vocabulary.tokenize(prefill, add_special=False)
        return Prompts([tokens], (text.text + prefill)[-_LONGEST_END:])

    def _texts(self, prompts: Sequence[Prompt], longest: int) -> list[list[int]]:
        for prompt in prompts:
            self._require_room(prompt, longest)
        return [self._tokens(prompt) for prompt in prompts]

    def _require_room(self, prompt: Prompt, longest: int) -> None:
        if isinstance(prompt, str):
            require_room(self._engine.vocabulary, [prompt], longest)
        elif len(prompt) > longest:
            raise too_long(len(prompt), longest)

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
