"""The inputs of a model's layers, which llama.cpp hands out for drafters that read early layers of
a target (EAGLE-3).

There is no C interface for this, only two C++ functions that libllama exports under mangled names.
A graph hands out its layers' inputs only where its architecture was prepared for it, and asking any
other ends the process: so the architecture is held against a list before llama.cpp is asked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.library import native_function
from specrun.bindings.model import Model

LAYER_INPUT_ARCHITECTURES = frozenset(
    {
        "gemma4",
        "gpt-oss",
        "hunyuan-dense",
        "lfm2",
        "lfm2moe",
        "llama",
        "mimo2",
        "minimax-m2",
        "muse-glimmer",
        "nanbeige",
        "nemotron_h",
        "nemotron_h_moe",
        "qwen3",
        "qwen35",
        "qwen35moe",
        "qwen3moe",
    }
)
"""Architectures whose graphs hand out layer inputs in llama-cpp-python 0.3.36's llama.cpp.

Recurrent and hybrid ones are left out where their state cannot take drafts back.
"""

# As C, as C++ of gcc and clang, as C++ of Visual Studio.
_SET = (
    "llama_set_embeddings_layer_inp",
    "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
    "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",
)
_GET = (
    "llama_get_embeddings_layer_inp",
    "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
    "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
)


def check_layer_inputs(model: Model, layers: Sequence[int]) -> None:
    """Raise UnsupportedModelError for a model without layer inputs, OptionError for no layer.

    Layers count from 0; the input of layer 0 are the token embeddings.
    """
    if model.architecture not in LAYER_INPUT_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{model.path}: llama.cpp does not hand out layer inputs of {model.architecture} "
            "models, which this "
            f"drafter reads; it does for {', '.join(sorted(LAYER_INPUT_ARCHITECTURES))}"
        )
    for layer in layers:
        if not 0 <= layer < model.n_layer:
            last = model.n_layer - 1
            raise OptionError(
                f"{model.path} has layers 0 to {last}, and the input of layer {layer} is asked for"
            )
    _setter(), _getter()


class LayerInputs:
    """Views of the inputs of `layers` in all evaluations from now on. Check the model first.

    A row belongs to each token of a batch in order, whether it asks for output or not. Views die
    with the next evaluation, as all views of a context do.
    """

    def __init__(self, context: Any, layers: Sequence[int], width: int) -> None:  # noqa: ANN401 - a ctypes pointer
        self._context = context
        self._layers = frozenset(layers)
        self._width = width
        self._views: dict[int, tuple[int, npt.NDArray[np.float32]]] = {}
        self._get = _getter()
        enable = _setter()
        for layer in sorted(self._layers):
            enable(context, layer, True)

    def rows(self, layer: int, count: int) -> npt.NDArray[np.float32]:
        """Return a layer's inputs at the first `count` or more tokens, float32 [n, width]."""
        if layer not in self._layers:
            raise OptionError(
                f"this context was made without the inputs of layer {layer} "
                "(ContextOptions.layer_inputs)"
            )
        address: int | None = self._get(self._context, layer)
        if not address:
            raise OptionError(f"this evaluation gave no inputs of layer {layer}")
        known = self._views.get(layer)
        # The buffer only moves when it grows, so the array over it is made once and reused.
        if known is None or known[0] != address or len(known[1]) < count:
            flat = (ctypes.c_float * (count * self._width)).from_address(address)
            known = self._views[layer] = (
                address,
                np.ctypeslib.as_array(flat).reshape(count, self._width),
            )
        return known[1]


def _setter() -> Any:  # noqa: ANN401 - a ctypes function
    return _exported(_SET, None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool)


def _getter() -> Any:  # noqa: ANN401 - a ctypes function
    return _exported(_GET, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)


def _exported(names: Sequence[str], result: Any, *arguments: Any) -> Any:  # noqa: ANN401 - ctypes types
    for name in names:
        try:
            return native_function(name, result, *arguments)
        except AttributeError:
            continue
    raise UnsupportedModelError(
        f"this build of llama.cpp does not export {names[0]}, so layer inputs cannot be read: "
        "install llama-cpp-python 0.3.36"
    )
