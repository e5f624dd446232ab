"""Trees that the authors of heads published, under the names that their programs give them.

Each was searched for one pair of models on one kind of GPU (63 nodes are for cards that verify them nearly for free);
on other machines a tree searched from measured accuracies is better.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["published_tree"]

# FasterDecoding/Medusa, medusa/model/medusa_choices.py. Hydra (zankner/Hydra) took over the first.
_MEDUSA = {
    "mc_sim_7b_63": "0 1 2 3 4 5 6 7 8 9 "
    "00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80 90 "
    "000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 200 0000 0001",
    "vicuna_7b_stage2": "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 20 21 30 31 40 50 60 70 "
    "000 001 002 003 004 005 006 007 008 010 011 012 013 020 021 030 040 050 100 101 102 110 200 "
    "0000 0001 0002 0003 0010 0020 0100",
}
# SafeAILab/EAGLE, eagle/model/choices.py: EAGLE-1's tree, which kept Medusa's name.
_EAGLE = {
    "mc_sim_7b_63": "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001",
}
_TREES: Mapping[str, Mapping[str, str]] = {"medusa": _MEDUSA, "hydra": _MEDUSA, "eagle": _EAGLE}


def published_tree(method: str, tree: str) -> str:
    """Return the nodes of a tree that goes by this name in the method's own program; other texts as they are."""
    return _TREES.get(method, {}).get(tree, tree)
