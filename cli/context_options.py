"""How models are loaded and contexts made, from the options of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specrun.cli.model_options import LoadSettings

if TYPE_CHECKING:
    from specrun.bindings.context import ContextOptions

__all__ = ["context_options", "runtime_options"]


def context_options(load: LoadSettings) -> ContextOptions:
    """Return how contexts are made, as `Runtime` makes them from the same options."""
    from specrun.bindings.context import ContextOptions

    return ContextOptions(
        n_ctx=load.ctx_size,
        n_batch=load.batch_size,
        n_ubatch=load.ubatch_size,
        n_threads=max(0, load.threads),
        n_threads_batch=max(0, load.threads_batch),
        flash_attention=load.flash_attn,
        cache_type_k=load.cache_type_k,
        cache_type_v=load.cache_type_v,
        rope=load.rope,
    )


def runtime_options(load: LoadSettings) -> dict[str, Any]:
    """Return the options of `Runtime` that say how models are loaded and evaluated."""
    return {
        "n_ctx": load.ctx_size,
        "n_batch": load.batch_size,
        "n_ubatch": load.ubatch_size,
        "n_gpu_layers": load.gpu_layers,
        "n_gpu_layers_draft": load.gpu_layers_draft,
        "n_threads": max(0, load.threads),
        "n_threads_batch": max(0, load.threads_batch),
        "flash_attention": load.flash_attn,
        "cache_type_k": load.cache_type_k,
        "cache_type_v": load.cache_type_v,
        "rope": load.rope,
        "use_mmap": load.mmap,
        "use_mlock": load.mlock,
    }
