"""Builds `draft(a.gguf, ...)`: the draft model, shared; each conversation gets a context of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import AS_TRAINED, ContextOptions, RopeScaling
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.batching import DraftContexts
from specrun.runtime.drafters.draft_model.source import DraftModelSource, draft_size
from specrun.runtime.drafters.draft_model.vocabulary import DraftPair, RetokenisedDrafter
from specrun.runtime.drafters.draft_model.window import KeptTokens, PartialSource, Window
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, model_file_of
from specrun.runtime.drafters.growing.drafter import GrowingDrafter
from specrun.runtime.drafters.tree_options import ChainOptions, Drafts, TreeOptions, tree_sampling
from specrun.runtime.language import TREE_OPTIONS, Expression, ExpressionOptions, options_of
from specrun.runtime.memory.fit import resolve_gpu_layers
from specrun.runtime.models.pairing import check_pair
from specrun.runtime.planning import (
    AdaptiveExitOptions,
    best_tree,
    measured_acceptance,
    typical_acceptance,
)
from specrun.runtime.round.drafter import Drafter, DrafterWeights, Pace
from specrun.runtime.trees import DynamicShape, Topology

USUAL_LENGTH = 5
"""Tokens of a chain if n is not given and nothing decides where to stop."""


def chain_options(expression: Expression) -> ChainOptions:
    """Return the options of a draft model that drafts chains."""
    options = options_of(expression)
    chain = ChainOptions.of(expression, "with", _adaptive_exit(options))
    if chain.n is not None and chain.n < 1:
        problem = f"n is {chain.n}: a draft model must draft at least 1 token (or use none)"
        raise OptionError(problem)
    # Draft & Verify's exit is a rule of its own for where chains stop. The demo's pair, which is
    # named without a file, drafts to show how: at its size nothing would pay.
    is_demo = expression.atom == "draft" and not expression.arguments and not options.is_auto("n")
    if chain.n is None and (chain.adaptive_exit is not None or is_demo):
        return dataclasses.replace(chain, n=USUAL_LENGTH)
    return chain


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The drafts of an expression with a model: chains or trees, and the contexts that they need.

    `make` makes a conversation's drafter of rows for this shape. Their context has so many
    sequences and output rows and, in addition to those of the text, `n_nodes` cells. `pace` limits
    the decisions by measured time.
    """

    make: Callable[[DraftModelSource], GrowingDrafter]
    shape: Topology | DynamicShape
    n_sequences: int
    n_outputs: int
    n_nodes: int
    pace: Pace


def build_draft(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `draft(a.gguf, ...)`: a chain or a tree from a draft model."""
    path = model_file_of(expression, env)

    def measured(nodes: int, depth: int) -> Topology:
        sampling = tree_sampling(options_of(expression), "without")
        found = measured_acceptance(env.target.path, path, sampling)
        return best_tree(found or typical_acceptance(sampling), nodes, depth)

    def share(source: DraftModelSource) -> float:
        return source.context.model.n_params / env.target.n_params

    return _with_draft_model(expression, env, plan_draft(expression, env, measured, share))


def plan_draft(
    expression: Expression,
    env: DraftEnvironment,
    sequoia: Callable[[int, int], Topology],
    share: Callable[[DraftModelSource], float],
    text_share: Callable[[DraftModelSource], Callable[[], float]] | None = None,
) -> ModelPlan:
    """Return the options of an expression about chains and trees.

    `sequoia(nodes, depth)` plans `tree=sequoia`. `share` is which part of the target a model reads
    for a token, `text_share` the reads of an evaluation of the target beside its weights (see
    `DraftEnvironment.draft_plan`).
    """
    tree = TreeOptions.of(expression)
    if tree.asks_for_tree:
        return _plan_tree(expression, env, tree, sequoia, share, text_share)
    chain = chain_options(expression)
    count = env.most_drafted if chain.n is None else chain.n
    drafts = chain.drafts(expression, env)

    def drafter(source: DraftModelSource) -> GrowingDrafter:
        return drafts.drafter(source, share(source), text_share and text_share(source))

    return ModelPlan(drafter, drafts.shape, 1, 1, count, drafts.pace)


def _adaptive_exit(options: ExpressionOptions) -> AdaptiveExitOptions | None:
    """Return the options of p_min=adaptive or p_min=adaptive(acceptance=0.9, ...), else None."""
    given = options.expression("p_min")
    if given is None or given.atom != "adaptive":
        return None
    known = [constant.name for constant in dataclasses.fields(AdaptiveExitOptions)]
    inner = ExpressionOptions(given, known, 0)
    named = {name: inner.number(name, 0.0) for name, _ in given.options}
    return AdaptiveExitOptions(**named)


def _plan_tree(
    expression: Expression,
    env: DraftEnvironment,
    tree: TreeOptions,
    sequoia: Callable[[int, int], Topology],
    share: Callable[[DraftModelSource], float],
    text_share: Callable[[DraftModelSource], Callable[[], float]] | None,
) -> ModelPlan:
    options = options_of(expression)
    if _adaptive_exit(options) is not None:
        problem = "p_min=adaptive ends chains, not trees; give n= or a fixed p_min"
        raise OptionError(f"{expression}: {problem}")
    sampling = tree_sampling(options, "argmax" if tree.is_dynamic else "without")
    shape = tree.shape(env.context.n_batch, sequoia, env.most_drafted)
    drafts = Drafts.of(expression, env, tree, shape, sampling)

    def drafter(source: DraftModelSource) -> GrowingDrafter:
        return drafts.drafter(source, share(source), text_share and text_share(source))

    n_sequences, n_outputs = draft_size(shape)
    n_nodes = shape.max_nodes
    if isinstance(shape, DynamicShape):  # evaluates more than it keeps
        n_nodes = max(n_nodes, shape.depth * shape.topk)
    n_sequences += env.keeps_rows
    return ModelPlan(drafter, shape, n_sequences, n_outputs, n_nodes, drafts.pace)


def _with_draft_model(
    expression: Expression, env: DraftEnvironment, plan: ModelPlan
) -> DrafterWeights:
    """Open a draft model; every conversation gets a context of it, and a drafter as planned."""
    n_sequences, n_outputs, n_text = plan.n_sequences, plan.n_outputs, 0
    model = _load_draft_model(model_file_of(expression, env), env)
    try:
        pair = DraftPair.of(env.target, model, expression)
        if pair.by_text:
            n_sequences, n_outputs, n_text = 1, 1, _length_of_text(expression, env)
    except BaseException:
        model.close()
        raise

    options = draft_context_options(env.context, model)
    options = dataclasses.replace(options, n_sequences=n_sequences, n_outputs=n_outputs)
    is_like = pair.tokens is None and not pair.by_text
    window = window_beyond(model, options.n_ctx, plan.n_nodes) if is_like else None
    short = remark_on_context(model, options.n_ctx, env.n_ctx, window)
    remark = "; ".join(filter(None, (pair.remark, short)))

    def drafter(context: Context) -> Drafter:
        if pair.by_text:
            words, name = env.target.vocabulary, str(expression)
            return RetokenisedDrafter(context, words, num_draft_tokens=n_text, name=name)
        if not short or window is None:
            return plan.make(pair.source(context, plan.shape))
        kept, size = KeptTokens(window), pair.target_size
        return plan.make(PartialSource(context, plan.shape, kept, target_vocab_size=size))

    together = pair.tokens is None and not pair.by_text and model.can_branch
    meeting = env.meeting if together else None
    contexts = DraftContexts(model, options, meeting, copies=env.keeps_rows)

    def start() -> Drafter:
        context = contexts.make()
        try:
            made = drafter(context)
            made.remark = remark
            return made
        except BaseException:
            context.close()
            raise

    # A draft by text has a shape of its own.
    pace = "counted" if pair.by_text else plan.pace
    return DrafterWeights(str(expression), start, [contexts, model], pace)


_SINK = 4  # tokens of the beginning that are kept, as of `partial`


def window_beyond(model: Model, n_ctx: int, n_nodes: int) -> Window | None:
    """Return the window of a text that a model drafts from beyond its trained context.

    Its tokens are the target's. None if its memory drops no tokens, or if there is no room.
    """
    size = (n_ctx - _SINK - n_nodes - 2) // 2
    return Window(_SINK, size) if model.can_branch and size > n_nodes else None


def remark_on_context(model: Model, n_ctx: int, longest: int, window: Window | None = None) -> str:
    """Return a note for the user on a context that is shorter than the texts; "" if none is.

    Behind it the model drafts from a window, or nothing.
    """
    if not 0 < n_ctx < longest:
        return ""
    beyond = "nothing more" if window is None else f"from the last {window.size} tokens and more"
    trained = f"{model.path.name} was trained for {n_ctx} tokens and the context has {longest}"
    return f"{trained}: beyond, it drafts {beyond}"


def _length_of_text(expression: Expression, env: DraftEnvironment) -> int:
    """Return how many tokens are drafted by a drafter that shares only text with the target."""
    options = options_of(expression)
    for name in (*TREE_OPTIONS, "p_min"):
        if options.optional(name) is not None:
            raise OptionError(
                f"{expression}: {name}= needs tokens that both vocabularies have, and this draft "
                "is passed on as text; leave it out, or give vocabulary=tokens"
            )
    if options.optional("sampling") not in (None, "argmax"):
        raise OptionError(f"{expression}: text is drafted greedily; leave out sampling=")
    n = options.length("n")
    return env.bounded(USUAL_LENGTH) if n is None else n


def open_draft_model(path: Path, env: DraftEnvironment) -> Model:
    """Load a draft model of the target's vocabulary; `PairError` or `UnsupportedModelError`."""
    model = _load_draft_model(path, env)
    try:
        check_pair(env.target, model)
    except BaseException:
        model.close()
        raise
    return model


def _load_draft_model(path: Path, env: DraftEnvironment) -> Model:
    layers = resolve_gpu_layers(env.n_gpu_layers, path, drafts=True)
    return Model(path, n_gpu_layers=layers, use_mmap=env.use_mmap, drafts=True)


def draft_context_options(options: ContextOptions, model: Model) -> ContextOptions:
    """Return the target's context settings, no longer than the draft model was trained for.

    If the target's positions are stretched, the draft model's are too, by its own factor, unless
    it was trained for so many.
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
