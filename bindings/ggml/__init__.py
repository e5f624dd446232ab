"""Small ggml graphs, built and run from Python over the ggml that llama.cpp already loaded.

`device` computes, `weights` holds tensors, `graph` builds operations and runs them.
"""

from typing import TYPE_CHECKING

from specrun.bindings.faces import lazy_face

if TYPE_CHECKING:
    from specrun.bindings.ggml.device import ComputeDevice
    from specrun.bindings.ggml.graph import Graph, GraphBuilder, Rope
    from specrun.bindings.ggml.tensor import F16, F32, I32, I64, Tensor, fields
    from specrun.bindings.ggml.weights import TargetTensors, TensorStore, load_tensors

__getattr__, __dir__ = lazy_face(__name__)
