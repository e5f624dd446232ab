"""Acceptance rules by name: what `--accept` may say, built."""

from __future__ import annotations

from collections.abc import Callable

from specrun.runtime.acceptance.block import BlockRule
from specrun.runtime.acceptance.exact import ExactRule
from specrun.runtime.acceptance.kseq import KSeqRule
from specrun.runtime.acceptance.rule import AcceptanceRule
from specrun.runtime.acceptance.sequential import (
    SequenceCascade,
    SequentialCascade,
    TokenCascade,
)
from specrun.runtime.acceptance.spec_cascade import CASCADES, SpecCascadeRule
from specrun.runtime.acceptance.typical import TypicalRule
from specrun.runtime.language import Expression, ExpressionOptions, parse_expression
from specrun.runtime.sampling import unknown_option


def rule_names() -> list[str]:
    """Return the names of all acceptance rules."""
    return [*_RULES, *_RULES_WITH_OPTIONS]


def build_rule(text: str) -> AcceptanceRule | SequentialCascade:
    """Return the rule that `--accept` names, such as "exact" or "cascade-opt(alpha=0.1)".

    Raises `OptionError` for an unknown rule or option and for values that make no sense.
    """
    expression = parse_expression(text)
    with_options = _RULES_WITH_OPTIONS.get(expression.atom)
    if with_options is not None and expression.count is None:
        return with_options(expression)
    rule = _RULES.get(_OTHER_NAMES.get(expression.atom, expression.atom))
    if rule is None:
        raise unknown_option(expression.atom, rule_names(), "the acceptance rule")
    if expression.arguments or expression.options:
        raise unknown_option(str(expression), rule_names(), "the acceptance rule")
    return rule()


def _build_typical(expression: Expression) -> AcceptanceRule:
    """Build `typical(eps=0.09, delta=0.3)`."""
    options = ExpressionOptions(expression, ["eps", "delta"], 0)
    # The defaults of Medusa's program: threshold 0.09, and 0.3 for what it calls alpha.
    return TypicalRule(options.number("eps", 0.09), options.number("delta", 0.3))


def _build_cascade(expression: Expression) -> AcceptanceRule:
    """Build `cascade-opt(alpha=0.1)` and the others of speculative cascades."""
    alpha = ExpressionOptions(expression, ["alpha"], 0).number("alpha", 0.1)
    return SpecCascadeRule(expression.atom, alpha)


def _build_token_cascade(expression: Expression) -> SequentialCascade:
    """Build `token-cascade(alpha=0.1)`."""
    return TokenCascade(ExpressionOptions(expression, ["alpha"], 0).number("alpha", 0.1))


def _build_sequence_cascade(expression: Expression) -> SequentialCascade:
    """Build `sequence-cascade(alpha=0.5, quantile=0.1)`; without quantile the score is the mean."""
    options = ExpressionOptions(expression, ["alpha", "quantile"], 0)
    quantile = None if options.optional("quantile") is None else options.number("quantile", 0.0)
    return SequenceCascade(options.number("alpha", 0.5), quantile)


_RULES: dict[str, type[AcceptanceRule]] = {"exact": BlockRule, "token": ExactRule, "kseq": KSeqRule}
_OTHER_NAMES = {"block": "exact"}
_RULES_WITH_OPTIONS: dict[str, Callable[[Expression], AcceptanceRule | SequentialCascade]] = {
    "typical": _build_typical,
    **dict.fromkeys(CASCADES, _build_cascade),
    "token-cascade": _build_token_cascade,
    "sequence-cascade": _build_sequence_cascade,
}
