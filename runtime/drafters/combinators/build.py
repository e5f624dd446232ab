"""Builds the combinators whose members depend on each other: `cascade(a, b)`, `relay(a@k, b@m)`,
`ouroboros(a)`.

Builds `auto(a, b, ...)`, and says what bare `auto` chooses from.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.context import Context
from specrun.bindings.errors import OptionError
from specrun.bindings.model import Model
from specrun.bindings.mtp_context import can_draft_nextn
from specrun.runtime.drafter import Drafter, DrafterWeights
from specrun.runtime.drafters.combinators.auto import AutoDrafter, read_choice_logs
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
    ChainOptions,
    chain_options,
    draft_context_options,
    open_draft_model,
)
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, build_parts, file_of
from specrun.runtime.drafters.lookahead import MAX_NGRAM, NgramStore, WindowGuard, open_store
from specrun.runtime.language import Expression, ExpressionOptions
from specrun.runtime.methods import TREE_OPTIONS, find_method, options_of
from specrun.runtime.trees import check_leaves

_PER_KEY, _MAX_KEYS = 16, 16384


def build_cascade(
    expression: Expression, environment: DraftEnvironment, build: BuildPart
) -> DrafterWeights:
    """Build `cascade(draft(a.gguf, n=5), b, rounds=0)`: b drafts for the draft model."""
    options = options_of(expression)
    if len(expression.arguments) != 2:
        raise OptionError(
            f"{expression}: a cascade has two parts, as in cascade(draft(a.gguf, n=5), "
            "prompt-lookup)"
        )
    outer, inner = expression.arguments
    draft = _open_cascade(expression, outer, environment, options.integer("rounds", 0))
    try:
        # For the inner drafter the draft model is the target.
        parts = build(inner, dataclasses.replace(environment, target=draft.model))
    except BaseException:
        draft.model.close()
        raise
    return DrafterWeights(str(expression), lambda: draft.start(parts.start()), [parts, draft.model])


@dataclass(frozen=True, slots=True)
class _CascadeModel:
    """The draft model of a cascade: what every conversation's own cascade is started from."""

    model: Model
    name: str
    chain: ChainOptions
    max_rounds: int
    environment: DraftEnvironment

    def start(self, inner: Drafter) -> CascadeDrafter:
        """Return a conversation's cascade, which owns `inner` from now on: it is closed if anything
        fails."""
        with contextlib.ExitStack() as opened:  # closed again if anything below fails
            opened.callback(inner.close)
            options = dataclasses.replace(
                draft_context_options(self.environment.context, self.model),
                n_sequences=inner.max_leaves,
                n_outputs=inner.max_nodes + 1 + JOINED_TOKENS,
            )
            context = Context(self.model, options)
            opened.callback(context.close)
            target_size = self.environment.target.vocabulary.size
            drafter = CascadeDrafter(
                DraftModelTarget(context, target_vocab_size=target_size),
                inner,
                num_draft_tokens=self.chain.n,
                sampling=self.chain.sampling,
                p_min=self.chain.p_min,
                max_rounds=self.max_rounds,
                name=self.name,
            )
            opened.pop_all()
        return drafter


def _open_cascade(
    expression: Expression, outer: Expression, environment: DraftEnvironment, max_rounds: int
) -> _CascadeModel:
    chain = _cascade_chain(outer, expression)
    model = open_draft_model(file_of(outer, environment), environment)
    return _CascadeModel(model, str(expression), chain, max_rounds, environment)


def build_ouroboros(
    expression: Expression, environment: DraftEnvironment, build: BuildPart
) -> DrafterWeights:
    """Build `ouroboros(draft(a.gguf, n=5), phrases=3, length=4, pool=FILE)`.

    A pool with a file is shared by all conversations, as that of `lookahead`; otherwise each has
    its own.
    """
    options = options_of(expression)
    count, length = options.integer("phrases", 3), options.integer("length", 4)
    if not (count >= 1 and 1 <= length < MAX_NGRAM):
        raise OptionError(
            f"{expression}: give 1 or more phrases of length 1 to {MAX_NGRAM - 1}, not {count} "
            f"of {length}"
        )
    check_leaves(expression, count, "use fewer phrases")
    store = _open_store(expression, options, environment, length)
    outer = expression.arguments[0] if expression.arguments else Expression("draft")
    draft = _open_cascade(expression, outer, environment, 0)
    try:
        _require_room(expression, draft.chain.n + count * length, environment)
        curve = environment.curve
    except BaseException:
        draft.model.close()
        raise

    def start() -> Drafter:
        own = store.for_conversation()
        cascade = draft.start(PhraseDrafter(own, count=count, length=length))
        guard = WindowGuard(curve)
        return OuroborosDrafter(
            cascade, own, count=count, length=length, guard=guard, name=str(expression)
        )

    return DrafterWeights(str(expression), start, [store, draft.model])


def _open_store(
    expression: Expression, options: ExpressionOptions, environment: DraftEnvironment, length: int
) -> NgramStore:
    file = options.optional("pool")
    keep = options.choice("save", ["yes", "no"], "yes") == "yes"
    if file is None and not keep:
        raise OptionError(f"{expression}: save=no is about a pool's file: name it with pool=FILE")
    return open_store(
        None if file is None else Path(file).expanduser(),
        environment.target.vocabulary,
        n=length + 1,
        per_key=_PER_KEY,
        max_keys=_MAX_KEYS,
        keep=keep,
    )


def _require_room(expression: Expression, nodes: int, environment: DraftEnvironment) -> None:
    if nodes + 1 > environment.context.n_batch:
        raise OptionError(
            f"{expression} evaluates up to {nodes + 1} tokens at once, which do not fit a batch of "
            f"{environment.context.n_batch}: use fewer or shorter phrases, or raise the batch "
            "size (-b)"
        )


def _cascade_chain(outer: Expression, whole: Expression) -> ChainOptions:
    if outer.atom != "draft":
        raise OptionError(
            f"{whole}: the first part is a draft model that decodes speculatively itself, as in "
            f"{whole.atom}(draft(a.gguf, "
            f"n=5){', prompt-lookup' if whole.atom == 'cascade' else ''})"
        )
    trees = {name for name, _ in outer.options}.intersection(TREE_OPTIONS)
    if trees:
        raise OptionError(
            f"{whole}: {whole.atom} drafts chains: leave out {', '.join(sorted(trees))}"
        )
    chain = chain_options(outer)
    if chain.adaptive_exit is not None:
        raise OptionError(
            f"{outer}: p_min=adaptive is for draft(...) on its own; give a fixed p_min here"
        )
    return chain


def build_relay(
    expression: Expression, environment: DraftEnvironment, build: BuildPart
) -> DrafterWeights:
    """Build `relay(draft(a.gguf)@2, prompt-lookup@3)`: each part goes on below the one before
    it."""
    if len(expression.arguments) < 2:
        raise OptionError(
            f"{expression}: a relay needs at least two parts, as in relay(draft(a.gguf)@2, ...)"
        )
    counts = [part.count for part in expression.arguments]
    return combined(
        str(expression),
        build_parts([_without_count(part) for part in expression.arguments], environment, build),
        lambda members: RelayDrafter(members, counts, name=str(expression)),
    )


def _without_count(part: Expression) -> Expression:
    """Return a relay's part with its count as the option `n` where it draws chains of its own
    length."""
    given = {name for name, _ in part.options}
    if (
        part.count is None
        or not find_method(part.atom).counted_by_n
        or given & {"n", *TREE_OPTIONS}
    ):
        return dataclasses.replace(part, count=None)
    options = (*part.options, ("n", Expression(str(part.count))))
    return dataclasses.replace(part, options=options, count=None, is_call=True)


def build_ensemble(
    expression: Expression, environment: DraftEnvironment, build: BuildPart
) -> DrafterWeights:
    """Build `ensemble(a, b, ...)`."""
    members = build_parts(expression.arguments, environment, build)
    return combined(
        str(expression), members, lambda started: EnsembleDrafter(started, name=str(expression))
    )


_WITHOUT_MODEL = ("prompt-lookup", "lookahead")
_NONE = Expression("none")


def auto_expression(draft: str) -> str:
    """Return what to choose from by default, beside `none`: a draft model's drafts and what needs
    no model."""
    return f"auto({', '.join([draft, *_WITHOUT_MODEL])})"


def build_auto(
    expression: Expression, environment: DraftEnvironment, build: BuildPart
) -> DrafterWeights:
    """Build `auto(a, b, replay=FILE)`; plain decoding is always one of the choices."""
    options = options_of(expression)
    replay = options.optional("replay")
    logs = read_choice_logs(Path(replay).expanduser()) if replay is not None else []
    arms = list(expression.arguments) or _default_arms(environment)
    if _NONE not in (Expression(arm.atom) if arm.atom == "none" else arm for arm in arms):
        arms.append(_NONE)
    _refuse_twins(expression, arms)
    return combined(
        str(expression),
        build_parts(arms, environment, build),
        lambda members: AutoDrafter(
            members,
            replay=logs,
            clock=environment.clock,
            sizes=[_size(arm) for arm in arms],
            name=str(expression),
        ),
    )


def _default_arms(environment: DraftEnvironment) -> list[Expression]:
    draft = [Expression("draft")] if "draft" in (environment.default_files or {}) else []
    blocks = [Expression("mtp")] if can_draft_nextn(environment.target) else []
    return [*draft, *blocks, *map(Expression, _WITHOUT_MODEL)]


def _size(expression: Expression) -> int:
    """Return of how many parts an expression is made."""
    return 1 + sum(map(_size, expression.arguments))


def _refuse_twins(expression: Expression, arms: Sequence[Expression]) -> None:
    names = [str(arm) for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(
                f"{expression}: {name} stands there twice: auto would measure the same thing twice"
            )
