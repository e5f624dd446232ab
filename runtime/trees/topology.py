"""Topologies: the shape of a static draft tree, and the texts that describe one.

Written in the drafter language as branching factors by depth, `4x2x2` (4 children of the root, 2
below each of them, 2 below each of those), or as a quoted list of nodes, `"0 1 00 01 000"`: each
node is the path of child ranks that leads to it, one sign a depth (0 to 9, then a to v for the
ranks 10 to 31). Lists of lists, as Medusa's and EAGLE's programs write their trees, mean the same:
`"[[0], [1], [0, 0], [0, 1], [0, 0, 0]]"`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
from dataclasses import dataclass

from specrun.bindings.contexts.context_options import MAX_SEQUENCES
from specrun.bindings.errors import OptionError
from specrun.runtime.trees.layout import count_leaves
from specrun.runtime.trees.tree import ROOT

MAX_NODES = 1024
"""More nodes than this are a mistake: no machine verifies them in the time of a few tokens."""

# Bounded digits: no text makes an integer of any size.
_WIDTHS = re.compile(r"[1-9]\d{0,8}(x\d{1,9})*")
_HINT = (
    'give branching factors such as 4x2x2, a quoted list of nodes such as "0 1 00 01", or sequoia'
)
# One sign a rank, so that the length of a node's name is its depth.
_RANKS = "0123456789abcdefghijklmnopqrstuv"
# The texts that may reach the JSON parser: digits, commas and brackets.
_LISTS = re.compile(r"[\d\s,\[\]()]*")
_MAX_TEXT = 1 << 16


@dataclass(frozen=True)
class Topology:
    """Node i hangs below `parents[i]` (ROOT or an earlier node), depth by depth.

    Siblings stand in the order in which they are drawn: the first has rank 0.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(not ROOT <= parent < node for node, parent in enumerate(self.parents)):
            raise OptionError("a tree lists parents before their children")
        if any(a > b for a, b in itertools.pairwise(self.depths)):
            raise OptionError("a tree lists its nodes depth by depth")

    @classmethod
    def chain(cls, n: int) -> Topology:
        """Return a chain of n nodes."""
        return cls(tuple(range(ROOT, n - 1)))

    def __len__(self) -> int:
        return len(self.parents)

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """The depth of each node, 1 below the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @functools.cached_property
    def children(self) -> dict[int, tuple[int, ...]]:
        """The children of each node that has some, and of ROOT, by rank."""
        below: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            below.setdefault(parent, []).append(node)
        return {parent: tuple(nodes) for parent, nodes in below.items()}

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each node among its siblings."""
        return tuple(self.children[parent].index(node) for node, parent in enumerate(self.parents))

    @property
    def max_depth(self) -> int:
        """The depth of the deepest node, 0 for no nodes."""
        return self.depths[-1] if self.parents else 0

    @property
    def max_nodes(self) -> int:
        """The most nodes that a draft of this shape has: all."""
        return len(self.parents)

    @property
    def max_leaves(self) -> int:
        """The most paths that a draft of this shape has: all."""
        return self.n_leaves

    @property
    def max_width(self) -> int:
        """The most children that a node has."""
        return max(map(len, self.children.values()), default=0)

    @functools.cached_property
    def n_leaves(self) -> int:
        """How many paths the tree has."""
        return count_leaves(self.parents)

    @functools.cached_property
    def inner_widths(self) -> tuple[int, ...]:
        """How many nodes with children each depth has, from the root's 1 on.

        So many a drafter evaluates at once: leaves need no distribution.
        """
        widths = [0] * self.max_depth
        for parent in self.children:
            widths[0 if parent == ROOT else self.depths[parent]] += 1
        return tuple(widths)

    @functools.cached_property
    def n_inner_leaves(self) -> int:
        """How many paths the nodes with children form: the sequences that a drafter needs."""
        # Renumbered as a tree of their own, whose leaves have nothing but leaves below them.
        inner = sorted(parent for parent in self.children if parent != ROOT)
        place = {node: index for index, node in enumerate([ROOT, *inner], ROOT)}
        return count_leaves(tuple(place[self.parents[node]] for node in inner))

    def limited(self, max_depth: int, max_nodes: int) -> Topology:
        """Return the first `max_nodes` nodes down to `max_depth`, the deepest going first."""
        parents = self.parents
        if max_nodes >= len(parents) and (not parents or max_depth >= self.depths[-1]):
            return self
        return _limited(self, max(0, max_depth), max(0, max_nodes))

    def __str__(self) -> str:
        """Return the quoted list's text."""
        names: dict[int, str] = {ROOT: ""}
        for node, parent in enumerate(self.parents):
            names[node] = names[parent] + _RANKS[self.ranks[node]]
        return " ".join(names[node] for node in range(len(self)))


@functools.lru_cache(maxsize=256)
def _limited(topology: Topology, max_depth: int, max_nodes: int) -> Topology:
    # Nodes stand depth by depth: those kept are the first ones, and no parent is lost.
    kept = sum(depth <= max_depth for depth in topology.depths[:max_nodes])
    return Topology(topology.parents[:kept])


def parse_topology(text: str) -> Topology:
    """Return the shape that `4x2x2`, `0 1 00 01 000` or `[[0], [1], [0, 0]]` describes.

    Raises `OptionError` for other texts, and for trees larger than any context can hold.
    """
    if _WIDTHS.fullmatch(text):
        return _from_widths(text)
    if text.lstrip().startswith(("[", "(")):
        return _from_paths(_names_of_lists(text))
    # Ranks count up from 0, so no list of nodes is letters alone: it is a misspelt name.
    if text.isalpha():
        raise OptionError(f"tree={text[:40]} is not a tree: {_HINT}")
    return _from_paths(text)


def _from_widths(text: str) -> Topology:
    widths = [int(width) for width in text.split("x")]
    if 0 in widths:
        raise OptionError(f"tree={text}: a branching factor of 0 ends the tree; leave it out")
    parents: list[int] = []
    level = [ROOT]
    for width in widths:
        # Called before the depth is made: a few signs may describe millions of nodes.
        if len(parents) + len(level) * width > MAX_NODES:
            advice = "use smaller or fewer branching factors"
            raise OptionError(f"tree={text} has more than {MAX_NODES} nodes: {advice}")
        first = len(parents)
        parents += [parent for parent in level for _ in range(width)]
        level = list(range(first, len(parents)))
    return _checked(Topology(tuple(parents)), text)


def _from_paths(text: str) -> Topology:
    # The shortest first: depth by depth and parents before children, in whatever order given.
    names = sorted(text.split(), key=lambda name: (len(name), name))
    if not names:
        raise OptionError(
            'tree is empty: give branching factors such as 4x2x2, or a list such as "0 1 00"'
        )
    if len(names) > MAX_NODES:
        raise OptionError(f"tree lists {len(names)} nodes: {MAX_NODES} at most; leave some out")
    places: dict[str, int] = {"": ROOT}
    for name in names:
        _check_name(name, places)
        places[name] = len(places) - 1
    return _checked(Topology(tuple(places[name[:-1]] for name in names)), text)


def _names_of_lists(text: str) -> str:
    """Return nodes given as lists or tuples of ranks by their names."""
    paths: object = None
    if len(text) <= _MAX_TEXT and _LISTS.fullmatch(text):
        squared = text.replace("(", "[").replace(")", "]")
        # Lists nested too deep for the parser are wrong lists like any other.
        with contextlib.suppress(ValueError, RecursionError):
            paths = json.loads(re.sub(r",\s*\]", "]", squared))  # a tuple of one has a comma
    if not isinstance(paths, list) or not all(isinstance(path, list) and path for path in paths):
        example = "a list of nodes such as [[0], [1], [0, 0], [0, 1]]"
        raise OptionError(f"tree: {text[:40]!r} is not {example}")
    names: list[str] = []
    for path in paths:
        if not all(isinstance(rank, int) and rank < len(_RANKS) for rank in path):
            ranks = f"a list of ranks from 0 to {len(_RANKS) - 1}"
            raise OptionError(f"tree lists node {str(path)[:40]}: a node is {ranks}")
        names.append("".join(_RANKS[rank] for rank in path))
    return " ".join(names)


def _check_name(name: str, known: dict[str, int]) -> None:
    """Raise unless a node's parent and its sibling of the rank before are `known`."""
    if any(sign not in _RANKS for sign in name):
        raise OptionError(f"tree: {name[:40]!r} is not a node: {_HINT}")
    if name in known:
        raise OptionError(f"tree lists node {name} twice: list every node once")
    if name[:-1] not in known:
        raise OptionError(f"tree lists node {name} without its parent {name[:-1]}: list both")
    # Rank 0 has no sibling before it; the test below leaves it out.
    before = name[:-1] + _RANKS[_RANKS.index(name[-1]) - 1]
    if name[-1] != "0" and before not in known:
        raise OptionError(
            f"tree lists node {name} without its sibling {before}: ranks count up from 0"
        )


def _checked(topology: Topology, text: str) -> Topology:
    check_leaves(f"tree={text[:60]}", topology.n_leaves)
    return topology


def check_leaves(what: object, n_leaves: int, advice: str = "use fewer branches") -> None:
    """Raise `OptionError` if a tree has more leaves than llama.cpp has sequence ids.

    Each path takes one. `advice` is a change of `what`.
    """
    if n_leaves > MAX_SEQUENCES:
        limit = f"as many sequences, and llama.cpp allows {MAX_SEQUENCES}"
        raise OptionError(f"{what}: {n_leaves} leaves need {limit}: {advice}")
