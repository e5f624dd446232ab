"""Several conversations: their texts are as near to plain decoding as the text of one.

Texts of plain decoding are forced through the slots of an engine, side by side in one context: what
the refused drafts of one leave behind lies among the cells of the others. Each text is then forced
through its slot alone, in chains that make evaluations as wide and keep as many tokens.
"""

from __future__ import annotations

import dataclasses
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
    Finding,
    ForcedText,
    TreeDrafts,
    chain_drafts,
    excess,
    force,
    plain_texts,
    report,
)
from specrun.bench.prove.setting import Check, ForkingDrafter, Logits, Setting
from specrun.bindings.contexts.context import Context
from specrun.runtime.acceptance import SequentialCascade
from specrun.runtime.engine import SharedEvaluation, SlotClock, n_slot_sequences
from specrun.runtime.planning import known_curve
from specrun.runtime.round import target_context_options
from specrun.runtime.trees import DraftTree

_CONVERSATIONS = 3
# Of a prompt: the kernel of 64 rows or more sums by tiles of cells, so its bits depend on the cells
# that a text lies in, whatever is drafted.
_PIECE = 32
_NODES = 7  # of a tree: evaluations are narrow enough for the kernels of few tokens
_MOST = 20  # groups of conversations


def check_conversations(setting: Setting) -> Check:
    """Force texts of plain decoding through an engine's slots, together and alone."""
    why = _left_out(setting)
    if why:
        return Check("conversations", "left out", note=why)
    deadline, drafter = setting.deadline(0.1), ForkingDrafter(setting, setting.source("slots"))
    drafter.min_nodes, drafter.max_nodes = 1, min(_NODES, setting.max_nodes)
    drafter.max_leaves = min(drafter.max_leaves, drafter.max_nodes)
    found = defaultdict[str, _Drifts](_Drifts)
    with (
        _slots(setting, drafter) as shared,
        closing(plain_texts(setting, shared.slots[0])) as texts,
    ):
        for _ in range(_MOST):
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
    if not setting.model.can_branch:
        return "a recurrent state is for one conversation at a time"
    if isinstance(setting.rule, SequentialCascade):
        return f"{setting.rule.name} is for one conversation at a time"
    if setting.runtime.session.drafter.embedding_inputs is not None:
        return "drafts at positions that are no tokens are for one conversation at a time"
    return ""


@contextmanager
def _slots(setting: Setting, drafter: ForkingDrafter) -> Iterator[SharedEvaluation]:
    """Open a context with a slot for each conversation, as an engine does."""
    model, own = setting.model, target_context_options(setting.context, drafter)
    options = dataclasses.replace(
        own,
        n_ctx=own.n_ctx * _CONVERSATIONS,
        n_sequences=n_slot_sequences(own.n_sequences, _CONVERSATIONS),
        n_outputs=own.n_outputs * _CONVERSATIONS,
    )
    curve = known_curve(model.path, setting.context, model.n_gpu_layers)
    with Context(model, options) as context:
        shared = SharedEvaluation(context, _CONVERSATIONS, own.n_ctx, curve, SlotClock())
        shared.longest_piece = min(_PIECE, shared.longest_piece)
        yield shared


@dataclass(slots=True)
class _Drifts:
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
    found: Mapping[str, _Drifts],
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
