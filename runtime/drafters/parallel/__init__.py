"""Parallel drafting by look-ahead positions of the target: PaSS and SPACE."""

from specrun.runtime.drafters.parallel.drafter import Below, ParallelDrafter
from specrun.runtime.drafters.parallel.lookahead_file import LookaheadFile
