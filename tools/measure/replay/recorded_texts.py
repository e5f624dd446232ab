"""Files of texts to replay: a target's own answers as token ids, recorded once.

They are JSON lines: {"name": text, "prompt": [ids], "answer": [ids], "end_tokens": [ids]}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measure.replay.replay import ReplayText
from specrun.bench.drafters.answers import prompt_ids
from specrun.bench.drafters.prompts import Prompt
from specrun.bindings.errors import FileMissingError, ModelError, OptionError
from specrun.bindings.files import atomic_path
from specrun.runtime.engine import Engine, Runtime
from specrun.runtime.laws import SamplingParams


def record_answers(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    name: str,
    max_tokens: int,
    as_chat: bool | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[ReplayText]:
    """Return what plain decoding answers to each prompt, each from an empty cache.

    `as_chat` is that of `prompt_ids`; `progress` gets the number of answers so far.
    """
    texts: list[ReplayText] = []
    for prompt in prompts:
        progress(len(texts))
        tokens = prompt_ids(runtime, prompt, as_chat)
        runtime.session.forget()
        answer = runtime.generate(tokens, params, max_tokens=max_tokens).token_ids
        ends = runtime.vocabulary.end_of_generation
        texts.append(ReplayText(name, tuple(tokens), tuple(answer), ends))
    return texts


def record_together(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    name: str,
    max_tokens: int,
    as_chat: bool | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[ReplayText]:
    """Return the same as `record_answers`, several prompts answered at once."""
    tokens = [prompt_ids(engine, prompt, as_chat) for prompt in prompts]
    n, ends = len(tokens), engine.vocabulary.end_of_generation
    results = engine.each_of_many(tokens, params, max_tokens=[max_tokens] * n, indices=[0] * n)
    texts: list[ReplayText] = []
    for prompt, result in zip(tokens, results, strict=True):
        progress(len(texts))
        texts.append(ReplayText(name, tuple(prompt), tuple(result.token_ids), ends))
    return texts


def write_texts(texts: Sequence[ReplayText], path: Path, *, force: bool = False) -> None:
    """Write a file of texts; an existing one only with `force`."""
    records = (asdict(text) | {"end_tokens": sorted(text.end_tokens)} for text in texts)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    with atomic_path(path, force=force) as aside:
        aside.write_text(lines, encoding="utf-8")


def read_texts(path: Path) -> list[ReplayText]:
    """Return the texts of a file; raises FileMissingError, or ModelError that names a bad line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileMissingError(f"{path} cannot be read: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    texts = [_text_of(line, f"{path}, line {number}") for number, line in numbered]
    if not texts:
        raise OptionError(f"{path} holds no texts: tools/measure replay --keep FILE writes them")
    return texts


def _text_of(line: str, where: str) -> ReplayText:
    try:
        value: Any = json.loads(line)
        ids = [tuple(value.get(key, ())) for key in ("prompt", "answer", "end_tokens")]
        if not all(type(token) is int and token >= 0 for part in ids for token in part):
            raise TypeError  # bool is an int too, but no token
        return ReplayText(str(value.get("name", "text")), ids[0], ids[1], frozenset(ids[2]))
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise ModelError(
            f'{where} is no recorded text: give {{"prompt": [ids], "answer": [ids]}}'
        ) from None
