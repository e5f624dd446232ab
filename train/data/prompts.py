"""Prompts that a target answers: of a file, built in, or written by the target itself."""

from __future__ import annotations

import functools
import itertools
import json
import random
import tomllib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import resources
from pathlib import Path
from typing import Any

from specrun.bindings.errors import ModelError, OptionError, TemplateError
from specrun.runtime import SamplingParams
from specrun.train.data.answers import Answerer, AskingSettings, Progress, Question, ask_target
from specrun.train.data.documents import Answered, Document, PlainText, read_documents
from specrun.train.data.tokens import TargetTokens

# == Prompts of a file, and the built-in ones ======================================================
#
# Those are questions and tasks of many kinds, written for specrun by templates over lists
# (`built_in_prompts.toml`), so that they belong to nobody else. Only the questions count: the
# answers are the target's own.


_BUILT_IN = "built_in_prompts.toml"


def read_prompts(path: Path) -> list[Document]:
    """Return a file's prompts: one a line, or JSON Lines and arrays as data have them.

    Answers that the file gives are not read. Raises as `read_documents`.
    """
    found: list[Document] = []
    for document in read_documents([path], need_answers=False):
        if not isinstance(document, PlainText):
            found.append(document)
        elif document.origin == path.name:  # the file is a text
            lines = enumerate(document.text.splitlines(), 1)
            found += [
                Answered(line, None, origin=f"line {number} of {path.name}")
                for number, line in lines
                if line.strip()
            ]
    if not found:
        raise ModelError(f"{path} holds no prompts: write one a line")
    return found


def usual_prompts(count: int, tokens: TargetTokens) -> list[Document]:
    """Return `count` built-in prompts; raises TemplateError without a chat template."""
    if tokens.template is None:
        raise TemplateError(
            f"{tokens.path} has no chat template, so it would not answer the built-in prompts: "
            "give texts to learn (--data), or beginnings that it is to go on with (--prompts)"
        )
    return built_in_prompts(count)


@functools.cache
def _all_prompts() -> tuple[str, ...]:
    """Return every prompt that there is, template by template."""
    text = resources.files(__package__).joinpath(_BUILT_IN).read_text(encoding="utf-8")
    return tuple(
        template.format(*" ".join(item.split()).split("|"))
        for kind in tomllib.loads(text).values()
        for template, item in itertools.product(kind["templates"], kind["items"].split(";"))
    )


def most_prompts() -> int:
    """Return how many built-in prompts there are."""
    return len(_all_prompts())


def built_in_prompts(count: int) -> list[Document]:
    """Return `count` of the built-in prompts, mixed; a smaller count gives the first of a larger.

    Raises OptionError if there are not so many.
    """
    prompts = list(_all_prompts())
    if not 1 <= count <= len(prompts):
        raise OptionError(
            f"{count} built-in prompts are asked for: give 1 to {len(prompts)}, or your own "
            "(--prompts FILE)"
        )
    random.Random(0).shuffle(prompts)  # the same order for everybody, so that answers can be kept
    return [Answered(prompt, None, origin="a built-in prompt") for prompt in prompts[:count]]


# == Prompts that a target writes itself, as its users would (Magpie, Xu et al. 2024) ==============
#
# A chat model that reads its template up to where a user's message begins goes on with a message,
# and ends it as users end theirs. So its prompts are of as many kinds as those that it was
# fine-tuned on, which no list of ours is: heads that learn from the answers know more of its later
# questions.


_LONGEST = (
    96  # tokens: longer ones have mostly lost their thread, and leave little room for an answer
)
_TOP_P = 0.9
"""Cuts unlikely tokens: users write more sensibly than small models at temperature 1."""
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
    the first of a larger one. Raises TemplateError if the target has no chat template,
    ModelError if its template shows no message or if it wrote nothing of use.
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
