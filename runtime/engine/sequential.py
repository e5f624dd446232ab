"""Sequential cascades: a small model decides tokens, and the target those it is not sure of.

For a token of the small model the target is not evaluated, not even on the prompt: it catches up
when it is needed, on everything that it missed, in one batch. The rules are `acceptance.build`'s.
This is no case of `decode_rounds`: there is no draft, and nothing to verify.

All tokens of a token cascade are drawn with the same noise, keyed by their position: if both models
agree it is the token of either alone. In a sequence cascade the small model has noise of its own:
an answer of the target is plain decoding's, and independent of the decision to use the target.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance import Rule, SequenceCascade, SequentialCascade, TokenCascade
from specrun.runtime.drafters.draft_model import DraftModelSource
from specrun.runtime.drafters.growing.drafter import GrowingDrafter
from specrun.runtime.laws.noise import NoiseSource
from specrun.runtime.laws.samplers import SamplerState
from specrun.runtime.laws.transform import Logits, log_probability, penalty_window, transformed_law
from specrun.runtime.round.drafter import Drafter
from specrun.runtime.round.loop import (
    NOT_EVALUATED,
    Conversation,
    DecodeSettings,
    Round,
    is_whole,
)
from specrun.runtime.round.target import TargetModel
from specrun.runtime.trees.tree import DraftTree

_NOTHING = DraftTree()


def small_model(rule: Rule | SequentialCascade, drafter: Drafter) -> DraftModelSource:
    """Return the drafter's draft model; raises `OptionError` if it has none."""
    if isinstance(drafter, GrowingDrafter) and isinstance(drafter.source, DraftModelSource):
        return drafter.source
    needed = "lets a small model of its own speak"
    advice = 'name one: -md SMALL, or --drafter draft("SMALL")'
    raise OptionError(f"{rule.name} {needed}, and the drafter is {drafter.name}: {advice}")


def sequential_rounds(
    target: TargetModel,
    conversation: Conversation,
    small: DraftModelSource,
    settings: DecodeSettings,
) -> Iterator[Round]:
    """Yield one token a round until an end token, the token limit or the end of the context.

    A round whose rows are `NOT_EVALUATED` is the small model's. State is consistent at
    each yield: a consumer may stop there.
    """
    models, rule = _TwoModels(target, conversation, small, settings), settings.rule
    if isinstance(rule, TokenCascade):
        return models.token_by_token(rule)
    assert isinstance(rule, SequenceCascade)
    return models.as_a_whole(rule)


class _TwoModels:
    """The rounds of one answer, each of the small model or of the target."""

    def __init__(
        self,
        target: TargetModel,
        conversation: Conversation,
        small: DraftModelSource,
        settings: DecodeSettings,
    ) -> None:
        self._target, self._conversation, self._small = target, conversation, small
        self._params, self._limits = settings.params, settings.limits
        self._end_tokens, self._state = settings.end_tokens, settings.state
        self._has_no_room()  # from here on the limits count

    def token_by_token(self, rule: TokenCascade) -> Iterator[Round]:
        """Take tokens of the small model while it is sure, else of the target."""
        tokens, noise = self._conversation.tokens, self._conversation.noise
        over = self._has_no_room()
        while not over:
            row = self._small_row(tokens)
            # log max q of the raw distribution: minus the logarithm of a sum of exponentials
            if row is None or rule.defers(math.exp(log_probability(row, int(row.argmax())))):
                this_round = self._ask_target(_NOTHING)
            else:
                this_round = self._spoken(self._draw(row, noise, tokens, self._state))
            yield this_round
            over = this_round.is_last

    def as_a_whole(self, rule: SequenceCascade) -> Iterator[Round]:
        """Take the small model's whole answer, or that of the target."""
        start = len(self._conversation.tokens)
        said, log_probs, whole = self._small_answer(start)
        if whole and not rule.defers(log_probs):
            for token in said:
                yield self._spoken(token)
            return
        self._small.rewind(start)
        # The whole answer was a draft that is rejected: the target's first token counts for it.
        rejected, over = DraftTree.chain(said), self._has_no_room()
        while not over:
            this_round = self._ask_target(rejected)
            yield this_round
            rejected, over = _NOTHING, this_round.is_last

    def _small_answer(self, start: int) -> tuple[list[int], list[float], bool]:
        """Return the small model's answer, log q of its tokens, and whether it came to its end."""
        tokens, noise = [*self._conversation.tokens], self._conversation.noise.for_drafting(start)
        log_probs: list[float] = []
        limits, state = copy.copy(self._limits), self._state
        while limits.next_round(len(tokens)):
            row = self._small_row(tokens)
            if row is None:
                return tokens[start:], log_probs, False
            token = self._draw(row, noise, tokens, state)
            log_probs.append(log_probability(row, token))
            tokens.append(token)
            if state.grammar is not None:
                state = state.at(state.grammar.after((token,)))
            if is_whole(tokens, self._end_tokens, state):
                break
        return tokens[start:], log_probs, True

    def _small_row(self, tokens: list[int]) -> Logits | None:
        """Return the small model's row after a text; None: its context has no room for that."""
        return self._small.row_after(tokens) if self._small.room(tokens) >= 0 else None

    def _draw(self, row: Logits, noise: NoiseSource, tokens: list[int], state: SamplerState) -> int:
        """Draw the token that follows these from a model's row after them."""
        noise.seek(len(tokens))
        window = penalty_window(tokens, (), self._params)
        return noise.choose(transformed_law(row, self._params, window, state))

    def _spoken(self, token: int) -> Round:
        """Commit a token of the small model; the target will read it when it is needed."""
        is_last, whole = self._commit(token)
        outcome = self._conversation.tokens, DraftTree.chain([token]), (0,), None, NOT_EVALUATED
        return Round(*outcome, [token], False, is_last, is_whole=whole)

    def _ask_target(self, rejected: DraftTree) -> Round:
        """Commit a token of the target, which reads the tokens that it missed."""
        conversation = self._conversation
        rows = self._target.catch_up(conversation)
        token = self._draw(rows.logits(0), conversation.noise, conversation.tokens, self._state)
        is_last, whole = self._commit(token)
        was_rejected = bool(rejected.tokens)
        outcome = conversation.tokens, rejected, (), token, rows
        return Round(*outcome, [token], was_rejected, is_last, is_whole=whole)

    def _commit(self, token: int) -> tuple[bool, bool]:
        """Append a token; return whether it is the answer's last, and whether that is whole."""
        tokens, state = self._conversation.tokens, self._state
        tokens.append(token)
        if state.grammar is not None:
            self._state = state.at(state.grammar.moved(token))
        whole = is_whole(tokens, self._end_tokens, self._state)
        return whole or self._has_no_room(), whole

    def _has_no_room(self) -> bool:
        return not self._limits.next_round(len(self._conversation.tokens))
