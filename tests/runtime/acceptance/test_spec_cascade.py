"""Speculative cascades: the shipped loop emits exactly the cascade's law, chains, trees and the
token after a whole draft, and that law is not the target's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.enumeration import (
    PROMPT,
    TOLERANCE,
    FixedTable,
    Propose,
    branching_tree,
    chain,
    emitted_law,
    enumerate_law,
    largest_error,
    top_k_points,
)
from support.law_pairs import (
    Pi,
    TellingDrafter,
    TransformedTable,
    deferral,
    dense,
    distance,
    pair_error,
    pi_at,
    texts_law,
    token_rule,
    top_beta,
    transformed,
)
from support.scripted import PLAIN, LawTable, ScriptedDrafter, TableTarget, conversation_of

from specrun.bench.prove.rules import pair_of
from specrun.bindings.errors import OptionError
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.acceptance import (
    DEFERRALS,
    TOKEN_RULES,
    Acceptance,
    LawPair,
    PairAt,
    PairRule,
    RawLaw,
    SpecCascadeRule,
    TokenCascadeRule,
    TopBetaRule,
    build_rule,
    rule_names,
    total_variation,
)
from specrun.runtime.acceptance import largest as largest_of
from specrun.runtime.laws import Law, NoiseSource, SeededNoise
from specrun.runtime.round.loop import DecodeSettings, RoundLimits, decode_rounds, require_laws
from specrun.runtime.trees import DraftTree

KINDS = [*DEFERRALS, *TOKEN_RULES]
ALPHA = {
    "cascade-chow": 0.4,
    "cascade-diff": 0.1,
    "cascade-opt": 0.3,
    "cascade-diff-log": 0.1,
    "cascade-opt-log": 0.8,
    "cascade-token-v1": 0.3,
    "cascade-token-v2": 0.3,
    "cascade-token-v3": 0.5,
}
"""Where, over laws on three tokens, each rule defers at some places and not at others."""
SETTINGS = {
    "open": PLAIN,
    "cold": PLAIN.replace(temperature=0.5),
    "narrow": PLAIN.replace(top_p=0.6),
    "greedy": PLAIN.replace(temperature=0.0),
}
SHAPES: dict[str, Callable[[LawTable], Propose]] = {
    "nothing": lambda drafts: chain(drafts, 0),
    "short chain": lambda drafts: chain(drafts, 1),
    "chain": lambda drafts: chain(drafts, 3),
    "i.i.d. siblings": lambda drafts: branching_tree(drafts, [2, 1], replace=True),
    "without replacement": lambda drafts: branching_tree(drafts, [2, 1], replace=False),
    "favourites": lambda drafts: top_k_points(drafts, 2, 2),
}


def rule_of(kind: str, alpha: float) -> PairRule:
    return (SpecCascadeRule if kind in DEFERRALS else TokenCascadeRule)(kind, alpha)


def pi_of(kind: str, alpha: float) -> Pi:
    return (deferral if kind in DEFERRALS else token_rule)(kind, alpha)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_emits_the_cascades_law(kind: str, shape: str, settings: str) -> None:
    """However long drafts are, and also after them: the law of a text is the product of pi."""
    rule, pi = rule_of(kind, ALPHA[kind]), pi_of(kind, ALPHA[kind])
    for seed in range(2):
        drafts, table = LawTable(3, seed + 40), LawTable(3, seed)
        error = pair_error(rule, pi, SHAPES[shape], drafts, table, SETTINGS[settings])
        assert error < TOLERANCE


@pytest.mark.parametrize("shape", ["chain", "without replacement", "favourites"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("beta", "tau"), [(1, 1.0), (2, 3.0), (3, 0.4)])
def test_the_loop_emits_top_betas_law(beta: int, tau: float, settings: str, shape: str) -> None:
    drafts, table = LawTable(3, 42, zeros=0.0), LawTable(3, 2, zeros=0.0)
    rule, pi = TopBetaRule(beta, tau), top_beta(beta, tau)
    assert pair_error(rule, pi, SHAPES[shape], drafts, table, SETTINGS[settings]) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_some_places_are_deferred_and_others_are_not(kind: str) -> None:
    """Else the test above would not see a rule that never, or always, defers."""
    found = set()
    for seed in range(2):
        drafts, table = LawTable(3, seed + 40), LawTable(3, seed)
        law = pi_at(pi_of(kind, ALPHA[kind]), drafts, table, PLAIN)
        for prefix in ([*PROMPT], *([*PROMPT, token] for token in range(3))):
            pi = law(prefix)
            found.add((np.allclose(pi, drafts(prefix)), np.allclose(pi, table(prefix))))
    # The law of single tokens is between the two.
    mixed = {(False, False)} if kind in TOKEN_RULES else {(True, False), (False, True)}
    assert found >= mixed


@pytest.mark.parametrize("settings", ["cold", "greedy"])
@pytest.mark.parametrize("kind", ["cascade-token-v3", "cascade-opt"])
def test_penalties_and_bias_are_of_the_transformed_laws_alone(kind: str, settings: str) -> None:
    """Raw rows have neither: a token that a bias forbids may still be the likeliest of q."""
    params = SETTINGS[settings].replace(logit_bias={0: -30.0})
    rule, pi = rule_of(kind, ALPHA[kind]), pi_of(kind, ALPHA[kind])
    drafts, table = LawTable(3, 41, zeros=0.0), LawTable(3, 1, zeros=0.0)

    def biased(law: np.ndarray) -> np.ndarray:
        weights = law * np.exp([-30.0, 0.0, 0.0])
        return transformed(weights / weights.sum(), SETTINGS[settings])

    class Biased(LawTable):
        def __call__(self, prefix: list[int]) -> np.ndarray:  # type: ignore[override]
            return biased(drafts(prefix))

    propose = chain(Biased(3, 0), 2)
    emitted = emitted_pairs(rule, propose, drafts, table, params)
    wanted = texts_law(
        lambda prefix: pi(
            drafts(prefix), table(prefix), biased(drafts(prefix)), biased(table(prefix))
        ),
        3,
        3,
    )
    assert distance(emitted, wanted) < TOLERANCE


def emitted_pairs(
    rule: PairRule,
    propose: Propose,
    drafts: LawTable,
    table: LawTable,
    params: SamplingParams = PLAIN,
) -> dict:
    def program(noise: NoiseSource) -> tuple[int, ...]:
        conversation = conversation_of(TellingDrafter(propose, drafts), PROMPT, noise)
        limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=3)
        list(decode_rounds(TableTarget(table), conversation, DecodeSettings(rule, params, limits)))
        return tuple(conversation.tokens[len(PROMPT) :])

    return enumerate_law(program)  # type: ignore[arg-type]


# -- the paper's lemmas ----------------------------------------------------------------------------


def random_pair(seed: int, params: SamplingParams) -> LawPair:
    source = np.random.default_rng(seed)
    rows = (2.0 * source.normal(size=(2, 5))).astype(np.float32)
    return pair_of(rows[0], rows[1], params)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", DEFERRALS)
def test_lemma_3_drafts_are_rejected_with_the_distance_where_the_rule_defers(
    kind: str, settings: str
) -> None:
    rule, params = SpecCascadeRule(kind, ALPHA[kind]), SETTINGS[settings]
    deferred = 0
    for seed in range(80):
        drafts, table = LawTable(3, seed + 40), LawTable(3, seed)
        q, p = drafts(PROMPT), table(PROMPT)
        sq, sp = transformed(q, params), transformed(p, params)
        # delta, read off its law: where both are one law it does not matter.
        defers = not np.allclose(deferral(kind, ALPHA[kind])(q, p, sq, sp), sq)
        deferred += defers
        rejected = first_rejected(rule, drafts, table, params)
        assert rejected == pytest.approx(defers * 0.5 * np.abs(sp - sq).sum(), abs=TOLERANCE)
    assert 0 < deferred < 80


def first_rejected(
    rule: PairRule, drafts: LawTable, table: LawTable, params: SamplingParams
) -> float:
    """The probability that the first drafted token is rejected."""

    def program(noise: NoiseSource) -> bool:
        propose = chain(TransformedTable(drafts, params), 1)
        conversation = conversation_of(TellingDrafter(propose, drafts), PROMPT, noise)
        limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=3)
        settings = DecodeSettings(rule, params, limits)
        return next(decode_rounds(TableTarget(table), conversation, settings)).rejected

    return enumerate_law(program).get(True, 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7, 1.0])
def test_lemma_7_v3_is_leviathans_lossy_greedy_decoding_at_temperature_0(alpha: float) -> None:
    rule, params = TokenCascadeRule("cascade-token-v3", alpha), SETTINGS["greedy"]
    kept = 0
    for seed in range(200):
        pair = random_pair(seed, params)
        p, drafted = pair.raw_target.probs, pair.draft.most_likely[0]
        accepts = p[drafted] >= (1 - alpha) * p.max() * (1 - 1e-9)
        kept += accepts and drafted != p.argmax()
        assert rule.law(pair).most_likely == (drafted if accepts else p.argmax(), 1.0)
    assert (kept > 0) == (alpha > 0)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.6])
def test_lemma_10_opt_and_diff_emit_one_law_at_temperature_0(alpha: float) -> None:
    differ = apart = 0
    for seed in range(300):
        pair = random_pair(seed, SETTINGS["greedy"])
        diff, opt = (SpecCascadeRule(f"cascade-{name}", alpha) for name in ("diff", "opt"))
        assert diff.law(pair).most_likely == opt.law(pair).most_likely
        # Where both name one token the distance is 0, and OPT may defer where Diff does not.
        differ += DEFERRALS["cascade-diff"](pair, alpha) != DEFERRALS["cascade-opt"](pair, alpha)
        warm = random_pair(seed, PLAIN)
        apart += total_variation(diff.law(warm), opt.law(warm)) > 1e-3
    # Not only because both rules are one: at temperature 1 they are not.
    assert (differ > 0) == (apart > 0) == (alpha > 0)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_alpha_0_is_exact_where_the_paper_says_so_and_nowhere_else(
    kind: str, settings: str
) -> None:
    """Chow's rule then always defers. V2 and V3 keep the likeliest token's mass of q, which is the
    target's own token at temperature 0 alone; Diff, OPT and V1 keep a q that is surer than p."""
    far = max(
        total_variation(pair.target, rule_of(kind, 0.0).law(pair))
        for pair in (random_pair(seed, SETTINGS[settings]) for seed in range(100))
    )
    greedy = settings == "greedy"
    exact = kind == "cascade-chow" or (greedy and kind in ("cascade-token-v2", "cascade-token-v3"))
    assert far < TOLERANCE if exact else far > 0.01


def test_top_beta_of_one_token_is_greedy_decoding() -> None:
    """SpecDec with beta = 1; at other temperatures it keeps q's mass of the likeliest token."""
    far = {
        name: max(
            total_variation(pair.target, TopBetaRule(1, 9.0).law(pair))
            for pair in (random_pair(seed, params) for seed in range(50))
        )
        for name, params in SETTINGS.items()
    }
    assert far["greedy"] == 0.0
    assert far["open"] > 0.05


def test_the_rules_by_hand() -> None:
    q, p = Law(np.array([0.5, 0.4, 0.1])), Law(np.array([0.1, 0.2, 0.7]))  # TV .6
    pair = LawPair(q, p, q, p)

    def defers(kind: str, *alphas: float) -> list[bool]:
        return [rule_of(kind, alpha).law(pair) is p for alpha in alphas]

    assert defers("cascade-chow", 0.0, 0.4, 0.55) == [True, True, False]
    assert defers("cascade-diff", 0.1, 0.4) == [True, False]  # .5 < .7 - alpha
    assert defers("cascade-opt", 0.1, 0.4, 4.0) == [True, False, False]  # .5 < .7 - .6 alpha
    # H(q) = .943, H(p) = .802 nats
    assert defers("cascade-diff-log", 0.1, 0.2) == [True, False]
    assert defers("cascade-opt-log", 0.2, 0.3) == [True, False]
    # Tokens 0 and 1 are deferred, .9 of Q: pi = P .9, and Q's .1 for token 2.
    pi = rule_of("cascade-token-v3", 0.4).law(pair)
    assert pi.probs == pytest.approx([0.09, 0.18, 0.73])
    assert rule_of("cascade-token-v2", 0.55).law(pair).probs == pytest.approx([0.05, 0.5, 0.45])
    assert rule_of("cascade-token-v1", 0.25).law(pair).probs == pytest.approx([0.55, 0.1, 0.35])


def test_laws_on_different_tokens_meet() -> None:
    """After truncation each model has tokens of its own."""
    q = Law(np.array([0.75, 0.25]), np.array([2, 9]))
    p = Law(np.array([0.5, 0.5]), np.array([2, 4]))
    pi = rule_of("cascade-token-v3", 0.5).law(LawPair(q, p, q, p))
    assert dense(pi, 10)[[2, 4, 9]].tolist() == [0.875, 0.125, 0.0]
    assert pi.probs.sum() == 1.0


def test_a_drafter_that_knows_fewer_tokens_gives_the_others_no_mass() -> None:
    row = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
    pair = pair_of(row[:2], row, PLAIN)
    for kind in KINDS:
        pi = rule_of(kind, ALPHA[kind]).law(pair)
        assert dense(pi, 4).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0])
def test_raw_laws_are_softmax_with_compiled_loops_and_without(
    monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    row = (scale * np.random.default_rng(1).normal(size=500)).astype(np.float32)
    row[7] = -np.inf
    exact = np.exp(row.astype(np.float64) - float(row.max()))
    exact /= exact.sum()
    some = exact[exact > 0]
    for logits in (row, row.astype(np.float64)):  # by loops in C, and by numpy
        raw = RawLaw(logits)
        assert raw.entropy == pytest.approx(-(some * np.log(some)).sum(), rel=1e-5, abs=1e-6)
        assert largest_of(RawLaw(logits)) == pytest.approx(exact.max(), rel=1e-5)
        assert raw.probs == pytest.approx(exact, rel=1e-4, abs=1e-12)


# -- drafters that tell nothing, at temperature 0 --------------------------------------------------


@pytest.mark.parametrize("kind", ["cascade-token-v2", "cascade-token-v3"])
def test_without_q_the_drafted_token_stands_for_it_at_temperature_0(kind: str) -> None:
    """And the token after a whole draft is the target's: heads and n-grams gain from it too."""
    rule = rule_of(kind, 0.6)
    changed = 0
    for seed in range(10):
        drafts, table = LawTable(3, seed + 40), LawTable(3, seed)
        conversation = conversation_of(
            ScriptedDrafter(top_k_points(drafts, 2, 2)), PROMPT, SeededNoise(0)
        )
        limits = RoundLimits(n_ctx=64, max_nodes=32, max_tokens=12)
        settings = DecodeSettings(rule, SamplingParams(temperature=0.0), limits)
        for this_round in decode_rounds(TableTarget(table), conversation, settings):
            start = len(conversation.tokens) - len(this_round.new)
            for place, token in enumerate(this_round.new):
                prefix = conversation.tokens[: start + place]
                p, best = table(prefix), int(table(prefix).argmax())
                draws = this_round.tree.draws.get(this_round.node_before(place), ())
                first = this_round.tree.tokens[draws[0].node] if draws else best
                lowest = p.max() * 0.4 if kind == "cascade-token-v3" else p.max() - 0.6
                wanted = first if p[first] >= lowest else best
                changed += wanted != best
                assert token == wanted
    assert changed > 5


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_drafters_that_tell_no_laws_are_refused_where_a_rule_needs_them(
    kind: str, greedy: bool
) -> None:
    drafter = ScriptedDrafter(chain(LawTable(3, 0), 1))
    params = SamplingParams(temperature=0.0 if greedy else 0.7)
    rule = rule_of(kind, 0.1)
    require_laws(rule, drafter, params)  # nothing is ever drafted
    drafter.max_nodes = 3
    if greedy and kind in ("cascade-token-v2", "cascade-token-v3"):
        require_laws(rule, drafter, params)
        return
    weighs = r"weighs the drafter's distributions, and scripted has none: .* draft\(FILE\)"
    with pytest.raises(OptionError, match=weighs):
        require_laws(rule, drafter, params)
    drafter.keeps_rows = True
    require_laws(rule, drafter, params)


@pytest.mark.parametrize("kind", ["cascade-opt", "cascade-token-v1", "cascade-token-v3"])
def test_where_the_drafter_says_nothing_the_law_is_the_targets(kind: str) -> None:
    """A token-specific rule would make another law of p and p: what it accepts would grow."""
    table, rule = LawTable(3, 4), rule_of(kind, 0.3)
    emitted = emitted_law(rule, None, table, 2, frozenset())
    assert largest_error(emitted, table, 2) < TOLERANCE
    if "token" in kind:
        p = RawLaw(np.log(table(PROMPT) + 1e-30))
        pair = LawPair(p, p, Law(table(PROMPT)), Law(table(PROMPT)))
        assert total_variation(pair.target, rule.law(pair)) > 0.05


# -- what must not pass ----------------------------------------------------------------------------


class Wrong(PairRule):
    """Another rule than the one whose law is asked of it."""

    def __init__(self, rule: PairRule) -> None:
        self.rule, self.name = rule, "wrong"

    def law(self, pair: LawPair) -> Law:
        return self.rule.law(pair)


class DefersOnTransformedLaws(Wrong):
    """As if temperature and truncation had not left anything out."""

    def law(self, pair: LawPair) -> Law:
        return self.rule.law(LawPair(pair.draft, pair.target, pair.draft, pair.target))


class EndsWithTheTargets(Wrong):
    """The token after a whole draft is the target's."""

    def accept(
        self, tree: DraftTree, pair_at: PairAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        def ending(node: int) -> LawPair:
            pair = pair_at(node)
            sure = LawPair(pair.raw_target, pair.raw_target, pair.target, pair.target)
            return pair if tree.draws.get(node) else sure

        return super().accept(tree, ending, noise, position)


class ReplacesFromTheTargets(Wrong):
    """After a rejection it draws from what is left of the target's law."""

    def accept(
        self, tree: DraftTree, pair_at: PairAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        path: list[int] = []
        node = -1
        while draws := tree.draws.get(node, ()):
            draft, pair = draws[0].law, pair_at(node)
            token = tree.tokens[draws[0].node]
            assert draft is not None
            if not noise.accept(self.law(pair).probability(token) / draft.probability(token)):
                left = pair.target.residual(draft)
                return Acceptance(tuple(path), noise.choose(left), True)
            node = draws[0].node
            path.append(node)
        return Acceptance(tuple(path), noise.choose(self.law(pair_at(node))), False)


class DefersTheOtherWay(Wrong):
    """Takes the drafter's law where the target's is due."""

    def law(self, pair: LawPair) -> Law:
        return pair.draft if self.rule.law(pair) is pair.target else pair.target


def is_caught(wrong: type[Wrong], kind: str, shape: str, settings: str) -> bool:
    """Whether one of some pairs shows it, by more than a percent of a text's probability."""
    rule, pi = wrong(rule_of(kind, ALPHA[kind])), pi_of(kind, ALPHA[kind])
    pairs = ((LawTable(3, seed + 40), LawTable(3, seed)) for seed in range(40))
    return any(
        pair_error(rule, pi, SHAPES[shape], *pair, SETTINGS[settings], length=2) > 1e-2
        for pair in pairs
    )


@pytest.mark.parametrize("settings", ["cold", "narrow", "greedy"])
@pytest.mark.parametrize("kind", KINDS)
def test_deferral_by_transformed_laws_is_caught(kind: str, settings: str) -> None:
    assert is_caught(DefersOnTransformedLaws, kind, "chain", settings)


@pytest.mark.parametrize("shape", ["short chain", "favourites", "nothing"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bonus_of_the_targets_is_caught(kind: str, shape: str) -> None:
    assert is_caught(EndsWithTheTargets, kind, shape, "open")
    assert is_caught(EndsWithTheTargets, kind, shape, "greedy")


@pytest.mark.parametrize("kind", TOKEN_RULES)
def test_a_residual_of_the_targets_is_caught(kind: str) -> None:
    assert is_caught(ReplacesFromTheTargets, kind, "chain", "open")


@pytest.mark.parametrize("kind", DEFERRALS)
def test_the_other_way_round_is_caught(kind: str) -> None:
    assert is_caught(DefersTheOtherWay, kind, "chain", "open")


def test_one_pair_by_hand() -> None:
    """One draft, then the token after it, both of pi."""
    drafts, table = FixedTable(0.6, 0.3, 0.1), FixedTable(0.5, 0.1, 0.4)
    law = pi_of("cascade-token-v3", 0.2)(*(2 * (drafts(()), table(()))))
    assert law == pytest.approx([0.75, 0.03, 0.22])
    emitted = emitted_pairs(rule_of("cascade-token-v3", 0.2), chain(drafts, 1), drafts, table)
    assert distance(emitted, texts_law(lambda _: law, 3, 3)) < TOLERANCE


# -- from its name to the mark ---------------------------------------------------------------------


def test_the_rules_are_built_by_name() -> None:
    assert set(KINDS) <= set(rule_names())
    rule = build_rule("cascade-opt")
    assert (rule.name, rule.exact) == ("cascade-opt(alpha=0.1)", False)
    assert build_rule("cascade-token(alpha=.25)").name == "cascade-token-v3(alpha=0.25)"
    assert build_rule("cascade-opt-log(alpha=2.5)").name == "cascade-opt-log(alpha=2.5)"
    assert build_rule("top-beta(beta=5, tau=3)").name == "top-beta(beta=5, tau=3)"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cascade-opt(alpha=-0.1)", "cascade-opt: alpha is -0.1: give 0 or more"),
        ("cascade-opt-log(alpha=inf)", "alpha is inf"),
        ("cascade-diff(alpha=1.5)", "alpha is 1.5: give 0 to 1"),
        ("cascade-chow(alpha=nan)", "alpha is nan"),
        ("cascade-chow(alpha=x)", "'x', which is not a number"),
        ("cascade-token(alpha=2)", "cascade-token-v3: alpha is 2: give 0 to 1"),
        ("cascade-opt(beta=.1)", "beta"),
        ("cascade-opt(0.1)", "unnamed arguments"),
        ("cascade-best", "did you mean 'cascade-"),
        ("cascade", "is a drafter .*, not an acceptance rule: .* are cascade-chow, cascade-diff"),
        ("top-beta(beta=0)", "top-beta: beta is 0: give 1 or more tokens"),
        ("top-beta(tau=-1)", "top-beta: tau is -1: give 0 nats or more"),
        ("top-beta(beta=x)", "not a whole number"),
    ],
)
def test_values_that_make_no_sense_are_refused(text: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        build_rule(text)


def test_statistics_say_that_it_is_not_exact_and_how_far_it_leads(tiny_model: Path) -> None:
    drafter = f'draft("{tiny_model}", n=3)'
    with Runtime(
        tiny_model, drafter=drafter, accept="cascade-diff", n_ctx=256, n_threads=1
    ) as runtime:
        stats = runtime.generate([5, 6, 7], SamplingParams(seed=1), max_tokens=8).stats.to_dict()
    assert (stats["rule"], stats["exact"]) == ("cascade-diff(alpha=0.1)", False)
    # A model that drafts for itself leads nowhere else.
    assert stats["total_variation"] == pytest.approx(0.0, abs=1e-4)
    assert 0.0 <= stats["changed_share"] <= 1.0


def test_rules_may_be_replaced_in_settings_like_any_other() -> None:
    settings = DecodeSettings(
        rule_of("cascade-opt", 0.1), PLAIN, RoundLimits(n_ctx=8, max_nodes=1, max_tokens=1)
    )
    laws = dataclasses.replace(settings, rule=rule_of("cascade-token-v3", 0.1))
    assert (settings.keep, laws.keep) == ("rows", "laws")
    assert dataclasses.replace(settings, rule=build_rule("exact")).keep == "nothing"
