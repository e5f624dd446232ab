"""Multi-token prediction: a target's own NextN blocks draft a chain (DeepSeek-V3, 2412.19437, section 2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from specrun.bindings.mtp_context import MtpContext
from specrun.runtime.drafters.draft_chain import draft_chain
from specrun.runtime.drafters.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.drafters.model_drafter import RANKED_WORDS, ranking_params
from specrun.runtime.drafters.mtp_state import MtpState
from specrun.runtime.drafters.tree_laws import check_p_min
from specrun.runtime.law import Law
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.transform import penalty_window, transformed_law
from specrun.runtime.tree import DraftTree

__all__ = ["MtpDrafter", "MtpSampling"]

MtpSampling = Literal["argmax", "with"]


class MtpDrafter(Drafter):
    """Drafts up to `num_draft_tokens` tokens in a row from the target's hidden states.

    A model with one block uses it again and again, on its own states; one with several has a block for each token.
    `sampling` "argmax" drafts point masses: the text stays plain decoding's own at every temperature. "with" draws from
    the blocks' law, transformed like the target's. `p_min` ends a chain before a token whose law gives no word that
    probability (at temperature 0: at temperature 1).

    It is one conversation's: it owns the context, and the model is shared. `n_params` are the parameters that drafting
    adds to the target's.
    """

    needs_nextn_states = True

    def __init__(
        self,
        context: MtpContext,
        *,
        num_draft_tokens: int = 3,
        sampling: MtpSampling = "argmax",
        p_min: float = 0.0,
        n_params: int = 0,
        name: str = "mtp",
    ) -> None:
        check_p_min(p_min)
        self.name = name
        self.max_nodes = num_draft_tokens
        self._context = context
        self._sampling = sampling
        self._p_min = p_min
        self._state = MtpState(context)
        self._prompt: list[int] = []
        self._n_params = n_params

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the pairs of what the prompt shares with the last text."""
        self._prompt = list(tokens)
        self._state.begin(tokens)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Pair the prompt's states with the tokens after them."""
        self._state.learn(start, _states(rows, range(count)), self._prompt)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a chain; none where the state before the last token is not known, or the context ends."""
        start = len(request.tokens)
        most = min(self.max_nodes, request.max_depth, request.max_nodes, self._context.n_ctx - start + 1)
        root = self._state.root(request.tokens) if most > 0 else None
        if root is None:
            return DraftTree()
        points = self._sampling == "argmax" or request.params.is_greedy
        params = request.params
        if points and self._p_min == 0.0:
            params = params.replace(temperature=0.0)  # the favourite is the same, and no law has to be made
        elif params.is_greedy:
            params = ranking_params(params, RANKED_WORDS)  # a greedy law is always certain

        def law_after(drafted: list[int]) -> Law:
            row = self._state.after(drafted[-1]) if drafted else root
            return transformed_law(row, params, penalty_window(request.tokens, drafted, params))

        return draft_chain(
            law_after,
            request.noise,
            start,
            most=most,
            points=points,
            threshold=self._p_min,
            end_tokens=request.end_tokens,
        )

    def observe(self, outcome: RoundOutcome) -> None:
        """Pair the target's states of the last token and the accepted drafts with what came after them."""
        self._state.learn(outcome.start - 1, _states(outcome.rows, outcome.path_rows), outcome.tokens)

    def rewind(self, length: int) -> None:
        """Forget tokens that were only guesses."""
        self._state.cut(length)

    @property
    def native_seconds(self) -> float:
        """Time in the blocks' evaluations."""
        return self._context.native_seconds

    @property
    def n_params(self) -> int:
        """The blocks' parameters; those of a whole file where they have one of their own."""
        return self._n_params

    def close(self) -> None:
        """Free the context."""
        self._context.close()


def _states(rows: EvaluatedRows, which: Sequence[int]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.stack([rows.nextn_state(row) for row in which])
