"""The name that a GGUF file gives its model, so that llama.cpp reads nothing wrong out of it."""

from __future__ import annotations

from collections.abc import Collection

from specrun.convert.checkpoint import Checkpoint
from specrun.convert.json_file import JsonObject

__all__ = ["loadable_name"]

# llama.cpp looks for these in the name. If one is there, control words swallow the spaces behind them, as
# Phi-3's tokenizer wants, and a file without the four words cannot be loaded.
_PHI3 = ("phi-3", "phi3")
_PHI3_WORDS = ("</s>", "<unk>", "<s>", "<|endoftext|>")


def loadable_name(name: str, checkpoint: Checkpoint, words: Collection[str]) -> str:
    """Return `name`, changed where llama.cpp would read something wrong out of it."""
    named = any(mark in name.lower() for mark in _PHI3)
    if named and not all(word in words for word in _PHI3_WORDS):
        return "model"
    if not named and _swallows_spaces(checkpoint) and all(word in words for word in _PHI3_WORDS):
        return f"{name} (phi-3)"
    return name


def _swallows_spaces(checkpoint: Checkpoint) -> bool:
    for value in checkpoint.optional("tokenizer.json").items("added_tokens"):
        entry = JsonObject(value if isinstance(value, dict) else {}, "an added token")
        if entry.any("content") == "</s>":
            return entry.any("rstrip") is True
    return False
