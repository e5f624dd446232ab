"""Small ggml graphs, built and run from Python over the ggml that llama.cpp already loaded.

`device` says where to compute, `weights` holds tensors there, `graph` builds operations and runs them.
"""
