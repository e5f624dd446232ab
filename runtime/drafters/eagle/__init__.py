"""EAGLE-1, EAGLE-2 and EAGLE-3 (Li et al. 2024, 2025): one layer predicts hidden states."""

from specrun.runtime.drafters.eagle.build import build_eagle, build_eagle3
from specrun.runtime.drafters.eagle.drafter import EagleDrafter
from specrun.runtime.drafters.eagle.eagle3_head import Eagle3Head, check_head, is_head
from specrun.runtime.drafters.eagle.eagle_head import EagleHead
from specrun.runtime.drafters.eagle.pair_cells import EagleRows, PairCells
from specrun.runtime.drafters.eagle.pair_head import PairHead
from specrun.runtime.drafters.eagle.state import EagleState
