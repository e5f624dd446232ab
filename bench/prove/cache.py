"""Cells of the cache: a text in trees is as near to plain decoding as the same text in chains.

Texts of plain decoding are forced through rounds of the pair's own target, with all its options.
Rounding depends on how many tokens an evaluation has, so rounds are compared with others of the
same widths: trees of which a random path is kept with chains that keep as many tokens, and these
with chains that are kept whole. A cell that should have been dropped, or that lies out of order,
adds to what rounding does.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

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
from specrun.bench.prove.setting import Check, ForkingDrafter, Setting
from specrun.runtime.round import CachedText, TargetModel

_MOST = 60  # texts
_LEAST = 3
_TIMES = 2.0  # chains that keep a part of their drafts, against chains that are kept whole


def check_cache(setting: Setting) -> Check:
    """Force texts of plain decoding through rounds of trees and of chains, and compare their rows.

    Notes how often chains part, and between which tokens they may.
    """
    deadline, drafter = setting.deadline(0.15), ForkingDrafter(setting, setting.source("cache"))
    found = defaultdict[str, _Drifts](lambda: _Drifts.of(drafter))
    with _target(setting, drafter) as target, closing(plain_texts(setting, target)) as texts:
        for number, text in enumerate(itertools.islice(texts, _MOST), 1):
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
    """Give the pair's own target, emptied; one for the drafter if the pair drafts nothing."""
    session = setting.runtime.session
    if session.drafter.max_nodes:
        session.forget()
        yield session.target
    else:
        with setting.session(drafter) as own:
            yield own.target


@dataclass(slots=True)
class _Drifts:
    """How far rows are from plain decoding's: of trees, of chains, and of chains kept whole.

    `wrong` are the last, after a prompt with a wrong cell. Of chains alone `trees` are the chains.
    """

    trees: Drift
    chains: Drift
    whole: Drift = field(default_factory=Drift)
    wrong: Drift = field(default_factory=Drift)

    @staticmethod
    def of(drafter: ForkingDrafter) -> _Drifts:
        """Return none yet, for a drafter of trees or of chains."""
        trees = Drift()
        return _Drifts(trees, Drift() if drafter.max_leaves > 1 else trees)

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
        self.whole.add(force(target, cached, text, whole_drafts(trees.rounds)), text)
        wrong = text.with_wrong_cell(source, n_vocab)
        self.wrong.add(force(target, cached, wrong, whole_drafts(trees.rounds)), wrong)

    def findings(self, group: str, setting: Setting) -> list[Finding]:
        """Return what exceeds what; in a fixed shape, how many rows have other bits."""
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
        # Where widths change no bit, neither do drafts that are refused.
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
