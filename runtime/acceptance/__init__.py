"""Acceptance rules: which drafted tokens are kept, and which token follows them.

A rule is pure numpy and draws only through a noise source; it does not depend on llama.cpp.
"""

from typing import TYPE_CHECKING

from specrun.bindings.faces import lazy_face

if TYPE_CHECKING:
    from specrun.runtime.acceptance.build import (
        Rule,
        SequenceCascade,
        SequentialCascade,
        TokenCascade,
        build_rule,
        register_rule,
        rule_names,
    )
    from specrun.runtime.acceptance.cascades import (
        DEFERRALS,
        TOKEN_RULES,
        BildRule,
        BildStarRule,
        LawFunction,
        LossyRule,
        SpecCascadeRule,
        TokenCascadeRule,
        TopBetaRule,
        UserRule,
    )
    from specrun.runtime.acceptance.exact import BlockRule, ExactRule, decide
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
    from specrun.runtime.acceptance.rule import (
        Acceptance,
        AcceptanceRule,
        LawAt,
        settle_point_masses,
        walk,
    )
    from specrun.runtime.acceptance.typical import TypicalRule, typical_threshold

__getattr__, __dir__ = lazy_face(__name__)
