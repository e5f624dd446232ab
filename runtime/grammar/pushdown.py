"""The next tokens of a text under rules of characters: those that llama.cpp's grammars allow.

A grammar stands at sets of stacks, as llama.cpp's does: the top of each is the character that comes
next, below it is the continuation after its rule. Here a set is one *state*, known by a number, and
a byte leads from one to another; both are found once. Stacks with a common top share it, so sets
stay small. Masks are read off a tree of the vocabulary's bytes, a level at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from specrun.runtime.grammar.gbnf import Characters, OneToken, Ranges, Rule, nullable
from specrun.runtime.grammar.token_tree import (
    BETWEEN,
    MOST_BITS,
    NEVER,
    OTHERS,
    UTF8,
    Bits,
    Ints,
    Mask,
    TokenTree,
)

_DEAD, _DONE = 0, 0
_KEPT_MASKS = 512
_MANY_NODES = 64  # more than finding out where a state leads to costs
_UNKNOWN = np.uint64(2**64 - 1)
_LEADS = ((0x80, 0), (0x800, 0xC0), (0x10000, 0xE0), (0x110000, 0xF0))
Tails = frozenset[int]
"""The continuations of a stack's top: frames, by number; frame 0 is the end of the text."""


@dataclass(slots=True)
class _State:
    """One set of stacks: the possible next tokens, and whether the text may end.

    `characters`: the node of a character's bytes, the place of that character, and its tails.
    """

    may_end: bool = False
    characters: tuple[tuple[int, int, Tails], ...] = ()
    tokens: tuple[tuple[int, Tails], ...] = ()
    next_token: dict[int, int] = field(default_factory=dict)


class Pushdown:
    """A grammar's states, as they are found."""

    def __init__(self, rules: list[Rule], tree: TokenTree, spelled: Sequence[bytes]) -> None:
        self._tree, self._spelled = tree, spelled
        self.is_empty = nullable(rules)
        self.symbols: list[Characters | OneToken | int | None] = []
        self.starts: list[list[int]] = []
        for rule in rules:
            starts: list[int] = []
            for symbols in rule:
                starts.append(len(self.symbols))
                self.symbols += [*symbols, None]
            self.starts.append(starts)
        self._bytes = _Bytes(self.symbols)
        self.frames: list[tuple[int, Tails]] = [(-1, frozenset())]
        self._frame_of: dict[tuple[int, Tails], int] = {}
        self._states = [_State()]
        self._state_of: dict[object, int] = {}
        self._next = np.full((64, self._bytes.n_classes), -1, np.int32)
        self._next[_DEAD] = _DEAD
        self._passes = np.full(64, _UNKNOWN, np.uint64)
        class_of = self._bytes.class_of
        self._classes = class_of[tree.bytes]
        bits = np.uint64(1) << class_of.astype(np.uint64)
        bits[class_of >= MOST_BITS] = NEVER
        bits[128:] = OTHERS
        self._below = tree.bits_below(bits)
        self._masks: dict[int, Mask] = {}
        bottom = frozenset({0})
        self.start = self._closed([(start, bottom) for start in self.starts[0]], {}, {})

    def state(self, number: int) -> _State:
        """Return the facts of a state."""
        return self._states[number]

    # -- continuations -----------------------------------------------------------------------------

    def mask(self, state: int) -> Mask:
        """Return which tokens may follow a state; the end of the text is not included."""
        known = self._masks.get(state)
        if known is None:
            known = self._masks[state] = self._walked(state)
            if len(self._masks) > _KEPT_MASKS:
                del self._masks[next(iter(self._masks))]
        return known

    def _walked(self, state: int) -> Mask:
        """Return a mask, by a walk over the tree of tokens, a level at a time.

        Tokens without others below them may follow whole if each byte there leads from the state
        back to itself.
        """
        tree = self._tree
        reached = np.zeros(len(tree.bytes), np.bool_)
        bounds = np.zeros(len(tree.sorted) + 1, np.int32)
        nodes, states = np.zeros(1, np.int64), np.full(1, state, np.int32)
        while len(nodes):
            counts = tree.n_children[nodes]
            below = np.repeat(tree.first_child[nodes] - counts.cumsum() + counts, counts)
            below += np.arange(len(below))
            states = self._advanced(np.repeat(states, counts), self._classes[below])
            alive = states.nonzero()[0]
            nodes, states = below[alive], states[alive]
            is_whole = self._below[nodes] & ~self._passed(states) == 0
            whole = nodes[is_whole]
            np.add.at(bounds, tree.first_below[whole], 1)
            np.add.at(bounds, tree.first_below[whole] + tree.n_below[whole], -1)
            nodes, states = nodes[~is_whole], states[~is_whole]
            reached[nodes] = True
        found: Mask = reached[tree.node_of]
        found[tree.sorted[bounds[:-1].cumsum() > 0]] = True
        for place, _ in self._states[state].tokens:
            symbol = self.symbols[place]
            assert isinstance(symbol, OneToken)
            if symbol.is_other:
                others = tree.has_text.copy()
                others[symbol.token : symbol.token + 1] = False
                found |= others
            elif symbol.token < len(found):
                found[symbol.token] = True
        return found

    def _advanced(self, states: Ints, classes: npt.NDArray[np.uint8]) -> Ints:
        """Return the states behind a byte of these classes each."""
        found: Ints = self._next[states, classes]
        unknown = found < 0
        if unknown.any():
            n = self._bytes.n_classes
            for key in np.unique(states[unknown] * n + classes[unknown]).tolist():
                self._step(*divmod(key, n))
            found = self._next[states, classes]
        return found

    def _passed(self, states: Ints) -> Bits:
        """Return the bits that lead each state back to itself; 0 for states of few nodes."""
        found = self._passes[states]
        unknown = found == _UNKNOWN
        if unknown.any():
            for state, number in zip(*np.unique(states[unknown], return_counts=True), strict=True):
                if number >= _MANY_NODES:
                    self._passes[state] = self._passed_by(int(state))
            found = self._passes[states]
            found[found == _UNKNOWN] = 0
        return found

    def _passed_by(self, state: int) -> np.uint64:
        found = np.uint64(0)
        for each in range(min(int(self._bytes.class_of[127]) + 1, MOST_BITS)):
            if self._step(state, each) == state:
                found |= np.uint64(1 << each)
        ahead = [(state, BETWEEN)] if found else []
        for at, place in ahead:  # it grows while it is read
            for low, high, following in UTF8[place]:
                classes = range(int(self._bytes.class_of[low]), int(self._bytes.class_of[high]) + 1)
                for behind in {self._step(at, each) for each in classes if low > 127}:
                    if not behind or (following == BETWEEN and behind != state):
                        return found
                    if following != BETWEEN and (behind, following) not in ahead:
                        ahead.append((behind, following))
        return found | OTHERS if found else found

    def after(self, state: int, token: int) -> int:
        """Return the state behind one more token; 0 if it may not follow."""
        known = self._states[state]
        found = known.next_token.get(token)
        if found is None:
            found = known.next_token[token] = self._after(state, token)
        return found

    def _after(self, state: int, token: int) -> int:
        ahead: list[tuple[int, Tails]] = []
        for place, tails in self._states[state].tokens:
            symbol = self.symbols[place]
            assert isinstance(symbol, OneToken)
            if (symbol.token == token) is not symbol.is_other:
                ahead.append((place + 1, tails))
        spelled = self._tree.node_of[token] if token < len(self._tree.node_of) else 0
        for byte in self._spelled[token] if spelled else b"":
            state = self._step(state, int(self._bytes.class_of[byte]))
        if not spelled:
            state = _DEAD
        if not ahead:
            return state
        other = self._states[state]
        characters = {(node, place): set(tails) for node, place, tails in other.characters}
        tokens = {place: set(tails) for place, tails in other.tokens}
        return self._closed(ahead, characters, tokens, may_end=other.may_end)

    def forced(self, state: int, most: int) -> bytes:
        """Return the bytes that have to follow, up to a number of them; tokens as `[id]` in FF."""
        found = bytearray()
        while len(found) < most:
            known = self._states[state]
            if known.may_end or not (known.characters or known.tokens):
                break
            if known.tokens:
                symbol = self.symbols[known.tokens[0][0]]
                assert isinstance(symbol, OneToken)
                if known.characters or len(known.tokens) > 1 or symbol.is_other:
                    break
                found += b"\xff[%d]" % symbol.token
                state = self.after(state, symbol.token)
                continue
            byte = self._bytes.single([node for node, _, _ in known.characters])
            if byte is None:
                break
            found.append(byte)
            state = self._step(state, int(self._bytes.class_of[byte]))
        return bytes(found)

    # -- states ------------------------------------------------------------------------------------

    def _step(self, state: int, byte_class: int) -> int:
        """Return the state behind a byte of a class."""
        known = int(self._next[state, byte_class])
        if known >= 0:
            return known
        ahead: list[tuple[int, Tails]] = []
        characters: dict[tuple[int, int], set[int]] = {}
        for node, place, tails in self._states[state].characters:
            following = self._bytes.following[node].get(byte_class)
            if following == _DONE:
                ahead.append((place + 1, tails))
            elif following is not None:
                characters.setdefault((following, place), set()).update(tails)
        found = self._closed(ahead, characters, {})
        self._next[state, byte_class] = found
        return found

    def _closed(
        self,
        ahead: list[tuple[int, Tails]],
        characters: dict[tuple[int, int], set[int]],
        tokens: dict[int, set[int]],
        *,
        may_end: bool = False,
    ) -> int:
        """Return the state of stacks with these tops, when rules are entered and left.

        `characters` and `tokens` are tops at which it stands already.
        """
        walk = _Walk(self)
        walk.enter(ahead)
        for place, source in walk.tops:
            tails = walk.tails(source)
            symbol = self.symbols[place]
            if isinstance(symbol, OneToken):
                tokens.setdefault(place, set()).update(tails)
            elif root := self._bytes.roots[place]:
                characters.setdefault((root, place), set()).update(tails)
        return self._numbered(
            _State(
                may_end or walk.may_end,
                tuple((n, p, frozenset(characters[n, p])) for n, p in sorted(characters)),
                tuple((p, frozenset(tokens[p])) for p in sorted(tokens)),
            )
        )

    def frame(self, place: int, tails: Tails) -> int:
        """Return the number of a continuation: at a place, and then at one of these tails."""
        number = self._frame_of.get((place, tails))
        if number is None:
            number = self._frame_of[place, tails] = len(self.frames)
            self.frames.append((place, tails))
        return number

    def _numbered(self, state: _State) -> int:
        if not (state.may_end or state.characters or state.tokens):
            return _DEAD
        key = state.may_end, state.characters, state.tokens
        number = self._state_of.get(key)
        if number is None:
            number = self._state_of[key] = len(self._states)
            self._states.append(state)
            if number >= len(self._next):
                self._next = np.concatenate([self._next, np.full_like(self._next, -1)])
                more = np.full_like(self._passes, _UNKNOWN)
                self._passes = np.concatenate([self._passes, more])
        return number


_Source = Tails | int
"""The continuation of a place: known tails, or those of a rule that was entered here."""


class _Walk:
    """Rules that are entered and left without a character, from the tops of stacks.

    A rule is entered once, whoever leads to it: `_callers` has all places that it returns to.
    """

    def __init__(self, grammar: Pushdown) -> None:
        self._grammar = grammar
        self._callers: dict[int, set[tuple[int, _Source]]] = {}
        self._known: dict[int, Tails] = {}  # by rule
        self.tops: set[tuple[int, _Source]] = set()
        self.may_end = False

    def enter(self, ahead: Iterable[tuple[int, _Source]]) -> None:
        """Follow these places."""
        grammar = self._grammar
        waiting, seen = list(ahead), set[tuple[int, _Source]]()
        while waiting:
            each = waiting.pop()
            if each in seen:
                continue
            seen.add(each)
            place, source = each
            symbol = grammar.symbols[place]
            if symbol is None:
                if not isinstance(source, int):  # else its callers went on: it may be empty
                    self.may_end |= 0 in source
                    waiting += [grammar.frames[frame] for frame in source if frame]
            elif isinstance(symbol, int):
                if symbol not in self._callers:
                    self._callers[symbol] = set()
                    waiting += [(start, symbol) for start in grammar.starts[symbol]]
                self._callers[symbol].add((place + 1, source))
                if grammar.is_empty[symbol]:
                    waiting.append((place + 1, source))
            else:
                self.tops.add(each)

    def tails(self, source: _Source) -> Tails:
        """Return the frames that follow a place."""
        if not isinstance(source, int):
            return source
        known = self._known.get(source)
        if known is None:
            found, below = set[int](), dict[int, set[int]]()
            for place, other in self._returns(source):
                tails = self.tails(other)
                if place < 0:
                    found.update(tails)
                else:
                    below.setdefault(place, set()).update(tails)
            for place, frames in below.items():
                found.add(self._grammar.frame(place, frozenset(frames)))
            known = self._known[source] = frozenset(found)
        return known

    def _returns(self, rule: int) -> Iterable[tuple[int, _Source]]:
        """Return where a rule returns to: at the end of a caller, where that one returns to."""
        waiting, seen = [rule], {rule}
        while waiting:
            for place, source in self._callers[waiting.pop()]:
                if self._grammar.symbols[place] is not None:
                    yield place, source
                elif not isinstance(source, int):
                    yield -1, source
                elif source not in seen:
                    seen.add(source)
                    waiting.append(source)


class _Bytes:
    """The characters of a grammar as bytes of UTF-8: nodes, and the edges between them.

    Bytes that lead to the same everywhere are one class.
    """

    def __init__(self, symbols: Sequence[Characters | OneToken | int | None]) -> None:
        self._nodes: list[tuple[tuple[int, int, int], ...]] = [()]
        self._node_of: dict[tuple[tuple[int, int, int], ...], int] = {}
        known: dict[Ranges, int] = {}
        self.roots: list[int] = []
        """By place: the node of its character, 0 if there is none."""
        for symbol in symbols:
            root = _DONE
            if isinstance(symbol, Characters) and symbol.ranges:
                root = known.get(symbol.ranges, _DONE)
                if not root:
                    sequences = [s for low, high in symbol.ranges for s in _sequences(low, high)]
                    root = known[symbol.ranges] = self._node(sequences)
            self.roots.append(root)
        bounds = {0, 128, 256}
        bounds |= {
            bound for node in self._nodes for low, high, _ in node for bound in (low, high + 1)
        }
        cuts = sorted(bounds)
        self.n_classes = len(cuts) - 1
        self.class_of = np.repeat(np.arange(self.n_classes, dtype=np.uint8), np.diff(cuts))
        self._firsts = [low if low + 1 == high else None for low, high in itertools.pairwise(cuts)]
        self.following = [
            {
                each: target
                for low, high, target in node
                for each in range(int(self.class_of[low]), int(self.class_of[high]) + 1)
            }
            for node in self._nodes
        ]

    def single(self, nodes: list[int]) -> int | None:
        """Return the only byte that may follow these nodes; None if several may."""
        classes = {each for node in nodes for each in self.following[node]}
        return self._firsts[classes.pop()] if len(classes) == 1 else None

    def _node(self, sequences: list[tuple[tuple[int, int], ...]]) -> int:
        """Return the node of sequences of ranges of bytes."""
        cuts = sorted({bound for s in sequences for bound in (s[0][0], s[0][1] + 1)})
        edges: list[tuple[int, int, int]] = []
        for low, high in itertools.pairwise(cuts):
            rests = [s[1:] for s in sequences if s[0][0] <= low and high - 1 <= s[0][1]]
            if rests:
                rest = [each for each in rests if each]
                edges.append((low, high - 1, self._node(rest) if rest else _DONE))
        key = tuple(edges)
        number = self._node_of.get(key)
        if number is None:
            number = self._node_of[key] = len(self._nodes)
            self._nodes.append(key)
        return number


def _sequences(low: int, high: int) -> list[tuple[tuple[int, int], ...]]:
    """Return the sequences of ranges of bytes that spell a range of code points in UTF-8."""
    found: list[tuple[tuple[int, int], ...]] = []
    begin = 0
    for more, (end, lead) in enumerate(_LEADS):
        first, last = max(low, begin), min(high, end - 1)
        if first <= last:
            found += _within(first, last, lead, more)
        begin = end
    return found


def _within(low: int, high: int, lead: int, more: int) -> list[tuple[tuple[int, int], ...]]:
    """Return them for values of one length: of a byte with these high bits, and so many others."""
    if not more:
        return [((lead | low, lead | high),)]
    size, first, last = 64**more, low // 64**more, high // 64**more
    if first == last:
        rests = _within(low % size, high % size, 0x80, more - 1)
        return [((lead | first, lead | first), *rest) for rest in rests]
    before, behind = [], []
    if low % size:
        rests = _within(low % size, size - 1, 0x80, more - 1)
        before = [((lead | first, lead | first), *rest) for rest in rests]
        first += 1
    if high % size != size - 1:
        rests = _within(0, high % size, 0x80, more - 1)
        behind = [((lead | last, lead | last), *rest) for rest in rests]
        last -= 1
    whole = [((lead | first, lead | last), *(((0x80, 0xBF),) * more))] if first <= last else []
    return [*before, *whole, *behind]
