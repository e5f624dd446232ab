"""TriForce's drafter (Sun et al. 2024): the target's own weights with a bounded second cache."""

from specrun.runtime.drafters.partial.build import PartialCache, partial_cache
from specrun.runtime.drafters.partial.chunks import ChunkMemory
from specrun.runtime.drafters.partial.state import PartialState, PartialTreeState
from specrun.runtime.drafters.partial.window import KeptTokens, Window
