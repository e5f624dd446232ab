"""How contexts are made, from the options of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrun.cli.model_options import LoadSettings

if TYPE_CHECKING:
    from specrun.bindings.context import ContextOptions

__all__ = ["context_options"]


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
    )
