"""The engine: several conversations whose draft trees are verified in one evaluation."""

from specrun.runtime.engine.engine import Engine
from specrun.runtime.engine.streams import EngineStream

__all__ = ["Engine", "EngineStream"]
