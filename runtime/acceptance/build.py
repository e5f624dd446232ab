"""Acceptance rules by name (`--accept`), and the settings of sequential cascades."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance.cascades import (
    DEFERRALS,
    TOKEN_RULES,
    Beta,
    BildRule,
    BildStarRule,
    LawFunction,
    LossyRule,
    SpecCascadeRule,
    TokenCascadeRule,
    TopBetaRule,
    UserRule,
)
from specrun.runtime.acceptance.exact import BlockRule, ExactRule
from specrun.runtime.acceptance.kseq import KSeqRule
from specrun.runtime.acceptance.law_pair import PairRule
from specrun.runtime.acceptance.rule import AcceptanceRule
from specrun.runtime.acceptance.typical import TypicalRule
from specrun.runtime.language import Expression, ExpressionOptions, parse_expression
from specrun.runtime.laws.sampling import unknown_name

# == Sequential cascades: one of two models answers, without verification. NOT exact ===============
#
# Narasimhan et al. 2024 (arXiv 2405.19261), section 2 and algorithm 2: the baselines of speculative
# cascades. The small model's tokens are not verified. With q its raw distribution at a place
# (the softmax of its logits, before any transformation) and S the transformation that sampling
# makes:
#
#     token-cascade     delta(q) = 1 where max q < 1 - alpha            (section 3.1, Chow's rule)
#                       pi = (1 - delta) S(q) + delta S(p)
#     sequence-cascade  the small model's whole answer y is kept unless exp(score(y)) < 1 - alpha;
#                       the large one then answers anew
#
# The score is the mean of log q(y_t), or a quantile of them: section 2's rule reads the probability
# of the best answer, which cannot be computed, and which shrinks with every token, where a mean
# does not. The end token counts, because it was generated as well.
#
# These are settings: `specrun.runtime.engine.sequential` runs them.


@dataclass(frozen=True, slots=True)
class TokenCascade:
    """The small model speaks while it is sure: max q >= 1 - alpha. `alpha` in [0, 1], not exact."""

    alpha: float = 0.1

    def __post_init__(self) -> None:
        _require_share("token-cascade", "alpha", self.alpha)

    @property
    def name(self) -> str:
        """The expression that makes it."""
        return f"token-cascade(alpha={self.alpha:g})"

    @property
    def exact(self) -> bool:
        """Whether texts have the target's distribution: they have not."""
        return False

    def defers(self, largest: float) -> bool:
        """Whether the large model decides if the small one's largest probability is this."""
        return largest < 1.0 - self.alpha


@dataclass(frozen=True, slots=True)
class SequenceCascade:
    """The small model's whole answer is kept if it was sure enough of its tokens, not exact.

    `quantile` None scores an answer by the mean of its tokens' log-probabilities; a number in
    [0, 1] by that quantile of them, 0 by the token that it was least sure of.
    """

    alpha: float = 0.5
    quantile: float | None = None

    def __post_init__(self) -> None:
        _require_share("sequence-cascade", "alpha", self.alpha)
        if self.quantile is not None:
            _require_share("sequence-cascade", "quantile", self.quantile)

    @property
    def name(self) -> str:
        """The expression that makes it."""
        score = "" if self.quantile is None else f", quantile={self.quantile:g}"
        return f"sequence-cascade(alpha={self.alpha:g}{score})"

    @property
    def exact(self) -> bool:
        """Whether texts have the target's distribution: they have not."""
        return False

    def defers(self, log_probs: Sequence[float]) -> bool:
        """Whether the large model answers anew, from log q of every token of the small one's."""
        if not log_probs:
            return False
        values = np.array(log_probs)
        score = values.mean() if self.quantile is None else np.quantile(values, self.quantile)
        return math.exp(float(score)) < 1.0 - self.alpha


SequentialCascade = TokenCascade | SequenceCascade
"""Names for `--accept` beside acceptance rules: a way to decode that verifies nothing."""


def _require_share(kind: str, name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise OptionError(f"{kind}: {name} is {value:g}: give 0 to 1")


# == Rules by name =================================================================================


Rule = AcceptanceRule | PairRule
"""The rule of rounds: by the target's distribution alone, or by the drafter's too."""


def rule_names() -> list[str]:
    """Return the names of all acceptance rules."""
    return [*_RULES, *_RULES_WITH_OPTIONS, *_REGISTERED]


def build_rule(text: str) -> Rule | SequentialCascade:
    """Return the rule that `--accept` names, such as "exact" or "cascade-opt(alpha=0.1)".

    Raises `OptionError` for an unknown rule or option and for values that make no sense.
    """
    expression = parse_expression(text)
    name = _OTHER_NAMES.get(expression.atom, expression.atom)
    with_options = _RULES_WITH_OPTIONS.get(name)
    if with_options is not None and expression.count is None:
        return with_options(expression)
    has_options = expression.arguments or expression.options or expression.count is not None
    if name in _REGISTERED and not has_options:
        return _REGISTERED[name]
    if name == "cascade":
        cascades = ", ".join([*DEFERRALS, *TOKEN_RULES])
        problem = "is a drafter (--drafter), not an acceptance rule"
        raise OptionError(f"cascade {problem}: the rules of speculative cascades are {cascades}")
    rule = _RULES.get(name)
    if rule is None and name not in _REGISTERED:
        raise unknown_name(expression.atom, rule_names(), "acceptance rule")
    if rule is None or has_options:
        raise OptionError(f"{expression}: the acceptance rule {expression.atom} has no options")
    return rule()


def register_rule(name: str, rule: LawFunction | PairRule) -> None:
    """Let `--accept NAME` and `Runtime(accept=NAME)` name a rule of your own.

    `rule` is a function from the distributions that tokens are drawn from, the drafter's and the
    target's, to the distribution pi that is to come out: float64 [n_vocab], each sums to 1. It must
    depend on nothing else. A rule that compares raw distributions is a subclass of `PairRule`.
    Registering a name again replaces it; raises `OptionError` for the name of a rule that exists,
    or no name.
    """
    if parse_expression(name) != Expression(name):
        raise OptionError(f"{name!r} is no name for a rule: give letters, digits and dashes")
    if name in _RULES or name in _RULES_WITH_OPTIONS or name in _OTHER_NAMES or name == "cascade":
        raise OptionError(f"{name!r} is the name of a rule that exists: give another one")
    if not (isinstance(rule, PairRule) or callable(rule)):
        raise OptionError(f"the rule {name!r} is {rule!r}: give a function of two distributions")
    _REGISTERED[name] = rule if isinstance(rule, PairRule) else UserRule(name, rule)


def _build_typical(expression: Expression) -> AcceptanceRule:
    """Build `typical(eps=0.09, delta=0.3)`."""
    options = ExpressionOptions(expression, ["eps", "delta"], 0)
    # The defaults of Medusa's program: threshold 0.09, and 0.3 for its alpha.
    return TypicalRule(options.number("eps", 0.09), options.number("delta", 0.3))


def _build_deferral(expression: Expression) -> PairRule:
    """Build `cascade-opt(alpha=0.1)` and the other rules that defer whole places."""
    alpha = ExpressionOptions(expression, ["alpha"], 0).number("alpha", 0.1)
    return SpecCascadeRule(expression.atom, alpha)


def _build_bild(expression: Expression) -> PairRule:
    """Build `bild(fallback=0.6, rollback=3)`."""
    options = ExpressionOptions(expression, ["fallback", "rollback"], 0)
    return BildRule(options.number("fallback", 0.6), options.number("rollback", 3.0))


def _build_bild_star(expression: Expression) -> PairRule:
    """Build `bild-star(rollback=3)`."""
    return BildStarRule(ExpressionOptions(expression, ["rollback"], 0).number("rollback", 3.0))


def _build_token_cascade(expression: Expression) -> SequentialCascade:
    """Build `token-cascade(alpha=0.1)`."""
    return TokenCascade(ExpressionOptions(expression, ["alpha"], 0).number("alpha", 0.1))


def _build_sequence_cascade(expression: Expression) -> SequentialCascade:
    """Build `sequence-cascade(alpha=0.5, quantile=0.1)`; without quantile the score is the mean."""
    options = ExpressionOptions(expression, ["alpha", "quantile"], 0)
    quantile = None if options.optional("quantile") is None else options.number("quantile", 0.0)
    return SequenceCascade(options.number("alpha", 0.5), quantile)


def _build_token_rule(expression: Expression) -> PairRule:
    """Build `cascade-token-v3(alpha=0.1)` and the other rules that defer single tokens."""
    alpha = ExpressionOptions(expression, ["alpha"], 0).number("alpha", 0.1)
    return TokenCascadeRule(_OTHER_NAMES.get(expression.atom, expression.atom), alpha)


def _build_lossy(expression: Expression) -> PairRule:
    """Build `lossy(alpha=0.1, beta=1)`; beta may be "solve"."""
    options = ExpressionOptions(expression, ["alpha", "beta"], 0)
    solves = options.optional("beta") == "solve"
    beta: Beta = "solve" if solves else options.number("beta", 1.0)
    return LossyRule(options.number("alpha", 0.1), beta)


def _build_top_beta(expression: Expression) -> PairRule:
    """Build `top-beta(beta=3, tau=1)`."""
    options = ExpressionOptions(expression, ["beta", "tau"], 0)
    return TopBetaRule(options.integer("beta", 3), options.number("tau", 1.0))


_RULES: dict[str, type[AcceptanceRule]] = {"exact": BlockRule, "token": ExactRule, "kseq": KSeqRule}
_OTHER_NAMES = {"block": "exact", "cascade-token": "cascade-token-v3"}
_RULES_WITH_OPTIONS: dict[str, Callable[[Expression], Rule | SequentialCascade]] = {
    "typical": _build_typical,
    **dict.fromkeys(DEFERRALS, _build_deferral),
    **dict.fromkeys(TOKEN_RULES, _build_token_rule),
    "lossy": _build_lossy,
    "top-beta": _build_top_beta,
    "bild": _build_bild,
    "bild-star": _build_bild_star,
    "token-cascade": _build_token_cascade,
    "sequence-cascade": _build_sequence_cascade,
}
_REGISTERED: dict[str, PairRule] = {}
