"""Drafters and rules to choose from: each request says which answers it, and how much is drafted.

An engine is told when it opens which drafters and rules there are to choose from: whoever asks
opens no files. Its context has room for the largest of their trees. Drafters under rules that are
not exact are made apart: they decide nothing by the clock, whatever the load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.contexts.embedding_inputs import EmbeddingInputs
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.models.model import Model
from specrun.runtime.acceptance import PairRule, Rule, SequentialCascade, build_rule, rule_names
from specrun.runtime.drafters.batching import MOST_SEQUENCES
from specrun.runtime.drafters.build import build_drafter
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.engine.opening import OpenModels
from specrun.runtime.engine.session import require_as_small, require_fitting
from specrun.runtime.engine.slots import n_slot_sequences
from specrun.runtime.language import parse_expression
from specrun.runtime.laws.sampling import SamplingParams, whole_number
from specrun.runtime.round.drafter import Drafter, DrafterWeights, Owned, close_all
from specrun.runtime.round.loop import require_laws, require_rule
from specrun.runtime.round.target import target_context_options


class RuleKind(NamedTuple):
    """What drafters are made for: rules that are exact or not, that read drafters' rows or not."""

    exact: bool
    reads_rows: bool

    @staticmethod
    def of(rule: Rule) -> RuleKind:
        """Return the kind of a rule."""
        return RuleKind(rule.exact, isinstance(rule, PairRule))


class DrafterKey(NamedTuple):
    """Names the drafters of one expression, made for one kind of rule."""

    expression: str
    kind: RuleKind


@dataclass(frozen=True, slots=True)
class Choice:
    """How an answer is drafted and verified: at most `n_max` nodes a round, None: no limit."""

    drafter: DrafterKey
    rule: Rule
    n_max: int | None = None


class SlotDrafters:
    """The drafters of one slot, each made when an answer first asks for it, and kept."""

    def __init__(self, start: Callable[[DrafterKey], Drafter]) -> None:
        self._start = start
        self.started: dict[DrafterKey, Drafter] = {}

    def get(self, key: DrafterKey) -> Drafter:
        """Return a drafter; raises what making it does."""
        drafter = self.started.get(key)
        if drafter is None:
            drafter = self.started[key] = self._start(key)
        return drafter

    def close(self) -> None:
        """Close all of them."""
        started, self.started = self.started, {}
        close_all([*started.values()])


class Choices:
    """The drafters and rules of an engine, and the choice that each request makes of them.

    The drafters of the first slot are made at once: they say how large their trees are, and which
    rules they fit. It owns the weights of all but the engine's own drafter: close it before those.
    """

    def __init__(
        self, opened: OpenModels, slots: int, others: Sequence[str], rules: Sequence[str]
    ) -> None:
        self._own_rule, self._environment = _parallel(opened.rule), opened.environment
        self._given = opened.weights
        self._named = rules
        kinds = [RuleKind.of(rule) for rule in (self._own_rule, *map(_rule_of, rules))]
        self._kinds = (*dict.fromkeys(kinds),)
        self.own = DrafterKey(opened.weights.name, self._kinds[0])
        self.own_drafter = self.own.expression
        """The expression of the engine's own drafter now: `swap` leaves its name to requests."""
        names = [str(parse_expression(text)) for text in others]
        self.names = (*dict.fromkeys([self.own.expression, "none", *names]),)
        self._weights: dict[DrafterKey, DrafterWeights] = {self.own: opened.weights}
        self.slots = [SlotDrafters(self._start) for _ in range(slots)]
        try:
            for kind in self._kinds:
                for name in self.names:
                    self._open(DrafterKey(name, kind))
            for each in self.slots:
                each.get(self.own)
            self.find(SamplingParams(temperature=0.0))  # raises where rule and drafter do not fit
        except BaseException:
            self.close()
            raise

    @property
    def environment(self) -> DraftEnvironment:
        """What drafters are built with."""
        return self._environment

    def _open(self, key: DrafterKey) -> None:
        if key not in self._weights:
            exact, keeps_rows = key.kind
            environment = self._environment
            made_for = dataclasses.replace(environment, by_clock=exact, keeps_rows=keeps_rows)
            self._weights[key] = build_drafter(key.expression, made_for)
        if self.slots[0].get(key).embedding_inputs is not None:
            why = "drafts at positions that are no tokens, which a batch has alone"
            raise OptionError(f"{key.expression} {why}: use Runtime")

    def _start(self, key: DrafterKey) -> Drafter:
        return self._weights[key].start()

    def close(self) -> None:
        """Close all drafters, then the weights of those that were opened here."""
        weights = [each for each in self._weights.values() if each is not self._given]
        close_all([*self.slots, *weights])

    # -- swapping ----------------------------------------------------------------------------------

    def swap(self, drafter: str, files: Mapping[str, Path] | None) -> list[Owned]:
        """Let another expression stand for the engine's own drafter; return what it replaced.

        That is to be closed once no session has it. Raises as building a drafter does, and
        `OptionError` for one that needs more room or other states of the target; all then stays.
        """
        environment = self._environment
        if files is not None:
            environment = dataclasses.replace(environment, default_files=files)
        keys = [key for key in self._weights if key.expression == self.own.expression]
        with ExitStack() as opened:
            new: dict[DrafterKey, DrafterWeights] = {}
            first: dict[DrafterKey, Drafter] = {}
            for key in keys:
                exact, keeps_rows = key.kind
                made_for = dataclasses.replace(environment, by_clock=exact, keeps_rows=keeps_rows)
                new[key] = build_drafter(drafter, made_for)
                opened.callback(new[key].close)
                first[key] = new[key].start()
                opened.callback(first[key].close)
                require_as_small(first[key], self.slots[0].get(key))
            opened.pop_all()
        replaced: list[Owned] = [
            slot.started.pop(key) for key in keys for slot in self.slots if key in slot.started
        ]
        replaced += [self._weights[key] for key in keys]
        self.own_drafter, self._environment = str(parse_expression(drafter)), environment
        self._weights.update(new)
        self.slots[0].started.update(first)
        return replaced

    # -- choosing ----------------------------------------------------------------------------------

    def find(
        self,
        params: SamplingParams,
        drafter: str | None = None,
        n_max: int | None = None,
        accept: str | None = None,
    ) -> Choice:
        """Return what is asked for, the engine's own where it is not said.

        Raises `OptionError` for what there is not, and for what does not fit together.
        """
        if n_max is not None and ((whole := whole_number(n_max)) is None or whole < 0):
            raise OptionError(f"n_max is {n_max!r}: give how many tokens to draft at most, from 0")
        rule = self._own_rule if accept is None else _rule_of(accept)
        kind = RuleKind.of(rule)
        if kind not in self._kinds:
            like = "is exact" if kind.exact else "is not exact"
            problem = f"{rule.name} {like}, and the engine was not opened for such rules"
            raise OptionError(f"accept is {accept!r}: {problem}: name it among its rules")
        key = DrafterKey(self._name(drafter), kind)
        if key.expression != "none":
            chosen = self.slots[0].get(key)
            require_fitting(rule, chosen, "free")
            require_laws(rule, chosen, params)
        require_rule(rule, params)
        return Choice(key, rule, n_max)

    def _name(self, drafter: str | None) -> str:
        """Return the expression that a request means: in full, or by the name of its method."""
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

    @property
    def rules(self) -> list[str]:
        """Rules that a request may name: those that were, then others of their kinds."""
        return [*dict.fromkeys([*self._named, *filter(self._offers, rule_names())])]

    def _offers(self, rule: str) -> bool:
        try:
            return RuleKind.of(_rule_of(rule)) in self._kinds
        except OptionError:  # it verifies nothing, or needs options
            return False

    # -- the context that verifies them ------------------------------------------------------------

    def context_options(self, model: Model, slots: int, n_ctx: int) -> ContextOptions:
        """Return the settings of a context in which every slot verifies any drafter's trees."""
        drafters = [self.slots[0].get(key) for key in self._weights]
        largest = max(drafters, key=lambda each: each.max_leaves)
        sizes = LargestDrafts.of(drafters)
        own = target_context_options(self._environment.context, sizes)
        if slots > 1 and not model.can_branch:
            kind = f"{model.architecture} models keep a recurrent state"
            raise UnsupportedModelError(f"{kind}: they answer one conversation at a time (slots=1)")
        # Prompts are read one at a time: rows of hidden states for these are needed once.
        n_sequences = n_slot_sequences(own.n_sequences, slots)
        n_outputs = (sizes.max_nodes + 1) * slots
        if n_sequences > MOST_SEQUENCES:
            has = f"{largest.name} drafts trees of up to {own.n_sequences} paths"
            most = (MOST_SEQUENCES - 1) // own.n_sequences
            problem = f"{has}, and llama.cpp has {MOST_SEQUENCES} sequences"
            raise OptionError(
                f"{problem}: take at most {most} slots, not {slots}, or smaller trees"
            )
        if n_outputs > own.n_batch:
            problem = f"{slots} slots evaluate up to {n_outputs} tokens at once, a batch has"
            raise OptionError(f"{problem} {own.n_batch}: raise n_batch, or take fewer slots")
        n_outputs = max(n_outputs, own.n_outputs)
        return dataclasses.replace(own, n_ctx=n_ctx, n_sequences=n_sequences, n_outputs=n_outputs)


@dataclass(slots=True)
class LargestDrafts:
    """What a context must have that verifies the trees of any of several drafters."""

    max_leaves: int
    max_nodes: int
    needs_hidden_states: bool
    layer_inputs: tuple[int, ...]
    needs_nextn_states: bool
    embedding_inputs: EmbeddingInputs | None = None

    @staticmethod
    def of(drafters: Sequence[Drafter]) -> LargestDrafts:
        """Return what these drafters need together."""
        return LargestDrafts(
            max(each.max_leaves for each in drafters),
            max(each.max_nodes for each in drafters),
            any(each.needs_hidden_states for each in drafters),
            (*sorted({layer for each in drafters for layer in each.layer_inputs}),),
            any(each.needs_nextn_states for each in drafters),
        )


def _rule_of(accept: str) -> Rule:
    return _parallel(build_rule(accept))


def _parallel(rule: Rule | SequentialCascade) -> Rule:
    """Return a rule that verifies drafts; raises `OptionError` for one that verifies nothing."""
    if isinstance(rule, SequentialCascade):
        why = "lets the small model speak alone, one conversation at a time"
        raise OptionError(f"{rule.name} {why}: use Runtime")
    return rule
