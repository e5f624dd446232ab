"""Acceptance rules: which drafted tokens are kept, and which token follows them.

A rule is pure numpy and draws only through a noise source; it knows nothing of llama.cpp.
"""

from specrun.runtime.acceptance.block import BlockRule
from specrun.runtime.acceptance.build import build_rule, rule_names
from specrun.runtime.acceptance.exact import ExactRule, decide
from specrun.runtime.acceptance.kseq import KSeq, KSeqRule
from specrun.runtime.acceptance.rule import (
    Acceptance,
    AcceptanceRule,
    LawAt,
    settle_point_masses,
    walk,
)
from specrun.runtime.acceptance.sequential import SequenceCascade, SequentialCascade, TokenCascade
from specrun.runtime.acceptance.spec_cascade import CASCADES, SpecCascadeRule
from specrun.runtime.acceptance.typical import TypicalRule, typical_threshold
from specrun.runtime.acceptance.verify_batch import PADDING, GeneratorNoise
