"""Acceptance rules: which drafted tokens are kept, and which token follows them.

A rule is pure numpy and draws only through a noise source; it knows nothing of llama.cpp.
"""

from specrun.runtime.acceptance.bild import BildRule, BildStarRule
from specrun.runtime.acceptance.block import BlockRule
from specrun.runtime.acceptance.build import Rule, build_rule, register_rule, rule_names
from specrun.runtime.acceptance.exact import ExactRule, decide
from specrun.runtime.acceptance.kseq import KSeq, KSeqRule
from specrun.runtime.acceptance.law_pair import (
    LawPair,
    PairAt,
    PairRule,
    RawLaw,
    entropy,
    largest,
    total_variation,
)
from specrun.runtime.acceptance.lossy import LossyRule
from specrun.runtime.acceptance.rule import (
    Acceptance,
    AcceptanceRule,
    LawAt,
    settle_point_masses,
    walk,
)
from specrun.runtime.acceptance.sequential import SequenceCascade, SequentialCascade, TokenCascade
from specrun.runtime.acceptance.spec_cascade import (
    DEFERRALS,
    TOKEN_RULES,
    SpecCascadeRule,
    TokenCascadeRule,
    TopBetaRule,
)
from specrun.runtime.acceptance.typical import TypicalRule, typical_threshold
from specrun.runtime.acceptance.user_rule import LawFunction, UserRule
from specrun.runtime.acceptance.verify_batch import PADDING, GeneratorNoise
