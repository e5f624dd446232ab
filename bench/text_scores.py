"""Log-probabilities of a given text's tokens, as evaluation harnesses request them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.models import Model
from specrun.runtime.laws.transform import highest_tokens, log_probabilities
from specrun.runtime.tuning import ROWS_AT_ONCE, scored_logits


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token of a text: its log-probability after the tokens before it, in nats.

    `top` are the most likely tokens there, best first, with theirs. The first token of a text has
    neither: nothing predicts it.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def score_text(
    model: Model, options: ContextOptions, tokens: Sequence[int], n_top: int = 0
) -> list[TokenScore]:
    """Return the score of each token, with the `n_top` most likely ones beside it.

    The text is evaluated in a context of its own: others may use the model meanwhile. Raises as
    `Context` does, such as `OutOfMemoryError`.
    """
    scores = [TokenScore(tokens[0])]
    if len(tokens) == 1:
        return scores
    own = dataclasses.replace(
        options,
        n_ctx=len(tokens),
        n_batch=max(ROWS_AT_ONCE, options.n_batch),
        n_sequences=1,
        n_outputs=ROWS_AT_ONCE,
        hidden_states=False,
        layer_inputs=(),
        nextn_states=False,
        n_rollback=0,
    )
    with Context(model, own) as context:
        for rows in scored_logits(context, tokens, 0):
            for row in rows:
                token = tokens[len(scores)]
                best = highest_tokens(row, n_top)
                logprob, *others = log_probabilities(row, [token, *best])
                scores.append(TokenScore(token, logprob, tuple(zip(best, others, strict=True))))
    return scores
