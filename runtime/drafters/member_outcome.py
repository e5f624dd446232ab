"""A round's outcome as one of several drafters sees it: in the nodes of the tree that it proposed itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specrun.runtime.drafters.drafter import RoundOutcome
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.tree import ROOT, DraftTree

__all__ = ["MemberRows", "outcome_for", "outcome_for_idle"]


def outcome_for(outcome: RoundOutcome, own: DraftTree, places: dict[int, int]) -> RoundOutcome:
    """Return the outcome as the member sees it: its own nodes keep their numbers, accepted ones are appended.

    `places` says where its nodes stand in the round's tree. Its ROOT may stand at an accepted node, for members
    that went on from what others drafted; then the member sees what came after that node.
    """
    root = places[ROOT]
    accepted = outcome.path if root == ROOT else outcome.path[outcome.path.index(root) + 1 :]
    back = {merged: node for node, merged in places.items()}
    tokens, parents, depths, flags = list(own.tokens), list(own.parents), list(own.depths), list(own.is_candidate)
    rows = [places[node] for node in range(len(own))]
    path: list[int] = []
    for merged in accepted:
        node = back.get(merged)
        if node is None:
            node = len(tokens)
            tokens.append(outcome.tree.tokens[merged])
            parents.append(path[-1] if path else ROOT)
            depths.append(len(path) + 1)
            flags.append(True)
            rows.append(merged)
        path.append(node)
    tree = own
    if len(tokens) > len(own):
        tree = DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(flags), own.draws)
    return RoundOutcome(outcome.tokens, tree, tuple(path), outcome.next_token, MemberRows(outcome.rows, [root, *rows]))


def outcome_for_idle(outcome: RoundOutcome) -> RoundOutcome:
    """Return the outcome as a member sees it that proposed nothing: the accepted path is all there is."""
    return outcome_for(outcome, DraftTree(), {ROOT: ROOT})


class MemberRows:
    """The evaluation's rows under a member's own node numbers: `places` of its root and its nodes, in order."""

    def __init__(self, rows: EvaluatedRows, places: list[int]) -> None:
        self._rows = rows
        self._places = places

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of the member's row."""
        return self._rows.logits(self._places[row] + 1)

    def hidden_state(self, row: int) -> npt.NDArray[np.float32]:
        """Return the hidden state of the member's row."""
        return self._rows.hidden_state(self._places[row] + 1)

    def layer_input(self, row: int, layer: int) -> npt.NDArray[np.float32]:
        """Return the input of a layer at the member's row."""
        return self._rows.layer_input(self._places[row] + 1, layer)
