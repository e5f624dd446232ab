"""Prompts that a target writes itself, as its users would (Magpie, Xu et al. 2024).

A chat model that reads its template up to where a user's message begins goes on with a message, and
ends it as users end theirs. So its prompts are of as many kinds as those that it was fine-tuned on,
which no list of ours is: heads that learn from the answers know more of what it will be asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from specrun.bindings.errors import ModelError
from specrun.runtime import SamplingParams
from specrun.train.data.asking import Answerer, AskingSettings, Progress, Question, ask_target
from specrun.train.data.data_file import Answered, Document
from specrun.train.data.target_tokens import TargetTokens

_LONGEST = 96  # tokens: what is longer has mostly lost its thread, and leaves little for an answer
_TOP_P = 0.9
"""What is seldom said goes: users ask more sensibly than small models at temperature 1."""
_FEWEST_WORDS = 3


def own_prompts(
    target: AbstractContextManager[Answerer],
    tokenizer: TargetTokens,
    count: int,
    store: Path,
    *,
    identity: Mapping[str, Any],
    seed: int = 0,
    parallel: int = 4,
    n_threads: int = 0,
    progress: Progress | None = None,
) -> list[Document]:
    """Return the prompts that the target writes in `count` tries, in their order.

    Left out are those that it did not end, those of fewer than three words, and those that it had
    written before. `target`, `store` and `identity` as of `answer_prompts`. A smaller count gives
    the first of a larger one. Raises TemplateError where the target has no chat template,
    ModelError where its template shows no message or where it wrote nothing of use.
    """
    opening = tokenizer.opening()
    params = SamplingParams(temperature=1.0, top_k=0, top_p=_TOP_P, min_p=0.0, seed=seed)
    how = ("a prompt of its own", identity, _TOP_P, _LONGEST, seed, opening)
    questions = [
        Question(opening, _LONGEST, json.dumps([*how, number], sort_keys=True))
        for number in range(count)
    ]
    # A prompt is as long as its text may be: nothing in it repeats, so nothing drafts.
    asking = AskingSettings(params, "none", parallel, len(opening) + _LONGEST + 1, n_threads)
    found: dict[str, None] = {}
    for said in ask_target(target, questions, store, asking, progress):
        text = said.text.strip()
        if said.is_whole and len(text.split()) >= _FEWEST_WORDS:
            found.setdefault(text)
    if not found:
        raise ModelError(
            f"{tokenizer.path.name} writes no prompts of its own: give some (--prompts FILE)"
        )
    return [Answered(text, None, origin="a prompt of the target's own") for text in found]
