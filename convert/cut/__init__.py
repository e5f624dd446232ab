"""Models with fewer layers or wider ones, made of their own weights."""

from specrun.convert.cut.cut import (
    CUT_LAYERS,
    CUT_SOURCE,
    CUT_SOURCE_LAYERS,
    CutReport,
    LayeredModel,
    cut_layers,
    parse_layers,
    range_text,
)
from specrun.convert.cut.layer_rules import RULES
from specrun.convert.cut.pad import PADDED_FROM, PadReport, pad_ffn
