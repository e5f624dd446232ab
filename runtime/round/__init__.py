"""One round: the drafter proposes, the target evaluates, the rule accepts, both commit.

`loop.decode_rounds` is the only loop that verifies drafts.
"""

from typing import TYPE_CHECKING

from specrun.bindings.faces import lazy_face

if TYPE_CHECKING:
    from specrun.runtime.round.backend_laws import BackendSampling
    from specrun.runtime.round.drafter import Drafter, DraftRequest, NoDrafter, close_all
    from specrun.runtime.round.loop import Conversation
    from specrun.runtime.round.padding import FixedShapeTarget, Shape, fixed_shape_options
    from specrun.runtime.round.results import (
        ChatResult,
        FinishReason,
        GenerationResult,
        SpecStats,
        TokenEvent,
    )
    from specrun.runtime.round.target import (
        CachedText,
        Target,
        TargetModel,
        checkpoint_places,
        target_context_options,
    )
    from specrun.runtime.round.text import common_prefix

__getattr__, __dir__ = lazy_face(__name__)
