"""From a bare GGUF to a fast one: tries possible drafters for it, and keeps the fastest."""

from specrun.bench.accelerate.accelerate import AccelerateResult, accelerate
from specrun.bench.accelerate.target import AccelerateOptions
