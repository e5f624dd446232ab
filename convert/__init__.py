"""Checkpoints to GGUF, GGUF to smaller GGUF, and models made up for tests and measurements."""

from __future__ import annotations

from specrun.convert.conversion import ConversionReport, convert_checkpoint
from specrun.convert.random_model import RandomLlama, write_random_llama

__all__ = ["ConversionReport", "RandomLlama", "convert_checkpoint", "write_random_llama"]
