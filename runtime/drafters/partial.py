"""TriForce's drafter (Sun et al. 2024): the target's own weights with a bounded second cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.contexts.rows import check_layer_inputs
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.runtime.drafters.draft_model import DraftModelSource, plan_draft
from specrun.runtime.drafters.draft_model.window import (
    ChunkMemory,
    KeptTokens,
    PartialSource,
    Window,
)
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment
from specrun.runtime.drafters.tree_options import tree_sampling
from specrun.runtime.language import Expression, options_of
from specrun.runtime.planning import best_tree, typical_acceptance
from specrun.runtime.planning.theory import memory_traffic
from specrun.runtime.round.drafter import Drafter, DrafterWeights
from specrun.runtime.trees import Topology

# == The builder of `partial(sink=4, window=256)`: a second context on the target's model ==========


SINK, WINDOW, CHUNK = 4, 256, 32
"""StreamingLLM's sinks; a window that is a small part of the contexts for which it pays."""


@dataclass(frozen=True, slots=True)
class PartialCache:
    """A bounded cache of a target: the tokens that it keeps, and the form of its context."""

    window: Window
    n_chunks: int
    chunk: int
    layer: int
    """The layer of the target whose inputs decide which chunks are kept."""

    env: DraftEnvironment

    @property
    def most_cells(self) -> int:
        """The most tokens that are kept of a text, of any length."""
        return self.window.most_cells + self.n_chunks * self.chunk

    def kept(self) -> KeptTokens:
        """Return the rule for the kept tokens of a conversation."""
        if not self.n_chunks:
            return KeptTokens(self.window)
        n_embd, n_ctx = self.env.target.n_embd, self.env.n_ctx
        chunks = ChunkMemory(
            self.chunk, self.n_chunks, layer=self.layer, n_embd=n_embd, n_ctx=n_ctx
        )
        return KeptTokens(self.window, chunks)

    def context_options(self, n_nodes: int, n_sequences: int, n_outputs: int) -> ContextOptions:
        """Return the settings of a context for the kept tokens and so many drafted ones."""
        # A shorter text than the window can hold needs no more cells than it has tokens.
        n_ctx = min(self.most_cells + n_nodes + 1, max(self.env.n_ctx, n_nodes + 1))
        return dataclasses.replace(
            self.env.context, n_ctx=n_ctx, n_sequences=n_sequences, n_outputs=n_outputs
        )

    @property
    def remark(self) -> str:
        """A note for the user, if it is no smaller than the target's own cache."""
        if self.most_cells < self.env.n_ctx:
            return ""
        kept = f"sink={self.window.sink}, window={self.window.size}"
        return (
            f"partial({kept}) keeps up to {self.most_cells} tokens, all of a context of "
            f"{self.env.n_ctx}: its drafts cost as much as the target's own tokens"
        )


def partial_cache(expression: Expression, env: DraftEnvironment, n_nodes: int) -> PartialCache:
    """Return the values of `sink=` and `window=`; drafts have up to `n_nodes` tokens.

    Raises OptionError for a window that is too small for them, and UnsupportedModelError if the
    target's memory cannot drop a part of a text.
    """
    options = options_of(expression)
    window = Window(options.integer("sink", SINK), options.integer("window", WINDOW))
    if not env.target.can_branch:
        problem = f"{env.target.architecture} models keep a recurrent state, which drops no tokens"
        raise UnsupportedModelError(f"{expression}: {problem}; use draft(FILE) or mtp")
    if window.size <= n_nodes:
        raise OptionError(
            f"{expression}: a window of {window.size} tokens is filled by a draft of {n_nodes}: "
            f"give window={n_nodes + 1} or more, or draft less"
        )
    n_chunks, chunk = options.integer("chunks", 0), options.integer("chunk", CHUNK)
    if n_chunks < 0 or chunk < 1:
        raise OptionError(
            f"{expression}: chunks is {n_chunks} of chunk={chunk} tokens: give 0 or more chunks of "
            "at least 1 token"
        )
    layer = max(1, env.target.n_layer // 2)
    if n_chunks:
        check_layer_inputs(env.target, (layer,))
    return PartialCache(window, n_chunks, chunk, layer, env)


def build_partial(
    expression: Expression, env: DraftEnvironment, build: BuildPart
) -> DrafterWeights:
    """Build `partial(sink=4, window=256, chunks=0, chunk=32, ...)`: the rest as of `draft`."""
    traffic = memory_traffic(env.target, env.context)
    weights = traffic.weights(1)

    def sequoia(nodes: int, depth: int) -> Topology:
        sampling = tree_sampling(options_of(expression), "without")
        return best_tree(typical_acceptance(sampling), nodes, depth)

    def share(_: DraftModelSource) -> float:
        # All weights, and on the average one and a half windows of keys and values.
        kept = cache.most_cells - cache.window.size / 2
        return traffic.evaluation(1, kept) / weights

    def text_share(source: DraftModelSource) -> Callable[[], float]:
        assert isinstance(source, PartialSource)
        return lambda: traffic.per_position * source.n_text / weights

    plan = plan_draft(expression, env, sequoia, share, text_share)
    cache = partial_cache(expression, env, plan.n_nodes)
    options = cache.context_options(plan.n_nodes, plan.n_sequences, plan.n_outputs)

    def start() -> Drafter:
        context = Context(env.target, options)
        try:
            size = env.target.vocabulary.size
            source = PartialSource(context, plan.shape, cache.kept(), target_vocab_size=size)
            drafter = plan.make(source)
            drafter.remark = cache.remark
            return drafter
        except BaseException:
            context.close()
            raise

    return DrafterWeights(str(expression), start, pace=plan.pace)
