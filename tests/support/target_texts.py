"""A target's texts: those that small heads are trained on, with its states, and those with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.models.model import Model
from specrun.runtime import GenerationResult, Runtime, SamplingParams
from support.tiny_models import F32

PROMPT_IDS = [5, 6, 7, 8, 9]


def greedy_answers(
    path: Path, options: dict[str, Any], count: int = 8, length: int = 30
) -> list[list[int]]:
    """Prompts of three tokens, each with the target's answer at temperature 0."""
    texts = []
    with Runtime(path, "none", **options) as runtime:
        for number in range(count):
            prompt = [5 + number, 6, 7 + number]
            answer = runtime.generate(prompt, SamplingParams(temperature=0.0), max_tokens=length)
            texts.append([*prompt, *answer.token_ids])
    return texts


def final_states(path: Path, text: list[int], options: dict[str, Any]) -> np.ndarray:
    """The target's final states at all positions, from one fresh evaluation."""
    with Model(path) as model:
        wide = ContextOptions(**{**options, "n_outputs": len(text)}, hidden_states=True)
        with Context(model, wide) as context:
            batch = Batch(context.n_batch, 1)
            batch.fill_chain(text, 0, [0], len(text))
            rows = context.decode(batch)
            return rows.hidden_states(range(len(text)))


def answer(
    path: Path,
    drafter: str,
    params: SamplingParams,
    length: int = 40,
    prompt: Sequence[int] = PROMPT_IDS,
) -> GenerationResult:
    """What a target answers with a drafter whose caches are exact."""
    with Runtime(path, drafter=drafter, **F32) as runtime:
        return runtime.generate(list(prompt), params, max_tokens=length)


def same_text(path: Path, drafter: str, length: int = 40) -> None:
    """Assert that drafts leave plain decoding's own text, drawn or not, under a penalty."""
    with Runtime(path, "none", **F32) as plain, Runtime(path, drafter, **F32) as drafts:
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, seed=3, repeat_penalty=1.1)
            drafted = drafts.generate(PROMPT_IDS, params, max_tokens=length)
            assert (
                drafted.token_ids == plain.generate(PROMPT_IDS, params, max_tokens=length).token_ids
            )
            assert drafted.stats.drafted > 0
