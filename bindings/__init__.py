"""libllama and libggml behind typed Python: models, contexts, batches, KV memory, devices.

The only package that imports `llama_cpp` or touches `ctypes`; it contains nothing about drafting,
sampling or the terminal. Importing it loads no native library: that happens with the first `Model`.
"""
