"""Draft trees: nodes and draws, shapes, growth, EAGLE-2's dynamic trees, and their layout."""

from typing import TYPE_CHECKING

from specrun.bindings.faces import lazy_face

if TYPE_CHECKING:
    from specrun.runtime.trees.eagle2 import (
        DynamicShape,
        GrownTree,
        check_sampling,
        expand_by_path_probability,
        grow_by_path_probability,
    )
    from specrun.runtime.trees.growth import (
        Child,
        LawSource,
        Propose,
        Stop,
        Threshold,
        TreeBuilder,
        TreeSampling,
        grow_tree,
        most_likely,
        proposal_scheme,
        propose_with_replacement,
        propose_without_replacement,
        tree_steps,
    )
    from specrun.runtime.trees.topology import MAX_NODES, Topology, check_leaves, parse_topology
    from specrun.runtime.trees.tree import ROOT, DraftTree

__getattr__, __dir__ = lazy_face(__name__)
