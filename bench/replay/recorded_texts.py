"""Texts to replay: a target's own answers, recorded once, and files that keep them.

A file is JSON, one text a line: {"name": ..., "prompt": [token ids], "answer": [token ids],
"end_tokens": [ids]}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specrun.bench.drafters.answers import prompt_ids
from specrun.bench.drafters.prompts import Prompt
from specrun.bench.replay.replay import ReplayText
from specrun.bindings.atomic import atomic_path
from specrun.bindings.errors import FileMissingError, ModelError, OptionError
from specrun.runtime.runtime import Runtime
from specrun.runtime.sampling import SamplingParams


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

    `as_chat` None renders prompts by the model's chat template if it has one. `progress` is told
    how many there are.
    """
    chat = runtime.model.chat_template is not None if as_chat is None else as_chat
    texts: list[ReplayText] = []
    for prompt in prompts:
        progress(len(texts))
        tokens = prompt_ids(runtime, prompt, chat)
        runtime.session.forget()
        answer = runtime.generate(tokens, params, max_tokens=max_tokens).token_ids
        texts.append(
            ReplayText(name, tuple(tokens), tuple(answer), runtime.vocabulary.end_of_generation)
        )
    return texts


def write_texts(texts: Sequence[ReplayText], path: Path, *, force: bool = False) -> None:
    """Write a file of texts; an existing one only with `force`."""
    lines = (
        json.dumps(
            {
                "name": text.name,
                "prompt": list(text.prompt),
                "answer": list(text.answer),
                "end_tokens": sorted(text.end_tokens),
            }
        )
        for text in texts
    )
    with atomic_path(path, force=force) as aside:
        aside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_texts(path: Path) -> list[ReplayText]:
    """Return the texts of a file; raises `FileMissingError`, or `ModelError` naming the line that
    is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileMissingError(f"{path} cannot be read: {error}") from None
    texts = [
        _text_of(line, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not texts:
        raise OptionError(f"{path} holds no texts: specrun bench replay --keep FILE writes them")
    return texts


def _text_of(line: str, where: str) -> ReplayText:
    try:
        value: Any = json.loads(line)
        ids = [tuple(value.get(key, ())) for key in ("prompt", "answer", "end_tokens")]
        if not all(
            isinstance(token, int) and not isinstance(token, bool) and token >= 0
            for part in ids
            for token in part
        ):
            raise TypeError
        return ReplayText(str(value.get("name", "text")), ids[0], ids[1], frozenset(ids[2]))
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise ModelError(
            f'{where} is no recorded text: give {{"prompt": [ids], "answer": [ids]}}'
        ) from None
