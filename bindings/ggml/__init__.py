"""Small ggml graphs, built and run from Python over the ggml that llama.cpp already loaded.

`device` computes, `weights` holds tensors, `graph` builds operations and runs them.
"""

from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.graph import Graph, GraphBuilder, Rope
from specrun.bindings.ggml.tensor import F16, F32, I32, I64, Tensor, call, fields
from specrun.bindings.ggml.weights import TargetTensors, TensorStore, load_tensors
