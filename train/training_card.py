"""The model card of what was trained: from what, how, and what it can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.train.token_corpus import TokenCorpus
from specrun.train.trainer import TrainingResult

__all__ = ["CardFacts", "training_card"]


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card says: `kind` is a heading, `target` and `data` are named without their folders."""

    kind: str
    target: Path
    teacher: Path | None
    data: Sequence[Path]
    device: str
    settings: Mapping[str, Any]
    n_trained: int


_USE = {
    "medusa": 'specrun chat -m TARGET.gguf --drafter "medusa(head.gguf)"',
    "hydra": 'specrun chat -m TARGET.gguf --drafter "hydra(head.gguf)"',
    "eagle": 'specrun chat -m TARGET.gguf --drafter "eagle(head.gguf)"',
    "eagle3": 'specrun chat -m TARGET.gguf --drafter "eagle3(head.gguf)"',
}


def training_card(facts: CardFacts, corpus: TokenCorpus, result: TrainingResult) -> str:
    """Return the card in Markdown."""
    measures = result.curves.measures[-1][1] if result.curves.measures else {}
    where = "the training texts themselves (too few to hold any out)" if corpus.measured_on_training else "held-out texts"
    learnt = sum(int(corpus.sequences[number].learnt.sum()) for number in corpus.training)
    lines = [
        "---",
        f"tags: [speculative-decoding, {facts.kind}]",
        f"base_model: {facts.target.name}",
        "---",
        f"# {facts.kind} for {facts.target.name}",
        "",
        f"Made by `specrun train {facts.kind}`; {facts.n_trained:,} trained parameters. It drafts for this target only, and "
        "verification keeps the target's own words or distribution whatever it drafts.",
        "",
        "## Data",
        f"{', '.join(path.name for path in facts.data)}: {len(corpus.training):,} sequences, {corpus.n_tokens:,} tokens, "
        f"{learnt:,} of them learnt; {0 if corpus.measured_on_training else len(corpus.held_out):,} sequences held out. "
        "The licence of the data and of the target apply.",
        "",
        "## Training",
        f"{len(result.curves.losses):,} steps, {result.tokens:,} tokens, {result.seconds:,.0f} s on {facts.device}; last loss "
        f"{result.curves.losses[-1]:.4f}." if result.curves.losses else "Not trained.",
    ]  # fmt: skip
    if facts.teacher is not None:
        lines.append(f"Hidden states and laws are those of {facts.teacher.name}, computed by llama.cpp.")
    lines += ["", "| setting | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.settings.items())]
    lines += [
        "",
        "## What it can do",
        f"Agreement with the target's own first choice at temperature 0, on {where}; `tokens a round` counts those of a "
        "drafted chain and the target's own.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value:.3f} |" for name, value in measures.items()),
    ]
    if facts.kind in _USE:
        lines += ["", "## Use", "```", "specrun convert FOLDER --target TARGET.gguf -o head.gguf", _USE[facts.kind], "```"]
    return "\n".join(lines) + "\n"
