"""Choices of requests: the drafters and the rules that an engine offers.

Requests open no files: an engine opens all its drafters and rules when it starts. Its context has
room for the largest of their trees. Drafters for rules that are not exact are separate objects:
their drafts never depend on measured time, whatever the load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Protocol

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.contexts.embedding_inputs import EmbeddingInputs
from specrun.bindings.errors import ClosedError, OptionError
from specrun.bindings.models.model import Model
from specrun.runtime.acceptance import PairRule, Rule, SequentialCascade, build_rule, rule_names
from specrun.runtime.drafters.batching import MOST_SEQUENCES
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.environment import DraftEnvironment, file_of
from specrun.runtime.engine.answer import AnswerOptions
from specrun.runtime.engine.sequential import small_model
from specrun.runtime.engine.slots import slot_options
from specrun.runtime.language import parse_expression
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.round.drafter import Drafter, DrafterWeights, Owned, close_all
from specrun.runtime.round.loop import require_laws, require_rule
from specrun.runtime.round.padding import Shape, open_target, paddings
from specrun.runtime.round.target import TargetModel, target_context_options


class RuleKind(NamedTuple):
    """The kinds of rules that need drafters of their own: exact or not, reading rows or not."""

    exact: bool
    reads_rows: bool

    @staticmethod
    def of(rule: Rule | SequentialCascade) -> RuleKind:
        """Return the kind of a rule."""
        return RuleKind(rule.exact, isinstance(rule, PairRule))

    def suited(self, environment: DraftEnvironment) -> DraftEnvironment:
        """Return the environment of drafters for such rules."""
        exact, reads_rows = self
        return dataclasses.replace(environment, by_clock=exact, keeps_rows=reads_rows)


class DrafterKey(NamedTuple):
    """Names the drafters of one expression for one kind of rule."""

    expression: str
    kind: RuleKind


class DrafterMaker(Protocol):
    """Makes the weights of a drafter that no expression describes; requests take it by its name."""

    @property
    def name(self) -> str:
        """A name that no method has."""

    def __call__(self, environment: DraftEnvironment) -> DrafterWeights:
        """Return the weights of drafters for the environment's target."""


class SlotDrafters:
    """The drafters of one slot, each made when an answer first needs it; `own` is the default."""

    def __init__(self, weights: Mapping[DrafterKey, DrafterWeights], own: DrafterKey) -> None:
        self._weights, self.own = weights, own
        self.started: dict[DrafterKey, Drafter] = {}
        self._closed = False

    def get(self, key: DrafterKey) -> Drafter:
        """Return a drafter; raises the errors of making one."""
        drafter = self.started.get(key)
        if drafter is None:
            if self._closed:
                raise ClosedError("the runtime is closed")
            drafter = self.started[key] = self._weights[key].start()
        return drafter

    def close(self) -> None:
        """Close all of them; none is made any more."""
        self._closed = True
        started, self.started = self.started, {}
        close_all([*started.values()])


class Choices:
    """The drafters and rules of an engine, and the choice that each request makes of them.

    The drafters of the first slot are made at once: the context's size and the rules that fit
    depend on them. It owns the weights of all drafters, those of the default one, too.
    """

    def __init__(
        self,
        own: DrafterWeights,
        rule: Rule | SequentialCascade,
        environment: DraftEnvironment,
        slots: int,
        others: Sequence[str | DrafterMaker] = (),
        rules: Sequence[str] = (),
    ) -> None:
        self._single = slots == 1
        self._own_rule, self.environment = self._allowed(rule), environment
        self._perhaps_unused: list[Owned] = []
        self._named = rules
        kinds = [RuleKind.of(rule) for rule in (self._own_rule, *map(self._rule_of, rules))]
        self._kinds = (*dict.fromkeys(kinds),)
        self.own = DrafterKey(own.name, self._kinds[0])
        self.own_drafter = self.own.expression
        """The expression of the default drafter now: requests name it as it was opened."""
        self._makers = {each.name: each for each in others if not isinstance(each, str)}
        names = [
            str(parse_expression(each)) if isinstance(each, str) else each.name for each in others
        ]
        self.names = (*dict.fromkeys([self.own.expression, "none", *names]),)
        self.weights: dict[DrafterKey, DrafterWeights] = {self.own: own}
        self.slots = [SlotDrafters(self.weights, self.own) for _ in range(slots)]
        try:
            for kind in self._kinds:
                for name in self.names:
                    self._open(DrafterKey(name, kind))
            for each in self.slots:
                each.get(self.own)
            require_fitting(self._own_rule, self.slots[0].get(self.own), self.environment.shape)
            self.find(SamplingParams(temperature=0.0), AnswerOptions())
        except BaseException:
            self.close()
            raise

    def _open(self, key: DrafterKey) -> None:
        if key not in self.weights:
            make = self._makers.get(key.expression, partial(build_drafter, key.expression))
            self.weights[key] = make(key.kind.suited(self.environment))
        if not self._single and self.slots[0].get(key).embedding_inputs is not None:
            why = "drafts at positions that are no tokens, which a batch has alone"
            raise OptionError(f"{key.expression} {why}: give slots=1")

    def _rule_of(self, accept: str) -> Rule | SequentialCascade:
        return self._allowed(build_rule(accept))

    def _allowed(self, rule: Rule | SequentialCascade) -> Rule | SequentialCascade:
        """Return the rule; raises `OptionError` if it needs a context of one conversation."""
        if isinstance(rule, SequentialCascade) and not self._single:
            why = "lets the small model speak alone, one conversation at a time"
            raise OptionError(f"{rule.name} {why}: give slots=1")
        return rule

    def close(self) -> None:
        """Close all drafters, then the weights of those that were opened here."""
        close_all([*self._unused(), *self.slots, *self.weights.values()])

    # -- swapping ----------------------------------------------------------------------------------

    def swap(self, drafter: str, files: Mapping[str, Path] | None) -> None:
        """Replace the default drafter by that of another expression.

        `close_unused` closes the old one, once no session has it. Raises as building a drafter
        does, and `OptionError` for one that needs more room or other states of the target; all then
        stays.
        """
        environment = self.environment
        if files is not None:
            environment = dataclasses.replace(environment, default_files=files)
        keys = [key for key in self.weights if key.expression == self.own.expression]
        new: dict[DrafterKey, DrafterWeights] = {}
        first: dict[DrafterKey, Drafter] = {}
        try:
            for key in keys:
                new[key] = build_drafter(drafter, key.kind.suited(environment))
                first[key] = new[key].start()
                require_as_small(first[key], self.slots[0].get(key))
        except BaseException:
            close_all([*first.values(), *new.values()])
            raise
        drafters = [slot.started[key] for slot in self.slots for key in keys if key in slot.started]
        weights = [*(self.weights[key] for key in keys), *new.values()]
        # Before anything changes: an interrupt leaves either drafter, and the other in this list.
        self._perhaps_unused += [*drafters, *first.values(), *weights]
        self.slots[0].started.update(first)
        self.weights.update(new)
        for slot in self.slots[1:]:
            for key in keys:
                slot.started.pop(key, None)
        self.own_drafter, self.environment = str(parse_expression(drafter)), environment

    def close_unused(self) -> None:
        """Close the drafters that were replaced, then their weights."""
        close_all(self._unused())
        self._perhaps_unused = []

    def _unused(self) -> list[Owned]:
        used = [drafter for slot in self.slots for drafter in slot.started.values()]
        known = {id(each) for each in (*used, *self.weights.values())}
        return [each for each in self._perhaps_unused if id(each) not in known]

    # -- choosing ----------------------------------------------------------------------------------

    def find(
        self, params: SamplingParams, options: AnswerOptions
    ) -> tuple[DrafterKey | None, Rule | SequentialCascade | None]:
        """Return the drafter and the rule of a request; None: the session's own.

        Raises `OptionError` for choices that are not offered or do not fit together.
        """
        rule = self._own_rule if options.accept is None else self._rule_of(options.accept)
        kind = RuleKind.of(rule)
        if kind not in self._kinds:
            like = "is exact" if kind.exact else "is not exact"
            problem = f"{rule.name} {like}, and the engine was not opened for such rules"
            raise OptionError(f"accept is {options.accept!r}: {problem}: name it among its rules")
        key = DrafterKey(self._name(options.drafter), kind)
        if key.expression != "none" or isinstance(rule, SequentialCascade):
            chosen = self.slots[0].get(key)
            require_fitting(rule, chosen, self.environment.shape)
            if not isinstance(rule, SequentialCascade):
                require_laws(rule, chosen, params)
        require_rule(rule, params)
        return None if key == self.own else key, None if options.accept is None else rule

    def _name(self, drafter: str | None) -> str:
        """Return the expression that a request names: in full, or by its method alone."""
        if drafter is None:
            return self.own.expression
        expression = parse_expression(drafter)
        if str(expression) in self.names:
            return str(expression)
        alike = [name for name in self.names if parse_expression(name).atom == str(expression)]
        if len(alike) != 1:
            there = ", ".join(self.names)
            raise OptionError(f"the drafter {drafter} is none of the engine's: it has {there}")
        return alike[0]

    def draft_file(self, drafter: str) -> Path:
        """Return the file of a draft model; raises `OptionError` for any other drafter."""
        expression = parse_expression(drafter)
        if expression.atom != "draft":
            problem = "is no draft model: give one, as in draft(small.gguf)"
            raise OptionError(f"{drafter} {problem}")
        return file_of(expression, self.environment)

    @property
    def rules(self) -> list[str]:
        """Rules that a request may name: those that were opened, then others of their kinds."""
        names = [*self._named]
        for name in rule_names():
            with suppress(OptionError):  # it needs options, or a context of one conversation
                names += [name] if RuleKind.of(self._rule_of(name)) in self._kinds else []
        return [*dict.fromkeys(names)]

    # -- the context that verifies them ------------------------------------------------------------

    def open_target(self, model: Model) -> TargetModel:
        """Return the target of a single slot, which verifies any drafter's trees alone."""
        own = self.environment
        sizes = LargestDrafts.of([self.slots[0].get(key) for key in self.weights])
        return open_target(model, sizes, own.context, own.shape, own.wider)

    def widths(self, slots: int) -> dict[int, int]:
        """Return the widths of common evaluations that are filled up, and to how many tokens."""
        own, drafters = self.environment, [self.slots[0].get(key) for key in self.weights]
        leaves, nodes = (max(map(attrgetter(n), drafters)) for n in ("max_leaves", "max_nodes"))
        fits = leaves * slots + 2 <= MOST_SEQUENCES  # with parking's sequence, and one more
        if slots == 1 or not own.target.can_branch or not fits:
            return {}
        most = min(own.context.n_batch, own.context.n_ubatch)
        return paddings(own.wider, min(most, (nodes + 1) * slots), most)

    def context_options(self, model: Model, slots: int, n_ctx: int) -> ContextOptions:
        """Return the settings of a context in which every slot verifies any drafter's trees."""
        drafters = [self.slots[0].get(key) for key in self.weights]
        largest = max(drafters, key=lambda each: each.max_leaves)
        sizes = LargestDrafts.of(drafters)
        own = target_context_options(self.environment.context, sizes)
        padded = self.widths(slots)
        most = (MOST_SEQUENCES - 1) // own.n_sequences
        if slots > most:
            has = f"{largest.name} drafts trees of up to {own.n_sequences} paths"
            problem = f"{has}, and llama.cpp has {MOST_SEQUENCES} sequences"
            raise OptionError(
                f"{problem}: take at most {most} slots, not {slots}, or smaller trees"
            )
        fills = bool(padded)
        options = slot_options(own, slots, can_branch=model.can_branch, fills=fills)
        # Prompts are read one at a time: rows of hidden states for these are needed once.
        n_outputs = (sizes.max_nodes + 1) * slots
        if n_outputs > own.n_batch:
            problem = f"{slots} slots evaluate up to {n_outputs} tokens at once, a batch has"
            raise OptionError(f"{problem} {own.n_batch}: raise n_batch, or take fewer slots")
        n_outputs = max(n_outputs, own.n_outputs, *padded.values())
        return dataclasses.replace(options, n_ctx=n_ctx, n_outputs=n_outputs)


@dataclass(slots=True)
class LargestDrafts:
    """The room and the states that the trees of several drafters need of one context."""

    max_leaves: int
    max_nodes: int
    needs_hidden_states: bool
    layer_inputs: tuple[int, ...]
    needs_nextn_states: bool
    embedding_inputs: EmbeddingInputs | None = None

    @staticmethod
    def of(drafters: Sequence[Drafter]) -> LargestDrafts:
        """Return the needs of these drafters together; raises `OptionError` if that cannot be."""
        with_inputs = [each for each in drafters if each.embedding_inputs is not None]
        inputs = {id(each.embedding_inputs): each for each in with_inputs}
        if len(inputs) > 1:
            names = " and ".join(each.name for each in inputs.values())
            raise OptionError(f"{names} draft at positions that are no tokens: open one of them")
        return LargestDrafts(
            max(each.max_leaves for each in drafters),
            max(each.max_nodes for each in drafters),
            any(each.needs_hidden_states for each in drafters),
            (*sorted({layer for each in drafters for layer in each.layer_inputs}),),
            any(each.needs_nextn_states for each in drafters),
            next((each.embedding_inputs for each in inputs.values()), None),
        )


def require_as_small(drafter: Drafter, old: Drafter) -> None:
    """Raise `OptionError` if a context made for the old drafter is too small for another."""
    for what, new, there in (
        ("nodes", drafter.max_nodes, old.max_nodes),
        ("paths", drafter.max_leaves, old.max_leaves),
    ):
        if new > there:
            problem = f"drafts {new} {what}, and the context has room for {there}"
            raise OptionError(f"{drafter.name} {problem}: open a new runtime for it")
    layers = set(drafter.layer_inputs) - set(old.layer_inputs)
    hidden = drafter.needs_hidden_states and not old.needs_hidden_states
    if layers or hidden or (drafter.needs_nextn_states and not old.needs_nextn_states):
        problem = f"reads states of the target that {old.name} did not"
        raise OptionError(f"{drafter.name} {problem}: open a new runtime for it")


def require_fitting(rule: Rule | SequentialCascade, drafter: Drafter, shape: Shape) -> None:
    """Raise `OptionError` if a rule needs another drafter, such as a draft model, or shape."""
    if isinstance(rule, PairRule):
        if rule.fallback > 0.0:
            small_model(rule, drafter)
        if rule.chains_only and drafter.max_leaves > 1:
            why = "tests one token after the other"
            problem = f"{rule.name} {why}, and {drafter.name} drafts trees: give a chain, as n=5"
            raise OptionError(problem)
    if not isinstance(rule, SequentialCascade):
        require_laws(rule, drafter)
        return
    small_model(rule, drafter)
    if shape != "free":
        why = "evaluates the target's missing tokens at once, in batches of any width"
        raise OptionError(f"{rule.name} {why}, and the shape is {shape}: give --shape free")
