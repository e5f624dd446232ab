"""A conversation: its tokens, what of them is cached, its drafter, and the noise of its answer.

Whatever else decoding needs, such as models, heads, stores and measured costs, belongs to weights
that any number of conversations may share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specrun.runtime.drafter import Drafter
from specrun.runtime.noise import NoiseSource, SeededNoise
from specrun.runtime.target import CachedText, TargetModel


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
        self.tokens = list(prompt)
        return shared

    def forget(self, target: TargetModel) -> None:
        """Drop all tokens, from cache and drafter: the next prompt shares nothing with them."""
        target.rewind(self, 0)
        self.drafter.begin(())
