"""Contexts of a model: batches, rows of results, keys and values, embeddings as inputs."""

from typing import TYPE_CHECKING

from specrun.bindings.faces import lazy_face

if TYPE_CHECKING:
    from specrun.bindings.contexts.assistant_context import (
        ASSISTANT_ARCHITECTURE,
        ASSISTED_ARCHITECTURE,
        AssistantContext,
    )
    from specrun.bindings.contexts.batch import Batch, BatchShape, chain_shape
    from specrun.bindings.contexts.block_context import (
        BLOCK_ARCHITECTURE,
        FEATURES_AT_ONCE,
        BlockContext,
        Lender,
        block_options,
        needs_lender,
    )
    from specrun.bindings.contexts.context import Context, MtpContext, StateBatch, check_nextn
    from specrun.bindings.contexts.context_options import AS_TRAINED, ContextOptions, RopeScaling
    from specrun.bindings.contexts.embedding_inputs import (
        EMBEDDING_INPUT_ARCHITECTURES,
        EmbeddingBatch,
        EmbeddingInputs,
    )
    from specrun.bindings.contexts.input_observer import InputObserver, InputSums, expert_sums
    from specrun.bindings.contexts.memory import Checkpoints
    from specrun.bindings.contexts.rows import (
        LAYER_INPUT_ARCHITECTURES,
        BackendSamplers,
        Rows,
        check_layer_inputs,
        layer_inputs,
    )

__getattr__, __dir__ = lazy_face(__name__)
