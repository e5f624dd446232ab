"""Checkpoints to GGUF, GGUF to smaller GGUF, and models made up for tests and measurements."""

from __future__ import annotations

from specrun.bindings.errors import MissingPackageError

try:
    from specrun.convert.conversion import (
        ConversionPlan,
        ConversionReport,
        convert_checkpoint,
        plan_conversion,
    )
    from specrun.convert.cut import CutReport, LayeredModel, PadReport, cut_layers, pad_ffn
    from specrun.convert.heads.head_conversion import convert_head, plan_head
    from specrun.convert.heads.target_facts import TargetFacts, target_facts
    from specrun.convert.model_set import SetPlan, plan_set
    from specrun.convert.quantize import (
        ImportanceMatrix,
        ImportanceOptions,
        ImportanceReport,
        QuantizationReport,
        measure_importance,
        merge_importance,
        quantize_model,
        read_importance,
        write_importance,
    )
    from specrun.convert.quantize.quantize_head import quantize_head
    from specrun.convert.random_model import RandomLlama, write_random_llama
except ModuleNotFoundError as error:
    if error.name != "gguf":
        raise
    raise MissingPackageError("this", "gguf", "convert") from error

__all__ = [
    "ConversionPlan",
    "ConversionReport",
    "CutReport",
    "ImportanceMatrix",
    "ImportanceOptions",
    "ImportanceReport",
    "LayeredModel",
    "PadReport",
    "QuantizationReport",
    "RandomLlama",
    "SetPlan",
    "TargetFacts",
    "convert_checkpoint",
    "convert_head",
    "cut_layers",
    "measure_importance",
    "merge_importance",
    "pad_ffn",
    "plan_conversion",
    "plan_head",
    "plan_set",
    "quantize_head",
    "quantize_model",
    "read_importance",
    "target_facts",
    "write_importance",
    "write_random_llama",
]
