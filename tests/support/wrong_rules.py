"""A rule that is wrong, for checks of whole texts to find."""

from __future__ import annotations

from specrun.runtime.acceptance import Acceptance, AcceptanceRule, ExactRule, LawAt
from specrun.runtime.laws import NoiseSource
from specrun.runtime.trees import DraftTree


class KeepsFirst:
    """Keeps the first draft, whatever the target's law is."""

    name, exact = "keeps first", True

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        rule: AcceptanceRule = ExactRule()
        if not tree.n_candidates:
            return rule.accept(tree, law_at, noise, position)
        noise.seek(position + 1)
        return Acceptance((0,), noise.choose(law_at(0)), rejected=False)
