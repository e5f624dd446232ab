"""From a bare GGUF to a fast one: tries what could draft for it, and keeps what is fastest."""

from specrun.bench.accelerate.accelerate import AccelerateResult, accelerate
from specrun.bench.accelerate.search import AccelerateOptions
