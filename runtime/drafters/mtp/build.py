"""Builds `mtp(...)`: the target's own NextN blocks, those of a file, or an assistant of Gemma 4."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import cast

from specrun.bindings.contexts import ASSISTANT_ARCHITECTURE, MtpContext, check_nextn
from specrun.bindings.errors import OptionError
from specrun.bindings.gguf import read_header
from specrun.bindings.models import Model
from specrun.runtime.drafters.batching import DraftContexts
from specrun.runtime.drafters.draft_model import draft_size
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, model_file_of
from specrun.runtime.drafters.growing.drafter import GrowingDrafter
from specrun.runtime.drafters.mtp.assistant import Assistant, AssistantSource
from specrun.runtime.drafters.mtp.blocks import (
    MtpSource,
    NextnCells,
    SharedNextn,
    multiplied_of_block,
    open_blocks,
)
from specrun.runtime.drafters.tree_options import ChainOptions, Drafts, TreeOptions, tree_sampling
from specrun.runtime.language import Expression, options_of
from specrun.runtime.planning import best_tree, typical_acceptance
from specrun.runtime.round.drafter import DrafterWeights, Owned
from specrun.runtime.trees import DynamicShape, Topology

_DEPTH = 8
_DEFAULT = TreeOptions(topk=2, nodes="auto")
"""The default trees: a round verifies the nodes that pay, mostly a chain."""


def build_mtp(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `mtp`, or `mtp(FILE)` of NextN blocks or an assistant: a tree that pays.

    Chains have `n=`, trees `depth=5, topk=3, nodes=auto` or `tree=4x2`. A hybrid verifies chains.
    """
    path = model_file_of(expression, env) if expression.arguments else None
    if path is not None and read_header(path).architecture == ASSISTANT_ARCHITECTURE:
        return _build_assistant(expression, path, env)
    return _build_blocks(expression, path, env)


def _drafts(expression: Expression, env: DraftEnvironment, limit: int = 0) -> Drafts:
    """Return the drafts of an expression, at most `limit` deep if that is not 0."""
    options, tree = options_of(expression), TreeOptions.of(expression)
    most = min(env.most_drafted, limit or env.most_drafted)
    is_bare = tree.n is None and not tree.asks_for_tree and options.optional("sampling") is None
    if is_bare and env.target.can_branch:
        tree = dataclasses.replace(_DEFAULT, depth=min(_DEPTH, most))
    if not tree.asks_for_tree:
        chain = ChainOptions.of(expression, "argmax").within(env.context.n_batch)
        return chain.drafts(expression, env, chain.n or most)
    sampling = tree_sampling(options, "argmax")
    if limit and tree.depth is None and tree.tree in (None, "sequoia"):
        nodes = tree.nodes if isinstance(tree.nodes, int) else limit
        tree = dataclasses.replace(tree, depth=max(1, min(limit, nodes)))

    def sequoia(nodes: int, depth: int) -> Topology:
        return best_tree(typical_acceptance(sampling), nodes, depth)

    shape = tree.shape(env.context.n_batch, sequoia, env.most_drafted)
    return Drafts.of(expression, env, tree, shape, sampling)


def _build_assistant(expression: Expression, path: Path, env: DraftEnvironment) -> DrafterWeights:
    """Open an assistant; its conversations draft chains or trees over the target's cache."""
    drafts = _drafts(expression, env)
    # A rule that reads the rows of leaves has them evaluated, too.
    width = draft_size(drafts.shape)[1]
    assistant = Assistant(path, env, max(width, drafts.shape.max_leaves * env.keeps_rows))
    share = assistant.multiplied / max(1, env.target.n_params)

    def start() -> GrowingDrafter:
        return drafts.drafter(AssistantSource(assistant, keeps_rows=env.keeps_rows), share)

    return DrafterWeights(str(expression), start, [assistant], drafts.pace)


def _build_blocks(
    expression: Expression, path: Path | None, env: DraftEnvironment
) -> DrafterWeights:
    """Draft with NextN blocks, of a file or the target's own."""
    model = env.target if path is None else open_blocks(path, env)
    try:
        blocks = model.nextn.count if model.nextn.count > 1 else 0
        drafts = _drafts(expression, env, blocks)
        _check_depth(expression, model, drafts.shape, blocks)
        check_nextn(model)
    except BaseException:
        if path is not None:
            model.close()
        raise
    n_params = model.n_params if path else model.nextn.n_parameters
    n_sequences, n_outputs = _context_size(drafts.shape, is_whole=blocks > 0)
    if env.keeps_rows:  # the row of a leaf is evaluated late
        n_sequences, n_outputs = n_sequences + 1, n_outputs + 1
    context = dataclasses.replace(env.context, n_sequences=n_sequences, n_outputs=n_outputs)
    depth_params = multiplied_of_block(model)
    share = depth_params / max(1, env.target.n_params)

    # A rule that reads rows keeps them longer than others' evaluations leave them alone.
    meeting = None if env.keeps_rows else env.meeting
    contexts = DraftContexts(model, context, meeting, kind=SharedNextn, make=MtpContext)

    def start() -> GrowingDrafter:
        own = cast("NextnCells", contexts.make())
        return drafts.drafter(MtpSource(own, n_params, depth_params), share)

    owned: list[Owned] = [contexts] if path is None else [contexts, model]
    return DrafterWeights(str(expression), start, owned, drafts.pace)


def _context_size(shape: Topology | DynamicShape, *, is_whole: bool) -> tuple[int, int]:
    """Return how many sequences and rows NextN blocks need; `is_whole`: for a tree at once."""
    n_sequences, width = draft_size(shape)
    depth = shape.max_depth
    if is_whole:
        width = (
            1 + shape.topk * (depth - 1)
            if isinstance(shape, DynamicShape)
            else sum(shape.inner_widths)
        )
    # After a path that was accepted as a whole, its pairs and the last token's are one evaluation.
    return n_sequences, max(depth + 1, width)


def _check_depth(
    expression: Expression, model: Model, shape: Topology | DynamicShape, blocks: int
) -> None:
    """Raise `OptionError` for drafts deeper than there are blocks, if there are several."""
    if blocks and shape.max_depth > blocks:
        is_chain = isinstance(shape, Topology) and shape.n_leaves == 1
        kind = "n is" if is_chain else "a tree has a depth of"
        limit = f"{blocks} NextN blocks, one for each token, so {kind} at most {blocks}"
        raise OptionError(f"{expression}: {model.path} has {limit}")


def reads_own_blocks(expression: Expression) -> bool:
    """Whether a drafter may draft with the target's own NextN blocks, so that they must be loaded.

    Bare `auto` does if the target has some.
    """
    # Options are looked through too: an expression may stand inside another's value.
    if expression.atom in ("mtp", "auto") and not expression.arguments:
        return True
    inner = (*expression.arguments, *(value for _, value in expression.options))
    return any(map(reads_own_blocks, inner))
