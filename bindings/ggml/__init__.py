"""Small ggml graphs, built and run from Python over the ggml that llama.cpp already loaded.

`device` computes, `weights` holds tensors, `graph` builds operations, `ready_graph` runs them.
"""

from specrun.bindings.ggml.device import ComputeDevice
from specrun.bindings.ggml.functions import F16, F32, I32, I64, call, fields
from specrun.bindings.ggml.graph import GraphBuilder, Rope
from specrun.bindings.ggml.ready_graph import Graph
from specrun.bindings.ggml.target_tensors import TargetTensors
from specrun.bindings.ggml.tensor import Tensor
from specrun.bindings.ggml.weights import TensorStore, load_tensors
