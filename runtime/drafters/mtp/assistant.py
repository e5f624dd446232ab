"""Gemma 4's assistants: a few layers over the target's own keys and values draft chains and trees.

An assistant has no keys and values (`bindings/contexts/assistant_context.py`). A node is evaluated
with its parent's state and attends to the committed text, not to the nodes above it, so a tree
costs one evaluation a depth and no cells. A conversation has one state: the target's at
the token before the last. An interrupt or a failed evaluation leaves it as it was.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path

import numpy as np

from specrun.bindings.contexts import (
    ASSISTANT_ARCHITECTURE,
    ASSISTED_ARCHITECTURE,
    AssistantContext,
    Context,
)
from specrun.bindings.errors import ClosedError, NoCacheSlotError, PairError, UnsupportedModelError
from specrun.bindings.gguf import ArrayValue, GGUFHeader
from specrun.bindings.models import Model, trusting_files
from specrun.runtime.drafters.batching import Joint, Shared
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.growing.source import Asked, NodeRows
from specrun.runtime.drafters.states_source import StatesSource
from specrun.runtime.heads import FloatRows, HeadFile, TextRows
from specrun.runtime.memory.fit import resolve_gpu_layers
from specrun.runtime.planning.theory import multiplied
from specrun.runtime.round.drafter import DraftRequest, close_all
from specrun.runtime.round.target import TargetModel

# == The file, and the target that it was made for =================================================


def check_assistant(path: Path, target: Model) -> None:
    """Raise unless an assistant's file was made for a target; an unknown one is then tried with it.

    Raises `PairError` for another width, vocabulary or other last layers.
    """
    file = HeadFile(path, ASSISTANT_ARCHITECTURE)
    pair = f"{path} cannot draft for {target.path}"
    if target.architecture != ASSISTED_ARCHITECTURE:
        kinds = f"an assistant of Gemma 4, and the target is a {target.architecture} model"
        raise PairError(f"{pair}: it is {kinds}")
    layers = file.size("block_count", 1 << 16)
    windows = _by_layer(file.header, "attention.sliding_window_pattern", layers)
    # llama.cpp lets layers with a window read the target's last but one, the others its last.
    theirs = {True: target.n_layer - 2, False: target.n_layer - 1}
    pattern = _by_layer(target.header, "attention.sliding_window_pattern", target.n_layer)
    if [pattern[theirs[kind]] for kind in (True, False)] != [True, False]:
        problem = "an assistant reads a layer with a window and one without"
        raise UnsupportedModelError(f"{pair}: {problem}, and the target's last two are others")
    for layer, has_window in enumerate(windows):
        read = theirs[bool(has_window)]
        for name in ("head_count_kv", "key_length"):
            key = f"attention.{name}{'_swa' * (name == 'key_length' and bool(has_window))}"
            own = _by_layer(file.header, key, layers)[layer]
            given = _by_layer(target.header, key, target.n_layer)[read]
            if own != given:
                has = f"its layer {layer} has {own} as {key}, and the target's layer {read} {given}"
                raise PairError(f"{pair}: {has}")
    file.check_target(target, hidden_key="embedding_length_out")


def _by_layer(header: GGUFHeader, name: str, n_layers: int) -> Sequence[object]:
    """Return a value of every layer, which may be one for all."""
    value = header.metadata.get(f"{header.architecture}.{name}")
    values = list(value) if isinstance(value, ArrayValue) else [value] * n_layers
    return (values + [None] * n_layers)[:n_layers]


class Assistant:
    """An assistant's model, which conversations share, and its context over the target's.

    Close it after all conversations and before the target. Raises as `check_assistant` and `Model`.
    """

    def __init__(self, path: Path, env: DraftEnvironment, n_tokens: int) -> None:
        check_assistant(path, env.target)
        layers = resolve_gpu_layers(env.n_gpu_layers, path, drafts=True)
        n_texts = 1 if env.meeting is None else env.meeting.n_texts
        self._n_tokens = n_tokens * n_texts
        self.together = None if env.meeting is None else SharedAssistant(env.meeting)
        # Kept by the conversations: each is freed with the last of them.
        self._contexts: weakref.WeakSet[AssistantContext] = weakref.WeakSet()
        with trusting_files():  # it was tried just now, if it had to be, with the target
            self.model = Model(
                path, n_gpu_layers=layers, use_mmap=env.use_mmap, load_nextn=True, drafts=True
            )
        # Its embeddings are its output matrix; the target's are looked up.
        self.multiplied = multiplied(self.model.header, self.model.header.tensors)

    def over(self, target: Context, *, is_alone: bool) -> AssistantContext:
        """Return the context over that of a target, the same for all conversations in it.

        `is_alone`: the target's context has one conversation.
        """
        over_it = (each for each in self._contexts if each.target is target and each.is_open)
        known = next(over_it, None)
        if known is None:
            # A text reads one of its sequences: with others, all may be requested.
            n_sequences = 1 if is_alone else target.options.n_sequences
            known = AssistantContext(
                self.model, target, n_tokens=self._n_tokens, n_sequences=n_sequences
            )
            self._contexts.add(known)
        return known

    def close(self) -> None:
        """Free contexts and model; again does nothing."""
        together = () if self.together is None else (self.together,)
        close_all([*together, *self._contexts, self.model])


# == Evaluations, of one conversation or of several ================================================


@dataclass(frozen=True, slots=True)
class Given:
    """Tokens of one depth behind a conversation's text, with the states before them [n, width]."""

    context: AssistantContext
    sequence: int
    tokens: Sequence[int]
    states: FloatRows


@dataclass(frozen=True, slots=True)
class Found:
    """The rows of logits after tokens, views that the next evaluation overwrites, and the states.

    Both are empty if the target's cache has no cells for the evaluation.
    """

    rows: NodeRows
    states: Sequence[FloatRows]


def evaluated(given: Sequence[Given]) -> tuple[list[Found], float]:
    """Evaluate the tokens of conversations in one context; return their rows and the seconds."""
    context, before = given[0].context, given[0].context.native_seconds
    tokens = [token for own in given for token in own.tokens]
    sequences = [own.sequence for own in given for _ in own.tokens]
    try:
        rows = context.evaluate(tokens, np.concatenate([own.states for own in given]), sequences)
    except NoCacheSlotError:  # texts fill the cache
        return [Found(NodeRows(), ())] * len(given), context.native_seconds - before
    found, first = [], 0
    for own in given:
        places = range(first, first := first + len(own.tokens))
        states = [np.array(rows.nextn_state(row)) for row in places]
        found.append(Found(NodeRows([rows.logits(row) for row in places]), states))
    return found, context.native_seconds - before


SharedDepth = Shared[Given, Found]


class SharedAssistant(Joint[SharedDepth]):
    """The depths that conversations have evaluated at once: no token sees another."""

    def fitting(self) -> list[SharedDepth]:
        """Return the first requests in one context, as many as it takes."""
        context = self.asking[0].given.context
        own = [*takewhile(lambda asked: asked.given.context is context, self.asking)]
        counts = accumulate(len(asked.given.tokens) for asked in own)
        return own[: max(1, sum(count <= context.n_outputs for count in counts))]

    def answers(self, taken: Sequence[SharedDepth]) -> tuple[list[Found], list[float]]:
        """Evaluate them side by side."""
        found, seconds = evaluated([asked.given for asked in taken])
        n = sum(len(asked.given.tokens) for asked in taken)
        return found, [seconds * len(asked.given.tokens) / n for asked in taken]


# == The source of rows ============================================================================


class AssistantCells:
    """The cells of an assistant's conversation: all lie in the target's context."""

    native_seconds = 0.0
    context: AssistantContext | None = None
    sequence = 0

    def opened(self) -> AssistantContext:
        """Return the context."""
        if self.context is None:
            raise ClosedError("the assistant's context is closed")
        return self.context

    def copy(self, other: AssistantCells, base: int, count: int) -> bool:
        """Return True: there is nothing to copy."""
        return True

    def close(self) -> None:
        """Let go of the context."""
        self.context = None


class AssistantSource(StatesSource[TextRows[FloatRows]]):
    """An assistant in one conversation; nodes of one depth are one evaluation.

    The target's state before a text's last token is read, and no other.
    """

    needs_nextn_states = True

    def __init__(self, assistant: Assistant, *, keeps_rows: bool) -> None:
        state = TextRows[FloatRows](
            lambda piece: piece.rows[-1], sys.maxsize, ahead=0, reads_all=False
        )
        self._cells = AssistantCells()
        super().__init__(state, self._cells, assistant.model.n_params, assistant.multiplied)
        self._assistant, self._copies = assistant, keeps_rows
        # A rule that reads rows has leaves evaluated, which would overwrite the rows of others.
        if assistant.together is not None and not keeps_rows:
            self.shared = Shared(assistant.together)
        self._states: list[FloatRows] = []  # after the root and the nodes

    def take_target(self, target: TargetModel) -> None:
        """Open the context over the target's, whose sequences the text has."""
        context, self._cells.sequence = target.lend()
        self._cells.context = self._assistant.over(context, is_alone=target.is_alone)

    def room(self, tokens: Sequence[int]) -> int:
        """Return how many cells are free behind the text: a node needs one while it is read."""
        context = self._cells.context
        return 0 if context is None else context.n_ctx - len(tokens)

    def root(self, request: DraftRequest, highest: int) -> NodeRows | None:
        """Evaluate the last token; None without its text's cache or the state before it."""
        given = self._given_root(request.tokens)
        return None if given is None else self._alone(given)

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> NodeRows | None:
        """Evaluate tokens with the states after their parents."""
        return self._alone(self._given_below(parents, tokens))

    def _given_root(self, text: Sequence[int]) -> Given | None:
        context, sequence, self._states = self._cells.opened(), self._cells.sequence, []
        state = self.state.said(text)
        # The target's cache may hold a text that others are still to verify.
        if state is None or context.next_position(sequence) != len(text) - 1:
            return None
        return Given(context, sequence, text[-1:], state[np.newaxis])

    def _given_below(self, parents: Sequence[int], tokens: Sequence[int]) -> Given:
        states = np.stack([self._states[parent + 1] for parent in parents])
        return Given(self._cells.opened(), self._cells.sequence, tokens, states)

    def _alone(self, given: Given) -> NodeRows | None:
        [found], seconds = evaluated([given])
        self._cells.native_seconds += seconds
        rows = self._noted(found)
        return None if rows.is_empty else rows

    def _noted(self, found: Found) -> NodeRows:
        self._states += found.states
        # Copies: the next evaluation overwrites them before they are read.
        if self._copies and found.rows.whole is not None:
            return NodeRows([row.copy() for row in found.rows.whole])
        return found.rows

    def submit(self, request: DraftRequest, asked: Asked) -> bool:
        """Have a depth evaluated with those of others; False without the state of this text."""
        assert isinstance(asked, tuple)
        assert self.shared is not None
        given = self._given_below(*asked) if asked[1] else self._given_root(request.tokens)
        if given is not None:
            self.shared.ask(given)
        return given is not None

    def result(self) -> NodeRows | None:
        """Return the rows of the depth; None before it was evaluated."""
        found = None if self.shared is None else self.shared.answered()
        return None if found is None else self._noted(found)

    @property
    def native_seconds(self) -> float:
        """Time in the evaluations of this conversation."""
        shared = 0.0 if self.shared is None else self.shared.native_seconds
        return self._cells.native_seconds + shared
