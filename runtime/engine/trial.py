"""The process in which an unknown head is tried: it drafts for its target, once."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.bindings.gguf import read_header
from specrun.bindings.trial_worker import run_trial
from specrun.runtime.engine.runtime import Runtime
from specrun.runtime.language import method_of_head, quoted

_PROMPT_TOKENS, _NEW_TOKENS = 8, 6


def try_head(arguments: Sequence[str]) -> None:
    """Answer a few tokens with a target and a head: the paths of their files."""
    target, head = arguments
    method = method_of_head(read_header(head).architecture)
    expression = "none" if method is None else f"{method.name}({quoted(head)})"
    with Runtime(target, expression, n_ctx=256, n_gpu_layers=0) as runtime:
        size = runtime.vocabulary.size
        prompt = [number * size // _PROMPT_TOKENS for number in range(_PROMPT_TOKENS)]
        runtime.generate(prompt, max_tokens=_NEW_TOKENS)


if __name__ == "__main__":
    run_trial(try_head)
