"""Mistral 7B, Nemo and Small: llama.cpp runs them as a Llama."""

from __future__ import annotations

from specrun.convert.checkpoint import JsonObject
from specrun.convert.families.family import Family
from specrun.convert.families.llama import describe_llama, llama_rules
from specrun.convert.gguf import Metadata


def _describe(config: JsonObject, metadata: Metadata) -> None:
    # llama.cpp's Llama attends to everything.
    window = config.count("sliding_window") if "sliding_window" in config else None
    describe_llama(config, metadata, window=window)


FAMILY = Family(("MistralForCausalLM",), "llama", _describe, llama_rules)
"""The family of MistralForCausalLM."""
