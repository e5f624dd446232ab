"""Cells of the cache: distributions in trees and in several conversations against plain ones."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice

from specrun.bench.prove.forced import (
    FALSE_ALARM,
    UNIT,
    Drift,
    Excess,
    Finding,
    ForcedText,
    TreeDrafts,
    chain_drafts,
    excess,
    force,
    plain_texts,
    report,
    whole_drafts,
)
from specrun.bench.prove.setting import Check, ForkingDrafter, Logits, Setting
from specrun.bindings.contexts import Context
from specrun.runtime.acceptance import SequentialCascade
from specrun.runtime.engine import Runtime, SharedEvaluation, SlotClock, slot_options
from specrun.runtime.planning import known_curve
from specrun.runtime.round import CachedText, TargetModel, target_context_options
from specrun.runtime.trees import DraftTree

# == A text in trees ===============================================================================
#
# Texts of plain decoding are forced through rounds of the pair's own target, with all its options.
# Rounding depends on the number of tokens of an evaluation, so rounds are compared with others of
# the same widths: trees of which a random path is kept with chains that keep as many tokens, and
# these with chains that are kept whole. A cell that should have been dropped, or that lies out of
# order, adds to the differences by rounding.


_MOST_TEXTS = 60  # texts
_LEAST = 3
_TIMES = 2.0  # chains that keep a part of their drafts, against chains that are kept whole


def check_cache(setting: Setting) -> Check:
    """Force texts of plain decoding through rounds of trees and of chains, and compare their rows.

    Notes how often chains part, and between which tokens they may.
    """
    deadline, drafter = setting.deadline(0.15), setting.forking_drafter("cache")
    found = defaultdict[str, _TreeDrifts](lambda: _TreeDrifts.of(drafter))
    with _target(setting, drafter) as target, closing(plain_texts(setting, target)) as texts:
        for number, text in enumerate(itertools.islice(texts, _MOST_TEXTS), 1):
            found[text.group].add(target, text, drafter)
            if number >= _LEAST and time.monotonic() > deadline:
                break
    if setting.width is None:  # other checks have short texts, as the first one is
        chains = next(iter(found.values())).chains
        setting.rate = chains.rate
        setting.near = max(setting.step, 2 * chains.shift)
    fixed = setting.width is not None
    why = "" if setting.model.can_branch else "; a recurrent state takes chains only"
    leaves = f"up to {setting.max_leaves} branches" if setting.max_leaves > 1 else "no branches"
    check = Check(
        "cache",
        "left out",
        f"tokens of {number} texts of plain decoding, through random trees of up to "
        f"{setting.max_nodes} nodes, {leaves}{why}",
        sum(each.trees.n_tokens for each in found.values()),
        unit="rows that have other bits" if fixed else UNIT,
        false_alarm="none: the same bits are asked for" if fixed else FALSE_ALARM,
        note="; ".join(f"{name} {each}" for name, each in found.items()),
    )
    findings = [each.findings(name, setting) for name, each in found.items()]
    return report(check, [*itertools.chain(*findings)])


@contextmanager
def _target(setting: Setting, drafter: ForkingDrafter) -> Iterator[TargetModel]:
    """Give the pair's own target, emptied; one for the drafter if the pair drafts nothing.

    An engine's thread has its targets, so the drafter has one of its own beside them, too.
    """
    session = setting.opened.session
    if session.drafter.max_nodes and isinstance(setting.opened, Runtime):
        session.forget()
        yield session.target
    else:
        with setting.session(drafter) as own:
            yield own.target


@dataclass(slots=True)
class _TreeDrifts:
    """How far rows are from plain decoding's: of trees, of chains, and of chains kept whole.

    `wrong` are the last, after a prompt with a wrong cell. Of chains alone `trees` are the chains.
    """

    trees: Drift
    chains: Drift
    whole: Drift = field(default_factory=Drift)
    wrong: Drift = field(default_factory=Drift)

    @staticmethod
    def of(drafter: ForkingDrafter) -> _TreeDrifts:
        """Return none yet, for a drafter of trees or of chains."""
        trees = Drift()
        return _TreeDrifts(trees, Drift() if drafter.max_leaves > 1 else trees)

    @property
    def has_trees(self) -> bool:
        """Whether trees were tried."""
        return self.trees is not self.chains

    def add(self, target: TargetModel, text: ForcedText, drafter: ForkingDrafter) -> None:
        """Force a text through rounds of every kind."""
        trees, source, n_vocab = TreeDrafts(drafter), drafter.source, drafter.n_vocab
        cached = CachedText()
        self.trees.add(force(target, cached, text, trees), text)
        if self.has_trees:
            draft = chain_drafts(trees.rounds, source, n_vocab)
            self.chains.add(force(target, cached, text, draft), text)
        # A waiting repetition may have been evaluated by itself.
        most = 1 + target.max_nodes
        rounds = [each._replace(width=min(each.width, most)) for each in trees.rounds]
        self.whole.add(force(target, cached, text, whole_drafts(rounds)), text)
        wrong = text.with_wrong_cell(source, n_vocab)
        self.wrong.add(force(target, cached, wrong, whole_drafts(rounds)), wrong)

    def findings(self, group: str, setting: Setting) -> list[Finding]:
        """Return the excesses; in a fixed shape, how many rows have other bits."""
        wrong, whole, chains = self.wrong, self.whole, self.chains
        if setting.width is not None:
            arms = (("trees", self.trees), ("chains", chains), ("whole chains", whole))
            return [
                Finding(
                    group,
                    f"rows of {name} have other bits",
                    Excess(arm.n_unequal, 0),
                    wrong.n_unequal,
                )
                for name, arm in arms
            ]
        # If widths change no bit, neither do drafts that are refused.
        beyond = excess(chains, whole, wrong, _TIMES, quiet=whole.is_equal)
        problem = f"chains drift over {_TIMES:g} times as far as their widths make"
        found = [Finding(group, problem, beyond, wrong.mean - _TIMES * whole.mean)]
        if self.has_trees:
            beyond = excess(self.trees, chains, wrong, quiet=chains.is_quiet)
            problem = "trees drift further than chains"
            found.append(Finding(group, problem, beyond, wrong.mean - chains.mean))
        return found

    def __str__(self) -> str:
        trees = f"; trees {self.trees}" if self.has_trees else ""
        drifts = f"total variation of chains {self.chains}{trees}"
        return f"part from plain decoding {self.chains.partings()} ({drifts})"


# == Several conversations =========================================================================
#
# Texts of plain decoding are forced through the slots of an engine, side by side in one context:
# cells of the refused drafts of one lie among the cells of the others. Each text is then forced
# through its slot alone, in chains that make evaluations as wide and keep as many tokens.


_CONVERSATIONS = 3
# Of a prompt: the kernel of 64 rows or more sums by tiles of cells, so its bits depend on the cells
# that a text lies in, whatever is drafted.
_PIECE = 32
_NODES = 7  # of a tree: evaluations are narrow enough for the kernels of few tokens
_MOST_GROUPS = 20  # groups of conversations


def check_conversations(setting: Setting) -> Check:
    """Force texts of plain decoding through an engine's slots, together and alone."""
    why = _left_out(setting)
    if why:
        return Check("conversations", "left out", note=why)
    deadline, drafter = setting.deadline(0.1), setting.forking_drafter("slots")
    drafter.min_nodes, drafter.max_nodes = 1, min(_NODES, setting.max_nodes)
    drafter.max_leaves = min(drafter.max_leaves, drafter.max_nodes)
    found = defaultdict[str, _SlotDrifts](_SlotDrifts)
    with (
        _slots(setting, drafter) as shared,
        closing(plain_texts(setting, shared.slots[0])) as texts,
    ):
        for _ in range(_MOST_GROUPS):
            _force(shared, [*islice(texts, _CONVERSATIONS)], drafter, found)
            if time.monotonic() > deadline:
                break
    check = Check(
        "conversations",
        "left out",
        f"tokens of texts of plain decoding, {_CONVERSATIONS} at once in an engine's slots, "
        f"through random trees of up to {drafter.max_nodes} nodes",
        sum(each.several.n_tokens for each in found.values()),
        unit=UNIT,
        false_alarm=FALSE_ALARM,
        note="; ".join(f"{name}: {each}" for name, each in found.items()),
    )
    return report(check, [each.finding(name) for name, each in found.items()])


def _left_out(setting: Setting) -> str:
    """Return why this pair answers one conversation at a time; empty if it need not."""
    if setting.width is not None:
        return "a fixed shape is for one conversation at a time"
    if not (setting.model.can_branch or setting.model.can_roll_back):
        return "a recurrent state that is held for a round is for one conversation at a time"
    if isinstance(setting.rule, SequentialCascade):
        return f"{setting.rule.name} is for one conversation at a time"
    if setting.opened.session.drafter.embedding_inputs is not None:
        return "drafts at positions that are no tokens are for one conversation at a time"
    return ""


@contextmanager
def _slots(setting: Setting, drafter: ForkingDrafter) -> Iterator[SharedEvaluation]:
    """Open a context with a slot for each conversation, as an engine does."""
    model, own = setting.model, target_context_options(setting.context, drafter)
    options = dataclasses.replace(
        slot_options(own, _CONVERSATIONS, can_branch=model.can_branch),
        # Alone, a chain is as wide as those of all together.
        n_ctx=(own.n_ctx + _CONVERSATIONS * own.n_outputs) * _CONVERSATIONS,
        n_outputs=own.n_outputs * _CONVERSATIONS,
        n_rollback=own.n_outputs * _CONVERSATIONS,
    )
    curve = known_curve(model.path, setting.context, model.n_gpu_layers)
    with Context(model, options) as context:
        shared = SharedEvaluation(context, _CONVERSATIONS, own.n_ctx, curve, SlotClock())
        shared.longest_piece = min(_PIECE, shared.longest_piece)
        yield shared


@dataclass(slots=True)
class _SlotDrifts:
    """How far rows are from plain decoding's, of conversations together and alone.

    `wrong` is a conversation alone after a prompt with a wrong cell.
    """

    several: Drift = field(default_factory=Drift)
    alone: Drift = field(default_factory=Drift)
    wrong: Drift = field(default_factory=Drift)

    def finding(self, texts: str) -> Finding:
        """Return by how much several exceed one."""
        alone, wrong = self.alone, self.wrong
        beyond = excess(self.several, alone, wrong, quiet=alone.is_quiet)
        problem = "several conversations drift further than one"
        return Finding(texts, problem, beyond, wrong.mean - alone.mean)

    def __str__(self) -> str:
        return f"total variation {self.several}; of one at a time {self.alone}"


def _force(
    shared: SharedEvaluation,
    texts: Sequence[ForcedText],
    drafter: ForkingDrafter,
    found: Mapping[str, _SlotDrifts],
) -> None:
    """Force texts through the slots, together and then each alone."""
    texts = [_read_here(shared, text) for text in texts]
    slots, drafts = shared.slots, [TreeDrafts(drafter) for _ in texts]
    runs = [
        force(slot, slot.text, text, draft)
        for slot, text, draft in zip(slots, texts, drafts, strict=True)
    ]
    rows, widths = _together(shared, runs)
    for slot in slots:
        slot.rewind(slot.text, 0)
    for slot, text, ours, draft in zip(slots, texts, rows, drafts, strict=True):
        drifts = found[text.group]
        drifts.several.add(ours, text)
        # Each had a round a turn, until its text was at its end.
        turns = zip(draft.rounds, widths, strict=False)
        rounds = [each._replace(width=width) for each, width in turns]
        wrong = text.with_wrong_cell(drafter.source, drafter.n_vocab)
        for drift, forced in ((drifts.alone, text), (drifts.wrong, wrong)):
            chains = chain_drafts(rounds, drafter.source, drafter.n_vocab)
            [theirs], _ = _together(shared, [force(slot, slot.text, forced, chains)])
            drift.add(theirs, forced)
        slot.rewind(slot.text, 0)


def _read_here(shared: SharedEvaluation, text: ForcedText) -> ForcedText:
    """Return a text with the rows that plain decoding has after a prompt in pieces of this size."""
    slot, rows = shared.slots[0], list[Logits]()
    slot.rewind(slot.text, 0)
    slot.text.tokens = list(text.prompt)
    slot.prefill(slot.text, len(text.prompt) - 1)
    for token in text.coming:
        slot.evaluate(slot.text, DraftTree())
        shared.evaluate([slot])
        row = slot.evaluate(slot.text, DraftTree())
        assert row is not None
        rows.append(row.logits(0).copy())
        slot.commit(slot.text, DraftTree(), ())
        slot.text.tokens.append(token)
    slot.rewind(slot.text, 0)
    return dataclasses.replace(text, rows=rows)


def _together(
    shared: SharedEvaluation, runs: Sequence[Iterator[Logits | None]]
) -> tuple[list[list[Logits]], list[int]]:
    """Run texts in their slots to the end; return the rows of each, and how wide turns were."""
    rows: list[list[Logits]] = [[] for _ in runs]
    widths: list[int] = []
    going = [*zip(runs, rows, strict=True)]
    while going:
        for each in [*going]:
            run, found = each
            for row in run:
                if row is None:
                    break
                found.append(row.copy())
            else:
                going.remove(each)
        waiting = sum(slot.n_waiting for slot in shared.slots)
        if waiting:
            widths.append(waiting)
            shared.evaluate(shared.slots)
    return rows, widths
