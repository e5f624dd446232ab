"""Builds `draft(a.gguf, ...)`: the draft model, shared; each conversation gets a context of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from specrun.bindings.context import Context
from specrun.bindings.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.model import Model
from specrun.bindings.rope_scaling import AS_TRAINED, RopeScaling
from specrun.runtime.costs import best_tree, measured_acceptance, typical_acceptance
from specrun.runtime.drafter import Drafter, DrafterWeights
from specrun.runtime.drafters.draft_model.adaptive_exit import AdaptiveExit, AdaptiveExitOptions
from specrun.runtime.drafters.draft_model.chain import DraftModelDrafter, DraftSampling
from specrun.runtime.drafters.draft_model.tree import DraftTreeDrafter, draft_size
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, file_of
from specrun.runtime.drafters.tree_options import TreeOptions, tree_sampling
from specrun.runtime.language import Expression, ExpressionOptions
from specrun.runtime.methods import options_of
from specrun.runtime.offload import resolve_gpu_layers
from specrun.runtime.pairing import check_pair
from specrun.runtime.trees import Topology

USUAL_LENGTH = 5
"""Tokens of a chain where n is not given and nothing decides where to stop."""


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """What `draft(a.gguf, n=auto, sampling=with, p_min=0)` says about chains.

    `n` None is n=auto. `adaptive_exit` are the options of p_min=adaptive, None without it; with it
    `p_min` is 0.
    """

    n: int | None
    sampling: DraftSampling
    p_min: float
    adaptive_exit: AdaptiveExitOptions | None


def chain_options(expression: Expression) -> ChainOptions:
    """Return the options of a draft model that drafts chains."""
    options = options_of(expression)
    schemes = list(get_args(DraftSampling))
    sampling = cast("DraftSampling", options.choice("sampling", schemes, "with"))
    adaptive_exit = _adaptive_exit(options)
    p_min = 0.0 if adaptive_exit is not None else options.number("p_min", 0.0)
    n = options.length("n")
    # Draft & Verify's exit is a rule of its own for where chains stop. The demo's pair, which is
    # named without a file, drafts to show how: at its size nothing would pay.
    is_demo = not expression.arguments and not options.is_auto("n")
    if n is None and (adaptive_exit is not None or is_demo):
        n = USUAL_LENGTH
    return ChainOptions(n, sampling, p_min, adaptive_exit)


def build_draft(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `draft(a.gguf, ...)`: a chain or a tree from a draft model."""
    tree = TreeOptions.of(expression)
    if tree.asks_for_tree:
        return _build_draft_tree(expression, env, tree)
    chain = chain_options(expression)
    # Where states are recurrent, each token that may be dropped again keeps one more of them.
    longest = env.most_drafted if env.target.can_branch else min(env.most_drafted, USUAL_LENGTH)

    def drafter(context: Context) -> Drafter:
        adaptive = chain.adaptive_exit
        share = context.model.n_params / env.target.n_params
        return DraftModelDrafter(
            context,
            target_vocab_size=env.target.vocabulary.size,
            num_draft_tokens=longest if chain.n is None else chain.n,
            sampling=chain.sampling,
            p_min=chain.p_min,
            # The threshold is learnt: each conversation has its own.
            adaptive_exit=None if adaptive is None else AdaptiveExit(adaptive),
            length=None if chain.n is not None else env.draft_length(share),
            name=str(expression),
        )

    return _with_draft_model(expression, env, drafter)


def _adaptive_exit(options: ExpressionOptions) -> AdaptiveExitOptions | None:
    """Return the options of p_min=adaptive or p_min=adaptive(acceptance=0.9, ...), else None."""
    given = options.expression("p_min")
    if given is None or given.atom != "adaptive":
        return None
    known = [constant.name for constant in dataclasses.fields(AdaptiveExitOptions)]
    inner = ExpressionOptions(given, known, 0)
    named = {name: inner.number(name, 0.0) for name, _ in given.options}
    return AdaptiveExitOptions(**named)


def _build_draft_tree(
    expression: Expression, env: DraftEnvironment, tree: TreeOptions
) -> DrafterWeights:
    options = options_of(expression)
    if _adaptive_exit(options) is not None:
        problem = "p_min=adaptive ends chains, not trees; give n= or a fixed p_min"
        raise OptionError(f"{expression}: {problem}")
    p_min = options.number("p_min", 0.0)
    sampling = tree_sampling(options, "argmax" if tree.is_dynamic else "without")
    path = file_of(expression, env)

    def plan(nodes: int, depth: int) -> Topology:
        measured = measured_acceptance(env.target.path, path, sampling)
        return best_tree(measured or typical_acceptance(sampling), nodes, depth)

    shape = tree.shape(env.context.n_batch, plan)

    def drafter(context: Context) -> Drafter:
        return DraftTreeDrafter(
            context,
            target_vocab_size=env.target.vocabulary.size,
            shape=shape,
            sampling=sampling,
            p_min=p_min,
            name=str(expression),
        )

    return _with_draft_model(expression, env, drafter, *draft_size(shape))


def _with_draft_model(
    expression: Expression,
    env: DraftEnvironment,
    make: Callable[[Context], Drafter],
    n_sequences: int = 1,
    n_outputs: int = 1,
) -> DrafterWeights:
    """Open a draft model; every conversation gets what `make` makes of a context of this size."""
    model = open_draft_model(file_of(expression, env), env)

    def start() -> Drafter:
        options = draft_context_options(env.context, model)
        options = dataclasses.replace(options, n_sequences=n_sequences, n_outputs=n_outputs)
        context = Context(model, options)
        try:
            return make(context)
        except BaseException:
            context.close()
            raise

    return DrafterWeights(str(expression), start, [model])


def open_draft_model(path: Path, env: DraftEnvironment) -> Model:
    """Load a draft model for the target; raises `PairError` or `UnsupportedModelError`."""
    layers = resolve_gpu_layers(env.n_gpu_layers, path, drafts=True)
    model = Model(path, n_gpu_layers=layers, use_mmap=env.use_mmap, drafts=True)
    try:
        check_pair(env.target, model)
    except BaseException:
        model.close()
        raise
    return model


def draft_context_options(options: ContextOptions, model: Model) -> ContextOptions:
    """Return the target's context settings, no longer than the draft model was trained for.

    Where the target's positions are stretched, the draft model's are too, by what it needs itself,
    unless it was trained for so many.
    """
    rope, trained = options.rope, model.n_ctx_train
    if 0 < options.n_ctx <= trained:
        rope = AS_TRAINED
    elif rope.scale > 1.0:
        # Base and original length are the target's own, and another model's may differ.
        needed = model.rope_factor * max(options.n_ctx / trained, rope.scale)
        rope = RopeScaling("yarn" if rope.kind == "yarn" else "linear", scale=needed)
    n_ctx = rope.context_size(options.n_ctx, trained, model.rope_factor)
    return dataclasses.replace(options, n_ctx=n_ctx, rope=rope)
