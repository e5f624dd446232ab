"""Prompts that a target is to answer: of a file, or the built-in ones.

Those are questions and tasks of many kinds, written for specrun by templates over lists
(`built_in_prompts.toml`), so that they belong to nobody else. Only what is asked counts: the
answers are the target's own.
"""

from __future__ import annotations

import functools
import itertools
import random
import tomllib
from importlib import resources
from pathlib import Path

from specrun.bindings.errors import ModelError, OptionError, TemplateError
from specrun.train.data.data_file import Answered, Document, PlainText, read_documents
from specrun.train.data.target_tokens import TargetTokens

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
    """Return `count` built-in prompts; raises TemplateError for a target that is not asked."""
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
        template.format(*item.split("|"))
        for kind in tomllib.loads(text).values()
        for template, item in itertools.product(kind["templates"], _items(kind["items"]))
    )


def _items(text: str) -> list[str]:
    return [" ".join(item.split()) for item in text.split(";")]


def most_prompts() -> int:
    """Return how many built-in prompts there are."""
    return len(_all_prompts())


def built_in_prompts(count: int) -> list[Document]:
    """Return `count` of the built-in prompts, mixed; a smaller count gives the first of a larger.

    Raises OptionError where there are not so many.
    """
    prompts = list(_all_prompts())
    if not 1 <= count <= len(prompts):
        raise OptionError(
            f"{count} built-in prompts are asked for: give 1 to {len(prompts)}, or your own "
            "(--prompts FILE)"
        )
    random.Random(0).shuffle(prompts)  # the same order for everybody, so that answers can be kept
    return [Answered(prompt, None, origin="a built-in prompt") for prompt in prompts[:count]]
