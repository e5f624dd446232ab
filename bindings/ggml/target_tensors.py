"""The target's own embedding and output matrices, for heads that read or predict its tokens.

They are shared where ggml can reach them: the tensor itself is named in the head's graph, wherever
llama.cpp put it and however it repacked it. Where llama.cpp's build hides them, keeps them on a
device that the head is not computed on, or in a form that the operation cannot read (rows of a
repacked matrix), they are loaded from the target's GGUF once more.
"""

from __future__ import annotations

import ctypes
import logging

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import UnsupportedModelError
from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.functions import F32, I32, call, fields
from specrun.bindings.ggml.graph import GraphBuilder
from specrun.bindings.ggml.tensor import Tensor
from specrun.bindings.ggml.weights import TensorStore, load_rows, load_tensors
from specrun.bindings.library import exported_function
from specrun.bindings.machine.placement import current_placement, resolve_placement
from specrun.bindings.models.model import Model

logger = logging.getLogger("specrun.heads")

# const ggml_tensor * llama_model::get_tensor(const char *) const: not part of the C interface.
# Compilers on Unix export it all the same; Visual C++ (Q: a public method, E: by a pointer of 64
# bits, B: const) only where it is told to export everything.
_GET = (
    "_ZNK11llama_model10get_tensorEPKc",
    "?get_tensor@llama_model@@QEBAPEBUggml_tensor@@PEBD@Z",
)
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


class TargetTensors:
    """Matrices of an open model, loaded as asked for. Close it before the model and the device."""

    def __init__(self, model: Model, device: ComputeDevice) -> None:
        self._model = model
        self._device = device
        self._loaded: list[TensorStore] = []
        self._named: dict[str, Tensor] = {}
        names = {tensor.name for tensor in model.header.tensors}
        # Tied models use the embedding for both.
        self._output_name = _OUTPUT if _OUTPUT in names else _EMBEDDING
        self.shared: dict[str, bool] = {}
        """Which matrices are the model's own memory; the others were loaded again."""

    def embedding(self) -> Tensor:
        """Return the matrix of token embeddings, (hidden, vocabulary)."""
        return self._reachable(_EMBEDDING, rows=True)

    def output(self) -> Tensor:
        """Return the output matrix, (hidden, vocabulary): the embedding in models that tie them."""
        return self._reachable(self._output_name, rows=False)

    def output_rows(self, tokens: npt.NDArray[np.integer]) -> Tensor:
        """Return the output matrix of some tokens alone, (hidden, n): a copy of their rows."""
        store = load_rows(self._model.path, self._device, self._output_name, tokens)
        self._loaded.append(store)
        return Tensor(store[self._output_name])

    def named(self, name: str) -> Tensor:
        """Return a matrix to multiply by, or a vector of a norm, by its name in the file."""
        if name not in self._named:
            self._named[name] = self._reachable(name, rows=False)
        return self._named[name]

    def close(self) -> None:
        """Free what had to be loaded again."""
        self._named.clear()
        while self._loaded:
            self._loaded.pop().close()

    def _reachable(self, name: str, *, rows: bool) -> Tensor:
        tensor = _tensor_of(self._model, name)
        if tensor is not None and self._usable(tensor, rows=rows):
            self.shared[name] = True
            return tensor
        self.shared[name] = False
        n_bytes = sum(known.n_bytes for known in self._model.header.tensors if known.name == name)
        logger.info("%s cannot be shared: %.0f MB are loaded again for a head", name, n_bytes / 1e6)
        store = load_tensors(self._model.path, self._device, [name])
        self._loaded.append(store)
        return Tensor(store[name])

    def _usable(self, tensor: Tensor, *, rows: bool) -> bool:
        """Whether the operation it is for can be computed where the tensor lies."""
        place = _device_of(tensor)
        if place and place not in self._device.devices:
            return False
        builder = GraphBuilder(self._device, max_operations=1)
        try:
            if rows:
                builder.get_rows(tensor, builder.input("rows", I32, 1))
            else:
                builder.mul_mat(tensor, builder.input("x", F32, tensor.shape[0], 1))
        except UnsupportedModelError:
            return False
        finally:
            builder.close()
        return True


def device_for_heads(model: Model) -> int:
    """Return the native handle of the device that a target's heads are computed on, 0: the CPU.

    That is where its output matrix lies, unless devices were chosen for what drafts (`placing`).
    """
    placement = current_placement()
    if placement.devices_draft is not None:
        chosen = resolve_placement(placement.for_drafts).offload
        return chosen[0].handle if chosen else 0
    if not model.n_gpu_layers:
        return 0
    tensor = _tensor_of(model, _OUTPUT) or _tensor_of(model, _EMBEDDING)
    if tensor is not None and tensor.handle:
        return _device_of(tensor)
    # This build shows no tensors. The output matrix is offloaded last, behind all layers.
    everything = model.n_gpu_layers < 0 or model.n_gpu_layers > model.n_layer
    return model.placed.offload[-1].handle if everything else 0


def _device_of(tensor: Tensor) -> int:
    """Return the native handle of the device in whose memory a tensor lies, 0: in the CPU's."""
    buffer = fields(tensor.handle).buffer
    if not buffer or call("ggml_backend_buffer_is_host")(buffer):
        return 0
    kind = call("ggml_backend_buffer_get_type")(buffer)
    device: int | None = call("ggml_backend_buft_get_device")(kind)
    return device or 0


def _tensor_of(model: Model, name: str) -> Tensor | None:
    """Return a tensor of an open model, None where this build of llama.cpp does not show them."""
    try:
        find = exported_function(_GET, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    except UnsupportedModelError:
        return None
    handle: int | None = find(model.handle, name.encode())
    return Tensor(handle) if handle else None
