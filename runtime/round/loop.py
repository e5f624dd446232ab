"""The decoding loop: propose, evaluate, accept, commit, observe; and the conversation it drives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, cast

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance import (
    Acceptance,
    AcceptanceRule,
    LawAt,
    LawPair,
    PairAt,
    PairRule,
    RawLaw,
    Rule,
    SequentialCascade,
)
from specrun.runtime.laws.law import Law, RowLaws
from specrun.runtime.laws.noise import NoiseSource, SeededNoise
from specrun.runtime.laws.samplers import FRESH, SamplerState, mu_after
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.laws.transform import (
    Logits,
    penalty_window,
    row_cuts,
    starting_mu,
    transformed_law,
)
from specrun.runtime.round.backend_laws import CutRows
from specrun.runtime.round.drafter import NOTHING, Drafter, DraftRequest, Keep, RoundOutcome
from specrun.runtime.round.target import CachedText, EvaluatedRows, Target, TargetModel
from specrun.runtime.trees.tree import ROOT, DraftTree

# == A conversation: its tokens, its cache, its drafter, and the noise of its answer ===============
#
# Everything else that decoding needs, such as models, heads, stores and measured costs, belongs to
# weights that any number of conversations may share.


class Conversation(CachedText):
    """A text that a drafter drafts for; `noise` decides the tokens of the answer under way.

    `drafter` is this conversation's own: its state follows these tokens and no others. In a cascade
    the draft model decodes a conversation of its own, whose tokens include guesses.
    """

    def __init__(
        self, drafter: Drafter, tokens: Sequence[int] = (), noise: NoiseSource | None = None
    ) -> None:
        super().__init__(tokens)
        self.drafter = drafter
        self.noise: NoiseSource = SeededNoise(0) if noise is None else noise

    def begin(self, target: TargetModel, prompt: Sequence[int]) -> int:
        """Bring cache and drafter to a prompt; return how many of its tokens were cached before.

        All but the last token are then cached: the first round, whose root it is, needs its row.
        """
        shared = self.turn_to(target, prompt)
        for _ in self.read_prompt(target):
            pass
        return shared

    def read_prompt(self, target: TargetModel) -> Iterator[None]:
        """Evaluate the prompt turned to, all but its last token; yields after each piece."""
        drafter = self.drafter
        for piece in target.prefill_pieces(self, len(self.tokens) - 1, drafter.learn_prompt):
            drafter.read_along(self.tokens, self.n_cached)
            yield piece

    def turn_to(self, target: TargetModel, prompt: Sequence[int]) -> int:
        """Take a prompt that is yet to be evaluated; return how many of its tokens are cached."""
        target.rewind(self, target.reusable(self, prompt, states=self.drafter.reads_target))
        # A memory that cannot drop a part was cleared: nothing is shared then.
        shared = self.n_cached
        # Before the prefill, of whose pieces the drafter learns.
        self.drafter.begin(prompt)
        # Before the tokens: after an interrupt here they must not pass for generated ones.
        self.n_prompt = len(prompt) - 1
        self.tokens = list(prompt)
        return shared

    def forget(self, target: TargetModel) -> None:
        """Drop all tokens, from cache and drafter: the next prompt shares nothing with them."""
        target.rewind(self, 0)
        self.drafter.begin(())


# == Limits of a round's draft tree: neither the context nor the answer overflows ==================


class RoundLimits:
    """Limits of drafts round by round, and the end of an answer that is as long as it may be.

    `n_ctx` is the context size, `max_nodes` the widest tree one evaluation takes, `max_tokens` the
    length of the answer (None: until the context is full), which begins with the first call of
    `next_round`. `n_max` is the request's limit of nodes drafted at once (None: any number).
    `max_depth` and `max_nodes` are the deepest and the largest tree of a round; none is deeper than
    it is large.
    """

    def __init__(
        self, *, n_ctx: int, max_nodes: int, max_tokens: int | None, n_max: int | None = None
    ) -> None:
        self._n_ctx = n_ctx
        self._most = max_nodes if n_max is None else min(max_nodes, n_max)
        self._max_tokens = sys.maxsize if max_tokens is None else max_tokens
        self._end: int | None = None  # the number of tokens at the answer's end
        self._last_free = -1  # with how many a round may draft the most for the last time
        self.max_depth = self.max_nodes = 0  # of the round that was allowed last

    def next_round(self, n_committed: int) -> bool:
        """Whether another round may start after `n_committed` tokens: `max_depth` and `max_nodes`.

        The last committed token is not cached yet, so it needs a position; then come the tree's
        nodes. The tree shrinks before the context overflows.
        """
        if n_committed <= self._last_free:
            return True  # as the round before
        if self._end is None:
            self._end = n_committed + self._max_tokens
            self._last_free = min(self._end - 1, self._n_ctx) - self._most
        left, room = self._end - n_committed, self._n_ctx - n_committed
        # With room 0 the last token still has its position: a round without drafts.
        if left <= 0 or room < 0:
            return False
        # A round produces at most depth + 1 tokens.
        depth = room if left > room else left - 1
        self.max_depth = depth if depth < self._most else self._most
        # Siblings share a position but not a cell: the whole tree has to fit.
        self.max_nodes = room if room < self._most else self._most
        return True

    def check(self, tree: DraftTree, drafter: str) -> None:
        """Raise if a drafter proposed more than it was allowed."""
        if len(tree) > self.max_nodes or tree.max_depth > self.max_depth:
            allowed = f"{self.max_nodes} nodes of depth {self.max_depth} were allowed"
            proposed = f"{len(tree)} nodes of depth {tree.max_depth}"
            raise OptionError(f"{drafter} proposed {proposed}, and {allowed}")


# == The loop ======================================================================================
#
# Every method and every acceptance rule runs through it; plain decoding is the same loop with empty
# trees.


Witness = Callable[[DraftTree, EvaluatedRows, LawAt, Acceptance], None]
"""Reads a round that was decided, before anything is committed: the draft tree, the target's rows,
its distribution after any node, and the accepted path (which an end token may cut short)."""


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How an answer is decoded: acceptance rule, sampling, limits, and the tokens that end it.

    `limits` are good for one answer. `state` is the samplers' first. `witness` decides nothing: it
    is for traces. `drafter` drafts for this answer in place of the conversation's. A rule that
    verifies nothing is for `engine.sequential`.
    """

    rule: Rule | SequentialCascade
    params: SamplingParams
    limits: RoundLimits
    end_tokens: frozenset[int] = frozenset()
    state: SamplerState = FRESH
    witness: Witness | None = None
    drafter: Drafter | None = None
    token_rule: AcceptanceRule | None = field(init=False)
    pair_rule: PairRule | None = field(init=False)
    """The rule: one of these, the second if it weighs the drafter's distributions, too."""
    laws: RowLaws | None = field(init=False)
    """The distributions of all rows of the answer, if cuts alone make them."""
    keep: Keep = field(init=False)
    """The part of the drafter's own distributions that the rule reads."""

    def __post_init__(self) -> None:
        # Once an answer: finding the kind of rule costs as much as proposing nothing.
        rule = None if isinstance(self.rule, SequentialCascade) else self.rule
        kinds = (None, rule) if isinstance(rule, PairRule) else (rule, None)
        for name, value in zip(("token_rule", "pair_rule"), kinds, strict=True):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "keep", _kept_for(kinds[1], self.params))
        cuts = row_cuts(self.params)
        object.__setattr__(self, "laws", None if cuts is None else RowLaws(cuts))


def _kept_for(rule: PairRule | None, params: SamplingParams) -> Keep:
    """Return the part of the drafter's own distributions that a rule reads."""
    if rule is None or not rule.reads_draft:
        return "nothing"
    if rule.reads_raw_draft:
        return "rows"
    return "points" if rule.takes_points and params.is_greedy else "laws"


class _NotEvaluated:
    """The rows of a round in which the target was not evaluated: it has none."""

    def _refuse(self, *_: object) -> NoReturn:
        raise OptionError("the target was not evaluated for this token: it has no row of logits")

    logits = hidden_states = layer_input = nextn_state = _refuse


NOT_EVALUATED: EvaluatedRows = _NotEvaluated()
"""In place of a round's rows, if a token was taken without evaluating the target."""


@dataclass(slots=True)
class Round(RoundOutcome):
    """One round: its outcome, and its part of an answer.

    `new` are the tokens that it committed, in order: the accepted ones, then the target's own. Its
    rows are valid until the next round starts, or `NOT_EVALUATED`. `is_last`: no round follows.
    `laws` are those of `Acceptance`, in the order of the tokens, and maybe more. `is_whole`: the
    answer came to an end token, or its grammar allows nothing more.
    """

    # Not frozen, as nothing is that a round makes: that costs a call for every field.
    new: list[int]
    rejected: bool
    is_last: bool
    laws: tuple[tuple[Law, Law], ...] = ()
    is_whole: bool = False

    def node_before(self, index: int) -> int:
        """Return the node (or ROOT) whose distribution decided the round's `index`-th token."""
        return ROOT if index == 0 else self.path[index - 1]

    def logits_of(self, index: int) -> Logits:
        """Return the row whose distribution decided the round's `index`-th token."""
        return self.rows.logits(self.path[index - 1] + 1 if index else ROOT + 1)


def decode_rounds(
    target: Target, conversation: Conversation, settings: DecodeSettings
) -> Iterator[Round | None]:
    """Yield rounds until an end token, the token limit or the end of the context.

    None is yielded if an evaluation waits for other conversations'. The target has cached all
    tokens of the conversation but the last; they grow with every round. State is consistent at each
    yield: a consumer may stop there.
    """
    tokens, noise = conversation.tokens, conversation.noise
    drafter = settings.drafter or conversation.drafter
    limits, state, pause = settings.limits, settings.state, drafter.pause
    next_token: int | None
    is_last = not limits.next_round(len(tokens))
    while not is_last:
        # Propose: a tree below the last token, and the distribution that each token was drawn from.
        start, tree, asked = len(tokens), NOTHING, not pause.rounds
        if asked:
            request = _ask(conversation, settings, state)
            while drafter.waits and not drafter.prepare(request):  # others draft meanwhile
                yield None
            tree = drafter.propose(request)
            if len(tree.tokens) > limits.max_depth:  # which is the lower limit of the two
                limits.check(tree, drafter.name)
        else:
            pause.rounds -= 1
        # Evaluate: the last token and the whole tree, in one batch, others' trees maybe beside it.
        while (rows := target.evaluate(conversation, tree)) is None:
            yield None
        # Accept: a path down the tree, and the target's own token after it.
        accepted, state = _accept(settings, state, tokens, tree, rows, noise)
        path, next_token = accepted.path, accepted.next_token
        if path or state.grammar is not None:  # else nothing was kept, and nothing is bound
            path, next_token, state = _cut_at_end(settings, state, tree, accepted)
        # Commit: keep the keys and values of the path, drop those of all other nodes.
        target.commit(conversation, tree, path)
        if next_token is not None:
            tokens.append(next_token)
        whole = is_whole(tokens, settings.end_tokens, state)
        is_last = whole or not limits.next_round(len(tokens))
        new, laws, refused = tokens[start:], accepted.laws, accepted.rejected
        this_round = Round(tokens, tree, path, next_token, rows, new, refused, is_last, laws, whole)
        # Observe: let the drafter receive the outcome of its guesses.
        if asked:
            drafter.observe(this_round)
        yield this_round


def is_whole(tokens: Sequence[int], end_tokens: frozenset[int], state: SamplerState) -> bool:
    """Whether an answer is whole: it ends with an end token, or its grammar allows nothing more."""
    return tokens[-1] in end_tokens or (state.grammar is not None and state.grammar.is_over)


def _ask(conversation: Conversation, settings: DecodeSettings, state: SamplerState) -> DraftRequest:
    """Return the request to a drafter; its draws are independent of acceptance."""
    tokens, rule, limits = conversation.tokens, settings.pair_rule, settings.limits
    return DraftRequest(
        tokens,
        settings.params,
        conversation.noise.for_drafting(len(tokens)),
        limits.max_depth,
        limits.max_nodes,
        settings.end_tokens,
        settings.keep if conversation.drafter.keeps_rows else "nothing",
        0.0 if rule is None else rule.fallback,
        state,
    )


def _accept(
    settings: DecodeSettings,
    state: SamplerState,
    tokens: Sequence[int],
    tree: DraftTree,
    rows: EvaluatedRows,
    noise: NoiseSource,
) -> tuple[Acceptance, SamplerState]:
    """Let the rule decide by the distributions that it reads; also return the samplers' state."""
    rule, params, start = settings.token_rule, settings.params, len(tokens)
    if rule is None:
        assert settings.pair_rule is not None
        pairs = law_pairs(tokens, tree, rows, params, state)
        accepted = settings.pair_rule.accept(tree, pairs, noise, start)
        if settings.witness is not None:
            settings.witness(tree, rows, lambda node: pairs(node).target, accepted)
        return accepted, state
    row_laws, laws = settings.laws, cast("LawAt", settings.laws)
    if row_laws is None or isinstance(rows, CutRows):
        laws = target_laws(tokens, tree, rows, params, state)
    else:
        row_laws.logits = rows.logits
    accepted = rule.accept(tree, laws, noise, start)
    if settings.witness is not None:
        settings.witness(tree, rows, laws, accepted)
    if params.is_adaptive and isinstance(laws, AdaptiveLaws):
        state = laws.state_after(accepted)
    return accepted, state


# -- the distributions that rules read -------------------------------------------------------------


def require_laws(rule: Rule, drafter: Drafter, params: SamplingParams | None = None) -> None:
    """Raise `OptionError` for a rule that needs distributions of a drafter that has none.

    Without `params`, whatever the settings of an answer will be.
    """
    # Without drafts nothing is traded: each token is the target's.
    if not isinstance(rule, PairRule) or drafter.keeps_rows or not drafter.max_nodes:
        return
    if rule.takes_points and (params is None or params.is_greedy):
        return
    if rule.takes_points and params is not None:
        needs = f"at temperature {params.temperature:g} weighs the drafter's distributions"
    else:
        needs = "weighs the drafter's distributions"
    without = "at temperature 0 cascade-token-v3, -v2 and top-beta need none, typical never does"
    problem = f"{rule.name} {needs}, and {drafter.name} has none"
    advice = "give draft(FILE), heads, or a cascade, relay or ensemble of these"
    raise OptionError(f"{problem}: {advice}; {without}")


def require_rule(rule: Rule | SequentialCascade, params: SamplingParams) -> None:
    """Raise `OptionError` for settings whose distributions this rule cannot follow.

    Mirostat reads how likely each token was under the distribution that it came from: an exact
    rule's tokens come from the target's.
    """
    if params.is_adaptive and (isinstance(rule, PairRule) or not rule.exact):
        needs = "mirostat needs tokens of the target's own distribution"
        problem = f"{needs}, and {rule.name} is not exact"
        raise OptionError(f"{problem}: give an exact acceptance rule, or mirostat 0")


def target_laws(
    tokens: Sequence[int],
    tree: DraftTree,
    rows: EvaluatedRows,
    params: SamplingParams,
    state: SamplerState = FRESH,
) -> LawAt:
    """Return the target's distributions after nodes, by the settings of sampling."""
    if isinstance(rows, CutRows):
        return lambda node: rows.law(node + 1, params)
    if params.is_adaptive:
        return AdaptiveLaws(tokens, tree, rows.logits, params, state)
    cuts = row_cuts(params)
    if cuts is not None:
        return RowLaws(cuts, rows.logits)
    if not params.has_penalties:
        logits = rows.logits
        return lambda node: transformed_law(logits(node + 1), params)
    return lambda node: _law_after(tokens, tree, node, rows.logits(node + 1), params, state)


class AdaptiveLaws:
    """The target's distributions after nodes, if mirostat's mu moves with every token above.

    A node's mu follows from its parent's distribution and its own token; that of the accepted path
    is kept for the next round.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        tree: DraftTree,
        logits: Callable[[int], Logits],
        params: SamplingParams,
        state: SamplerState,
    ) -> None:
        self._tokens, self._tree, self._logits = tokens, tree, logits
        self._params, self._state = params, state
        self._mus = {ROOT: starting_mu(params, state)}
        self._laws: dict[int, Law] = {}

    def __call__(self, node: int) -> Law:
        """Return the distribution after a node."""
        if node not in self._laws:
            row, state = self._logits(node + 1), self._state.with_mu(self._mu(node))
            self._laws[node] = _law_after(self._tokens, self._tree, node, row, self._params, state)
        return self._laws[node]

    def state_after(self, accepted: Acceptance) -> SamplerState:
        """Return the state after the accepted path and the target's own token."""
        last = accepted.path[-1] if accepted.path else ROOT
        return self._state.with_mu(self._moved(last, accepted.next_token))

    def _mu(self, node: int) -> float:
        tree, mus = self._tree, self._mus
        if node not in mus:
            # From the root down, so that no distribution is computed by recursion.
            for below in tree.path_to(node):
                if below not in mus:
                    mus[below] = self._moved(tree.parents[below], tree.tokens[below])
        return mus[node]

    def _moved(self, node: int, token: int) -> float:
        """Return mu after a token that follows a node."""
        params, probability = self._params, self(node).probability(token)
        return mu_after(self._mu(node), probability, params.mirostat_ent, params.mirostat_lr)


def law_pairs(
    tokens: Sequence[int],
    tree: DraftTree,
    rows: EvaluatedRows,
    params: SamplingParams,
    state: SamplerState = FRESH,
) -> PairAt:
    """Return both models' distributions after nodes, raw and by the settings of sampling."""
    kept, all_draws, logits = tree.rows, tree.draws, rows.logits

    def transformed(node: int, row: Logits) -> Law:
        return _law_after(tokens, tree, node, row, params, state)

    def pair_at(node: int) -> LawPair:
        target_row = logits(node + 1)
        target, raw_target = transformed(node, target_row), RawLaw(target_row)
        row = None if kept is None else kept.logits(node)
        draws = all_draws.get(node, ())
        # Of several draws, the first is from S(q) itself: later siblings without replacement come
        # from its residual.
        draft = next((draw.law for draw in draws if draw.law is not None), None) if draws else None
        if draft is None:
            if row is not None:
                draft = transformed(node, row)
            elif draws:  # at temperature 0 the drafter's favourite is all its distribution
                draft = Law.point(tree.tokens[draws[0].node])
            else:
                return LawPair(raw_target, raw_target, target, target)
        return LawPair(draft if row is None else RawLaw(row), raw_target, draft, target)

    return pair_at


def _law_after(
    tokens: Sequence[int],
    tree: DraftTree,
    node: int,
    row: Logits,
    params: SamplingParams,
    state: SamplerState,
) -> Law:
    if not params.has_penalties:
        return transformed_law(row, params, (), state)
    above = [tree.tokens[i] for i in tree.path_to(node)]
    return transformed_law(row, params, penalty_window(tokens, above, params), state)


def _cut_at_end(
    settings: DecodeSettings, state: SamplerState, tree: DraftTree, accepted: Acceptance
) -> tuple[tuple[int, ...], int | None, SamplerState]:
    """Return path and next token, cut at the end of a whole answer, and the state after them.

    Nothing is generated after an end token. If a grammar allows nothing more, only the end of the
    text could follow: no draw of it is needed.
    """
    path, tokens, place, end_tokens = accepted.path, tree.tokens, state.grammar, settings.end_tokens
    for index, node in enumerate(path):
        if place is not None:
            place = place.moved(tokens[node])
        if tokens[node] in end_tokens or (place is not None and place.is_over):
            return path[: index + 1], None, state.at(place)
    if place is not None:
        state = state.at(place.moved(accepted.next_token))
    return path, accepted.next_token, state
