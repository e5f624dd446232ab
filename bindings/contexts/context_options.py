"""Options of a context (llama_context_params), checked before llama.cpp sees them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

from specrun.bindings.errors import OptionError
from specrun.bindings.models.rope_scaling import AS_TRAINED, RopeScaling

if TYPE_CHECKING:
    from specrun.bindings.models.model import Model

MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
MAX_THREADS = 512  # GGML_MAX_N_THREADS: ggml crashes beyond it
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
# ggml_type numbers of what keys and values may be stored as.
CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3}
CACHE_TYPES |= {"q5_0": 6, "q5_1": 7, "iq4_nl": 20}

# Marks the fields that nobody chooses: they follow from what a context is to evaluate.
_FROM_USE = {"from_use": True}


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """How a context is made. Zero means: the model's own context length; as many threads as cores.

    `n_outputs` is the most rows one evaluation may give, `n_sequences` the most sequence ids: both
    size native buffers, so they should be what the widest tree needs and no more. `hidden_states`
    makes the final normed state of every token available, at the price of evaluating the output
    head for it. `layer_inputs` are the layers whose inputs are available at every token, at no such
    price. `nextn_states` makes available what NextN blocks read, for every token and without the
    output head. `n_rollback` is how many of the last evaluation's tokens a recurrent state can take
    back, where `Model.can_roll_back`; other models ignore it. Without `offload_kv` keys and values
    stay in this machine's memory, whatever computes. `rope` stretches positions beyond the trained
    context.
    """

    n_ctx: int = 0
    n_batch: int = 512
    n_ubatch: int = 512
    n_sequences: int = field(default=1, metadata=_FROM_USE)
    n_outputs: int = field(default=1, metadata=_FROM_USE)
    n_threads: int = 0
    n_threads_batch: int = 0
    hidden_states: bool = field(default=False, metadata=_FROM_USE)
    layer_inputs: tuple[int, ...] = field(default=(), metadata=_FROM_USE)
    nextn_states: bool = field(default=False, metadata=_FROM_USE)
    n_rollback: int = field(default=0, metadata=_FROM_USE)
    flash_attention: Literal["auto", "on", "off"] = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    offload_kv: bool = True
    rope: RopeScaling = AS_TRAINED

    def __post_init__(self) -> None:
        if not 0 <= self.n_ctx < 2**31:
            raise OptionError(f"n_ctx is {self.n_ctx}: give 0 (automatic) or a positive number")
        for name in ("n_threads", "n_threads_batch"):
            value = getattr(self, name)
            if not 0 <= value <= MAX_THREADS:
                raise OptionError(f"{name} is {value}: give 0 (automatic) to {MAX_THREADS}")
        for name in ("n_batch", "n_ubatch", "n_outputs"):
            if not 1 <= getattr(self, name) < 2**31:
                raise OptionError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if not 0 <= self.n_rollback < 2**16:
            raise OptionError(f"n_rollback is {self.n_rollback}: give 0 or a few tokens")
        if not 1 <= self.n_sequences <= MAX_SEQUENCES:
            limits = f"llama.cpp allows 1 to {MAX_SEQUENCES}"
            raise OptionError(f"n_sequences is {self.n_sequences}: {limits}")
        if self.flash_attention not in FLASH_ATTENTION:
            raise OptionError(f"flash attention is {self.flash_attention!r}: use auto, on or off")
        for name in ("cache_type_k", "cache_type_v"):
            if getattr(self, name) not in CACHE_TYPES:
                known = ", ".join(CACHE_TYPES)
                raise OptionError(f"{name} is {getattr(self, name)!r}: use one of {known}")

    @classmethod
    def chosen_names(cls) -> list[str]:
        """Return the names of the fields that users choose; the others follow from the drafter."""
        return [field_.name for field_ in fields(cls) if not field_.metadata]

    def size_for(self, model: Model) -> int:
        """Return the length for a model: as trained at most, unless `rope` stretches that."""
        return self.rope.context_size(self.n_ctx, model.n_ctx_train, model.rope_factor)
