"""KV truth: after rounds of random trees and paths, a target says what it says without drafts.

Random trees of the drafter's size are evaluated and a random path of each is kept. The rows that
decided a token are then compared with those of the same tokens evaluated one at a time in another
context. How far those may lie apart is measured, not assumed: the same tokens are evaluated several
at a time too, and what that alone changes is rounding.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from specrun.bench.models.divergence import log_laws
from specrun.bench.models.model_comparison import Chunk, scored_logits
from specrun.bench.prove.setting import Check, ForkingDrafter, Logits, Setting, judged
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.runtime.target import CachedText, TargetModel
from specrun.runtime.tree import DraftTree

_MOST = 25  # texts
_LEAST = 3
_ROUNDS = 5
_PROMPT = 12  # tokens
_TIMES_NOISE = 4.0


def check_cache(setting: Setting) -> Check:
    """Compare the rows of rounds with those of plain evaluations of the same tokens."""
    source, deadline = setting.source("cache"), setting.deadline(0.2)
    n_vocab = setting.model.vocabulary.size
    drafter = ForkingDrafter(setting, source)
    n_texts, n_rows, apart, noise, seen = 0, 0, 0.0, 0.0, float("inf")
    context = setting.context_for_rows
    with (
        setting.session(drafter, context) as session,
        _Plain(setting, context, session.target) as plain,
    ):
        while n_texts < _MOST and (n_texts < _LEAST or time.monotonic() < deadline):
            prompt = [source.randrange(n_vocab) for _ in range(_PROMPT)]
            tokens, ours = _random_rounds(session.target, drafter, prompt)
            theirs = plain.rows(tokens, _PROMPT - 1, 1)
            apart = max(apart, float(_distances(ours, theirs).max()))
            if setting.width is None:
                wide = plain.rows(tokens, _PROMPT - 1, setting.max_nodes + 1)
                noise = max(noise, float(_distances(wide, theirs).max()))
            # One other token, as a sibling that stayed would be: rows after its own have to move.
            other = [*tokens]
            other[_PROMPT] = (other[_PROMPT] + 1 + source.randrange(n_vocab - 1)) % n_vocab
            moved = _distances(plain.rows(other, _PROMPT - 1, 1), theirs)[2:]
            seen = min(seen, float(moved.max()))
            n_texts, n_rows = n_texts + 1, n_rows + len(ours)
    bound = max(setting.floor, _TIMES_NOISE * noise)
    leaves = f"up to {setting.max_leaves} branches" if setting.max_leaves > 1 else "no branches"
    if context.flash_attention != setting.context.flash_attention:
        leaves += ", flash attention off: its sums hang on where cells lie"
    why = "" if setting.model.can_branch else "; a recurrent state takes chains only"
    problem = f"a row is {apart:.2g} nats off where rounding explains {bound:.2g}"
    weak = "one other token moves rows no further than rounding does: this says nothing here"
    status = judged(apart <= bound, seen > bound)
    return Check(
        "cache",
        status,
        f"rows after {n_texts} texts of {_ROUNDS} random rounds, "
        f"trees of up to {setting.max_nodes} nodes, {leaves}{why}",
        n_rows,
        apart,
        bound,
        "nats (root mean square over the vocabulary), the largest",
        "none: the same bits are asked for"
        if setting.width
        else f"no figure: the bound is {_TIMES_NOISE:g} times what widths alone change "
        f"({noise:.2g}), {setting.floor:g} at least for this type of cache",
        f"one other token in the text moves later rows by {seen:.2g} or more",
        {"failed": problem, "left out": weak}.get(status, ""),
    )


def _random_rounds(
    target: TargetModel, drafter: ForkingDrafter, prompt: list[int]
) -> tuple[list[int], Logits]:
    """Keep random paths of random trees; return the tokens and the rows that came before each.

    The rows, [tokens after the prompt, n_vocab], are those of the prompt's last token and of all
    that follow but the last.
    """
    source = drafter.source
    text, rows = CachedText(), []
    target.rewind(text, 0)
    target.context.memory.clear()
    text.tokens = list(prompt)
    target.prefill(text, len(prompt) - 1)
    for _ in range(_ROUNDS):
        tree = drafter.tree(drafter.max_nodes, drafter.max_nodes)
        found = target.evaluate(text, tree)
        path = tree.path_to(source.randrange(-1, len(tree)))
        rows += [found.logits(row).copy() for row in (0, *(node + 1 for node in path))]
        target.commit(text, tree, path)
        text.tokens.append(source.randrange(drafter.n_vocab))
    return list(text.tokens), np.stack(rows)


class _Plain:
    """Plain evaluations: in a context of their own, or one width where that is fixed."""

    def __init__(self, setting: Setting, context: ContextOptions, target: TargetModel) -> None:
        self._target = target
        self._context: Context | None = None
        if setting.width is None:
            n_rows = setting.max_nodes + 1
            options = dataclasses.replace(context, n_outputs=n_rows, n_sequences=1)
            self._context = Context(setting.model, options)

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *_: object) -> None:
        if self._context is not None:
            self._context.close()

    def rows(self, tokens: Sequence[int], first: int, width: int) -> Logits:
        """Return the logits after tokens `first` to the last but one, `width` at a time."""
        if self._context is not None:
            chunk = Chunk(tuple(tokens), first)
            return np.concatenate([*scored_logits(self._context, chunk, width)])
        return np.stack([*self._fixed(tokens, first)])

    def _fixed(self, tokens: Sequence[int], first: int) -> Iterator[Logits]:
        text, target = CachedText(), self._target
        target.context.memory.clear()
        text.tokens = list(tokens[: first + 1])
        target.prefill(text, first)
        for token in tokens[first + 1 :]:
            yield target.evaluate(text, DraftTree()).logits(0).copy()
            target.commit(text, DraftTree(), ())
            text.tokens.append(token)


def _distances(ours: Logits, theirs: Logits) -> npt.NDArray[np.float64]:
    """Return how far laws lie apart, row by row: the root mean square over tokens, in nats."""
    first, other = log_laws(ours), log_laws(theirs)
    apart = np.zeros_like(first)
    # Tokens that neither ever says (logits of -inf) do not differ.
    np.subtract(first, other, out=apart, where=first != other)
    return np.asarray(np.sqrt(np.mean(apart * apart, axis=1)))
