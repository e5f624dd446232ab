"""Gemma 4's assistants: a few layers over the target's own keys and values draft chains and trees.

An assistant has no keys and values (`bindings/contexts/assistant_context.py`). A node is evaluated
with its parent's state and attends to the committed text, not to the nodes above it, so a tree
costs one evaluation a depth and no cells. What a conversation knows is one state: the target's at
the token before the last. An interrupt or a failed evaluation leaves it as it was.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specrun.bindings.contexts import (
    ASSISTANT_ARCHITECTURE,
    ASSISTED_ARCHITECTURE,
    AssistantContext,
    Context,
    Rows,
)
from specrun.bindings.errors import ClosedError, NoCacheSlotError, PairError, UnsupportedModelError
from specrun.bindings.gguf import ArrayValue, GGUFHeader
from specrun.bindings.models import Model, trusting_files
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.source import NodeRows
from specrun.runtime.drafters.states_source import StatesSource
from specrun.runtime.heads import FloatRows, HeadFile, TextRows
from specrun.runtime.memory.fit import resolve_gpu_layers
from specrun.runtime.planning.theory import multiplied
from specrun.runtime.round.drafter import DraftRequest, close_all
from specrun.runtime.round.target import EvaluatedRows, TargetModel
from specrun.runtime.trees.tree import ROOT

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
        self._n_tokens, self._is_alone = n_tokens, env.meeting is None
        # Kept by the conversations: each is freed with the last of them.
        self._contexts: weakref.WeakSet[AssistantContext] = weakref.WeakSet()
        with trusting_files():  # it was tried just now, if it had to be, with the target
            self.model = Model(
                path, n_gpu_layers=layers, use_mmap=env.use_mmap, load_nextn=True, drafts=True
            )
        # Its embeddings are its output matrix; the target's are looked up.
        self.multiplied = multiplied(self.model.header, self.model.header.tensors)

    def over(self, target: Context) -> AssistantContext:
        """Return the context over that of a target, the same for all conversations in it."""
        over_it = (each for each in self._contexts if each.target is target and each.is_open)
        known = next(over_it, None)
        if known is None:
            # A text reads one of its sequences: with others, all may be asked for.
            n_sequences = 1 if self._is_alone else target.options.n_sequences
            known = AssistantContext(
                self.model, target, n_tokens=self._n_tokens, n_sequences=n_sequences
            )
            self._contexts.add(known)
        return known

    def close(self) -> None:
        """Free contexts and model; again does nothing."""
        close_all([*self._contexts, self.model])


# == The source of rows ============================================================================


class AssistantState(TextRows[FloatRows]):
    """The target's state before a text's last token: no other is read."""

    reads_all = False

    def __init__(self) -> None:
        super().__init__(lambda piece: piece.rows[-1], sys.maxsize, ahead=0)


class _NoCells:
    """The cells of an assistant's conversation: none, as all lie in the target's context."""

    native_seconds = 0.0

    def close(self) -> None:
        """Do nothing."""


class AssistantSource(StatesSource[AssistantState]):
    """An assistant in one conversation; nodes of one depth are one evaluation."""

    needs_nextn_states = True

    def __init__(self, assistant: Assistant, *, keeps_rows: bool) -> None:
        self._cells = _NoCells()
        super().__init__(
            AssistantState(), self._cells, assistant.model.n_params, assistant.multiplied
        )
        self._assistant, self._copies = assistant, keeps_rows
        self._context: AssistantContext | None = None
        self._sequence = 0
        self._states: list[FloatRows] = []  # after the root and the nodes

    def take_target(self, target: TargetModel) -> None:
        """Open the context over the target's, whose sequences the text has."""
        context, self._sequence = target.lend()
        self._context = self._assistant.over(context)

    def room(self, tokens: Sequence[int]) -> int:
        """Return how many cells are free behind the text: a node needs one while it is read."""
        return 0 if self._context is None else self._context.n_ctx - len(tokens)

    def root(self, request: DraftRequest, highest: int) -> NodeRows | None:
        """Evaluate the last token; None without its text's cache or the state before it."""
        context, tokens, self._states = self._opened(), request.tokens, []
        state = self.state.said(tokens)
        # What lies in the target's cache may be a text that others are still to verify.
        if state is None or context.next_position(self._sequence) != len(tokens) - 1:
            return None
        return self._evaluated(context, tokens[-1:], [state])

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> NodeRows | None:
        """Evaluate tokens with the states after their parents."""
        states = [self._states[0 if parent == ROOT else parent + 1] for parent in parents]
        return self._evaluated(self._opened(), tokens, states)

    def _opened(self) -> AssistantContext:
        if self._context is None:
            raise ClosedError("the assistant's context is closed")
        return self._context

    def _evaluated(
        self, context: AssistantContext, tokens: Sequence[int], states: Sequence[FloatRows]
    ) -> NodeRows | None:
        n, before = len(tokens), context.native_seconds
        try:
            rows: Rows = context.evaluate(tokens, np.stack(states), [self._sequence] * n)
        except NoCacheSlotError:  # texts of other conversations fill the cache
            return None
        finally:
            self._cells.native_seconds += context.native_seconds - before
        # Copies: the next evaluation overwrites them before they are read.
        self._states += [np.array(rows.nextn_state(row)) for row in range(n)]
        logits = [rows.logits(row) for row in range(n)]
        return NodeRows([row.copy() for row in logits] if self._copies else logits)

    def read_states(self, rows: EvaluatedRows, wanted: Sequence[int]) -> FloatRows:
        """Return a copy [n, width] of the target's last states, normed."""
        return np.stack([rows.nextn_state(row) for row in wanted])

    def close(self) -> None:
        """Let go of the context: again does nothing."""
        self._context = None
