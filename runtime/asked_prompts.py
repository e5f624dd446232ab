"""Prompts as a model would be asked them."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.bindings.model import Model
from specrun.runtime.chat_template import ChatTemplate, chat_tokens

__all__ = ["prompt_tokens"]


def prompt_tokens(model: Model, prompts: Sequence[str], as_text: bool = False) -> list[list[int]]:
    """Return each prompt's tokens: a user's message where the model has a chat template, else, or `as_text`, bare."""
    words = model.vocabulary
    if as_text or model.chat_template is None:
        return [words.tokenize(prompt) for prompt in prompts]
    bos = words.text(words.bos) if words.bos is not None else ""
    eos = words.text(words.eos) if words.eos is not None else ""
    template = ChatTemplate(model.chat_template, bos=bos, eos=eos)
    return [chat_tokens(template, words, [{"role": "user", "content": prompt}]) for prompt in prompts]
