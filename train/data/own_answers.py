"""Self-distillation: before training, the target answers the data's prompts itself.

Heads that learn what the target says, rather than what a data set says, guess it more often
(Medusa, section 2.3).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.bindings.errors import ModelError
from specrun.convert import convert_checkpoint
from specrun.runtime import SamplingParams
from specrun.train.data.asking import (
    Answerer,
    AskingSettings,
    FileAnswerer,
    Progress,
    Question,
    ask_target,
)
from specrun.train.data.data_file import Document
from specrun.train.data.target_tokens import TargetTokens, TokenSequence


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """How the target answers: temperature, most tokens, a drafter, how many prompts at once."""

    temperature: float = 0.0
    longest: int = 512
    drafter: str = "prompt-lookup"
    seed: int = 0
    parallel: int = 4

    @property
    def params(self) -> SamplingParams:
        """Plain sampling from the target's own law; answers differ by their index."""
        return SamplingParams(
            temperature=self.temperature, top_k=0, top_p=1.0, min_p=0.0, seed=self.seed
        )


def answer_prompts(
    target: AbstractContextManager[Answerer],
    tokenizer: TargetTokens,
    documents: Sequence[Document],
    store: Path,
    settings: AnswerSettings,
    *,
    identity: Mapping[str, Any],
    max_length: int,
    n_threads: int = 0,
    progress: Progress | None = None,
) -> list[TokenSequence]:
    """Return each prompt of the documents with the target's answer; the answer is what is learnt.

    `target` is entered only where an answer is missing in `store`. `identity` names its weights:
    others are asked again. Texts that ask nothing, and prompts that leave no room for an answer
    within `max_length` tokens, are left out. Raises ModelError where none is left,
    MalformedFileError for a damaged `store`.
    """
    found = map(tokenizer.prompt, documents)
    prompts = [prompt for prompt in found if prompt and len(prompt) < max_length - 1]
    if not prompts:
        raise ModelError(
            f"the data ask nothing that {tokenizer.path.name} could answer: give prompts or chats"
        )
    # The number, for a prompt that is asked twice is answered twice, with noise of its own.
    how = (identity, settings.temperature, settings.seed)
    questions = []
    for number, prompt in enumerate(prompts):
        room = min(settings.longest, max_length - len(prompt))
        key = json.dumps([*how, number, room, prompt], sort_keys=True)
        questions.append(Question(prompt, room, key))
    asking = AskingSettings(
        settings.params, settings.drafter, settings.parallel, max_length, n_threads
    )
    answers = ask_target(target, questions, store, asking, progress)
    pairs = zip(prompts, answers, strict=True)
    return [TokenSequence.of([*prompt, *said.token_ids], len(prompt)) for prompt, said in pairs]


@contextmanager
def runnable_target(folder: Path, place: Path, note: Callable[[str], None]) -> Iterator[Path]:
    """Yield a folder's model as GGUF: for a while in float16 in `place`."""
    path = place / "target.gguf"
    note(f"{folder.name} is converted to float16, to answer the prompts of the data")
    try:
        convert_checkpoint(folder, path, outtype="f16", verify=False, force=True)
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def converted_answerer(
    folder: Path, place: Path, note: Callable[[str], None]
) -> Iterator[FileAnswerer]:
    """Yield what answers for a folder: its model as GGUF, as of `runnable_target`."""
    with runnable_target(folder, place, note) as path:
        yield FileAnswerer(path)
