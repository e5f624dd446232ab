"""The model card of what was trained: from what, how, and what it can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.runtime.methods import method_of_head
from specrun.train.token_corpus import TokenCorpus
from specrun.train.training_progress import TrainingResult

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


def training_card(facts: CardFacts, corpus: TokenCorpus, result: TrainingResult) -> str:
    """Return the card in Markdown."""
    curves = result.curves
    measures = curves.measures[-1][1] if curves.measures else {}
    lines = [
        "---",
        f"tags: [speculative-decoding, {facts.kind}]",
        f"base_model: {facts.target.name}",
        "---",
        f"# {facts.kind} for {facts.target.name}",
        "",
        f"Made by `specrun train {facts.kind}`; {facts.n_trained:,} trained parameters. It drafts for this target "
        "only, and verification keeps the target's own words or distribution whatever it drafts.",
        "",
        "## Data",
        _data_sentence(facts, corpus),
        "",
        "## Training",
        f"{len(curves.losses):,} steps, {result.tokens:,} tokens, {result.seconds:,.0f} s on {facts.device}; "
        f"the loss fell from {curves.losses[0]:.4f} to {curves.losses[-1]:.4f}.",
    ]
    if facts.teacher is not None:
        lines.append(f"Hidden states and laws are those of {facts.teacher.name}, computed by llama.cpp.")
    lines += ["", "| setting | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.settings.items())]
    where = "the training texts, too few to hold any out" if corpus.measured_on_training else "held-out texts"
    lines += [
        "",
        "## What it can do",
        f"Agreement with the target's own first choice, on {where}; `tokens a round` counts those of a drafted chain",
        "and the target's own.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value:.3f} |" for name, value in measures.items()),
    ]
    method = method_of_head(facts.kind)
    if method is not None:
        convert = "specrun convert FOLDER --target TARGET.gguf -o head.gguf"
        chat = f'specrun chat -m TARGET.gguf --drafter "{method.name}(head.gguf)"'
        lines += ["", "## Use", "```", convert, chat, "```"]
    return "\n".join(lines) + "\n"


def _data_sentence(facts: CardFacts, corpus: TokenCorpus) -> str:
    learnt = sum(int(corpus.sequences[number].learnt.sum()) for number in corpus.training)
    aside = 0 if corpus.measured_on_training else len(corpus.held_out)
    names = ", ".join(path.name for path in facts.data)
    return (
        f"{names}: {len(corpus.training):,} sequences, {corpus.n_tokens:,} tokens, {learnt:,} of them learnt; "
        f"{aside:,} sequences held out. The licences of the data and of the target apply."
    )
