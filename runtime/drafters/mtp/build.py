"""Builds `mtp(...)`: the target's own NextN blocks, those of a file, or an assistant of Gemma 4."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specrun.bindings.contexts import ASSISTANT_ARCHITECTURE, MtpContext, check_nextn
from specrun.bindings.errors import OptionError
from specrun.bindings.gguf import read_header
from specrun.bindings.models import Model
from specrun.runtime.drafters.draft_model import draft_size
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, model_file_of
from specrun.runtime.drafters.growing import GrowingDrafter, check_p_min
from specrun.runtime.drafters.mtp.assistant import Assistant, AssistantSource
from specrun.runtime.drafters.mtp.blocks import MtpSource, multiplied_of_block, open_blocks
from specrun.runtime.drafters.tree_options import ChainOptions, TreeOptions, tree_sampling
from specrun.runtime.language import Expression, options_of
from specrun.runtime.planning import best_tree, typical_acceptance
from specrun.runtime.round.drafter import DrafterWeights
from specrun.runtime.trees import DynamicShape, Topology, check_sampling

_DEPTH = 8
_DEFAULT = TreeOptions(topk=2, nodes="auto")
"""An assistant's trees if nothing is said: a round verifies what pays of them, mostly a chain."""


def build_mtp(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `mtp(n=auto, sampling=argmax, p_min=0)`, or `mtp(FILE, ...)` of blocks or an assistant.

    An assistant drafts trees, too: `mtp(FILE, depth=5, topk=3, nodes=auto)` or `tree=4x2`.
    """
    path = model_file_of(expression, env) if expression.arguments else None
    if path is not None and read_header(path).architecture == ASSISTANT_ARCHITECTURE:
        return _build_assistant(expression, path, env)
    if TreeOptions.of(expression).asks_for_tree:
        problem = "NextN blocks draft chains: give n=; trees are for assistants of Gemma 4"
        raise OptionError(f"{expression}: {problem}")
    return _build_blocks(expression, path, env)


def _build_assistant(expression: Expression, path: Path, env: DraftEnvironment) -> DrafterWeights:
    """Open an assistant; its conversations draft chains or trees over the target's cache."""
    name, options, tree = str(expression), options_of(expression), TreeOptions.of(expression)
    chain: ChainOptions | None = None
    shape: Topology | DynamicShape
    if tree.n is None and not tree.asks_for_tree and options.optional("sampling") is None:
        tree = dataclasses.replace(_DEFAULT, depth=min(_DEPTH, env.most_drafted))
    sampling, p_min = tree_sampling(options, "argmax"), options.number("p_min", 0.0)
    if tree.asks_for_tree:

        def sequoia(nodes: int, depth: int) -> Topology:
            return best_tree(typical_acceptance(sampling), nodes, depth)

        check_p_min(p_min)
        shape = tree.shape(env.context.n_batch, sequoia, env.most_drafted)
        check_sampling(shape, sampling)
        pace = env.pace_of(chooses=tree.nodes == "auto", draws=sampling != "argmax")
    else:
        chain = ChainOptions.of(expression, "argmax").within(env.context.n_batch)
        shape, pace = Topology.chain(chain.n or env.most_drafted), chain.pace(env)
    # A rule that reads the rows of leaves has them evaluated, too.
    at_once = shape.max_leaves if env.keeps_rows else draft_size(shape)[1]
    assistant = Assistant(path, env, max(at_once, draft_size(shape)[1]))
    share = assistant.multiplied / max(1, env.target.n_params)

    def start() -> GrowingDrafter:
        source = AssistantSource(assistant, keeps_rows=env.keeps_rows)
        if chain is not None:
            return chain.drafter(source, shape.max_nodes, env, share, name)
        plan = tree.plan(shape, env, share)
        return GrowingDrafter(source, shape, sampling=sampling, p_min=p_min, plan=plan, name=name)

    return DrafterWeights(name, start, [assistant], pace)


def _build_blocks(
    expression: Expression, path: Path | None, env: DraftEnvironment
) -> DrafterWeights:
    """Draft with NextN blocks, of a file or the target's own."""
    chain = ChainOptions.of(expression, "argmax").within(env.context.n_batch)
    model = env.target if path is None else open_blocks(path, env)
    try:
        n_tokens = _n_tokens(expression, model, chain.n, env.most_drafted)
        check_nextn(model)
    except BaseException:
        if path is not None:
            model.close()
        raise
    name, n_params = str(expression), model.n_params if path else model.nextn.n_parameters
    # After a draft accepted as a whole, its n pairs and the last token's are one evaluation.
    context = dataclasses.replace(env.context, n_sequences=1, n_outputs=n_tokens + 1)
    depth_params = multiplied_of_block(model)
    share = depth_params / max(1, env.target.n_params)

    def start() -> GrowingDrafter:
        source = MtpSource(MtpContext(model, context), n_params, depth_params)
        return chain.drafter(source, n_tokens, env, share, name)

    return DrafterWeights(name, start, [] if path is None else [model], chain.pace(env))


def _n_tokens(expression: Expression, model: Model, n: int | None, most: int) -> int:
    """Return the most tokens to draft: as asked, and with several blocks no more than there are."""
    blocks = model.nextn.count
    if blocks < 2:
        return n or most
    if n is not None and n > blocks:
        limit = f"{blocks} NextN blocks, one for each token, so n is at most {blocks}"
        raise OptionError(f"{expression}: {model.path} has {limit}")
    return n or min(most, blocks)


def reads_own_blocks(expression: Expression) -> bool:
    """Whether a drafter may draft with the target's own NextN blocks, so that they must be loaded.

    Bare `auto` does where the target has some.
    """
    # Options are looked through too: an expression may stand inside another's value.
    if expression.atom in ("mtp", "auto") and not expression.arguments:
        return True
    inner = (*expression.arguments, *(value for _, value in expression.options))
    return any(map(reads_own_blocks, inner))
