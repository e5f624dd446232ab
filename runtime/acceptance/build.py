"""From a rule's name to the rule."""

from __future__ import annotations

from specrun.runtime.acceptance.block import BlockRule
from specrun.runtime.acceptance.exact import ExactRule
from specrun.runtime.acceptance.kseq import KSeqRule
from specrun.runtime.acceptance.rule import AcceptanceRule
from specrun.runtime.drafters.expression import parse_expression
from specrun.runtime.sampling import unknown_option

__all__ = ["build_rule", "rule_names"]

_RULES: dict[str, type[AcceptanceRule]] = {"exact": ExactRule, "block": BlockRule, "kseq": KSeqRule}


def rule_names() -> list[str]:
    """Return the names of all acceptance rules."""
    return list(_RULES)


def build_rule(text: str) -> AcceptanceRule:
    """Return the rule that an `--accept` value names, such as "exact" or "block"."""
    expression = parse_expression(text)
    rule = _RULES.get(expression.atom)
    if rule is None:
        raise unknown_option(expression.atom, rule_names(), "the acceptance rule")
    if expression.arguments or expression.options:
        raise unknown_option(str(expression), rule_names(), "the acceptance rule")
    return rule()
