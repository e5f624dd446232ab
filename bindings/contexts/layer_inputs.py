"""Inputs of a model's layers, handed out by llama.cpp for EAGLE-3, which reads early layers.

There is no C interface for this, only two C++ functions that libllama exports under mangled names.
A graph hands out its layers' inputs only where its architecture was prepared for it, and asking any
other ends the process: so the architecture is held against a list before llama.cpp is asked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.library import cpp_names, exported_function
from specrun.bindings.models.model import Model

_NAMES = """
    gemma4 gpt-oss hunyuan-dense lfm2 lfm2moe llama mimo2 minimax-m2 muse-glimmer nanbeige
    nemotron_h nemotron_h_moe qwen3 qwen35 qwen35moe qwen3moe
"""
LAYER_INPUT_ARCHITECTURES = frozenset(_NAMES.split())
"""Architectures whose graphs hand out layer inputs in llama-cpp-python 0.3.36's llama.cpp.

Recurrent and hybrid ones are left out where their state cannot take drafts back.
"""

_OF_LAYER = "llama_context *", "uint32_t"
_SET = cpp_names("llama_set_embeddings_layer_inp", "void", *_OF_LAYER, "bool")
_GET = cpp_names("llama_get_embeddings_layer_inp", "float *", *_OF_LAYER)


def check_layer_inputs(model: Model, layers: Sequence[int]) -> None:
    """Raise UnsupportedModelError for a model without layer inputs, OptionError for no layer.

    Layers count from 0; the input of layer 0 are the token embeddings.
    """
    if model.architecture not in LAYER_INPUT_ARCHITECTURES:
        problem = f"llama.cpp does not hand out layer inputs of {model.architecture} models"
        works = ", ".join(sorted(LAYER_INPUT_ARCHITECTURES))
        reads = f"which this drafter reads; it does for {works}"
        raise UnsupportedModelError(f"{model.path}: {problem}, {reads}")
    for layer in layers:
        if not 0 <= layer < model.n_layer:
            there = f"{model.path} has layers 0 to {model.n_layer - 1}"
            raise OptionError(f"{there}, and the input of layer {layer} is asked for")
    _setter(), layer_input_rows()


def show_layer_inputs(context: Any, layers: Iterable[int]) -> None:  # noqa: ANN401 - a ctypes pointer
    """Let a context keep the inputs of `layers` in every evaluation from now on, for all tokens.

    A row belongs to each token of a batch in order, whether it asks for output or not.
    """
    enable = _setter()
    for layer in sorted(set(layers)):
        enable(context, layer, True)


def layer_input_rows() -> Any:  # noqa: ANN401 - a ctypes function
    """Return the function that tells where a context's inputs of a layer lie."""
    return exported_function(_GET, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)


def _setter() -> Any:  # noqa: ANN401 - a ctypes function
    return exported_function(_SET, None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool)
