"""Sessions, `Runtime`, and `Engine`: several conversations, verified in one evaluation.

The modules that open models are imported when a model is opened.
"""

from typing import TYPE_CHECKING

from specrun.bindings.faces import lazy_face

if TYPE_CHECKING:
    from specrun.runtime.engine.answer import AnswerOptions
    from specrun.runtime.engine.engine import Engine
    from specrun.runtime.engine.opening import RuntimeOptions, parse_options
    from specrun.runtime.engine.runtime import Runtime
    from specrun.runtime.engine.session import Session
    from specrun.runtime.engine.slots import SharedEvaluation, SlotClock, slot_options
    from specrun.runtime.engine.streams import EngineStream, GenerationStream
    from specrun.runtime.engine.trace import RoundTrace

__getattr__, __dir__ = lazy_face(__name__)
