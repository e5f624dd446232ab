"""The decoding loop of speculative decoding: propose, evaluate, accept, commit, observe.

Every method and every acceptance rule runs through it; plain decoding is the same loop with empty
trees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specrun.runtime.acceptance import Acceptance, AcceptanceRule, ExactRule, LawAt
from specrun.runtime.acceptance.certain import CertainLaws
from specrun.runtime.backend_laws import CutRows
from specrun.runtime.conversation import Conversation
from specrun.runtime.drafter import DraftRequest, RoundOutcome
from specrun.runtime.law import Law
from specrun.runtime.limits import Allowance, RoundLimits
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.target import EvaluatedRows, Target
from specrun.runtime.transform import penalty_window, transformed_law
from specrun.runtime.tree import ROOT, DraftTree


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How an answer is decoded: acceptance rule, sampling, limits, and the tokens that end it.

    `limits` counts down: it is good for one answer.
    """

    rule: AcceptanceRule
    params: SamplingParams
    limits: RoundLimits
    end_tokens: frozenset[int] = frozenset()

    @property
    def rule_in_force(self) -> AcceptanceRule:
        """The rule; at temperature 0 an exact one, which keeps plain decoding's text.

        A rule that trades the target's law for speed cannot see the temperature: to it a truncation
        that leaves one token looks the same.
        """
        return ExactRule() if self.params.is_greedy and not self.rule.exact else self.rule


@dataclass(slots=True)
class Round:
    """One round: its accepted tokens in order, then the target's own (None after an end token).

    `tokens` are all of them. `rows` are the target's rows (0 for the root, node + 1 for a node),
    valid until the next round starts. `is_last` says that none will.
    """

    # Not frozen, as nothing is that a round makes: that costs a call for every field.
    tree: DraftTree
    path: tuple[int, ...]
    next_token: int | None
    tokens: list[int]
    rejected: bool
    rows: EvaluatedRows
    is_last: bool

    def node_before(self, index: int) -> int:
        """Return the node (or ROOT) whose law decided the round's `index`-th token."""
        return ROOT if index == 0 else self.path[index - 1]

    def row_before(self, index: int) -> int:
        """Return the row whose law decided the round's `index`-th token."""
        return self.path[index - 1] + 1 if index else ROOT + 1


def decode_rounds(
    target: Target, conversation: Conversation, settings: DecodeSettings
) -> Iterator[Round]:
    """Yield rounds until an end token, the token limit or the end of the context.

    The target has cached all tokens of the conversation but the last; they grow with every round.
    State is consistent at each yield: a consumer may stop there.
    """
    tokens, drafter, noise = conversation.tokens, conversation.drafter, conversation.noise
    rule, params, limits = settings.rule_in_force, settings.params, settings.limits
    allowance = limits.next_round(len(tokens))
    while allowance is not None:
        start = len(tokens)
        # Propose: a tree of guesses below the last token, and the law that each was drawn from.
        tree = drafter.propose(_ask(conversation, settings, allowance))
        allowance.check(tree, drafter.name)
        # Evaluate: the last token and the whole tree, in one batch.
        rows = target.evaluate(conversation, tree)
        # Accept: a path down the tree, and the target's own token after it.
        accepted = rule.accept(tree, _target_laws(tokens, tree, rows, params), noise, start)
        path, next_token = _cut_at_end(tree, accepted, settings.end_tokens)
        # Commit: keep the keys and values of the path, drop those of all other nodes.
        target.commit(conversation, tree, path)
        if next_token is not None:
            tokens.append(next_token)
        # Observe: let the drafter learn what became of its guesses.
        drafter.observe(RoundOutcome(tokens, tree, path, next_token, rows))
        limits.spend(len(tokens) - start)
        ended = tokens[-1] in settings.end_tokens
        allowance = None if ended else limits.next_round(len(tokens))
        new, is_last = tokens[start:], allowance is None
        yield Round(tree, path, next_token, new, accepted.rejected, rows, is_last)


def _ask(
    conversation: Conversation, settings: DecodeSettings, allowance: Allowance
) -> DraftRequest:
    """Return what a drafter is told; its draws are independent of acceptance."""
    tokens = conversation.tokens
    return DraftRequest(
        tokens,
        settings.params,
        conversation.noise.for_drafting(len(tokens)),
        allowance.max_depth,
        allowance.max_nodes,
        settings.end_tokens,
    )


def _target_laws(
    tokens: Sequence[int], tree: DraftTree, rows: EvaluatedRows, params: SamplingParams
) -> LawAt:
    """Return what gives the target's law after a node, by the settings of sampling."""
    if isinstance(rows, CutRows):
        return lambda node: rows.law(node + 1, params)
    if params.is_greedy and not (params.has_penalties or params.logit_bias):
        return CertainLaws(rows.logits, params)
    if not params.has_penalties:
        logits = rows.logits
        return lambda node: transformed_law(logits(node + 1), params)

    def law_at(node: int) -> Law:
        above = [tree.tokens[i] for i in tree.path_to(node)]
        return transformed_law(rows.logits(node + 1), params, penalty_window(tokens, above, params))

    return law_at


def _cut_at_end(
    tree: DraftTree, accepted: Acceptance, end_tokens: frozenset[int]
) -> tuple[tuple[int, ...], int | None]:
    """Return path and next token, cut at the first end token, after which nothing is generated."""
    path, tokens = accepted.path, tree.tokens
    for index, node in enumerate(path):
        if tokens[node] in end_tokens:
            return path[: index + 1], None
    return path, accepted.next_token
