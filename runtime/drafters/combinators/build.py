"""Builds the combinators: `cascade`, `ouroboros`, `relay`, `ensemble` and `auto`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.contexts.context import Context, can_draft_nextn
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.combinators.auto import AutoDrafter, read_choice_logs
from specrun.runtime.drafters.combinators.bandit import Arm, ArmForecast
from specrun.runtime.drafters.combinators.cascade import (
    JOINED_TOKENS,
    CascadeDrafter,
    DraftModelTarget,
)
from specrun.runtime.drafters.combinators.ensemble import EnsembleDrafter
from specrun.runtime.drafters.combinators.members import combined
from specrun.runtime.drafters.combinators.ouroboros import OuroborosDrafter, PhraseDrafter
from specrun.runtime.drafters.combinators.relay import RelayDrafter
from specrun.runtime.drafters.draft_model import (
    USUAL_LENGTH,
    chain_options,
    draft_context_options,
    open_draft_model,
    remark_on_context,
    window_beyond,
)
from specrun.runtime.drafters.draft_model.window import KeptTokens
from specrun.runtime.drafters.environment import (
    BuildPart,
    DraftEnvironment,
    build_parts,
    model_file_of,
)
from specrun.runtime.drafters.lookahead import MAX_NGRAM, WindowGuard
from specrun.runtime.drafters.lookahead.drafter import open_pool
from specrun.runtime.drafters.partial import PartialCache, partial_cache
from specrun.runtime.drafters.tree_options import ChainOptions
from specrun.runtime.language import TREE_OPTIONS, Expression, find_method, options_of
from specrun.runtime.planning.theory import multiplications
from specrun.runtime.round.drafter import Drafter, DrafterWeights
from specrun.runtime.trees import check_leaves


def build_cascade(
    expression: Expression, env: DraftEnvironment, build: BuildPart
) -> DrafterWeights:
    """Build `cascade(draft(a.gguf, n=5), b, rounds=0)`: b drafts for the draft model."""
    options = options_of(expression)
    if len(expression.arguments) != 2:
        example = "cascade(draft(a.gguf, n=5), prompt-lookup)"
        raise OptionError(f"{expression}: a cascade has two parts, as in {example}")
    outer, inner = expression.arguments
    draft = _open_cascade(expression, outer, env, options.integer("rounds", 0))
    try:
        # For the inner drafter the draft model is the target.
        parts = build(inner, dataclasses.replace(env, target=draft.model, learnt=None))
    except BaseException:
        draft.close()
        raise
    return DrafterWeights(str(expression), lambda: draft.start(parts.start()), [parts, draft])


@dataclass(frozen=True, slots=True)
class _CascadeModel:
    """The draft model of a cascade: the common part of all conversations' cascades.

    With `cache` it is the target itself, whose model is not closed here.
    """

    model: Model
    name: str
    chain: ChainOptions
    max_rounds: int
    env: DraftEnvironment
    cache: PartialCache | None = None

    @property
    def n(self) -> int:
        """How many tokens it drafts at most: its own rounds are not stopped one token early."""
        return self.chain.n or USUAL_LENGTH

    def start(self, inner: Drafter) -> CascadeDrafter:
        """Return a conversation's cascade, which owns `inner`: if anything fails, it is closed."""
        with contextlib.ExitStack() as opened:  # closed again if anything below fails
            opened.callback(inner.close)
            options, kept, remark = self._cache_beside(inner)
            context = Context(self.model, options)
            opened.callback(context.close)
            size, n_ctx = self.env.target.vocabulary.size, self.env.n_ctx
            n_positions = context.n_ctx if kept is None else n_ctx
            model = DraftModelTarget(
                context, target_vocab_size=size, n_positions=n_positions, kept=kept
            )
            drafter = CascadeDrafter(
                model,
                inner,
                num_draft_tokens=self.n,
                sampling=self.chain.sampling,
                p_min=self.chain.p_min,
                max_rounds=self.max_rounds,
                name=self.name,
            )
            drafter.remark = remark
            opened.pop_all()
        return drafter

    def _cache_beside(self, inner: Drafter) -> tuple[ContextOptions, KeptTokens | None, str]:
        """Return the settings of a context for the trees of `inner`, and a remark for the user.

        And the tokens of a text that the cache holds; None: all.
        """
        n_sequences, n_outputs = inner.max_leaves, inner.max_nodes + 1 + JOINED_TOKENS
        n_nodes = self.n + n_outputs
        if self.cache is not None:
            options = self.cache.context_options(n_nodes, n_sequences, n_outputs)
            return options, self.cache.kept(), self.cache.remark
        options = draft_context_options(self.env.context, self.model)
        window = window_beyond(self.model, options.n_ctx, n_nodes)
        remark = remark_on_context(self.model, options.n_ctx, self.env.n_ctx, window)
        kept = KeptTokens(window) if remark and window is not None else None
        options = dataclasses.replace(options, n_sequences=n_sequences, n_outputs=n_outputs)
        return options, kept, remark

    def close(self) -> None:
        """Free the draft model, unless it is the target."""
        if self.cache is None:
            self.model.close()


def _open_cascade(
    expression: Expression, outer: Expression, env: DraftEnvironment, max_rounds: int
) -> _CascadeModel:
    chain = _cascade_chain(outer, expression)
    if outer.atom == "partial":
        cache = partial_cache(outer, env, chain.n or USUAL_LENGTH)
        return _CascadeModel(env.target, str(expression), chain, max_rounds, env, cache)
    model = open_draft_model(model_file_of(outer, env), env)
    return _CascadeModel(model, str(expression), chain, max_rounds, env)


def build_ouroboros(
    expression: Expression, env: DraftEnvironment, build: BuildPart
) -> DrafterWeights:
    """Build `ouroboros(draft(a.gguf, n=5), phrases=3, length=4, pool=FILE)`.

    A pool with a file is shared by all conversations, as that of `lookahead`; otherwise each has
    its own.
    """
    options = options_of(expression)
    count, length = options.integer("phrases", 3), options.integer("length", 4)
    if not (count >= 1 and 1 <= length < MAX_NGRAM):
        allowed = f"1 or more phrases of length 1 to {MAX_NGRAM - 1}"
        raise OptionError(f"{expression}: give {allowed}, not {count} of {length}")
    check_leaves(expression, count, "use fewer phrases")
    store = open_pool(expression, env, length + 1)
    outer = expression.arguments[0] if expression.arguments else Expression("draft")
    draft = _open_cascade(expression, outer, env, 0)
    nodes, n_batch = draft.n + count * length, env.context.n_batch
    try:
        if nodes + 1 > n_batch:
            raise OptionError(
                f"{expression} evaluates up to {nodes + 1} tokens at once, which do not fit a "
                f"batch of {n_batch}: use fewer or shorter phrases, or raise the batch size (-b)"
            )
        curve = env.curve
    except BaseException:
        draft.close()
        raise

    def start() -> Drafter:
        own = store.for_conversation()
        cascade = draft.start(PhraseDrafter(own, count=count, length=length))
        guard = WindowGuard(curve)
        return OuroborosDrafter(
            cascade, own, count=count, length=length, guard=guard, name=str(expression)
        )

    return DrafterWeights(str(expression), start, [store, draft])


def _cascade_chain(outer: Expression, whole: Expression) -> ChainOptions:
    if outer.atom not in ("draft", "partial"):
        raise OptionError(
            f"{whole}: the first part is a model that decodes speculatively itself, as in "
            f"{whole.atom}(draft(a.gguf, n=5){', prompt-lookup' * (whole.atom == 'cascade')})"
        )
    trees = {name for name, _ in outer.options}.intersection(TREE_OPTIONS)
    if trees:
        names = ", ".join(sorted(trees))
        raise OptionError(f"{whole}: {whole.atom} drafts chains: leave out {names}")
    chain = chain_options(outer)
    if options_of(outer).is_auto("n"):
        problem = "n=auto is for a drafter on its own; give a number here, or leave n out"
        raise OptionError(f"{outer}: {problem}")
    if chain.adaptive_exit is not None:
        problem = "p_min=adaptive is for a drafter on its own; give a fixed p_min here"
        raise OptionError(f"{outer}: {problem}")
    return chain


def build_relay(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `relay(draft(a.gguf)@2, prompt-lookup@3)`: each part goes on below the one before."""
    name, arguments = str(expression), expression.arguments
    if len(arguments) < 2:
        example = "relay(draft(a.gguf)@2, ...)"
        raise OptionError(f"{expression}: a relay needs at least two parts, as in {example}")
    counts = [part.count for part in arguments]
    parts = build_parts([_without_count(part) for part in arguments], env, build)
    return combined(name, parts, lambda members: RelayDrafter(members, counts, name=name))


def _without_count(part: Expression) -> Expression:
    """Return a relay's part with its count as the option `n`, if its chains have a length."""
    given = {name for name, _ in part.options} & {"n", *TREE_OPTIONS}
    if part.count is None or given or not find_method(part.atom).counted_by_n:
        return dataclasses.replace(part, count=None)
    options = (*part.options, ("n", Expression(str(part.count))))
    return dataclasses.replace(part, options=options, count=None, is_call=True)


def build_ensemble(
    expression: Expression, env: DraftEnvironment, build: BuildPart
) -> DrafterWeights:
    """Build `ensemble(a, b, ...)`."""
    name, parts = str(expression), build_parts(expression.arguments, env, build)
    return combined(name, parts, lambda members: EnsembleDrafter(members, name=name))


_WITHOUT_MODEL = ("prompt-lookup", "lookahead")
_NONE = Expression("none")
_LEAST_DRAFT = 0.03  # of a plain round: a token of the smallest draft model


def auto_expression(draft: str) -> str:
    """Return the default choices: `draft`, those without a model, and `none`."""
    return f"auto({', '.join([draft, *_WITHOUT_MODEL])})"


def build_auto(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `auto(a, b, replay=FILE)`; plain decoding is always one of the choices."""
    options = options_of(expression)
    replay = options.optional("replay")
    if replay is None and not env.by_clock:
        problem = "chooses by measured time, on which the text would depend under a rule that is"
        advice = "name one drafter, or give replay=FILE"
        raise OptionError(f"{expression} {problem} not exact: {advice}")
    logs = read_choice_logs(Path(replay).expanduser()) if replay is not None else []
    arms = list(expression.arguments) or _default_arms(env)
    if not env.target.can_branch:  # lookahead as it is planned is a tree
        arms = [arm for arm in arms if str(arm) != "lookahead"]
    if _NONE not in (Expression(arm.atom) if arm.atom == "none" else arm for arm in arms):
        arms.append(_NONE)
    if twin := next((str(arm) for arm in arms if arms.count(arm) > 1), None):
        problem = f"{twin} stands there twice: auto would measure the same thing twice"
        raise OptionError(f"{expression}: {problem}")
    # Arms learn themselves how far the forecasts are from measurements.
    name, clock, curve = str(expression), env.clock, env.known
    shared: list[Arm] = []  # by all conversations

    def forecast(arm: Expression, member: Drafter) -> ArmForecast:
        # An evaluation costs its bytes, but never less than its calls.
        share = member.depth_params / multiplications(env.target)
        draft = max(share, _LEAST_DRAFT) if share else 0.0
        most = max(1, member.max_nodes - member.max_filled)
        return ArmForecast(_size(arm), most, draft, curve)

    def combine(members: Sequence[Drafter]) -> Drafter:
        forecasts = [forecast(*pair) for pair in zip(arms, members, strict=True)]
        return AutoDrafter(
            members, replay=logs, clock=clock, forecasts=forecasts, shared=shared, name=name
        )

    parts = build_parts(arms, env, build)
    weights = combined(name, parts, combine, mixes=False)
    # It stops drafts that do not pay itself. Costs are learnt only if no member draws: then the
    # text hangs on no draft, and a log of choices repeats one that was drawn.
    paces = {part.pace for arm, part in zip(arms, parts, strict=True) if arm.atom != _NONE.atom}
    weights.pace = "timed" if paces <= {"compared", "paying"} else "counted"
    return weights


def _default_arms(env: DraftEnvironment) -> list[Expression]:
    draft = [Expression("draft")] if "draft" in (env.default_files or {}) else []
    blocks = [Expression("mtp")] if can_draft_nextn(env.target) else []
    return [*draft, *blocks, *map(Expression, _WITHOUT_MODEL)]


def _size(expression: Expression) -> int:
    """Return of how many parts an expression is made."""
    return 1 + sum(map(_size, expression.arguments))
