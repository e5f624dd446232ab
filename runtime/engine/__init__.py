"""Sessions, `Runtime`, and `Engine`: several conversations, verified in one evaluation."""

from specrun.runtime.engine.engine import Engine
from specrun.runtime.engine.opening import RuntimeOptions, parse_options
from specrun.runtime.engine.runtime import Runtime
from specrun.runtime.engine.session import Session
from specrun.runtime.engine.slots import SharedEvaluation, SlotClock, n_slot_sequences
from specrun.runtime.engine.streams import EngineStream, GenerationStream
from specrun.runtime.engine.trace import RoundTrace
