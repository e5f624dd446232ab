"""What the target continues while it is tuned."""

from __future__ import annotations

from specrun.cli.paths import read_text
from specrun.cli.tune_options import TuneText

__all__ = ["prompt_texts"]

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
