"""EAGLE-1, 2 and 3 (Li et al. 2024, 2025): one layer predicts hidden states; and P-EAGLE."""

from specrun.runtime.drafters.eagle.build import build_eagle, build_eagle3
from specrun.runtime.drafters.eagle.head import EagleRows, PairCells, PairHead
from specrun.runtime.drafters.eagle.source import EagleSource, EagleState
from specrun.runtime.drafters.eagle.versions import (
    DRAFT_TOKENS,
    DRAFTED,
    FEWEST,
    MASK_FEATURES,
    MASK_TOKEN,
    VOCABULARY_MAP,
    Eagle3Head,
    EagleHead,
    check_head,
    is_head,
)
