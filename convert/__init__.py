"""Checkpoints to GGUF, GGUF to smaller GGUF, and models made up for tests and measurements."""

from __future__ import annotations

from specrun.bindings.errors import SpecrunError

try:
    from specrun.convert.conversion import ConversionReport, convert_checkpoint
    from specrun.convert.cut import CutReport, LayeredModel, cut_layers
    from specrun.convert.pad import PadReport, pad_ffn
    from specrun.convert.quantize import QuantizationReport, quantize_model
    from specrun.convert.random_model import RandomLlama, write_random_llama
except ModuleNotFoundError as error:
    if error.name != "gguf":
        raise
    raise SpecrunError("this needs the package gguf: run pip install 'specrun[convert]'") from error

__all__ = [
    "ConversionReport",
    "CutReport",
    "LayeredModel",
    "PadReport",
    "QuantizationReport",
    "RandomLlama",
    "convert_checkpoint",
    "cut_layers",
    "pad_ffn",
    "quantize_model",
    "write_random_llama",
]
