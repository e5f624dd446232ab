"""Draft trees: nodes and draws, shapes, growth, EAGLE-2's dynamic trees, and their layout."""

from specrun.runtime.trees.eagle2 import (
    DynamicShape,
    GrownTree,
    check_sampling,
    expand_by_path_probability,
    grow_by_path_probability,
)
from specrun.runtime.trees.growth import (
    ChainStop,
    Child,
    LawSource,
    Propose,
    TreeSampling,
    chain_steps,
    draft_chain,
    grow_tree,
    most_likely,
    proposal_scheme,
    propose_with_replacement,
    propose_without_replacement,
)
from specrun.runtime.trees.topology import MAX_NODES, Topology, check_leaves, parse_topology
from specrun.runtime.trees.tree import ROOT, DraftTree, TreeBuilder
