"""What the target continues while it is tuned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specrun.cli.paths import read_text
from specrun.cli.tune_options import TuneText

if TYPE_CHECKING:
    from specrun.bindings.model import Model

__all__ = ["prompt_texts", "prompt_tokens"]

_QUESTIONS = 8
# Where no prompt is given: an explanation, a story, code and facts, as people ask for them.
_PROMPTS = (
    "Explain how a hash table works, and when it is the wrong choice.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Write a Python function that merges two sorted lists, with comments.",
    "List the planets of the solar system with one sentence about each.",
)


def prompt_texts(text: TuneText, *, demo: bool) -> tuple[str, ...]:
    """Return the prompts that were given, or a few for any model."""
    prompts = list(text.prompt)
    if text.file is not None:
        # As in generate, one newline at the end of a file is not part of its prompt.
        prompts.append(read_text(text.file).removesuffix("\n").removesuffix("\r"))
    if prompts:
        return tuple(prompts)
    if demo:
        from specrun.bench.prompts import demo_prompts

        return demo_prompts(_QUESTIONS)
    return _PROMPTS


def prompt_tokens(model: Model, prompts: Sequence[str], as_text: bool) -> list[list[int]]:
    """Return the prompts as the target would be asked them."""
    words = model.vocabulary
    if as_text or model.chat_template is None:
        return [words.tokenize(prompt) for prompt in prompts]
    from specrun.runtime.chat_template import ChatTemplate, chat_tokens

    bos = words.text(words.bos) if words.bos is not None else ""
    eos = words.text(words.eos) if words.eos is not None else ""
    template = ChatTemplate(model.chat_template, bos=bos, eos=eos)
    return [chat_tokens(template, words, [{"role": "user", "content": prompt}]) for prompt in prompts]
