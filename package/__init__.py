"""specrun: speculative decoding of GGUF models, with exactly the target's distribution.

    from specrun import Runtime, SamplingParams

Importing it loads neither llama.cpp nor torch; the first `Runtime` does.
"""

from typing import TYPE_CHECKING

from specrun.bindings.faces import lazy_face

if TYPE_CHECKING:
    from specrun.bindings.contexts.context_options import RopeScaling
    from specrun.bindings.errors import (
        BusyError,
        ClosedError,
        ContextFullError,
        DecodeError,
        FileMissingError,
        MalformedFileError,
        ModelError,
        ModelLoadError,
        OptionError,
        OutOfMemoryError,
        PairError,
        SpecrunError,
        TemplateError,
        UnsupportedModelError,
    )
    from specrun.runtime.chat import ToolCall
    from specrun.runtime.engine import Engine
    from specrun.runtime.engine.opening import RuntimeOptions
    from specrun.runtime.engine.runtime import Runtime
    from specrun.runtime.engine.streams import EngineStream, GenerationStream
    from specrun.runtime.grammar import Grammar, GrammarError
    from specrun.runtime.laws.sampling import SamplingParams
    from specrun.runtime.round.results import (
        ChatResult,
        GenerationResult,
        SpecStats,
        TokenEvent,
        Usage,
    )

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_face(__name__)

__all__ = [
    "BusyError",
    "ChatResult",
    "ClosedError",
    "ContextFullError",
    "DecodeError",
    "Engine",
    "EngineStream",
    "FileMissingError",
    "GenerationResult",
    "GenerationStream",
    "Grammar",
    "GrammarError",
    "MalformedFileError",
    "ModelError",
    "ModelLoadError",
    "OptionError",
    "OutOfMemoryError",
    "PairError",
    "RopeScaling",
    "Runtime",
    "RuntimeOptions",
    "SamplingParams",
    "SpecStats",
    "SpecrunError",
    "TemplateError",
    "TokenEvent",
    "ToolCall",
    "UnsupportedModelError",
    "Usage",
]
